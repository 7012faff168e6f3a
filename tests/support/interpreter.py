"""Triton's interpreter without work whose results it throws away or finds again and again.

Each thing is replaced where this version of Triton has it:

- Every addition, subtraction and product of integers is repeated in int64 to find overflows, and what was found is
  dropped, because `debug` is off.
- Each launch and each call of a device function puts the interpreter's functions into triton.language and takes them
  out again. Here they stay: nothing in this process compiles.
- Each of those functions checks and copies its keyword arguments in three layers.
- NumPy's dtypes, types of blocks, shapes of tensors and types of results are made anew for each value, though a kernel
  has few of them.
- Two blocks of one shape are compared dimension by dimension, and types by their names.
- Operands of other shapes are written out in the shape of the result, though NumPy broadcasts them itself.
- A number that is added to a block becomes a block each time.
- Whether a value is a number is asked of an abstract class, which takes ten times as long as asking for two classes.
- A reduction with a function of the kernel's own goes through the elements one by one.

One thing is replaced because its results are wrong: float32 numbers that round up to a power of two lose it when they
become e4m3, where GPUs carry into the exponent and saturate. And instructions are added: Triton's interpreter runs no
assembler.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import triton.language as tl
import triton.language.semantic
from triton.runtime import interpreter


def spare() -> None:
    """Replaces them, until the process ends."""
    options = getattr(interpreter.interpreter_builder, "options", None)
    if options is not None and not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope"):
        replace(interpreter, "_patch_lang", staying)
        replace(interpreter, "_patch_attr", directly)
    replace(interpreter, "_get_np_dtype", by_name)
    replace(interpreter, "_convert_float", with_carries)
    replace(interpreter.InterpreterBuilder, "create_inline_asm", with_products_of_four)
    replace(interpreter.InterpreterBuilder, "create_inline_asm", with_numbers_of_codes)
    replace(interpreter.TensorHandle, "__post_init__", once_a_size)
    replace(interpreter.ReduceOps, "generic_reduce", by_slices)
    replace(tl.block_type, "__init__", once_a_type)
    replace(tl.block_type, "to_ir", lambda to_ir: lambda self, builder: self)
    replace(tl.tensor, "__init__", once_a_shape)
    replace(tl.dtype, "__eq__", same_first)
    replace(tl.core, "_unwrap_if_constexpr", by_class)
    semantic = type(interpreter.interpreter_semantic)
    replace(semantic, "computation_type_impl", once_for_two_types)
    operands = Operands()
    replace(semantic, "broadcast_impl_value", operands.unless_alike)
    replace(semantic, "binary_op_type_checking_impl", operands.as_operands)
    replace(triton.language.semantic, "numbers", lambda module: SimpleNamespace(Number=(int, float, numpy.number)))


def replace(owner: Any, name: str, by: Callable[[Any], Any]) -> None:
    if hasattr(owner, name):
        setattr(owner, name, by(getattr(owner, name)))


def with_carries(convert: Callable[..., Any]) -> Callable[..., Any]:
    def converted(numbers: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source != tl.float32 or target != tl.float8e4nv:
            return convert(numbers, source, target, rounding_mode)
        found = torch.from_numpy(numpy.ascontiguousarray(numbers, dtype=numpy.float32))
        return found.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    return converted


def with_products_of_four(create: Callable[..., Any]) -> Callable[..., Any]:
    """`_dot4` of `hybridrt/kernels/state/state_codes_triton.py`."""
    byte = {f"dp4a.s32.{name} $0, $1, $2, $3;": type for name, type in (("s32", numpy.int8), ("u32", numpy.uint8))}

    def created(self: Any, asm: str, constraints: str, operands: Any, types: Any, *rest: Any) -> Any:
        if asm not in byte:
            return create(self, asm, constraints, operands, types, *rest)
        a, b, total = numpy.broadcast_arrays(*(operand.data for operand in operands))
        left, right = (
            numpy.ascontiguousarray(words)[..., None].view(type).astype(numpy.int32)
            for words, type in ((a, numpy.int8), (b, byte[asm]))
        )
        found = interpreter.TensorHandle(total + (left * right).sum(-1, dtype=numpy.int32), tl.int32)
        return SimpleNamespace(get_result=lambda _: found)

    return created


def with_numbers_of_codes(create: Callable[..., Any]) -> Callable[..., Any]:
    """e4m3 codes of `numbers_of_pairs` in `hybridrt/kernels/attention/kv_codes_triton.py`."""

    def created(self: Any, asm: str, constraints: str, operands: Any, types: Any, *rest: Any) -> Any:
        if not asm.startswith("{.reg .b32 both; .reg .b16 first, second; prmt.b32 both, $2, 0, 0x3120;"):
            return create(self, asm, constraints, operands, types, *rest)
        words = numpy.ascontiguousarray(operands[0].data)
        codes = torch.from_numpy(words[..., None].view(numpy.uint8).copy()).view(torch.float8_e4m3fn)
        numbers = codes.to(torch.float16)
        found = [interpreter.TensorHandle(numbers[..., i].numpy(), tl.float16) for i in range(2)]
        return SimpleNamespace(get_result=found.__getitem__)

    return created


def staying(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`patch(fn)` puts the interpreter's functions into the modules that `fn` uses, and returns a scope that takes them
    out again. This one's scope takes out nothing, and a function that was seen finds all in place."""
    seen, nothing = set[Any](), interpreter._LangPatchScope()

    @functools.wraps(patch)
    def stays(fn: Any) -> Any:
        if fn not in seen:
            patch(fn)
            fn.__signature__ = inspect.signature(fn)  # which each launch asks for twice
            seen.add(fn)
        return nothing

    return stays


def directly(patch: Callable[..., None]) -> Callable[..., None]:
    """`patch` puts a function in the place of `member` that calls it with the interpreter's semantic. This one calls
    what `member` wraps, which only checks that a semantic is there."""

    @functools.wraps(patch)
    def patched(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, called)

    return patched


def by_name(lookup: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's dtype for the elements of a Triton type, by the name of their type."""
    known: dict[str, Any] = {}

    @functools.wraps(lookup)
    def looked_up(type: Any) -> Any:
        element = type.scalar
        try:
            return known[element.name]
        except KeyError:
            return known.setdefault(element.name, lookup(element))

    return looked_up


def once_a_type(initialise: Callable[..., None]) -> Callable[..., None]:
    """`block_type(element, shape)` with the fields of the first one like it. Equal shapes are the same object."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    @functools.wraps(initialise)
    def initialised(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in known:
            initialise(self, element_ty, shape)
            self.shape = shapes.setdefault(tuple(self.shape), self.shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    return initialised


def once_a_shape(initialise: Callable[..., None]) -> Callable[..., None]:
    """`tensor(handle, type)` with the shape of the first one of that type."""
    known: dict[str, dict[str, Any]] = {}

    @functools.wraps(initialise)
    def initialised(self: Any, handle: Any, type: Any) -> None:
        fields = known.get(type.name)
        if fields is None:
            initialise(self, handle, type)
            known[type.name] = {name: vars(self)[name] for name in ("shape", "numel")}
        else:
            self.__dict__.update(fields)
            self.handle, self.type, self.dtype = handle, type, type.scalar

    return initialised


def once_for_two_types(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The type that two scalar types are computed in, remembered by their names."""
    known: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(compute)
    def computed(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        if key not in known:
            known[key] = compute(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]

    return computed


class Operands:
    """What the two operands of an operation become. A tensor leaves the operation in the shape of the result, whatever
    shape NumPy got its operands in."""

    def __init__(self) -> None:
        self.left_to_numpy = False  # within the check of an operation's operands

    def unless_alike(self, broadcast: Callable[..., Any]) -> Callable[..., Any]:
        """Two blocks of one shape are broadcast to each other as they are. `once_a_type` gives them the same object.
        Two operands of other shapes get the types of both, and keep their elements."""
        known: dict[tuple[str, str], tuple[Any, Any]] = {}

        @functools.wraps(broadcast)
        def broadcasted(semantic: Any, lhs: Any, rhs: Any) -> Any:
            left = getattr(lhs.type, "shape", None)
            if left is not None and left is getattr(rhs.type, "shape", None):
                return lhs, rhs
            if not self.left_to_numpy:
                return broadcast(semantic, lhs, rhs)
            key = (lhs.type.name, rhs.type.name)
            if key not in known:
                known[key] = tuple(each.type for each in broadcast(semantic, lhs, rhs))
            types = known[key]
            return tuple(each if each.type is type else tl.tensor(each.handle, type)
                         for each, type in zip((lhs, rhs), types))  # fmt: skip

        return broadcasted

    def as_operands(self, check: Callable[..., Any]) -> Callable[..., Any]:
        """Two operands in the type and the shape that they are computed in. Those of one type, whose sums and quotients
        have it too, are left as they are. What a number becomes next to a type is remembered."""
        plain = {"int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp32", "fp64"}
        known: dict[tuple[Any, ...], Any] = {}
        tensor = tl.tensor

        def checked(semantic: Any, *args: Any, **kwargs: Any) -> Any:
            self.left_to_numpy = True
            try:
                return check(semantic, *args, **kwargs)
            finally:
                self.left_to_numpy = False

        @functools.wraps(check)
        def operands(semantic: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
            left, right = type(lhs), type(rhs)
            if left is tensor and right is tensor:
                if lhs.type.name == rhs.type.name and lhs.dtype.name in plain:
                    return lhs, rhs
            elif left is tensor and (right is int or (right is float and rhs)):  # -0.0 is equal to 0.0
                key = (lhs.type.name, rhs, right, args, *kwargs.items())
                if key in known:
                    return lhs, known[key]
                found = checked(semantic, lhs, rhs, *args, **kwargs)
                if found[0] is lhs:
                    known[key] = found[1]
                if len(known) > 4096:
                    known.clear()
                return found
            return checked(semantic, lhs, rhs, *args, **kwargs)

        return operands


def by_class(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The value of a constexpr; what else occurs most is itself."""
    plain, constexpr = {tl.tensor, int, float, bool, type(None)}, tl.constexpr

    @functools.wraps(unwrap)
    def unwrapped(o: Any) -> Any:
        kind = type(o)
        if kind in plain:
            return o
        return o.value if kind is constexpr else unwrap(o)

    return unwrapped


def same_first(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    @functools.wraps(equal)
    def equals(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    return equals


def once_a_size(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Whether NumPy's items are too large for a Triton type, asked once for each pair of them."""
    known = set[tuple[int, str]]()

    @functools.wraps(check)
    def checked(self: Any) -> None:
        pair = (self.data.itemsize, self.dtype.name)
        if pair not in known:
            check(self)
            known.add(pair)

    return checked


def by_slices(reduce: Callable[[Any, Any], list[Any]]) -> Callable[[Any, Any], list[Any]]:
    """A reduction with a function of a kernel's own, which gets whole slices along the axis instead of numbers."""

    @functools.wraps(reduce)
    def reduced(self: Any, input: Any) -> list[Any]:
        if self.axis is None or self.keep_dims:
            return reduce(self, input)
        parts = zip(*(numpy.moveaxis(each.handle.data, self.axis, 0) for each in input), strict=True)
        slices = (tuple(map(self.to_tensor, part, (each.dtype for each in input))) for part in parts)
        found = functools.reduce(lambda left, right: self.combine_fn.fn(*left, *right), slices)
        return list(found) if isinstance(found, tuple) else [found]

    return reduced
