"""Scales of a KV cache that checkpoints bring: of every spelling, incomplete ones, and those that cannot be."""

import logging
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.base.errors import CheckpointError
from hybridrt.mem_cache.pools.kv_pool import KVScales
from hybridrt.runtime.run import kv_scales
from tests.models.test_quantised_checkpoints import BLOCKS, Case
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import sweep
from tests.support.session import Session

CODES: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
NEMOTRON = Case("nemotron-plain", {"": "fp8-tensor"}, {}, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
PLAIN = Case("nemotron-plain", {}, {}, {"quant_algo": None, "kv_cache_quant_algo": "FP8"})
QWEN = Case("qwen-plain", {"": "fp8-blocks"}, BLOCKS)


def attention_layers(tensors: dict[str, Tensor]) -> list[str]:
    return [key.removesuffix(".k_proj.weight") for key in tensors if key.endswith(".k_proj.weight")]


def scales(path: Path, **config: Any) -> dict[int, KVScales]:
    return Session(path, **(CODES | config)).runner.pools.kv.scales


SPELLINGS = [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("attn.kv_scale",)]


@pytest.mark.parametrize(("case", "names"), sweep(product([NEMOTRON, QWEN], SPELLINGS), 2))
def test_scales_of_the_checkpoint(
    case: Case, names: tuple[str, ...], checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for layer in attention_layers(tensors):
            for i, name in enumerate(names):
                tensors[f"{layer}.{name}"] = torch.tensor(0.25 + i, dtype=torch.bfloat16).view((1,) * i)

    monkeypatch.setattr(kv_scales, "_measured", None)
    path, _ = case.write(checkpoints, tmp_path, add)
    assert set(scales(path).values()) == {KVScales(0.25, 1.25 if len(names) > 1 else 0.25)}
    assert set(scales(path, kv_scales="one").values()) == {KVScales(1.0, 1.0)}


def test_scales_of_a_plain_checkpoint(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    def add(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for layer in attention_layers(tensors):
            tensors |= {f"{layer}.{name}": torch.tensor(0.25) for name in ("k_scale", "v_scale")}

    path, _ = PLAIN.write(checkpoints, tmp_path, add)
    assert set(scales(path).values()) == {KVScales(0.25, 0.25)}


def test_scales_that_are_missing_are_measured(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    def add(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"{attention_layers(tensors)[0]}.k_scale"] = torch.tensor(0.3)

    path, twin = NEMOTRON.write(checkpoints, tmp_path, add)
    found, measured = scales(path), scales(twin)
    first = min(found)
    assert found == measured | {first: KVScales(pytest.approx(0.3), measured[first].values)}
    assert len(found) == 2


@pytest.mark.parametrize(
    "value", [torch.tensor(0.0), torch.tensor(-1.0), torch.tensor(torch.nan), torch.tensor(torch.inf), torch.ones(2)]
)
def test_scales_that_are_no_positive_number(value: Tensor, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    def add(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"{attention_layers(tensors)[0]}.v_scale"] = value

    path, _ = NEMOTRON.write(checkpoints, tmp_path, add)
    with pytest.raises(CheckpointError, match=r"v_scale is .*one positive number"):
        scales(path)
    assert scales(path, kv_scales="one")


def test_a_layer_that_no_model_has(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Python converts no more than 4,300 digits."""

    def add(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        layer = attention_layers(tensors)[0]
        tensors[re.sub(r"\d+", "1" * 5000, layer) + ".k_scale"] = torch.tensor(0.3)

    path, twin = NEMOTRON.write(checkpoints, tmp_path, add)
    assert scales(path) == scales(twin)


def test_two_scales_for_the_same_keys(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    def add(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in ("k_scale", "k_proj.k_scale"):
            tensors[f"{attention_layers(tensors)[0]}.{name}"] = torch.tensor(0.3)

    path, _ = NEMOTRON.write(checkpoints, tmp_path, add)
    with pytest.raises(CheckpointError, match="second scale for k of layer"):
        scales(path)


def test_auto_keeps_the_models_dtype_and_says_so(
    checkpoints: CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"{attention_layers(tensors)[0]}.k_scale"] = torch.tensor(0.3)

    path, _ = NEMOTRON.write(checkpoints, tmp_path, add)
    with caplog.at_level(logging.INFO, "hybridrt.load"):
        kv = Session(path).runner.pools.kv
    assert all(tensor.dtype == torch.float32 for tensor in kv.tensors)
    assert caplog.text.count('has scales for kv_cache_dtype="fp8_e4m3"') == 1
