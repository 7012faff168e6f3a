"""JSON schemas over the keywords that llguidance supports, after the idea of JSON-Schema-Test-Suite. Texts that they
accept are short: a model with random weights writes each of them to its end."""

from typing import Any

_SHORT = {"type": "string", "maxLength": 4}
_BIT = {"enum": [0, 1]}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


SCHEMAS: list[dict[str, Any]] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": -5, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9},
    {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 25},
    {"type": "number", "minimum": 0.5, "maximum": 0.75, "multipleOf": 0.125},
    {"type": ["boolean", "null"]},
    {"const": {"a": [1, "two", None]}},
    {"const": 'é\n"quoted" \\ 😀'},
    {"enum": [1, "one", [1], {"a": 1}, None, True]},
    _SHORT,
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "pattern": "^(ab|cd)-[0-9]{2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": _BIT, "maxItems": 4},
    {"type": "array", "items": _BIT, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "null"}, _BIT], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [_BIT], "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": _BIT, "maxItems": 2}, "maxItems": 2},
    _object({}),
    _object({"a": _BIT}),
    _object({"a": _BIT, "b": _SHORT, "c": {"type": "null"}}),
    _object({"a": _BIT, "b": _BIT}, required=["b"]),
    _object({"outer": _object({"inner": _object({"x": _BIT})})}),
    _object({"list": {"type": "array", "items": _object({"k": _BIT}), "maxItems": 2}}),
    {"type": "object", "properties": {"a": _BIT}, "additionalProperties": _BIT, "required": ["a"], "maxProperties": 1},
    {"anyOf": [_BIT, {"type": "null"}]},
    {"anyOf": [_object({"kind": {"const": "a"}, "x": _BIT}), _object({"kind": {"const": "b"}, "y": _BIT})]},
    {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    {"allOf": [{"type": "string", "pattern": "^[ab]+$"}, {"minLength": 2, "maxLength": 3}]},
    {"$ref": "#/$defs/bit", "$defs": {"bit": _BIT}},
    _object(
        {"a": {"$ref": "#/$defs/pair"}},
        **{"$defs": {"pair": {"type": "array", "items": _BIT, "minItems": 2, "maxItems": 2}}},
    ),
    {"$defs": {"tree": _object({"left": {"anyOf": [{"type": "null"}, {"type": "null"}]}})}, "$ref": "#/$defs/tree"},
    {"type": "object", "patternProperties": {"^x[0-9]$": _BIT}, "additionalProperties": False, "maxProperties": 1},
    _object({'quo"ted': _BIT, "é": _BIT}),
    {
        "title": "t",
        "description": "d",
        "examples": [1],
        "default": 1,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "boolean",
    },
]
