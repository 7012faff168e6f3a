"""StructuredOutputs: what it takes, and what it says about the rest."""

from typing import Any

import pytest

from hybridrt import RequestError, SamplingParams, StructuredOutputs
from hybridrt.base.structured_outputs import MAX_CHARACTERS, MAX_CHOICES
from hybridrt.parallel.messages import decode, encode
from hybridrt.runtime.step.plan import Admission, StepPlan

DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]

BAD: list[dict[str, Any]] = [
    {},
    {"json": {}, "regex": "a"},
    *({"json": value} for value in ("", "{", "[]", "null", 3, [], {"a": float("nan")}, {"a": object()}, {"a": DEEP})),
    {"json": '{"title": "\\ud800"}'},
    *({kind: value} for kind in ("regex", "grammar") for value in ("", 3, b"a", "\ud800", "a" * (MAX_CHARACTERS + 1))),
    *({"choice": value} for value in ("ab", [], [""], [3], {"a": 1}, ["a"] * (MAX_CHOICES + 1), ["a" * 2**18] * 3)),
]


@pytest.mark.parametrize("fields", BAD, ids=[f"{i}-{min(fields, default=None)}" for i, fields in enumerate(BAD)])
def test_bad_values_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs") as info:
        StructuredOutputs(**fields)
    assert info.value.field == "structured_outputs" and len(str(info.value)) < 400


def test_equal_schemas_are_equal_values_and_keep_their_order() -> None:
    as_object = StructuredOutputs(json={"type": "object", "required": ["ä"]})
    assert as_object == StructuredOutputs(json=' {"type": "object",\n "required": ["ä"]}') and as_object.kind == "json"
    assert hash(as_object) == hash(StructuredOutputs(json=as_object.json))
    assert as_object != StructuredOutputs(json={"required": ["ä"], "type": "object"})
    assert StructuredOutputs(json=True).json == "true"
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")


def test_sampling_params_take_it_and_refuse_what_contradicts_it() -> None:
    with pytest.raises(RequestError, match="StructuredOutputs"):
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="ignore_eos") as info:
        SamplingParams(structured_outputs=StructuredOutputs(json={}), ignore_eos=True)
    assert info.value.field == "ignore_eos"


@pytest.mark.parametrize("fields", [{"json": {"a": [1]}}, {"choice": ["a", "b"]}])
def test_ranks_get_it_as_it_is(fields: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**fields))
    assert decode(encode(StepPlan([Admission.from_prompt(1, 1, [5], params, 0)]))).admissions[0].params == params
