"""`hybridrt quantize`: what is written is read here, with the numbers of the formulas, and is whole or not there."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.base.quantization import Scheme
from hybridrt.cli.app import app
from hybridrt.layers.quant.encoders import encode, stored_tensors
from hybridrt.models.config.quant_compressed import compressed_rules
from hybridrt.models.config.quant_online import SCHEMES
from hybridrt.runtime.load import quantise
from hybridrt.runtime.load.quantise import write_quantised
from tests.support.checkpoints import falcon, write
from tests.support.live_bytes import LiveBytes
from tests.support.newer_checkpoints import granite, qwen35_seeing
from tests.support.online import MODELS, with_number, write_plain, write_twin
from tests.support.session import Session
from tests.support.tiny import write_tiny

GROUPS: dict[str, dict[str, Any]] = {
    "fp8": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}
BF16 = torch.bfloat16
PROMPTS = [([5, 9, 17, 3, 40, 8], 4), ([2, 3], 4)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    return {name: write_plain(name, folder / name) for name in ("falcon", "qwen")}


def logits_of(path: Path, **options: Any) -> list[torch.Tensor]:
    return [sample.logits for sample in Session(path, **options).run(PROMPTS, chunk=4)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["falcon", pytest.param("qwen", marks=pytest.mark.slow)])
def test_what_is_written_is_the_dequantised_twin(
    name: str, scheme: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    made = write_quantised(str(plain[name]), tmp_path / "out", scheme, ())
    twin = write_twin(name, scheme, plain[name], tmp_path / "twin")
    found = logits_of(made.path)
    torch.testing.assert_close(found, logits_of(twin), rtol=1e-4, atol=1e-4)
    if scheme != "nvfp4":
        torch.testing.assert_close(found, logits_of(plain[name], quantization=scheme), rtol=0, atol=0)
    assert made.bytes < 0.5 * made.source_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_configuration_says_what_the_file_holds(scheme: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """In the words of compressed-tensors: each module is in one group or ignored."""
    write_quantised(str(plain["qwen"]), tmp_path / "out", scheme, ())
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    assert GROUPS[scheme].items() <= said["config_groups"]["group_0"]["weights"].items()
    rules = compressed_rules(said, "config.json")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    modules = {key.rpartition(".")[0] for key, t in tensors.items() if t.dim() > 1}
    quantised = {key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")}
    assert quantised == {module for module in modules if not rules.leaves_plain(module)}
    held = {name: [t for key, t in tensors.items() if key.rpartition(".")[0] == name] for name in quantised}
    for name, own in held.items():
        scheme_of = rules.scheme(name)
        assert scheme_of is not None and stored_sizes(scheme_of, own), name


def stored_sizes(scheme: Scheme, tensors: list[torch.Tensor]) -> bool:
    """Whether there is a scale for each block of the codes."""
    codes, scales = tensors[0], tensors[1]
    inputs = codes.shape[1] * {torch.float8_e4m3fn: 1, torch.uint8: 2, torch.int32: 8}[codes.dtype]
    rows, columns = scheme.block
    return scales.shape == (-(-codes.shape[0] // rows), -(-inputs // columns))


def test_names_of_groups_that_differ(plain: dict[str, Path], tmp_path: Path) -> None:
    write_quantised(str(plain["falcon"]), tmp_path / "out", "int4", ())
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    others = said["config_groups"]["group_1"]
    assert others["weights"]["group_size"] == 32
    assert [f"model.layers.{i}.feed_forward.down_proj" in others["targets"] for i in (0, 1)] == [True, True]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [(130, 192), (256, 128)])
def test_tensors_are_those_that_the_header_announces(scheme: str, size: tuple[int, int]) -> None:
    found = SCHEMES[scheme] if scheme != "int4" else Scheme("int4", "compressed-packed", (1, 64), scale_dtype=BF16)
    module, tensors = encode("x", found, torch.randn(size))
    assert stored_tensors(found, *size) == module.tensors == {k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()}


def test_shards_and_other_files(tmp_path: Path) -> None:
    write(MODELS["qwen"][0], tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "weights.bin", "model.gguf"):
        (tmp_path / "model" / name).write_text("{}")
    made = write_quantised(str(tmp_path / "model"), tmp_path / "new" / "out", "fp8", ())
    names = {file.name for file in made.path.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json"} <= names
    assert not {"weights.bin", "model.gguf"} & names
    index = json.loads((made.path / "model.safetensors.index.json").read_text())
    for file in made.path.glob("*.safetensors"):
        with safe_open(file, "pt") as held:
            assert {key for key, name in index["weight_map"].items() if name == file.name} == set(held.keys())
    torch.testing.assert_close(logits_of(made.path), logits_of(tmp_path / "model", quantization="fp8"))
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["out"]


STACKED = {
    "qwen35": (
        qwen35_seeing(
            experts=True, hidden_size=128, moe_intermediate_size=128, shared_expert_intermediate_size=128,
            num_hidden_layers=2, full_attention_interval=2, num_experts=3,
        ),
        "model.language_model.layers.1.mlp.experts.2.gate_proj.weight",
    ),
    "granite": (
        granite(hidden_size=128, intermediate_size=128, shared_intermediate_size=128,
                mamba_n_heads=16, mamba_d_head=16),
        "model.layers.1.block_sparse_moe.experts.2.gate_proj.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKED)
def test_stacks_of_experts_become_modules(name: str, tmp_path: Path) -> None:
    """One for each expert and matrix, under the file's own prefix."""
    make, key = STACKED[name]
    write(make, tmp_path / "model")
    made = write_quantised(str(tmp_path / "model"), tmp_path / "out", "int4", ())
    tensors = load_file(made.path / "model.safetensors")
    assert tensors[f"{key}_packed"].shape == (128, 16) and not any("visual" in k and "packed" in k for k in tensors)
    found = logits_of(made.path)
    torch.testing.assert_close(found, logits_of(tmp_path / "model", quantization="int4"), rtol=1e-6, atol=1e-6)


def test_modules_to_ignore(plain: dict[str, Path], tmp_path: Path) -> None:
    ignore = ["model.layers.0.mamba.in_proj", "re:.*self_attn"]
    made = write_quantised(str(plain["falcon"]), tmp_path / "out", "fp8", ignore)
    tensors = load_file(made.path / "model.safetensors")
    kinds = {key: t.dtype for key, t in tensors.items() if key.endswith("proj.weight")}
    left = {key for key, dtype in kinds.items() if dtype == torch.float32}
    assert left == {key for key in kinds if "self_attn" in key or key.startswith("model.layers.0.mamba.in_proj")}
    said = json.loads((made.path / "config.json").read_text())["quantization_config"]
    assert {key.removesuffix(".weight") for key in left} <= set(said["ignore"])
    assert logits_of(made.path)


@pytest.mark.parametrize(
    ("ignore", "text"),
    [
        (["re:.*nothing"], "ignore is 're:.*nothing', which matches no matrix"),
        (["re:("], "no regular expression"),
        (["re:.*"], "ignore leaves no matrix"),
        (["re:.*experts.1.up_proj"], "ignore names some matrices of|holds several matrices"),
    ],
)
def test_patterns_are_checked_before_anything_is_written(
    ignore: list[str], text: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        write_quantised(str(plain["qwen"]), tmp_path / "out", "fp8", ignore)
    assert not list(tmp_path.iterdir())


def test_memory_holds_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrt.kernels.quant.encode.NUMBERS", 1 << 16)
    write(falcon(hidden_size=128, intermediate_size=4096, vocab_size=64, num_hidden_layers=4), tmp_path / "model")
    largest = max(t.nbytes for t in load_file(tmp_path / "model" / "model.safetensors").values())
    with LiveBytes() as live:
        made = write_quantised(str(tmp_path / "model"), tmp_path / "out", "fp8", ())
    at_once = 4 * 128 * 4096  # bytes of a block's rows
    assert largest < live.peak < 1.25 * largest + 3 * at_once < made.source_bytes / 2


def test_nothing_is_left_after_a_failure(
    plain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(plain["falcon"])
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="there exists; choose another name"):
        write_quantised(source, tmp_path / "there", "fp8", ())
    write_quantised(source, tmp_path / "once", "fp8", ())
    with pytest.raises(ConfigError, match=r"quantised already \(by compressed-tensors\)"):
        write_quantised(str(tmp_path / "once"), tmp_path / "twice", "fp8", ())

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hybridrt.models.loading.tensor_writer.TensorWriter.write", fails)
    with pytest.raises(ConfigError, match=r"twice cannot be written: .*No space left"):
        write_quantised(source, tmp_path / "twice", "fp8", ())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["once", "there"]


def test_damaged_numbers_leave_nothing(plain: dict[str, Path], tmp_path: Path) -> None:
    path = with_number(plain["falcon"], tmp_path / "model", torch.nan)
    with pytest.raises(CheckpointError, match="up_proj contains NaN"):
        write_quantised(str(path), tmp_path / "out", "int4", ())
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_the_command_prints_the_perplexity_before_and_after(tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text(
        "def read_lines(path):\n    with open(path) as file:\n        return file.read()\n"
    )
    words = ["quantize", "embedded", str(tmp_path / "out"), "--scheme", "int4"]
    result = CliRunner().invoke(app, [*words, "--text", str(tmp_path / "text.py"), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if line.startswith("perplexity"))
    before, after = (float(word) for word in line.split() if word[0].isdigit())
    assert 1 < before < 100 and after != before and abs(after / before - 1) < 0.3


def test_words_of_the_command_are_checked(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model")
    for words, text in (
        (["--scheme", "int3"], "--scheme is 'int3'; it must be one of fp8, int4, nvfp4"),
        (["--scheme", "fp8", "--text", str(tmp_path / "no.txt")], "no.txt cannot be read"),
        (["--scheme", "fp8"], "has no matrix of at least 128 x 128|no \\*.safetensors"),
    ):
        result = CliRunner().invoke(app, ["quantize", str(path), str(tmp_path / "out"), *words])
        assert result.exit_code == 2, result.output
        assert any(each in " ".join(result.stderr.split()) for each in text.replace("\\", "").split("|"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_an_end_by_a_signal_leaves_nothing(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the directories that were made for it."""

    def end(*_: object) -> None:
        assert len(list((tmp_path / "new" / "er").iterdir())) == 1  # the temporary directory
        os.kill(os.getpid(), sent)

    def passes(*_: object) -> None: ...

    monkeypatch.setattr(quantise, "_write_shards", end)
    before = signal.signal(sent, passes)  # without a handler of the command, pytest goes on
    try:
        words = ["quantize", "embedded", str(tmp_path / "new" / "er" / "out"), "--scheme", "int4"]
        result = CliRunner().invoke(app, words)
        assert signal.getsignal(sent) is passes
    finally:
        signal.signal(sent, before)
    assert result.exit_code == 128 + sent and not list(tmp_path.iterdir())


def test_an_ignored_sighup_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "_write_shards", lambda *_: os.kill(os.getpid(), signal.SIGHUP) or (1, 1))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = CliRunner().invoke(app, ["quantize", "embedded", str(tmp_path / "out"), "--scheme", "int4"])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.exit_code == 0 and (tmp_path / "out").is_dir()


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda tensors: tensors.pop("model.final_layernorm.weight"), "1 missing: model.final_layernorm.weight"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "1 that nothing consumes: extra"),
        (
            lambda tensors: tensors.update({"model.final_layernorm.weight": torch.ones(2)}),
            r"norm.weight takes shape \(\d+,\), the checkpoint's \(2,\)",
        ),
        (
            lambda tensors: tensors.update({"model.final_layernorm.weight": torch.ones(256, dtype=torch.int16)}),
            "model.final_layernorm.weight holds torch.int16",
        ),
    ],
)
def test_what_a_model_would_refuse_is_not_written(
    edit: Callable[[dict[str, torch.Tensor]], object], text: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(plain["falcon"], path)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=text):
        write_quantised(str(path), tmp_path / "out", "fp8", ())
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_tensors_of_two_files(plain: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(plain["falcon"], path)
    shutil.copy(path / "model.safetensors", path / "other.safetensors")
    with pytest.raises(CheckpointError, match="filled more than once"):
        write_quantised(str(path), tmp_path / "out", "fp8", ())


def test_places_that_cannot_be_written(plain: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(plain["falcon"], path)
    with pytest.raises(ConfigError, match="would be within the checkpoint"):
        write_quantised(str(path), path / "out", "fp8", ())
    with pytest.raises(ConfigError, match=r"cannot be written: .*File name too long"):
        write_quantised(str(path), tmp_path / ("x" * 300), "fp8", ())


def test_transformers_reads_the_configuration(plain: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    import transformers as tf

    made = write_quantised(str(plain["falcon"]), tmp_path / "out", "fp8", ())
    config = tf.AutoConfig.from_pretrained(made.path)
    tf.AutoModelForCausalLM.from_pretrained(made.path, config=config, dtype=torch.float32)
