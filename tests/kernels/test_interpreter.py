"""tests.support.interpreter: what it replaces in Triton's interpreter gives what Triton's own gives."""

import itertools
from typing import Any

import numpy
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.conftest import _interpreter_problem
from tests.support import interpreter as ours

pytestmark = pytest.mark.skipif(_interpreter_problem() is not None, reason=str(_interpreter_problem()))


@triton.jit
def _twice(x):  # type: ignore[no-untyped-def]
    return x + x


@triton.jit
def _later(a, a_at, b, b_at):  # type: ignore[no-untyped-def]
    """Not commutative: which slice comes first shows."""
    return tl.where(b > 2 * a, b, a), a_at + 3 * b_at


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


def test_the_interpreter_s_functions_are_put_in_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[str] = []
    patch = interpreter._patch_lang.__wrapped__
    monkeypatch.setattr(interpreter, "_patch_lang", ours.staying(lambda fn: patched.append(fn.__name__) or patch(fn)))
    for _ in range(2):
        assert torch.equal(launch(), WANTED)
        assert sorted(patched) == sorted({"_kernel", "_twice", "sum"})
        assert not tl.core.is_builtin(tl.load) and not tl.core.is_builtin(tl.tensor.__add__)


@pytest.mark.parametrize("dtype", [tl.int1, tl.uint8, tl.bfloat16, tl.float8e4nv, tl.int64, tl.pointer_type(tl.int8)])
def test_dtypes_and_types_of_blocks(dtype: tl.dtype) -> None:
    own: Any = interpreter._get_np_dtype.__wrapped__
    found = ours.by_name(own)
    block = tl.block_type(dtype, [4, 2])
    for _ in range(2):
        assert found(dtype) == own(dtype) and found(block) == own(block)
    plain = tl.block_type.__new__(tl.block_type)
    make: Any = tl.block_type.__init__.__wrapped__
    make(plain, dtype, [4, 2])
    again = ours.once_a_type(make)
    for _ in range(2):
        other = tl.block_type.__new__(tl.block_type)
        again(other, dtype, [4, 2])
        assert vars(other) == vars(plain) and other == block
    with pytest.raises(ValueError, match="power of 2"):
        again(other, dtype, [3])


def test_overflows_are_not_looked_for_where_nothing_would_report_them() -> None:
    options = interpreter.interpreter_builder.options
    assert options.debug or not options.sanitize_overflow


def block(values: Any, dtype: tl.dtype) -> tl.tensor:
    data = numpy.asarray(values)
    type = tl.block_type(dtype, list(data.shape)) if data.shape else dtype
    return tl.tensor(interpreter.TensorHandle(data if data.shape else data[None], dtype), type)


def test_a_tensor_s_fields() -> None:
    make: Any = tl.tensor.__init__.__wrapped__
    again = ours.once_a_shape(make)
    for type in (tl.int32, tl.block_type(tl.float16, [4, 2]), tl.block_type(tl.float16, [2, 4]), tl.float16) * 2:
        plain, other, handle = tl.tensor.__new__(tl.tensor), tl.tensor.__new__(tl.tensor), object()
        make(plain, handle, type)
        again(other, handle, type)
        assert vars(plain).keys() == vars(other).keys()
        assert other.handle is handle and other.type is type and other.dtype == plain.dtype
        assert [n.value for n in other.shape] == [n.value for n in plain.shape]
        assert other.numel.value == plain.numel.value


def test_types_of_results() -> None:
    semantic = interpreter.interpreter_semantic
    compute: Any = type(semantic).computation_type_impl.__wrapped__
    again = ours.once_for_two_types(compute)
    types = (tl.int1, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32)
    for _ in range(2):
        for pair in itertools.product(types, (False, True), types, (False, True), (False,)):
            assert again(semantic, *pair) == compute(semantic, *pair), pair
    assert again(semantic, tl.bfloat16, False, tl.bfloat16, False, True) == tl.float32


def test_blocks_of_one_shape_are_not_broadcast() -> None:
    semantic = interpreter.interpreter_semantic
    wide, high, other = (block(numpy.ones(shape, numpy.float32), tl.float32) for shape in ((1, 4), (2, 1), (2, 4)))
    mask = block(numpy.ones((2, 4), bool), tl.int1)
    left, right = semantic.broadcast_impl_value(other, mask)
    assert left is other and right is mask
    left, right = semantic.broadcast_impl_value(wide, high)
    assert left.handle.data.shape == right.handle.data.shape == (2, 4)
    with pytest.raises(ValueError, match="incompatible dimensions"):
        semantic.broadcast_impl_value(block(numpy.ones(2), tl.float64), block(numpy.ones(4), tl.float64))


@pytest.mark.parametrize("dtype", [tl.int8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32])
def test_operands(dtype: tl.dtype) -> None:
    """As Triton's own makes them, the first time and again: numbers of every sign and kind next to types that hold them
    or do not, types of which a quotient has another one, and shapes that differ, which NumPy broadcasts."""
    semantic = interpreter.interpreter_semantic
    again: Any = type(semantic).binary_op_type_checking_impl
    check = again.__wrapped__
    data = numpy.ones((2, 4), interpreter._get_np_dtype(dtype))
    whole, column, single = block(data, dtype), block(data[:, :1], dtype), block(data[0, 0], dtype)
    others = [whole, column, single, 3, 3.0, 0.0, -0.0, 7, 1.5]
    for other, quotient, _ in itertools.product(others, (False, True), range(2)):
        for pair in ((whole, other), (other, whole)):
            found, wanted = (f(semantic, *pair, div_or_mod=quotient) for f in (again, check))
            for got, want in zip(found, wanted, strict=True):
                assert got.type == want.type
                elements = numpy.broadcast_to(got.handle.data, want.handle.data.shape)
                assert elements.tobytes() == want.handle.data.tobytes()


def test_operands_of_other_shapes_keep_their_elements_until_numpy_has_both() -> None:
    """A result has the shape of both, and so has what is made of it."""
    semantic = interpreter.interpreter_semantic
    wide, high = (block(numpy.ones(shape, numpy.float32), tl.float32) for shape in ((1, 4), (2, 1)))
    single = block(numpy.float32(2), tl.float32)
    left, right = semantic.binary_op_type_checking_impl(wide, high)
    assert left.handle.data.shape == (1, 4) and right.handle.data.shape == (2, 1)
    assert [n.value for n in left.shape] == [n.value for n in right.shape] == [2, 4]
    mask = semantic.less_than(wide, high)
    for found in (
        semantic.add(wide, high, False),
        mask,
        semantic.where(mask, wide, single),
        semantic.mul(mask, mask, False),
    ):
        assert found.handle.data.shape == (2, 4) and [n.value for n in found.shape] == [2, 4]
    left, right = semantic.broadcast_impl_value(wide, high)
    assert left.handle.data.shape == right.handle.data.shape == (2, 4), "as kernels ask for it"


def test_values_of_constants() -> None:
    tensor = block(numpy.float32(2), tl.float32)
    values = [tl.constexpr(3), 3, 2.5, None, [tl.constexpr(1), 2], (tl.constexpr(4),)]
    assert [tl.core._unwrap_if_constexpr(value) for value in values] == [3, 3, 2.5, None, [1, 2], (4,)]
    assert tl.core._unwrap_if_constexpr(tensor) is tensor


def test_numbers_that_are_too_large_for_their_type() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="exceeds"):
            interpreter.TensorHandle(numpy.ones(2, numpy.int64), tl.int32)
    assert interpreter.TensorHandle(numpy.ones(2, numpy.int64), tl.int64)


@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_by_slices(axis: int) -> None:
    """As number by number: the same order, the same bits."""
    rng = numpy.random.default_rng(0)
    values, at = rng.random((4, 8), numpy.float32), rng.integers(9, size=(4, 8), dtype=numpy.int32)
    by_slices, one_by_one = interpreter.ReduceOps.generic_reduce, interpreter.ReduceOps.generic_reduce.__wrapped__
    for columns in (slice(None), 0 if axis == 0 else slice(0, 1)):
        parts = (block(values[:, columns], tl.float32), block(at[:, columns], tl.int32))
        operation = interpreter.ReduceOps(axis, _later, False)
        found, wanted = by_slices(operation, parts), one_by_one(operation, parts)
        for got, want in zip(found, wanted, strict=True):
            assert got.type == want.type and got.handle.data.dtype == want.handle.data.dtype
            assert numpy.array_equal(got.handle.data, want.handle.data)


def test_float32_becomes_e4m3_as_on_a_gpu() -> None:
    """Numbers that round up to a power of two, ties, subnormals, and those too large."""
    numbers = numpy.float32([1.97, 3.9, -15.5, 1.0625, 1.1875, 2.0**-9, 2.0**-10, 3e-9, 450.0, -1e9, numpy.nan])
    wanted = torch.tensor([2, 4, -16, 1, 1.25, 2.0**-9, 0, 0, 448, -448, torch.nan])
    codes = interpreter._convert_float(numbers, tl.float32, tl.float8e4nv, None)
    found = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
