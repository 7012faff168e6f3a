"""JSON schemas of tools: parts of larger schemas, and facts about single arguments."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridrt.base.errors import RequestError, shown
from hybridrt.base.structured_outputs import MAX_CHARACTERS
from hybridrt.chat.tools import Tool
from hybridrt.chat.values import MAX_NAME

# Models write calls in one or few lines.
LITTLE_SPACE = {"whitespace_pattern": r"[\x20\x0A]{1,2}"}
_TYPES: dict[str, Any] = {
    "string": str, "object": dict, "array": list, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
# Names in schemas that were not written for JSON.
_SAME = {
    "str": "string", "dict": "object", "list": "array", "tuple": "array", "set": "array", "int": "integer",
    "float": "number", "bool": "boolean", "None": "null", "NoneType": "null",
}  # fmt: skip
_IMPLIED = {
    "properties": "object", "additionalProperties": "object", "patternProperties": "object", "items": "array",
    "prefixItems": "array",
}  # fmt: skip
_MAX_PARTS = 256  # parts of a schema that tell its types
_MAX_REFERENCES = 8
_DESCRIBE = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}  # what may describe properties elsewhere
# Formats that write arguments one by one do not enforce these.
_OF_THE_WHOLE = (
    "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties",
    "dependentRequired", "dependentSchemas",
)  # fmt: skip


def one_call(tools: Sequence[Tool]) -> dict[str, Any]:
    """Schema of {"name", "arguments"} for any of the tools. It needs `definitions` at the root."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{i}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for i, tool in enumerate(tools)
        ]
    }


def definitions(tools: Sequence[Tool]) -> dict[str, Any]:
    """Each tool's schema by its number, for `$defs`. One without properties takes no arguments."""
    found = {}
    for i, tool in enumerate(tools):
        schema = {"type": "object", **tool.parameters}
        schema.pop("$id", None)  # references would be relative to it
        if not schema.get("properties") and not schema.keys() & _DESCRIBE:
            schema.setdefault("additionalProperties", False)
        try:
            found[str(i)] = _moved(schema, f"#/$defs/{i}")
        except RecursionError:
            raise RequestError(f"the parameters of {tool.name} are nested too deeply", "tools") from None
    return found


def named_arguments(tool: Tool, name: re.Pattern[str]) -> dict[str, tuple[Any, bool]]:
    """Schema of each argument of a strict tool, and whether it is required, for formats that write
    arguments one by one.

    Args:
        name: what the format reads as the name of an argument.

    Raises:
        RequestError: such a format cannot be held to the tool's schema.
    """
    found = resolved(tool.parameters, tool.parameters)
    schema: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    described, required = schema.get("properties"), schema.get("required")
    properties: Mapping[str, Any] = described if isinstance(described, Mapping) else {}
    needed = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    wrong = [key for key in _OF_THE_WHOLE if key in schema]
    wrong += [
        f"the property {shown(key)}" for key in properties if not 0 < len(key) <= MAX_NAME or not name.fullmatch(key)
    ]
    wrong += [f"the undescribed property {shown(key)}" for key in needed if key not in properties]
    if wrong:
        raise RequestError(
            f"the parameters of {tool.name} have {wrong[0]}, which this model's format of tool calls cannot enforce: "
            "leave strict out, or set tool_choice to 'required'",
            "tools",
        )
    return {key: (part, key in needed) for key, part in properties.items()}


def check_names(tools: Sequence[Tool], name: re.Pattern[str]) -> None:
    """RequestError for a tool name that a format would not read."""
    for tool in tools:
        if not name.fullmatch(tool.name):
            raise RequestError(
                f"this model's format of tool calls has no room for the name {shown(tool.name)}: choose another "
                "one, or set tool_choice to 'required'",
                "tools",
            )


def calls(tools: Sequence[Tool], schema: Mapping[str, Any]) -> str:
    """JSON text of a schema made of `one_call`, with its definitions."""
    return json_text({**schema, "$defs": definitions(tools), "x-guidance": LITTLE_SPACE})


def with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the schema `root` with the definitions that it needs. No object: any value."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**shared, **(schema if isinstance(schema, Mapping) else {}), "x-guidance": LITTLE_SPACE}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of the schema `root`, its reference followed."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or reference[:2] != "#/":
            break
        schema = root
        for key in reference[2:].split("/"):
            schema = schema.get(key.replace("~1", "/").replace("~0", "~"), {}) if isinstance(schema, Mapping) else {}
    return schema


def limited(rules: Iterable[str]) -> list[str]:
    """Rules of a grammar. RequestError above a grammar's length: each rule may repeat what many
    parts refer to."""
    found, length = list[str](), 0
    for rule in rules:
        found.append(rule)
        length += len(rule)
        if length > MAX_CHARACTERS:
            raise RequestError("the strict schemas of the tools are too large: leave strict out of some", "tools")
    return found


def types_of(schema: object, root: Mapping[str, Any]) -> set[str]:
    """Types that a part of the schema `root` names, alternatives included. Empty: unknown. Looks at
    _MAX_PARTS at most, since alternatives may refer to each other."""
    parts, found = [schema], set[str]()
    for part in parts:
        part = resolved(part, root)
        if not isinstance(part, Mapping):
            continue
        found |= _named_types(part)
        for key in ("anyOf", "oneOf", "allOf"):
            options = part.get(key)
            parts += options[: _MAX_PARTS - len(parts)] if isinstance(options, list) else ()
    return found


def _named_types(schema: Mapping[str, Any]) -> set[str]:
    named, options = schema.get("type"), options_of(schema)
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    found = {_SAME.get(name, name) for name in names[:_MAX_PARTS] if isinstance(name, str)}
    if not found and options is not None:
        found = {name for name in _TYPES for value in options[:_MAX_PARTS] if is_of(value, name)}
    return found or {name for key, name in _IMPLIED.items() if key in schema}


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = resolved(schema, schema)
    properties = found.get("properties") if isinstance(found, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def options_of(schema: Any) -> list[Any] | None:
    """The values that a schema allows; None: it does not name them."""
    if not isinstance(schema, Mapping):
        return None
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    return options if isinstance(options, list) and options else None


def is_of(value: object, name: str) -> bool:
    """Whether a value has this JSON type. True is no number, unlike in Python."""
    return isinstance(value, _TYPES.get(name, ())) and not (isinstance(value, bool) and name in ("integer", "number"))


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _moved(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_moved(entry, place) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = moved.get("$ref")
    return moved | ({"$ref": place + reference[1:]} if isinstance(reference, str) and reference[:1] == "#" else {})
