"""Kernels for GPUs that we did not run on: they compile, and fit in the shared memory that a program may have."""

from pathlib import Path

import pytest
import torch

from hybridrt.base.device import KNOWN
from hybridrt.base.tried import COMPILED
from hybridrt.kernels.attention import paged_attention_triton
from hybridrt.kernels.attention.paged_attention_triton import DECODES, Decode, _loaded_bytes
from hybridrt.kernels.delta_rule import delta_rule_triton
from hybridrt.kernels.delta_rule.delta_rule_triton import PASSES, Pass
from hybridrt.kernels.quant import quant_experts_triton
from tests.support.quant_weights import empty_weight
from tests.support.sm90_process import Compiler

CPU = torch.device("cpu")

GPUS = [name for name, gpu in KNOWN.items() if gpu.capability in COMPILED]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name == "l40s" else pytest.mark.soak) for name in GPUS
])  # fmt: skip
def test_the_most_demanding_kernels_fit(name: str, tmp_path: Path) -> None:
    """Larger tiles of the H200 ask for up to 137 KB where 99 KB are there. A product of pairs of bfloat16 is an
    instruction of sm_90. The slow level has one that is older than sm_90 and has little shared memory."""
    compiler, room = Compiler(tmp_path / "errors", name), KNOWN[name].shared_memory
    try:
        usages = compiler("demanding")
    finally:
        compiler.close()
    assert {
        "_attention_decode_kernel",
        "_attention_extend_kernel",
        "_pass_kernel",
        "_mamba2_outputs_kernel",
        "_matmul_kernel",
    } <= {usage["kernel"] for usage in usages}
    assert [usage for usage in usages if "error" in usage or usage["shared"] > room] == []


@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        (Decode(32, 5, 16, 2, 256, 0, 4096, 0, False, torch.bfloat16), 32),
        (Decode(1, 1, 32, 1, 512, 64, 4096, 0, False, torch.bfloat16), 32),
        (Decode(128, 1, 12, 2, 128, 0, 4096, 0, False, torch.bfloat16), 64),
    ],
)
def test_decode_loads_as_many_keys_as_fit(shape: Decode, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled for sm_89: 106,496 and 114,688 bytes with 64 keys at a time."""
    monkeypatch.setattr(paged_attention_triton, "shared_memory", lambda _: KNOWN["l40s"].shared_memory)
    tile = DECODES.built_in(shape, CPU)
    assert tile["BLOCK_N"] == keys and _loaded_bytes(shape, tile) <= KNOWN["l40s"].shared_memory
    monkeypatch.setattr(paged_attention_triton, "shared_memory", lambda _: KNOWN["h200"].shared_memory)
    assert DECODES.built_in(shape, CPU)["BLOCK_N"] == 64


@pytest.mark.parametrize(("gpu", "wide"), [("l40s", 2048), ("h200", 6144)])
def test_experts_with_few_pairs_whose_inputs_fit(gpu: str, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the shared memory holds the inputs of 16 pairs; of e2m1 those of 8, where a block has no more."""
    monkeypatch.setattr(quant_experts_triton, "shared_memory", lambda _: KNOWN[gpu].shared_memory)

    def takes(name: str, width: int, each: float) -> bool:
        weight = empty_weight(name, 512, width, 64, device="meta")
        return quant_experts_triton.takes_few_pairs(weight, torch.bfloat16, each)

    assert takes("nvfp4", wide, 8) and not takes("nvfp4", 2 * wide, 8)
    for name, each in (("fp8 blocks", 8), ("int4", 8), ("nvfp4", 9)):
        assert takes(name, wide // 2, each) and not takes(name, wide, each)


@pytest.mark.parametrize(
    ("gpu", "by_channel", "tile"),
    [
        ("l40s", False, {"BLOCK_V": 32, "num_warps": 4, "num_stages": 3}),
        ("l40s", True, {"BLOCK_V": 32, "num_warps": 4, "num_stages": 2}),
        ("a100", False, {"BLOCK_V": 32, "num_warps": 4, "num_stages": 4}),
        ("a100", True, {"BLOCK_V": 32, "num_warps": 4, "num_stages": 3}),
    ],
)
def test_a_pass_prefetches_as_many_chunks_as_fit(
    gpu: str, by_channel: bool, tile: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compiled: 99,840 and 70,144 bytes on sm_89, 137,472 and 123,904 on sm_80."""
    monkeypatch.setattr(delta_rule_triton, "shared_memory", lambda _: KNOWN[gpu].shared_memory)
    heads = 32 if by_channel else 16
    assert PASSES.built_in(Pass(16, 32, heads, 128, 128, 64, by_channel, torch.bfloat16), CPU) == tile
