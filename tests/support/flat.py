"""Calls of operations whose arguments are given one by one: the records that an operation takes are made of them."""

from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from types import NoneType
from typing import Any, get_args, get_type_hints

from hybridrt.kernels.operation import Operation


@cache
def _records(reference: Callable[..., Any]) -> dict[str, tuple[type, bool]]:
    """The records among a function's parameters, and whether each may be None."""
    hints, found = get_type_hints(reference), {}
    for name in signature(reference).parameters:
        kinds = get_args(hints[name]) or (hints[name],)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
                found[name] = kind, NoneType in kinds
    return found


def packed(reference: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with records in place of their fields, in the order of the signature. An optional record is
    None where its first field is not given; fields of a record with defaults may be left out.

    Raises TypeError for a name that is neither a parameter nor a field.
    """
    records, result = _records(reference), {}
    known = {field for kind, _ in records.values() for field in kind._fields}  # type: ignore[attr-defined]
    if unknown := args.keys() - known - signature(reference).parameters.keys():
        raise TypeError(f"{reference.__name__} takes no {', '.join(sorted(unknown))}")
    for name in signature(reference).parameters:
        if name in args:
            result[name] = args[name]
        elif name in records:
            kind, optional = records[name]
            fields = kind._fields  # type: ignore[attr-defined]
            if not optional or args.get(fields[0]) is not None:
                result[name] = kind(**{field: args[field] for field in fields if field in args})
    return result


def flat(operation: Callable[..., Any], *first: Any, **args: Any) -> Any:
    """operation(...) of arguments given one by one; an operation, its reference, or any function of records. Those that
    are not named are the first parameters."""
    reference = operation.reference if isinstance(operation, Operation) else operation
    return operation(**packed(reference, dict(zip(signature(reference).parameters, first)) | args))
