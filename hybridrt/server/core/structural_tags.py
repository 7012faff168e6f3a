"""Structural tags: free text, in which each trigger begins a tag whose content a schema accepts."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybridrt.base.structured_outputs import MAX_CHARACTERS, WHITESPACE
from hybridrt.server.core.protocol import MAX_STRUCTURES, ResponseFormat, Structure
from hybridrt.server.wire.errors import APIError

_FIELD = "response_format"
MAX_TAG_CHARACTERS = 1024


class _Format(BaseModel):
    """A part of xgrammar's form of structural tags. Further fields would change the output."""

    model_config = ConfigDict(strict=True, extra="forbid")


class _Content(_Format):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool


class _Tag(_Format):
    type: Literal["tag"] = "tag"
    begin: str
    content: _Content
    end: str


class _TriggeredTags(_Format):
    type: Literal["triggered_tags"]
    triggers: Annotated[list[str], Field(max_length=MAX_STRUCTURES)]
    tags: Annotated[list[_Tag], Field(max_length=MAX_STRUCTURES)]
    at_least_one: Literal[False] = False
    stop_after_first: Literal[False] = False


def read_tags(text: str) -> ResponseFormat:
    """vLLM's `structured_outputs.structural_tag`, the JSON text of a response format."""
    try:
        return ResponseFormat.model_validate(json.loads(text))
    except (ValidationError, ValueError, RecursionError) as e:
        raise APIError(400, "structural_tag must be the JSON text of an object of type structural_tag") from e


def tag_grammar(given: ResponseFormat) -> str:
    """A grammar in llguidance's variant of Lark.

    Raises:
        APIError: it has neither {"structures", "triggers"} nor such a format, or its tags cannot be told apart.
    """
    tags, triggers = (given.structures, given.triggers) if given.format is None else _of_format(given.format)
    if given.type != "structural_tag" or not tags or not triggers:
        text = "structural tags need structures, each with begin, schema and end, and triggers; or a format"
        raise APIError(400, text, _FIELD, "unsupported")
    _check(tags, triggers)
    found = [next((t for t in triggers if tag.begin.startswith(t)), None) for tag in tags]
    if None in found:
        tag = tags[found.index(None)]
        raise APIError(400, f"no trigger is the beginning of {tag.begin[:100]!r}: add one", f"{_FIELD}.triggers")
    used = sorted(set(filter(None, found)))
    length = len(used) * sum(map(len, used))  # each trigger's rule has all others
    if length > MAX_CHARACTERS:
        text = f"{len(used)} triggers make a grammar of {length} characters; there may be {MAX_CHARACTERS}"
        raise APIError(400, f"{text}: pass fewer or shorter ones", f"{_FIELD}.triggers")
    rules = [f"start: ({' | '.join(f'trigger{i}' for i in range(len(used)))})* PLAIN", f"PLAIN: {_without(used)}"]
    for i, trigger in enumerate(used):
        others = [other for other in used if other != trigger]
        bodies = " | ".join(_body(tag, trigger) for tag, each in zip(tags, found, strict=True) if each == trigger)
        rules += [f"trigger{i}: begin{i} ({bodies})", f"begin{i}[lazy]: BEGIN{i}"]
        rules += [f"BEGIN{i}: /(?s:.*){_regex(trigger)}/{' & ' + _without(others) if others else ''}"]
    return "\n".join(rules)


def _of_format(form: Any) -> tuple[list[Structure], list[str]]:
    """Structures and triggers of xgrammar's newer form."""
    try:
        found = _TriggeredTags.model_validate(form)
    except ValidationError as e:
        where = ".".join(map(str, e.errors()[0]["loc"]))
        text = f"format must be triggered_tags of tags whose content is a json_schema: {where} is not supported"
        raise APIError(400, text, f"{_FIELD}.format", "unsupported") from e
    tags = [Structure(begin=tag.begin, schema=tag.content.json_schema, end=tag.end) for tag in found.tags]
    return tags, found.triggers


def _check(tags: list[Structure], triggers: list[str]) -> None:
    for text in (*triggers, *(tag.begin for tag in tags), *(tag.end for tag in tags)):
        if len(text) > MAX_TAG_CHARACTERS:
            raise APIError(400, f"a tag has {len(text)} characters; at most {MAX_TAG_CHARACTERS}", _FIELD)
    for trigger in triggers:
        if not trigger or any(trigger != other and trigger in other for other in triggers):
            raise APIError(400, f"the trigger {trigger[:100]!r} is empty, or part of another one", f"{_FIELD}.triggers")


def _body(tag: Structure, trigger: str) -> str:
    schema = {} if tag.schema_ is None or tag.schema_ is True else tag.schema_ or {"enum": []}
    inner = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
    ends = [json.dumps(text) for text in (tag.begin[len(trigger) :], tag.end)]
    parts = [ends[0] if ends[0] != '""' else "", f"%json {json.dumps(inner)}", ends[1] if ends[1] != '""' else ""]
    return " ".join(filter(None, parts))


def _without(triggers: list[str]) -> str:
    return f"/(?s:.*)/ & ~/(?s:.*)({'|'.join(map(_regex, triggers))})(?s:.*)/" if triggers else "/(?s:.*)/"


def _regex(text: str) -> str:
    escaped = "".join(f"\\{c}" if c in r"\/.*+?()[]{}|^$" else c for c in text)
    return re.sub(r"\n", r"\\n", escaped)
