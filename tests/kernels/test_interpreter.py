"""tests.support.interpreter: what it replaces in Triton's interpreter gives what Triton's own gives."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.conftest import _interpreter_problem
from tests.support.interpreter import by_name, once_a_type, remembering, replaced

pytestmark = pytest.mark.skipif(_interpreter_problem() is not None, reason=str(_interpreter_problem()))


@triton.jit
def _twice(x):  # type: ignore[no-untyped-def]
    return x + x


@triton.jit
def _kernel(source, sums, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    values = tl.load(source + tl.program_id(0) * COUNT + at)
    tl.store(sums + tl.program_id(0), tl.sum(_twice(values), 0))


def launch() -> torch.Tensor:
    source, sums = torch.arange(32, dtype=torch.float32), torch.zeros(4)
    _kernel[(4,)](source, sums, COUNT=8)
    return sums


WANTED = torch.tensor([56.0, 184.0, 312.0, 440.0])


def test_a_launch_finds_what_the_launch_before_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are looked for in the first launch alone, once for each set of modules, and put back after each."""
    searched: list[str] = []
    patch = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *a: (searched.append(a[0].__name__), patch(*a)))
    fresh = remembering(interpreter._patch_lang.__wrapped__)
    monkeypatch.setattr(interpreter, "_patch_lang", fresh)
    assert torch.equal(launch(), WANTED)
    assert searched and not replaced(tl.load) and not replaced(tl.tensor.__add__)
    first = searched.copy()
    assert torch.equal(launch(), WANTED)
    assert searched == first and not replaced(tl.load) and not replaced(tl.tensor.__add__)


@pytest.mark.parametrize("dtype", [tl.int1, tl.uint8, tl.bfloat16, tl.float8e4nv, tl.int64, tl.pointer_type(tl.int8)])
def test_dtypes_and_types_of_blocks(dtype: tl.dtype) -> None:
    own: Any = interpreter._get_np_dtype.__wrapped__
    ours = by_name(own)
    block = tl.block_type(dtype, [4, 2])
    for _ in range(2):
        assert ours(dtype) == own(dtype) and ours(block) == own(block)
    plain = tl.block_type.__new__(tl.block_type)
    make: Any = tl.block_type.__init__.__wrapped__
    make(plain, dtype, [4, 2])
    again = once_a_type(make)
    for _ in range(2):
        other = tl.block_type.__new__(tl.block_type)
        again(other, dtype, [4, 2])
        assert vars(other) == vars(plain) and other == block
    with pytest.raises(ValueError, match="power of 2"):
        again(other, dtype, [3])


def test_overflows_are_not_looked_for_where_nothing_would_report_them() -> None:
    options = interpreter.interpreter_builder.options
    assert options.debug or not options.sanitize_overflow
