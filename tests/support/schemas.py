"""JSON schemas: a list and random ones, over the keywords that llguidance supports, and those of the official suite.
Texts that the first two accept are short: a model with random weights writes each of them to its end."""

import json
import random
from pathlib import Path
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

# Of JSON-Schema-Test-Suite, draft 2020-12. The file names its licence.
_FILES = json.loads(Path(__file__).with_name("json_schema_suite.json").read_text())["schemas"]
SUITE: list[dict[str, Any] | bool] = [schema for schemas in _FILES.values() for schema in schemas]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A schema that some short text satisfies, of any of the keywords above, nested."""
    return _random(rng, 2) | {"$defs": {"bit": _BIT}}


def _random(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_number, _text, _values] + ([_list, _record, _record, _choice] if depth else [])
    return rng.choice(kinds)(rng, depth - 1)


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    step = {"multipleOf": rng.choice((1, 2, 5))} if rng.random() < 0.3 else {}
    ends = rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
    return {"type": "integer", ends[0]: low, ends[1]: low + rng.randrange(10, 200)} | step


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    length = {"minLength": rng.randrange(2), "maxLength": rng.randrange(1, 5)}
    pattern = {"pattern": rng.choice(("^[a-z]{1,3}$", "^(yes|no)$", "^[0-9]{2}:[0-9]{2}$", "^x?y?z$"))}
    return {"type": "string"} | rng.choice((length, pattern, {"format": "date"}))


def _values(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [None, True, 3, -1.5, "é", 'a"b', [], [1], {}, {"k": "v"}, "\\n"]
    return {"const": rng.choice(values)} if rng.random() < 0.3 else {"enum": rng.sample(values, rng.randrange(1, 4))}


def _list(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    found = {"type": "array", "items": _random(rng, depth), "minItems": least, "maxItems": least + 1}
    if rng.random() < 0.3:
        found |= {"prefixItems": [_random(rng, 0)], "minItems": 1, "maxItems": 2}
    return found


def _record(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(("a", "bc", "name", "é", "x y", 'q"'), rng.randrange(1, 4))
    properties = {name: _random(rng, depth) for name in names}
    if rng.random() < 0.3:
        properties[names[0]] = {"$ref": "#/$defs/bit"}
    return _object(properties, required=rng.sample(names, rng.randrange(len(names) + 1)))


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_random(rng, depth) for _ in range(2)]}


# After its first tokens the parser needs more items than llguidance's limit.
MANY_RULES = "\n".join(
    ['start: "aéa" (' + " | ".join(f'"b" r{i}' for i in range(2500)) + ")", *(f'r{i}: "{i}"' for i in range(2500))]
)
