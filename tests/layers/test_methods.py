"""Methods of linear layers: one from another package, alone and next to dense in one merged weight."""

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridrt.base import plugins
from hybridrt.base.errors import BackendError, CheckpointError, ConfigError
from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.linear import ColumnLinear, DenseMethod, MixedMethod, RowLinear, Segment, linear_method
from hybridrt.layers.moe import Experts
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointMap, LinearMethod
from hybridrt.models.config.read_quant import read_quant_config
from tests.support.checkpoints import CheckpointStore
from tests.support.outside_method import ScaledInt8, build_with, quantised
from tests.support.session import Session

BUILD = Build(TPGroup(), torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = {
        "scaled_int8": "tests.support.outside_method:ScaledInt8",
        "wrong": "tests.support.outside_method:quantised",
    }
    points = [SimpleNamespace(name=name, value=value) for name, value in names.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == "hybridrt.linear_methods" else [])
    linear_method.cache_clear()
    yield
    linear_method.cache_clear()


def fill(targets: CheckpointMap, tensors: dict[str, Tensor]) -> None:
    assert set(targets) == set(tensors)
    for key, tensor in tensors.items():
        for piece in targets[key]:
            piece.fill(key, tensor)


def restored(tensors: dict[str, Tensor], key: str) -> Tensor:
    """The matrix under a key, whatever holds it."""
    weight = tensors[f"{key}.weight"]
    return weight if weight.is_floating_point() else weight.float() * tensors[f"{key}.weight_scale"][:, None]


def written(key: str, weight: Tensor, int8: bool) -> dict[str, Tensor]:
    if not int8:
        return {f"{key}.weight": weight}
    values, scales = quantised(weight)
    return {f"{key}.weight": values, f"{key}.weight_scale": scales}


def test_names_of_methods() -> None:
    assert linear_method("dense") is DenseMethod and linear_method("scaled_int8") is ScaledInt8
    with pytest.raises(BackendError, match=r"'nope' is not supported.*dense, fp4, fp8, int4, int8, scaled_int8, wrong"):
        linear_method("nope")
    with pytest.raises(BackendError, match="must name a LinearMethod"):
        linear_method("wrong")
    with pytest.raises(BackendError, match="leave the experts dense"):
        Experts(
            "experts", 1, 4, 4, activation="silu", build=build_with(BUILD, ("experts.0", "gate"), ("experts.0", "up"))
        )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("int8", [(), ("k",), ("k", "v"), ("q", "gate"), ("q", "k", "v", "gate")])
@pytest.mark.parametrize("bias", [False, True])
def test_segments_of_one_output_may_differ(int8: tuple[str, ...], rank: int, bias: bool) -> None:
    """One checkpoint matrix holds q and gate, which stand apart in the weight. A multiplier lands on the scales."""
    torch.manual_seed(1)
    build = build_with(Build(TPGroup(rank, 2), torch.float32, torch.device("cpu")), *(("qkv", name) for name in int8))
    sizes = {"q": 8, "k": 4, "v": 4, "gate": 8}
    segments = [Segment(name, size, 1 if name in "kv" else None, bias) for name, size in sizes.items()]
    linear = ColumnLinear("qkv", 6, segments, build=build)
    kinds = [type(run) for run in getattr(linear.method, "runs", [linear.method])]
    assert kinds.count(DenseMethod) == {(): 1, ("k",): 2, ("k", "v"): 2, ("q", "gate"): 1}.get(int8, 0)
    assert isinstance(linear.method, MixedMethod) == (len(kinds) > 1)
    scale, whole, tensors, targets = {"q": 3.0, "v": 0.5}, {}, {}, {}
    for key, names in (("qg", ["q", "gate"]), ("k", ["k"]), ("v", ["v"])):
        weight, b = torch.randn(sum(sizes[n] for n in names), 6), torch.randn(sum(sizes[n] for n in names))
        tensors |= written(key, weight, names[0] in int8) | ({f"{key}.bias": b} if bias else {})
        targets |= linear.targets(key, names, scale=scale)
        parts = restored(tensors, key).split([sizes[n] for n in names]), b.split([sizes[n] for n in names])
        whole |= {n: (w * scale.get(n, 1.0), b) for n, w, b in zip(names, *parts, strict=True)}
    fill(targets, tensors)
    names = [piece.name for pieces in targets.values() for piece in pieces]
    assert len(set(names)) == len(names)
    mine = {n: [build.tp.shard(t, 0, 1 if n in "kv" else None) for t in whole[n]] for n in sizes}
    weight, offset = (torch.cat([mine[n][i] for n in sizes]) for i in (0, 1))
    x, residual = torch.randn(3, 6), torch.randn(3, 6)
    expected = x @ weight.t() + (offset if bias else 0.0)
    torch.testing.assert_close(linear(x), expected)
    torch.testing.assert_close(linear(x, "relu2"), expected.relu().square())
    norm = RMSNorm("norm", 6, 1e-5, device=torch.device("cpu"))
    norm.weight.data.fill_(1.0)
    normed, total = linear.method.apply_normed(norm, x, residual.clone(), linear.bias)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, linear(norm(x, residual.clone())[0]))


@pytest.mark.parametrize("int8", [("ssm",), ("attn",), ("attn", "ssm")])
@pytest.mark.parametrize("adds", [False, True])
def test_segments_of_one_input_may_differ(int8: tuple[str, ...], adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    monkeypatch.setattr(LinearMethod, "adds_from", 0 if adds else inf)
    sizes = {"attn": 4, "ssm": 6}
    build = build_with(BUILD, *(("out", name) for name in int8))
    linear = RowLinear("out", [Segment(*item) for item in sizes.items()], 5, build=build)
    tensors: dict[str, Tensor] = {}
    for name, size in sizes.items():
        tensors |= written(name, torch.randn(5, size), name in int8)
    targets = {**linear.targets("attn", "attn"), **linear.targets("ssm", "ssm", scale=2.0)}
    assert len(linear.method.runs) == 2, "two matrices of one scheme have scales of their own"  # type: ignore[attr-defined]
    fill(targets, tensors)
    x, tail, residual = torch.randn(3, 4), torch.randn(3, 6), torch.randn(3, 5)
    expected = x @ restored(tensors, "attn").t() + tail @ restored(tensors, "ssm").t() * 2.0
    torch.testing.assert_close(linear(x, tail), expected)
    added, rest = linear.onto(residual.clone(), x, tail)
    assert (rest is None) == adds
    torch.testing.assert_close(added if rest is None else added + rest, expected + residual)


def test_a_tensor_of_another_dtype_is_refused() -> None:
    linear = ColumnLinear("qkv", 6, [Segment("q", 4)], build=build_with(BUILD, ("qkv", "q")))
    piece = linear.targets("q", ["q"])["q.weight"][0]
    with pytest.raises(CheckpointError, match=r"float32, and qkv.q.weight takes torch.int8"):
        piece.fill("q.weight", torch.randn(4, 6))


def test_a_list_of_plain_modules_that_is_none(tmp_path: Path) -> None:
    said = {"quant_method": "scaled_int8", "ignore": 5}
    with pytest.raises(ConfigError, match="quantization_config: ignore is 5; it must be null, or a list"):
        read_quant_config(tmp_path, {"quantization_config": said}, {})


def test_a_model_whose_merged_weights_are_partly_int8(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Falcon-H1 merges z, x, B, C, dt, q, k, v, whose multipliers land on the scales, and two outputs. Its logits are
    those of the same numbers in a dense model. config.json names the method, which gets it as options."""
    source = checkpoints["falcon-plain"].path
    patterns = ("k_proj.weight", "v_proj.weight", "mamba.out_proj.weight", "down_proj.weight", "up_proj.weight")
    tensors = {key: t for file in source.glob("*.safetensors") for key, t in load_file(file).items()}
    small, dense = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in tensors.items():
        parts = written(key.removesuffix(".weight"), tensor, True) if key.endswith(patterns) else {key: tensor}
        small |= parts
        dense[key] = restored(parts, key.removesuffix(".weight")) if key.endswith(patterns) else tensor
    prompts, logits = [([5, 9, 17, 3, 40, 8], 6), ([2, 3], 6)], []
    said = {"quant_method": "scaled_int8", "colour": "blue"}
    for name, stored in (("int8", small), ("dense", dense)):
        path = tmp_path / name
        path.mkdir()
        for file in source.glob("*.json"):
            if "index" not in file.name:
                (path / file.name).write_bytes(file.read_bytes())
        if name == "int8":
            fields = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(fields | {"quantization_config": said}))
        save_file({key: t.contiguous() for key, t in stored.items()}, path / "model.safetensors")
        session = Session(path)
        runs: Any = [m.method for m in session.runner.model.modules() if hasattr(m, "method")]
        found = [run for mixed in runs if isinstance(mixed, MixedMethod) for run in mixed.runs]
        assert [run.scheme.options for run in found if isinstance(run, ScaledInt8)] == [said] * 6 * (name == "int8")
        logits.append([sample.logits for sample in session.run(prompts, chunk=4)])
    for ours, theirs in zip(*logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
