"""Triton's interpreter without the work whose results it throws away: the kernel tests take half as long.

Four things are replaced, each where this version of Triton has it:

- Every addition, subtraction and product of integers is repeated in int64 to find overflows, and what was found is
  dropped, because `debug` is off.
- Each launch and each call of a device function looks through triton.language for functions to replace. A device
  function finds them replaced already, and a launch finds the same ones as the launch before.
- The table of NumPy's dtypes is made anew whenever one is looked up.
- The type of a block is checked and named anew for each value, though a kernel has few types.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

Changes = list[tuple[Any, str, Any]]  # object, attribute, value


def spare() -> None:
    """Replaces them, until the process ends."""
    options = getattr(interpreter.interpreter_builder, "options", None)
    if options is not None and not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = remembering(interpreter._patch_lang)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    tl.block_type.__init__ = once_a_type(tl.block_type.__init__)


def remembering(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`patch(fn)` puts the interpreter's functions into the modules that `fn` uses, and returns a scope that takes them
    out again. This one looks for them once."""
    found: dict[tuple[int, ...], Changes] = {}

    @functools.wraps(patch)
    def remembered(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        scope = interpreter._LangPatchScope()
        if modules and all(map(replaced, (tl.tensor.__add__, *(module.load for module in modules)))):
            return scope  # a device function within a launch
        key = tuple(map(id, modules))
        if key not in found:
            scope = patch(fn)
            found[key] = [(thing, name, vars(thing)[name]) for thing, name, _ in scope._changes]
            return scope
        for change in found[key]:
            scope.set_attr(*change)
        return scope

    return remembered


def replaced(function: Any) -> bool:
    return not tl.core.is_builtin(function)


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
    """`block_type(element, shape)` with the fields of the first one like it."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    @functools.wraps(initialise)
    def initialised(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in known:
            initialise(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    return initialised
