"""Slots past 4096: slot times stride no longer fits 32 bits, and an address computed so would hit another request."""

import mmap
from math import prod

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import plan_chunks
from hybridrt.kernels.core.records import ConvState, ConvWeights, IntermediateStates
from hybridrt.kernels.mamba.mamba2_replay import mamba2_replay
from hybridrt.kernels.mamba.mamba2_scan import mamba2_chunk_scan
from hybridrt.kernels.mamba.selective_state_update import selective_state_update
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen, conv_window
from hybridrt.kernels.state.state_commit import commit_intermediate
from hybridrt.kernels.state.state_ring import RingFolds, fold_ring
from tests.support.flat import flat
from tests.support.mamba2_oracle import close, int32, same_bytes, scan_inputs, scan_loop

pytestmark = pytest.mark.usefixtures("provider")
STRIDE = 32 * 128 * 128
FAR = 4099
STATE = (4, 3, 5)


def far_pool(*shape: int) -> Tensor:
    """float16 [4100, *shape], slots 2^19 elements apart: 4.3 GB of addresses, of which few pages are touched."""
    buffer = mmap.mmap(-1, 2 * STRIDE * (FAR + 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(buffer, dtype=torch.float16)
    inner = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return flat.as_strided((FAR + 1, *shape), (STRIDE, *inner))


def states_with(initial: Tensor) -> Tensor:
    states = far_pool(*STATE)
    states[FAR] = initial
    return states


def test_selective_state_update() -> None:
    torch.manual_seed(0)
    inputs, initial = scan_inputs(1, 2), torch.randn(STATE).half()
    states, slots = states_with(initial), int32(FAR)
    pool = {"states": states, "read_state_slots": slots, "write_state_slots": slots}
    out = flat(selective_state_update, **inputs.terms(), **pool)
    expected, after = scan_loop(inputs[0], initial)
    close(out[0], expected, 5e-3)
    close(states[FAR], after[-1], 5e-3)


def test_replay_and_fold() -> None:
    torch.manual_seed(1)
    inputs, initial = scan_inputs(1, 2), torch.randn(STATE).half()
    states = states_with(initial)
    values, keys, gates = torch.zeros(3, 4, 8, 3), torch.zeros(3, 2, 8, 5), torch.zeros(3, 4, 8)
    slots, rows, zero = int32(FAR), int32(2), int32(0)
    out = flat(
        mamba2_replay, **inputs.terms(), states=states, read_state_slots=slots, write_state_slots=slots,
        values=values, keys=keys, gates=gates, rows=rows, start=zero, length=zero,
    )  # fmt: skip
    expected, after = scan_loop(inputs[0], initial)
    close(out[0], expected, 1e-5)
    folds = RingFolds(slots, rows, zero, int32(2), int32(1), int32(FAR - 1))
    fold_ring(*(part[None] for part in (states, values, keys, gates, inputs.A)), folds)
    close(states[FAR - 1], after[-1], 2e-3)
    assert same_bytes(states[FAR], initial)


def test_chunk_scan() -> None:
    torch.manual_seed(2)
    inputs, initial = scan_inputs(9), torch.randn(STATE).half()
    states = states_with(initial)
    out = flat(
        mamba2_chunk_scan, **inputs.terms(), states=states, read_state_slots=int32(FAR),
        write_state_slots=int32(FAR - 1),
        has_initial_state=torch.tensor([True]), query_start_loc=int32(0, 9), plan=plan_chunks([3], [9], 4),
    )  # fmt: skip
    expected, after = scan_loop(inputs, initial)
    close(out, expected, 1e-5)
    close(states[FAR - 1], after[-1], 2e-3)


def test_conv() -> None:
    torch.manual_seed(3)
    conv, weight, x = far_pool(6, 8), torch.randn(6, 4).half(), torch.randn(7, 6).half()
    slots = int32(FAR)
    weights = ConvWeights(weight)
    first = causal_conv1d_varlen(x[:5], weights, ConvState(conv, slots, slots, int32(0)), int32(0, 5))
    second = causal_conv1d_update(x[5:][None], weights, ConvState(conv, slots, int32(FAR - 1), int32(5)))
    near = torch.zeros(2, 6, 8).half()
    whole = causal_conv1d_varlen(x, weights, ConvState(near, int32(1), int32(1), int32(0)), int32(0, 7))
    close(torch.cat([first, second[0]]), whole, 1e-3)
    assert same_bytes(conv_window(conv, int32(FAR - 1), int32(7), 4)[0], x[4:].t())


def test_commit() -> None:
    torch.manual_seed(4)
    states, stored = far_pool(*STATE), torch.randn(2, 3, *STATE).half()
    commit_intermediate(states[None], IntermediateStates(stored[None], int32(1)), int32(FAR), int32(3))
    assert same_bytes(states[FAR], stored[1, 2])
