"""SamplingParams refuses every value out of range, by name, and keeps every one in it."""

import math
from typing import Any

import numpy as np
import pytest

from hybridrt.base.errors import HybridrtError, RequestError
from hybridrt.base.sampling_params import SamplingParams

BAD: list[tuple[str, Any]] = [
    *(("max_tokens", v) for v in (0, -3, 1.5, True, "9")),
    *(("temperature", v) for v in (math.nan, math.inf, -0.1, "hot", None, True)),
    *(("top_p", v) for v in (0, 2.0, -1, math.nan)),
    *(("top_k", v) for v in (-2, 1.5)),
    *(("min_p", v) for v in (-0.1, 1.1, math.nan)),
    *(("repetition_penalty", v) for v in (0, -1, math.nan, math.inf)),
    *((name, v) for name in ("presence_penalty", "frequency_penalty") for v in (-2.1, 2.1, math.nan)),
    *(("stop", v) for v in ([""], [3])),
    *(("stop_token_ids", v) for v in ([-1], [1.5], [True])),
    *((name, np.array(3)) for name in ("stop", "stop_token_ids")),
    *(("seed", v) for v in (-1, 2**63, 0.5)),
    *(("logprobs", v) for v in (-1, 65, True, 1.0)),
    *(("n", v) for v in (0, 1025, True, 1.0)),
]
GOOD: list[tuple[str, Any]] = [
    *(("max_tokens", v) for v in (1, None)),
    *(("temperature", v) for v in (0, 0.7, 5)),
    *(("top_p", v) for v in (1, 0.01)),
    *(("top_k", v) for v in (-1, 0, 50)),
    *(("min_p", v) for v in (0, 1)),
    ("repetition_penalty", 0.5),
    *((name, v) for name in ("presence_penalty", "frequency_penalty") for v in (-2, 2)),
    *(("seed", v) for v in (0, 2**63 - 1, None)),
    *(("logprobs", v) for v in (0, 64, None)),
    *(("n", v) for v in (1, 1024)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as info:
        SamplingParams(**{name: value})
    assert isinstance(info.value, HybridrtError) and isinstance(info.value, ValueError)


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_good_values_are_kept(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.filterwarnings("error")
def test_numpy_numbers_are_taken_without_a_warning() -> None:
    """float16 does not hold the largest temperature."""
    params = SamplingParams(temperature=np.float16(0.5), top_p=np.float32(0.5), max_tokens=np.int8(9), seed=np.uint8(3))  # type: ignore[arg-type]
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.5, 9, 3)
    for value in (np.float16("inf"), np.float64("nan"), 10**400):
        with pytest.raises(RequestError, match="temperature"):
            SamplingParams(temperature=value)  # type: ignore[arg-type]


def test_unknown_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]


def test_stop_may_be_one_string_or_several() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)


def test_params_are_values() -> None:
    params = SamplingParams(stop=["a"])
    assert params == SamplingParams(stop="a") and hash(params) == hash(SamplingParams(stop="a"))
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]


def test_what_decides_how_tokens_are_chosen() -> None:
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy
    assert not SamplingParams().uses_penalties
    for name, value in [("repetition_penalty", 1.1), ("presence_penalty", 0.1), ("frequency_penalty", -0.1)]:
        assert SamplingParams(**{name: value}).uses_penalties
