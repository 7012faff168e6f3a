"""Source of other engines, if it is at hand: installed, or in a folder that HYBRIDRT_PEERS names. It is parsed, not
imported."""

import ast
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path


def source_of(package: str) -> Path | None:
    """The folder of a package."""
    if given := os.environ.get("HYBRIDRT_PEERS"):
        return folder if (folder := Path(given) / package).is_dir() else None
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def definition(file: Path, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """A class or function by its qualified name."""
    found: ast.AST = ast.parse(file.read_text())
    for part in name.split("."):
        inner = [node for node in ast.iter_child_nodes(found) if getattr(node, "name", None) == part]
        if not inner:
            return None
        found = inner[-1]  # of overloads the last one
    assert isinstance(found, ast.ClassDef | ast.FunctionDef)
    return found


def signature(function: ast.FunctionDef) -> list[str]:
    """Arguments with their defaults, without types."""
    plain = ast.arguments(**{name: _untyped(value) for name, value in ast.iter_fields(function.args)})
    return ast.unparse(plain).split(", ")


def _untyped(value: object) -> object:
    if isinstance(value, list):
        return [_untyped(each) for each in value]
    return ast.arg(value.arg) if isinstance(value, ast.arg) else value


def fields(node: ast.ClassDef) -> set[str]:
    """Names that a class declares, assigns, defines, or assigns to self in a method."""
    return set(_fields(node))


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and inner in node.body:
                yield target.id
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr
        if isinstance(inner, ast.FunctionDef):
            yield inner.name
