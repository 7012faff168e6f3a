"""Files of a checkpoint that are damaged or made to harm: each ends in a typed error, and nothing else is opened."""

import json
import logging
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import CheckpointError, ConfigError, UnsupportedModelError
from hybridrt.cli.inspect import describe_model
from hybridrt.engine.text.tokenizer import load_tokenizer
from hybridrt.models.config.read_config import read_model_config
from hybridrt.models.loading import weight_files
from tests.models.test_loader import load
from tests.support.checkpoints import (
    CASES,
    CheckpointStore,
    Make,
    falcon,
    falcon_mamba,
    jamba,
    lfm2,
    lfm2_moe,
    mamba,
    mamba2,
    nemotron,
    puzzle,
    qwen,
    swa_ssm,
    write,
)
from tests.support.levels import sweep
from tests.support.newer_checkpoints import NEWER, QWEN35
from tests.support.odd_configs import DEEP, changes, some, write_fields
from tests.support.published import PUBLISHED
from tests.support.seeing_checkpoints import SEEING
from tests.support.tiny import write_tiny
from tests.support.windowed_checkpoints import WINDOWED

FAMILIES: dict[str, Make] = {
    "falcon": falcon(), "nemotron": nemotron("M*-ME"), "qwen": qwen(), "falcon_mamba": falcon_mamba(),
    "jamba": jamba(), "lfm2": lfm2(), "lfm2_moe": lfm2_moe(), "mamba": mamba(), "mamba2": mamba2(),
    "puzzle": puzzle("ME", {1: {"num_experts_per_tok": 2}}),
    "swa_ssm": swa_ssm(),
    **{name: cases["plain"] for name, cases in (NEWER | PUBLISHED | WINDOWED).items()},
    "qwen35-seeing": QWEN35["seeing_experts"],
    "nemotron-omni": SEEING["nemotron_omni"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _transformers_logs_nothing() -> Iterator[None]:
    """It quotes odd values, half surrogates among them. pytest would send these between its processes, and cannot."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def fields_of(family: str, path: Path) -> dict[str, Any]:
    """The config.json of a family, which is written."""
    write(FAMILIES[family], path)
    fields: dict[str, Any] = json.loads((path / "config.json").read_text())
    return fields


def check_config(path: Path, fields: dict[str, Any]) -> None:
    """A config either describes a model or is refused as one."""
    write_fields(path, fields)
    try:
        describe_model(EngineConfig(str(path), device="cpu"))
    except (ConfigError, CheckpointError):
        pass
    except Exception as e:
        raise AssertionError(f"{str(fields)[:2000]}") from e


@pytest.mark.parametrize("family", sweep(FAMILIES, 12, thin=len(FAMILIES)))
def test_odd_configs_end_in_typed_errors(family: str, tmp_path: Path) -> None:
    fields = fields_of(family, tmp_path)
    for change in some(fields, 40, family):
        check_config(tmp_path, {**fields, **change})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("every", [pytest.param(192, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.soak)])
def test_every_odd_config_ends_in_a_typed_error(every: int, family: str, tmp_path: Path) -> None:
    """The slow level takes one in 192 of them."""
    fields = fields_of(family, tmp_path)
    for change in [*changes(fields), *some(fields, 500, f"more of {family}")][::every]:
        check_config(tmp_path, {**fields, **change})


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"architectures": 5}, ConfigError, "architectures is 5; it must be null, or a list"),
        ({"architectures": [["x"]]}, ConfigError, "architectures"),
        ({"architectures": ["x"]}, UnsupportedModelError, "'x' is not supported"),
        ({"eos_token_id": "x"}, ConfigError, "eos_token_id is 'x'"),
        ({"eos_token_id": [1, -2]}, ConfigError, "eos_token_id"),
        ({"hidden_size": -8}, ConfigError, "hidden_size is -8; it must be an integer from 1 to 1048576"),
        ({"hidden_size": 10**12}, ConfigError, "hidden_size is 1000000000000"),
        ({"num_hidden_layers": 10**12}, ConfigError, "num_hidden_layers"),
        ({"max_position_embeddings": 10**400}, ConfigError, "max_position_embeddings is 1000"),
        ({"rms_norm_eps": float("nan")}, ConfigError, "rms_norm_eps is nan"),
        ({"key_multiplier": None}, ConfigError, "key_multiplier is None; it must be a number"),
        ({"ssm_multipliers": [1.0]}, ConfigError, "ssm_multipliers.*a list of 5"),
        ({"mamba_d_ssm": 2**20, "mamba_n_heads": 2**20, "mamba_d_head": 1, "mamba_n_groups": 2**20}, ConfigError,
         "width of B"),
        ({"vocab_size": DEEP}, ConfigError, "config.json is not valid JSON"),
        ({"dtype": ["float32"]}, ConfigError, "dtype"),
        ({"model_type": "bert"}, ConfigError, "model_type is 'bert', but FalconH1ForCausalLM goes with 'falcon_h1'"),
        ({"mamba_chunk_size": 2**15}, ConfigError, "mamba_chunk_size is 32768; it must be an integer from 1 to 1024"),
        ({"time_step_limit": [1e39, {"__float__": "Infinity"}]}, ConfigError, "time_step_limit is"),
        ({"hidden_act": "a" * 5000}, ConfigError, r"hidden_act is 'a{76}\.\.\.; hybridrt implements 'silu'"),
        ({"architectures": ["a" * 5000]}, UnsupportedModelError, r"architecture 'a{76}\.\.\. is not supported"),
        ({"head_dim": 7}, ConfigError, "even rotary dimension|would turn 7 of 7"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, ConfigError, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, ConfigError, "rope_theta is -1.0"),
    ],
)  # fmt: skip
def test_an_odd_field_is_named(change: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    fields = json.loads((write_tiny(tmp_path, tokenizer=False) / "config.json").read_text())
    write_fields(tmp_path, {**fields, **change})
    with pytest.raises(error, match=text):
        describe_model(EngineConfig(str(tmp_path), device="cpu"))


@pytest.mark.parametrize("family", ["falcon", "qwen", "swa_ssm"])
def test_heads_that_rotary_embeddings_cannot_turn_are_refused(family: str, tmp_path: Path) -> None:
    fields = fields_of(family, tmp_path)
    write_fields(tmp_path, {**fields, "head_dim": 1})
    with pytest.raises(ConfigError, match="rotary"):
        read_model_config(tmp_path)


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, tokenizer=False)
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(ConfigError, match=r"generation_config.json cannot be read: Is a directory"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config.json cannot be read: Is a directory"):
        read_model_config(tmp_path)


def test_a_config_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"architectures": ["\xff"]}')
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_model_config(tmp_path)


# Weight files


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tmp_path / "sharded"
    write(CASES["qwen-plain"], path, max_shard_size="40KB")
    return path


def map_to(path: Path, name: object) -> None:
    """Lets the index name another file for all keys of the first shard."""
    index = path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    first = sorted(set(found["weight_map"].values()))[0]
    found["weight_map"] = {key: name if file == first else file for key, file in found["weight_map"].items()}
    index.write_text(json.dumps(found))


OUTSIDE = [
    "/etc/passwd", "../x", "../secret.safetensors", "a/../../secret.safetensors", "sub/x.safetensors", "..", ".", "",
    "..\\secret.safetensors", "C:\\x.safetensors", "C:x.safetensors", "x\0.safetensors", "model.bin", 5, None, ["x"],
    {"x": 1}, True,
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_an_index_names_files_beside_it_alone(name: object, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands there, nothing is opened, although the file that it names may exist."""
    shutil.copy(sorted(sharded.glob("*.safetensors"))[0], sharded.parent / "secret.safetensors")
    map_to(sharded, name)

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"opened {arguments}")

    monkeypatch.setattr(weight_files, "TensorFile", refuse)
    with pytest.raises(CheckpointError, match="must be the name of a"):
        load(sharded)


def test_shards_may_be_links_that_leave_the_directory(sharded: Path) -> None:
    """The hub's snapshots are: snapshots/<commit>/model.safetensors -> ../../blobs/<hash>."""
    snapshot, blobs = sharded.parent / "snapshots" / "c0ffee", sharded.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.copy(file, blobs / f"{number:x}")
        os.symlink(f"../../blobs/{number:x}", snapshot / file.name)
    load(snapshot)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "5", "null", '"x"', "{}", '{"weight_map": null}', '{"weight_map": []}', '{"weight_map": [1, 2]}',
        '{"weight_map": [["a", "b"]]}', '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_an_index_that_is_none(text: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        load(sharded)


def test_an_index_that_cannot_be_read(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "model.safetensors.index.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(sharded)


def image(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file: the header's length, the header, the tensors' bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
IMAGES: dict[str, bytes] = {
    "empty": b"",
    "seven_bytes": b"\0" * 7,
    "no_header": image(b""),
    "garbage_header": image(os.urandom(64)),
    "huge_header": image(b"{}", length=2**40),
    "largest_header": image(b"{}", length=2**64 - 1),
    "header_beyond_the_end": image(b"{}", length=100),
    "header_of_another_type": image([1, 2]),
    "deep_header": image(b"[" * 10_000),
    "negative_offsets": image({"a": ONE | {"data_offsets": [-8, 0]}}, bytes(8)),
    "offsets_beyond_the_end": image({"a": ONE | {"data_offsets": [0, 800]}}, bytes(8)),
    "overlapping_offsets": image({"a": ONE, "b": ONE | {"data_offsets": [4, 12]}}, bytes(12)),
    "holes": image({"a": ONE, "b": ONE | {"data_offsets": [16, 24]}}, bytes(24)),
    "shape_of_another_size": image({"a": ONE | {"shape": [3]}}, bytes(8)),
    "shape_that_overflows": image({"a": ONE | {"shape": [2**40, 2**40]}}, bytes(8)),
    "negative_shape": image({"a": ONE | {"shape": [-2]}}, bytes(8)),
    "unknown_dtype": image({"a": ONE | {"dtype": "X9"}}, bytes(8)),
    "entry_of_another_type": image({"a": 5}, bytes(8)),
    "names_twice": image(b'{"a":' + json.dumps(ONE).encode() + b',"a":' + json.dumps(ONE).encode() + b"}", bytes(8)),
    "a_program": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("name", IMAGES)
def test_a_weight_file_that_is_none(name: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, tokenizer=False)
    (tmp_path / "model.safetensors").write_bytes(IMAGES[name])
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_a_directory_in_place_of_a_weight_file(tmp_path: Path) -> None:
    (write_tiny(tmp_path, tokenizer=False) / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path)


def spoilt(whole: bytes, rng: random.Random) -> bytes:
    """A file with a few bytes changed in its header, cut off, or grown."""
    data = bytearray(whole)
    kind = rng.randrange(3)
    if kind == 0:
        header = struct.unpack("<Q", data[:8])[0] + 8
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(header)] = rng.randrange(256)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    else:
        data += rng.randbytes(rng.randint(1, 9))
    return bytes(data)


@pytest.mark.parametrize(
    "count", [30, pytest.param(150, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.soak)]
)
def test_spoilt_weight_files_end_in_typed_errors(count: int, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """A change that does no harm (a name's letter in the metadata) may load."""
    source, rng = checkpoints["falcon-plain"].path, random.Random(count)
    whole = (source / "model.safetensors").read_bytes()
    path = Path(shutil.copytree(source, tmp_path / "spoilt"))
    refused = 0
    for _ in range(count):
        (path / "model.safetensors").write_bytes(spoilt(whole, rng))
        try:
            load(path)
        except CheckpointError:
            refused += 1
    assert refused > 0.9 * count


def test_a_shard_with_a_key_of_another(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    shutil.copy(first, second)
    with pytest.raises(CheckpointError, match="disagree"):
        load(sharded)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    write_tiny(tmp_path, tokenizer=False)
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="nothing consumes: a"):
        load(tmp_path)


# Tokenizers


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "5", "{}x", '{"model": 5}', "[" * 20_000, "\xff"])
def test_tokenizer_files_that_are_none(file: str, text: str, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / file).write_bytes(text.encode("latin-1"))
    if (file, text) == ("tokenizer_config.json", '{"model": 5}'):
        return  # a setting that nothing reads
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("value", [5, [], {}, "AutoModel", "AutoTokenizer", "RagRetriever", "pipeline", "__version__"])
def test_a_tokenizer_class_that_is_none(value: object, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    for file in ("tokenizer_config.json", "config.json"):
        before = (tmp_path / file).read_text()
        (tmp_path / file).write_text(json.dumps(json.loads(before) | {"tokenizer_class": value}))
        with pytest.raises(CheckpointError, match=r"tokenizer_class is .*, which is no tokenizer"):
            load_tokenizer(tmp_path)
        (tmp_path / file).write_text(before)


@pytest.mark.parametrize("value", [[], "long", {}])
def test_a_tokenizer_that_fails_only_on_text_ends_in_a_typed_error(value: object, tmp_path: Path) -> None:
    """transformers takes any `model_max_length`, and compares it with the length of the first text."""
    file = write_tiny(tmp_path) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": value}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    with pytest.raises(CheckpointError, match="tokenizer fails"):
        tokenizer.encode("some text")
