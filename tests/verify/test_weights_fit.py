"""Trained weights tell which tensor is none of theirs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrt.runtime.load.model_path import ASSETS
from hybridrt.verify import text_fit, weights_fit
from hybridrt.verify.files import check_config
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject
from hybridrt.verify.text import check_tokenizer
from hybridrt.verify.weights_fit import check_weights_fit
from tests.support import damages
from tests.support.checkpoints import CheckpointStore

LAYER = "model.layers.2."


def judged(path: Path) -> Result:
    subject, result = Subject(str(path), device="cpu"), Result("weights by text")
    check_config(subject, Result("config"))
    check_tokenizer(subject, Result("tokenizer"))
    check_weights_fit(subject, result)
    return result


def exchanged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    other = {"1": "2", "2": "1"}
    parts = ((key.split("."), tensor) for key, tensor in tensors.items())
    return {
        ".".join([*key[:2], other.get(key[2], key[2]), *key[3:]]) if "layers" in key else ".".join(key): tensor
        for key, tensor in parts
    }


def one(name: str, change: Any) -> Any:
    return lambda tensors: tensors | {LAYER + name: change(tensors[LAYER + name])}


DAMAGES = {
    "none": (lambda tensors: tensors, ""),
    "a decay times 3": (one("mamba.A_log", lambda t: 3 * t), f"in {LAYER}mamba.A_log"),
    "1 more in a norm": (one("input_layernorm.weight", lambda t: t + 1), f"in {LAYER}input_layernorm.weight"),
    "a transposed matrix": (one("self_attn.o_proj.weight", lambda t: t.t().contiguous()), f"{LAYER}self_attn.o_proj"),
    "another seed": (
        one("feed_forward.up_proj.weight", lambda t: torch.randn_like(t) * t.std()), f"{LAYER}feed_forward."
    ),
    "two layers exchanged": (exchanged, "with layers 1 and 2 exchanged"),
    "1 more in all norms": (
        lambda tensors: {key: t + 1 if "norm" in key else t for key, t in tensors.items()}, "-1 in all norm weights"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if i < 1 else pytest.mark.soak) for i, name in enumerate(DAMAGES)],
)
def test_a_tensor_that_is_none_of_theirs_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_fit, "TOKENS", 256)  # enough for these damages
    path = shutil.copytree(ASSETS / "embedded", tmp_path / "model")
    change, told = DAMAGES[name]
    torch.manual_seed(0)
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})
    result = judged(path)
    assert (result.status == "passed") == (not told)
    assert bool(result.findings) == bool(told) and (not told or told in result.findings[0]), result.findings


def test_random_weights_tell_nothing(
    checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are not tried for as long as trained ones."""
    monkeypatch.setattr(text_fit, "TOKENS", 40)
    path = damages.copied(checkpoints["falcon-plain"].path, tmp_path / "model")
    result = judged(path)
    assert result.status == "passed" and "these weights do not know the text" in result.notes[-1]
    monkeypatch.setattr(weights_fit, "SECONDS_UNTOLD", 0.0)
    assert "stopped after 0 seconds and 1 changes" in judged(path).notes


def test_each_change_is_taken_back() -> None:
    layers = [torch.nn.ModuleDict({"norm": torch.nn.RMSNorm(3), "out": torch.nn.Linear(3, 3)}) for _ in range(3)]
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = []
    for name, changed in weights_fit._changes(model):
        names.append(name)
        with changed:
            assert any(not torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items()) or (
                "norm.weight" in name  # norms begin with the same numbers
            )
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert names[-3:] == [f"with layers {pair} exchanged" for pair in ("0 and 1", "1 and 2", "0 and 2")]
    assert len(names) == 9 + 2 + 3
