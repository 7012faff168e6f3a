"""The plugins against the Triton kernels that vLLM and SGLang publish, both in Triton's interpreter. Skipped where
their source is not at hand (`tests/support/peer_source.py`)."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from hybridrt.kernels.core.records import GateWeights
from tests.support import sglang_stub, vllm_stub
from tests.support.gdn_loops import relative_error
from tests.support.mamba2_oracle import int32
from tests.support.peer_modules import installed
from tests.support.peer_source import source_of

HEADS, KEY_HEADS, V, K, BLOCKS = 4, 2, 16, 32, 6
CHANNELS = 2 * KEY_HEADS * K + HEADS * V


def loaded(file: Path, name: str) -> ModuleType:
    """One file of another engine, as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folder(peer: str) -> Path:
    source = source_of(peer)
    if source is None:
        pytest.skip(f"{peer} is not at hand")
    return source


@pytest.fixture
def vllm_kernel() -> Iterator[Any]:
    """vLLM's decode of one token, with what its file imports."""
    ops = folder("vllm") / "third_party/flash_linear_attention/ops"
    needed = {"vllm.platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: False, is_rocm=lambda: False)}}
    needed |= {"vllm.triton_utils": {"tl": tl, "triton": triton}, "vllm": {}, "fla_ops": {}}
    stub = SimpleNamespace(**{name: value for names in needed.values() for name, value in names.items()})
    with installed(stub, {name: list(names) for name, names in needed.items()}, "vllm"):
        assert "exp = tl.exp" in (ops / "op.py").read_text()
        functions = SimpleNamespace(exp=lambda x: tl.exp(x), log=lambda x: tl.log(x))
        sys.modules["fla_ops.op"] = functions  # type: ignore[assignment]
        module = loaded(ops / "fused_recurrent.py", "fla_ops.fused_recurrent")
        yield module.fused_recurrent_gated_delta_rule_packed_decode
    sys.modules.pop("fla_ops.op", None)


def tokens(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    merged = torch.randn(rows, CHANNELS + 2 * HEADS, generator=torch.Generator().manual_seed(seed))
    qkv, a, b = merged.split([CHANNELS, HEADS, HEADS], -1)
    return qkv, a.contiguous(), b.contiguous()


def test_vllms_kernel(provider: str, vllm_kernel: Any) -> None:
    torch.manual_seed(0)
    weights, blocks = GateWeights(torch.randn(HEADS) - 3, torch.randn(HEADS)), int32(3, 0, 5)
    own, ours = (torch.randn(BLOCKS, HEADS, V, K, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    ring = torch.zeros(BLOCKS, HEADS, 4, V), torch.zeros(BLOCKS, HEADS, 4), torch.zeros(BLOCKS, KEY_HEADS, 4, K)
    with installed(vllm_stub, vllm_stub.MODULES, "vllm"):
        replay = importlib.import_module("hybridrt_vllm.replay").ReplayBlocks(ours, ring, max_rows=3)
    for step in range(8):
        qkv, a, b = tokens(3, step)
        expected = torch.empty(3, 1, HEADS, V)
        vllm_kernel(qkv, a, b, *weights[:2], K**-0.5, own, expected, blocks, use_qk_l2norm_in_kernel=True)
        out = replay.decode(qkv, a, b, weights, replay.rows(blocks))
        assert relative_error(out, expected[:, 0]) < 1e-5
    assert relative_error(ours, own) < 1e-5, "eight tokens are two whole rings"


@pytest.fixture
def bool_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.9 stores nothing with a mask that is the `&` of a block and of a compared scalar."""
    from triton.runtime.interpreter import interpreter_builder as builder

    store = builder.create_masked_store

    def stored(pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(pointers, value, mask, policy)

    monkeypatch.setattr(builder, "create_masked_store", stored)


@pytest.mark.usefixtures("bool_masks")
def test_sglangs_kernel(provider: str) -> None:
    """With a ring, through full and forced folds; either of the two can go on from the other one's memory."""
    kernel = loaded(
        folder("sglang") / "kernels/ops/attention/linear/fused_recurrent_linear_replayssm.py", "sglang_replay"
    ).fused_recurrent_linear_replayssm_decode
    torch.manual_seed(0)
    A_log, dt_bias, slots, columns = torch.randn(HEADS) - 3, torch.randn(HEADS), int32(3, -1, 5), 4
    state = torch.randn(BLOCKS, HEADS, V, K)
    memory = [state, torch.zeros(BLOCKS, HEADS, columns, V), torch.zeros(BLOCKS, KEY_HEADS, columns, K)]
    memory.append(torch.zeros(BLOCKS, HEADS, columns))
    own, ours, written = [part.clone() for part in memory], [part.clone() for part in memory], int32(0, 0, 2)
    own[3][5, :, :2] = ours[3][5, :, :2] = -0.1
    with installed(sglang_stub, sglang_stub.MODULES, "sglang"):
        decode = importlib.import_module("hybridrt_sglang.decode").replay_decode
    for step, forced in enumerate([0, 0, 0, 1, 0, 0, 0, 0]):
        qkv, a, b = tokens(3, step)
        expected, force = torch.empty(3, 1, HEADS, V), int32(forced, 0, 0)
        kernel(qkv, a, b, A_log, dt_bias, K**-0.5, *own, expected, slots, written, force, use_qk_l2norm_in_kernel=True)
        ring = dict(zip(sglang_stub.RING, (*ours[1:], written), strict=True))
        terms = {"A_log": A_log, "dt_bias": dt_bias, "ssm_states": ours[0], "cache_indices": slots, **ring}
        out = decode(qkv, a, b, terms | {"replayssm_force_flush": force})
        assert relative_error(out[0], expected[:, 0]) < 1e-5
        assert relative_error(ours[0], own[0]) < 1e-5
        if step == 5:
            own, ours = ours, own
        written = torch.where((written == columns - 1) | (force != 0), 0, written + 1).int()
