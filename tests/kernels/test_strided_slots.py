"""Slots with gaps between them: operations give the bits of dense slots, and leave the gaps alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.core.providers import select
from hybridrt.kernels.core.records import IntermediateStates, StateSlots
from hybridrt.kernels.mamba.prefix_sum import prefix_sum_update, prefix_sum_varlen
from hybridrt.kernels.state.row_tables import clear_slots
from hybridrt.kernels.state.state_commit import commit_intermediate
from tests.gpu import kernel_cases, rig
from tests.support.checkpoints import CheckpointStore
from tests.support.flat import flat
from tests.support.kernel_cases import Case, DecodeRows, Prompts

pytestmark = pytest.mark.usefixtures("provider")
GAP = 48  # numbers between slots
MODELS = [
    "falcon_mamba-plain", "lfm2-plain",
    *[pytest.param(n, marks=pytest.mark.slow) for n in ("falcon-plain", "qwen-plain", "kimi-plain")],
    pytest.param("minimax-plain", marks=pytest.mark.soak),  # runs the operations of falcon-plain, but for its conv
]  # fmt: skip


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def with_gaps(dense: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """A copy with gaps between the entries of dimension `dim`, 0 or 1, and its memory [slots, numbers]."""
    slots, numbers = dense.shape[dim], dense.numel() // dense.shape[dim]
    memory = torch.full((slots, numbers + GAP), torch.nan).to(dense.dtype)
    strides = list(dense.stride())
    if dim:
        strides[0] = numbers // dense.shape[0]
    strides[dim] = numbers + GAP
    return memory.as_strided(dense.shape, strides).copy_(dense), memory


def gaps_are_left(memory: Tensor) -> bool:
    return bool(memory[:, -GAP:].isnan().all())


def call(case: Case, gaps: bool) -> dict[str, Tensor]:
    args: dict[str, Any] = kernel_cases.copied(case)
    memories = list[Tensor]()
    for name in ("states", "conv") if gaps else ():
        if name in args:
            args[name], memory = with_gaps(args[name], 1 if case.op == "fold_ring" else 0)
            memories.append(memory)
    result = flat(select(case.op, "cpu"), **args)
    assert all(map(gaps_are_left, memories))
    outputs = result if isinstance(result, tuple) else (result,)
    return {f"output {i}": out for i, out in enumerate(outputs) if out is not None} | {
        name: args[name] for name in case.pools
    }


@pytest.mark.parametrize("model", MODELS)
def test_operations_of_recurrent_layers(
    model: str, provider: str, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig, "DEVICE", "cpu")
    if provider != "torch":  # the interpreter takes as much longer as there are more rows
        monkeypatch.setattr(kernel_cases, "DecodeRows", partial(DecodeRows, batch=4, padding=1))
    monkeypatch.setattr(kernel_cases, "FEW", (9, 1, 6, 2, 3))
    monkeypatch.setattr(kernel_cases, "Prompts", partial(Prompts, lengths=(19, 1, 3, 2, 1)))
    torch.manual_seed(0)
    for what, make in kernel_cases.recurrent_cases(str(checkpoints[model].path)):
        case = make()
        wanted, got = call(case, False), call(case, True)
        assert wanted.keys() == got.keys()
        for name, tensor in got.items():
            assert rig.same_bits(tensor, wanted[name]), f"{what}: {name}"


def sums(x: Tensor, states: Tensor) -> Tensor:
    return prefix_sum_varlen(x, StateSlots(states, int32(2, 4), int32(2, 1)), int32(0, 5, 7))


def next_sums(x: Tensor, states: Tensor) -> Tensor:
    return prefix_sum_update(x[:6].view(2, 3, -1), StateSlots(states, int32(2, 4), int32(2, 1)))


def committed(x: Tensor, states: Tensor) -> None:
    commit_intermediate(states[None], IntermediateStates(x.view(1, 7, 1, -1), int32(3, 5)), int32(4, 1), int32(1, 1))


def cleared(x: Tensor, states: Tensor) -> None:
    clear_slots(states[None], int32(3, 1))


@pytest.mark.parametrize("operation", [sums, next_sums, committed, cleared])
def test_other_operations(operation: Callable[[Tensor, Tensor], Tensor | None]) -> None:
    torch.manual_seed(0)
    x, dense = torch.randn(7, 70), torch.randn(6, 70)
    strided, memory = with_gaps(dense)
    before = dense.clone()
    wanted, got = operation(x, dense), operation(x, strided)
    assert not torch.equal(dense, before)
    assert torch.equal(dense, strided) and gaps_are_left(memory)
    assert wanted is None or got is None or torch.equal(got, wanted)
