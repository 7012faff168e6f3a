"""Records the operations of a CPU step once and repeats them over the same tensors.

In a small model's step, layers in Python, views and allocations take longer than most operations. A
read of a number on the host, or an operation that cannot be repeated, is a `problem`, unless it is
within `call_again`. Calls of libraries with addresses are not seen.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that pass numbers between tensors and Python.
_HOST = frozenset(("resolve_conj", "resolve_neg", "lift_fresh"))
# Result shapes that depend on numbers; random numbers, which recording would draw twice; strides
# changed in place.
_UNSTEADY = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view))
_PLACES = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
_COPIES = frozenset(("clone", "_to_copy"))
# Names that another PyTorch may lack are looked up, for `missing`.
_OWNERS = getattr(torch._C, "_VariableFunctions", None), getattr(torch._C, "_nn", None), Tensor
_COMPOSITE: Any = getattr(torch._C.DispatchKey, "CompositeImplicitAutograd", None)
_PRIVATE = (
    (torch._C, ("_VariableFunctions", "_nn", "_dispatch_has_kernel_for_dispatch_key")),
    (torch._C.DispatchKey, ("CompositeImplicitAutograd",)),
    (torch.ops.aten.add.Tensor, ("_schema", "_op", "_op_dk", "tags")),
    (torch.UntypedStorage, ("_cdata",)),
)


def missing() -> str | None:
    """The undocumented part of PyTorch that recordings need and this version lacks; None if
    complete."""
    lost = [name for owner, names in _PRIVATE for name in names if not hasattr(owner, name)]
    return f"PyTorch {torch.__version__} has no {', '.join(lost)}" if lost else None


class Recording(TorchDispatchMode):
    """A step that ran once within `with recording`.

    Args:
        most_bytes: limit for the tensors that the step makes, together.

    Attributes:
        problem: why it cannot be repeated; None if it can.
        bytes: size of these tensors.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False avoids the import of torch.compile, which takes a second."""
        return False

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.problem: str | None = None
        self.bytes = 0
        self._most_bytes = most_bytes
        self._calls: list[Callable[[], object]] = []
        self._aside = False

    def repeat(self) -> None:
        """Runs the step again, over the tensors of the recorded step."""
        for call in self._calls:
            call()

    def call_again(self, call: Callable[[], Tensor]) -> Tensor:
        """call(), which each repetition calls again. It works on tensors of the recorded step;
        repetitions leave the result where that step had it."""
        self._aside = True
        try:
            result = call()
        finally:
            self._aside = False
        self._calls.append(partial(_leave, call, result))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if not self._aside and not self.problem:
            self._check(_is_steady(func, name, args), f"{name} cannot be repeated")
        if self._aside or self.problem:
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if func._schema.is_mutable:
            return self._change(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if name not in _PLACES and not _is_view(result, args):
            self._make(func, name, args, kwargs, result)
        return result

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds and self.problem is None:
            self.problem = otherwise
            self._calls.clear()

    def _change(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call, result = _called(name, args, kwargs)
        if call is None:
            call = partial(func._op, *args, **kwargs)
            result = call()
        self._calls.append(call)
        return result

    def _make(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        results = result if isinstance(result, (tuple, list)) else (result,)
        dense = all(isinstance(each, Tensor) and each.layout == torch.strided for each in results)
        self._check(dense, f"{name} cannot be repeated: it makes no dense tensors")
        if not dense:
            return
        self.bytes += sum(each.nbytes for each in results)
        self._check(self.bytes <= self._most_bytes, f"the tensors of a step take more than {self._most_bytes} bytes")
        if name in _COPIES:
            call: Callable[[], object] | None = partial(result.copy_, args[0])
        else:
            call, _ = _called(name, args, {**kwargs, "out": result})
        self._calls.append(call or partial(_leave, partial(func._op, *args, **kwargs), result))


def _called(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Callable[[], object] | None, Any]:
    """The faster Python function of an operation, and its result; (None, None) if there is none."""
    for owner in _OWNERS:
        function = getattr(owner, name, None)
        if function is not None:
            call = partial(function, *args, **kwargs)
            try:
                return call, call()
            except TypeError:  # nothing is computed yet
                continue
    return None, None


def _is_steady(func: Any, name: str, args: Sequence[Any]) -> bool:
    """Whether an operation does the same with other numbers."""
    if "::" in name or name in _HOST:
        return False
    if name == "index":  # tagged because of masks
        return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])
    return _UNSTEADY.isdisjoint(func.tags)


def _leave(call: Callable[[], Any], place: Any) -> None:
    result = call()
    if isinstance(place, Tensor):
        result, place = (result,), (place,)
    for each, made in zip(place, result, strict=True):
        if made is not each:
            each.copy_(made)


def _is_view(result: Any, args: Sequence[Any]) -> bool:
    first = result[0] if isinstance(result, (list, tuple)) else result
    if not isinstance(first, Tensor) or first.layout != torch.strided:
        return False
    storage = first.untyped_storage()._cdata
    dense = (a for a in args if isinstance(a, Tensor) and a.layout == torch.strided)
    return any(a.untyped_storage()._cdata == storage for a in dense)
