"""Calls of operations whose arguments are given one by one: the records that an operation takes are made of them."""

from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from types import NoneType
from typing import Any, get_args, get_type_hints

from hybridrt.kernels.core.operation import Operation


@cache
def _records(of: Callable[..., Any]) -> dict[str, tuple[type, bool]]:
    """The records among a function's parameters, or among a record's fields, and whether each may be None."""
    hints, found = get_type_hints(of), {}
    for name in _names(of):
        kinds = get_args(hints[name]) or (hints[name],)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
                found[name] = kind, NoneType in kinds
    return found


def _names(of: Callable[..., Any]) -> tuple[str, ...]:
    """Parameters of a function, or fields of a record."""
    return getattr(of, "_fields", None) or tuple(signature(of).parameters)


def _known(of: Callable[..., Any]) -> set[str]:
    """All names that arguments may have."""
    return {*_names(of)}.union(*(_known(kind) for kind, _ in _records(of).values()))


def _values(of: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    records, result = _records(of), {}
    for name in _names(of):
        if name in args:
            result[name] = args[name]
        elif name in records:
            kind, optional = records[name]
            if not optional or args.get(_names(kind)[0]) is not None:
                result[name] = kind(**_values(kind, args))
    return result


def packed(reference: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with records in place of their fields, in the order of the signature; the fields of a record
    may be records too. An optional record is None where its first field is not given; fields of a record with defaults
    may be left out.

    Raises TypeError for a name that is neither a parameter nor a field.
    """
    if unknown := args.keys() - _known(reference):
        raise TypeError(f"{reference.__name__} takes no {', '.join(sorted(unknown))}")
    return _values(reference, args)


def flat(operation: Callable[..., Any], *first: Any, **args: Any) -> Any:
    """operation(...) of arguments given one by one; an operation, its reference, or any function of records. Those that
    are not named are the first parameters."""
    reference = operation.reference if isinstance(operation, Operation) else operation
    return operation(**packed(reference, dict(zip(signature(reference).parameters, first)) | args))
