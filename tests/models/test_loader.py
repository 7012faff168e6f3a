"""Checkpoints that do not fit: each key is used exactly once, and whatever is wrong is named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.collectives.groups import TPGroup
from hybridrt.models.base import CausalLM
from hybridrt.models.loading.loader import fill_dummy, load_weights
from hybridrt.runtime.load.build_model import build_model, empty_model
from hybridrt.runtime.load.load_target import load_target
from tests.models.test_models_parity import BASES, check_sample, requests
from tests.support.checkpoints import CASES, CheckpointStore, write
from tests.support.levels import sweep
from tests.support.session import Session

Tensors = dict[str, Tensor]


def empty(path: Path) -> CausalLM:
    config = EngineConfig(str(path), device="cpu", dtype="float32", max_model_len=128)
    target = load_target(config, TPGroup())[1]
    return empty_model(config, target, torch.device("cpu"))


def load(path: Path, **config: Any) -> CausalLM:
    engine_config = EngineConfig(str(path), **{"device": "cpu", "dtype": "float32", "max_model_len": 128, **config})
    return build_model(engine_config, load_target(engine_config, TPGroup())[1], path, False)


def skipped(path: Path) -> list[str]:
    with torch.no_grad():
        return load_weights(empty(path), path)


@pytest.fixture
def copy_of(checkpoints: CheckpointStore, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint of its own to spoil."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(checkpoints[name].path, tmp_path / name))

    return make


def edit(path: Path, change: Callable[[Tensors], object], file: str = "model.safetensors") -> None:
    tensors = load_file(path / file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)


@pytest.mark.parametrize("name", sweep(CASES, 6, thin=2))
def test_every_key_is_used_once_and_every_parameter_filled(name: str, checkpoints: CheckpointStore) -> None:
    """What nothing fills stays NaN: uninitialised memory is NaN in tests."""
    path = checkpoints[name].path
    model = empty(path)
    with torch.no_grad():
        found = load_weights(model, path)
    # Images, what a Zamba2 model whose blocks serve one place each keeps for other places, and powers of decays.
    images = r"model\.(visual|vision_tower|multi_modal_projector|merger)\.|vision_model\.|mlp1\."
    unused = {key for key in found if re.search(rf"^({images})|_adapter_list\.|_decay$|slope_rate$", key)}
    assert set(found) - unused <= {"lm_head.weight"}
    for parameter_name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), f"{parameter_name} is not filled"


@pytest.mark.parametrize("name", sweep(CASES, 6, thin=2))
def test_no_two_keys_fill_one_place(name: str, checkpoints: CheckpointStore) -> None:
    """Pieces have names of their own, and the elements they fill do not overlap (biases that add up, apart)."""
    model = empty(checkpoints[name].path)
    pieces = [piece for target in model.checkpoint_map().values() for piece in target]
    assert len({piece.name for piece in pieces}) == len(pieces)
    for parameter in model.parameters():
        parameter.data.zero_()
    for piece in pieces:
        if not piece.accumulate:
            piece.dest.add_(1)
    for parameter_name, parameter in model.named_parameters():
        assert parameter.max() <= 1, parameter_name


def test_an_older_name_of_mambas_embedding(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("mamba-plain")
    edit(path, lambda tensors: tensors.update({"backbone.embedding.weight": tensors.pop("backbone.embeddings.weight")}))
    assert load(path).embed.weight.isfinite().all()


@pytest.mark.parametrize("name", sweep(BASES, 4, thin=3))
def test_each_missing_key_is_named(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    whole = load_file(checkpoints[name].path / "model.safetensors")
    shutil.copy(checkpoints[name].path / "config.json", tmp_path)
    model = empty(checkpoints[name].path)
    for key in [key for key in sorted(whole)[::9] if not re.search("_decay$|slope_rate$", key)]:
        save_file({k: v for k, v in whole.items() if k != key}, tmp_path / "model.safetensors")
        parts = model.parts_of(key)
        with pytest.raises(CheckpointError, match=f"{len(parts)} missing") as error:
            load(tmp_path)
        assert all(part in str(error.value) for part in sorted(part for part, _ in parts)[:8])


def test_a_key_that_nothing_consumes_is_named(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("falcon-plain")
    edit(path, lambda t: t.update({"model.layers.0.surplus.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"nothing consumes: model\.layers\.0\.surplus\.weight"):
        load(path)


def test_many_offenders_are_counted(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("falcon-plain")
    edit(path, lambda t: [t.pop(key) for key in list(t) if ".mamba." in key])
    with pytest.raises(CheckpointError, match=r"\d+ missing: .* and \d+ more"):
        load(path)


def grown(tensor: Tensor, dim: int, by: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] += by
    return torch.ones(shape)


@pytest.mark.parametrize("by", [-1, 1, 8])
@pytest.mark.parametrize(
    "name", ["falcon-all_biases", "nemotron-latent_experts_in_groups", "qwen-attention_first", "jamba-projection_bias"]
)
def test_every_misshapen_tensor_is_refused(name: str, by: int, copy_of: Callable[[str], Path]) -> None:
    """Too small and too large, in every dimension: nothing is cut off or repeated to fit."""
    path = copy_of(name)
    whole = load_file(path / "model.safetensors")
    model = empty(path)
    for name_in_file, target in model.checkpoint_map().items():
        key = next(k for k in whole if model.rename_key(k) == name_in_file)
        for dim in range(whole[key].dim()):
            if whole[key].shape[dim] + by < 1:
                continue
            wrong = grown(whole[key], dim, by)
            with torch.no_grad(), pytest.raises(CheckpointError, match="shape") as error:
                for piece in target:
                    piece.fill(key, wrong)
            assert key in str(error.value) and str(wrong.shape[dim]) in str(error.value)


def test_config_and_weights_that_do_not_belong_together(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("falcon-plain")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"vocab_size": 100}))
    with pytest.raises(CheckpointError, match="131"):
        load(path)


@pytest.mark.parametrize("size", [0, 5, 3000, -1])
def test_a_truncated_file_is_refused(size: int, copy_of: Callable[[str], Path]) -> None:
    path = copy_of("qwen-plain")
    file = path / "model.safetensors"
    with file.open("r+b") as f:
        f.truncate(size if size >= 0 else file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(path)


def test_no_weights_at_all(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("qwen-plain")
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="dummy"):
        load(path)


def sharded(tmp_path: Path, name: str = "qwen-plain") -> Path:
    path = tmp_path / "sharded"
    write(CASES[name], path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.mark.parametrize("name", sweep(BASES, 4, thin=3))
def test_shards_equal_one_file(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = sharded(tmp_path, name)
    sample = Session(path).run(requests(9, steps=3))[0]
    check_sample(checkpoints[name], sample, name)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    shard = sorted(path.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(path)


def test_shards_without_an_index(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """The files say themselves what they hold; if one is gone, its keys are missing."""
    path = sharded(tmp_path)
    (path / "model.safetensors.index.json").unlink()
    load(path)
    sorted(path.glob("*.safetensors"))[0].unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load(path)


def test_a_key_in_two_shards(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    first, second = sorted(path.glob("*.safetensors"))[:2]
    key, tensor = next(iter(load_file(first).items()))
    edit(path, lambda t: t.update({key: tensor}), second.name)
    with pytest.raises(CheckpointError, match=key):
        load(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="more than once"):
        load(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_a_broken_index(text: str, tmp_path: Path) -> None:
    path = sharded(tmp_path)
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        load(path)


def test_an_index_that_names_another_file_than_holds_the_key(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    key = next(iter(index["weight_map"]))
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][key] = next(f for f in files if f != index["weight_map"][key])
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=key):
        load(path)


@pytest.mark.parametrize("name", ["qwen-plain", "nemotron-experts"])
def test_training_leftovers_are_reported(name: str, copy_of: Callable[[str], Path]) -> None:
    path = copy_of(name)
    edit(path, lambda t: t.update({"mtp.fc.weight": torch.ones(2), "mtp.layers.0.norm.weight": torch.ones(3)}))
    assert sorted(skipped(path)) == ["mtp.fc.weight", "mtp.layers.0.norm.weight"]
    load(path)


def test_saved_rotary_frequencies_are_skipped(copy_of: Callable[[str], Path]) -> None:
    """As older versions of transformers saved them, of the model or of each layer."""
    path, keys = copy_of("bamba-plain"), [f"model.{at}rotary_emb.inv_freq" for at in ("", "layers.1.self_attn.")]
    edit(path, lambda tensors: tensors.update({key: torch.ones(2) for key in keys}))
    assert sorted(skipped(path)) == sorted(keys)


@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("falcon-groups_no_conv_bias_tied", "model.embed_tokens.weight"),
        ("qwen-attention_bias_tied", "model.embed_tokens.weight"),
    ],
)
def test_tied_embeddings_stored_twice(
    name: str, embedding: str, copy_of: Callable[[str], Path], checkpoints: CheckpointStore
) -> None:
    path = copy_of(name)
    edit(path, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    assert skipped(path) == ["lm_head.weight"]
    model = load(path)
    assert model.head is model.embed
    check_sample(checkpoints[name], Session(path).run(requests(5, steps=2))[0], name)


@pytest.mark.parametrize(
    ("name", "embedding", "older"),
    [
        ("qwen-attention_bias_tied", "model.embed_tokens", "model.embed_tokens"),
        ("mamba-biases_tied", "backbone.embeddings", "backbone.embedding"),
    ],
)
def test_a_head_that_differs_is_not_tied(name: str, embedding: str, older: str, copy_of: Callable[[str], Path]) -> None:
    """transformers, too, goes by the weights where config.json says tied and they differ."""
    path = copy_of(name)
    head = torch.randn(131, 32)
    edit(path, lambda t: t.update({f"{older}.weight": t.pop(f"{embedding}.weight"), "lm_head.weight": head}))
    model = load(path)
    assert torch.equal(model.logits(torch.eye(32)), head.T)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_weights_are_refused(dtype: torch.dtype, copy_of: Callable[[str], Path]) -> None:
    """A quantised checkpoint without its scales would load as noise."""
    path = copy_of("falcon-plain")
    edit(path, lambda t: t.update({"model.layers.0.mamba.D": t["model.layers.0.mamba.D"].to(dtype)}))
    with pytest.raises(CheckpointError, match=str(dtype).removeprefix("torch.")):
        load(path)


def test_stored_dtypes_are_converted(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("falcon-plain")
    edit(path, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    model = load(path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    half = {name: p.dtype for name, p in load(path, dtype="float16").named_parameters()}
    assert half["stack.parts.0.in_proj.weight"] == torch.float16
    assert half["stack.parts.0.mamba.A"] == half["norm.weight"] == torch.float32


@pytest.mark.parametrize("name", sweep(CASES, 12, thin=5))
def test_dummy_weights_are_seeded_and_finite(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """config.json is all they need; another seed gives others, and long prompts stay finite."""
    (tmp_path / "config.json").write_bytes((checkpoints[name].path / "config.json").read_bytes())
    first, again, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (3, 3, 4))
    for (what, a), b in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all(), what
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    session = Session(tmp_path, load_format="dummy", max_model_len=128)
    sample = session.run(requests(100, steps=3))[0]
    assert sample.logits.isfinite().all() and sample.logits.std() > 0


def test_all_rows_of_e4m3_codes_are_filled() -> None:
    """Of a stack, in blocks of 4,096 rows."""
    layer = nn.Module()
    layer.codes = nn.Parameter(torch.zeros(3, 3000, 16).to(torch.float8_e4m3fn), requires_grad=False)
    layer.codes.dummy = "codes"  # type: ignore[attr-defined]
    fill_dummy(layer, 0)
    numbers = layer.codes.float()
    assert (numbers.abs().amax(2) > 0).all() and 0.9 < float(numbers.std()) < 1.1


def test_a_dummy_fill_without_a_meaning_is_refused() -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.dummy = "noise"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"weight\.dummy is 'noise'; use normal"):
        fill_dummy(layer, 0)
