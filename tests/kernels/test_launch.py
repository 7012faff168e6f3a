"""Helpers of launchers: sizes of grids, and rows without a token."""

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrt.kernels.core.launch import cdiv, next_power_of_2, zero_after


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 1000, 2**31 + 1])
def test_sizes_are_those_of_triton(n: int) -> None:
    assert next_power_of_2(n) == triton.next_power_of_2(n)
    assert [cdiv(n, size) for size in (1, 7, 16)] == [triton.cdiv(n, size) for size in (1, 7, 16)]


def test_there_is_a_block_for_nothing() -> None:
    assert (next_power_of_2(0), cdiv(0, 16)) == (1, 0)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [0, 2, 3])
def test_rows_after_the_tokens(tokens: int) -> None:
    """If there are none, the host launches nothing."""
    out = torch.ones(3, 2)
    with Operations() as operations:
        zero_after(out, tokens)
    assert out.sum(1).tolist() == [2.0] * tokens + [0.0] * (3 - tokens)
    assert (operations.count == 0) == (tokens == 3)
