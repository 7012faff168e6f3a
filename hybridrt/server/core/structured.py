"""Structured output in requests: OpenAI's `response_format` and vLLM's fields."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridrt.base.errors import RequestError
from hybridrt.base.structured_outputs import StructuredOutputs
from hybridrt.server.core.protocol import ResponseFormat, Sampling
from hybridrt.server.core.structural_tags import read_tags, tag_grammar
from hybridrt.server.wire.errors import APIError

# vLLM's older fields, and those of StructuredOutputs that they set.
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_ANY_OBJECT = {"type": "object"}
_FORMS = {"json_", "regex", "choice", "grammar", "json_object", "structural_tag"}  # of StructuredFields


def structured_outputs(body: Sampling) -> StructuredOutputs | None:
    """The constraints of an output; None: anything.

    Raises:
        APIError: two fields of the body set them.
        RequestError: the errors of StructuredOutputs; its field is `structured_outputs`.
    """
    given = _given(body)
    if len(given) > 1:
        raise APIError(
            400, f"{' and '.join(given)} both say what the output looks like: set one of them", list(given)[1]
        )
    return next((StructuredOutputs(**fields) for fields in given.values()), None)


@contextmanager
def own_names(body: Sampling) -> Iterator[None]:
    """Within it, errors name the body's own fields of structured outputs and length."""
    try:
        yield
    except RequestError as e:
        longest = "max_completion_tokens"
        if e.field == "structured_outputs":
            raise APIError(400, str(e), next(iter(_given(body)), e.field)) from e
        if e.field == "max_tokens" and getattr(body, longest, None) is not None:
            raise APIError(400, str(e), longest) from e
        raise


def _given(body: Sampling) -> dict[str, dict[str, Any]]:
    given = {"response_format": _format(body.response_format), "structured_outputs": _fields(body)}
    given |= {name: None if (value := getattr(body, name)) is None else {kind: value} for name, kind in GUIDED.items()}
    return {name: fields for name, fields in given.items() if fields is not None}


def _fields(body: Sampling) -> dict[str, Any] | None:
    if body.structured_outputs is None:
        return None
    fields: dict[str, Any] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True, include=_FORMS)
    if fields.pop("json_object", False):
        fields.setdefault("json", _ANY_OBJECT)
    if "structural_tag" in fields:
        fields["grammar"] = tag_grammar(read_tags(fields.pop("structural_tag")))
    return fields


def _format(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {"json": _ANY_OBJECT if response_format.schema_ is None else response_format.schema_}
    if response_format.type == "structural_tag":
        return {"grammar": tag_grammar(response_format)}
    named = response_format.json_schema
    schema = response_format.schema_ if named is None else named.schema_
    if named is None and schema is None:
        raise APIError(400, "response_format of type json_schema needs json_schema", "response_format.json_schema")
    return {"json": _ANY_OBJECT if schema is None else schema}
