"""Stop strings cost a step little, however many and long they are, and are found where a search would find them."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt import RequestError, SamplingParams
from hybridrt.base.sampling_params import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from hybridrt.engine.text.stop_strings import StopStrings

PIECES = st.lists(st.text("abc", max_size=6), max_size=8)
STRINGS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5)


@settings(deadline=None)
@given(STRINGS, PIECES)
def test_the_first_string_of_a_piece_is_found_and_nothing_before_it(strings: list[str], pieces: list[str]) -> None:
    machine, state, text = StopStrings(strings), 0, ""
    for piece in pieces:
        text += piece
        state, behind = machine.scan(state, piece)
        found = [i for s in strings if (i := text.find(s)) >= 0]
        assert behind == (len(text) - min(found) if found else 0)
        if found:
            return
        starts = [n for n in range(1, len(text) + 1) for s in strings if s.startswith(text[-n:])]
        assert machine.held(state) == max(starts, default=0)


class CountingStops(StopStrings):
    """Counts the looks at its tables."""

    looks = 0

    def _step(self, state: int, character: str) -> int:
        before, self.looks = state, self.looks + 1
        state = super()._step(state, character)
        self.looks += self._depth[before] + 1 - self._depth[state]  # ends that were tried in vain
        return state


def test_a_step_does_not_cost_more_with_more_or_longer_strings() -> None:
    text = ("a" * 200 + "b") * 20
    looks = []
    for strings in (["ac"], ["a" * 255 + "c"], ["a" * (255 - i) + "c" for i in range(32)]):
        stops = CountingStops(strings)
        stops.looks, state = 0, 0
        for start, end in pairwise(range(0, len(text) + 1, 3)):
            state, behind = stops.scan(state, text[start:end])
            assert not behind
            stops.held(state)
        looks.append(stops.looks)
    assert max(looks) <= 3 * len(text), "a character is looked at a bounded number of times"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": ["x" * (MAX_STOP_CHARACTERS + 1)]}, "strings of 1 to 256 characters"),
        ({"stop": [f"{i}" for i in range(MAX_STOP_STRINGS + 1)]}, "stop has more than 32 entries"),
        ({"stop": b"abc"}, "stop is b'abc'"),
        ({"stop": {"a": 1}}, "stop is"),
        ({"stop": 5}, "stop is 5"),
        ({"stop_token_ids": range(MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids has more than 1024 entries"),
        ({"stop_token_ids": range(10**12)}, "stop_token_ids has more than 1024 entries"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'"),
    ],
)
def test_stops_are_capped(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        SamplingParams(**fields)


def test_as_many_stops_as_are_allowed() -> None:
    params = SamplingParams(
        stop=["x" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS, stop_token_ids=[1] * MAX_STOP_TOKEN_IDS
    )
    assert (len(params.stop), len(params.stop_token_ids)) == (MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS)
