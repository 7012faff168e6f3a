"""What drafters propose, and how long the drafts are that a request has earned."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrt.errors import EngineError
from hybridrt.mem_cache.allocator import Slot
from hybridrt.sampling_params import SamplingParams
from hybridrt.speculative.drafter import AdaptiveDrafter, Draft, DraftRequest
from hybridrt.speculative.ngram import NgramDrafter
from hybridrt.speculative.tree import merge, with_siblings


@dataclass(eq=False)
class Asker:
    """A request as drafters see it."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    row: Slot | None = None
    computed: int = 0
    end_page: int = 0
    finish_reason: str | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class AsMany:
    """Proposes as many as it may, and notes how many that were."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
        self.asked.append(list(most))
        return [Draft([7] * n) for n in most]


def lengths(drafter: AdaptiveDrafter, request: Asker, kept: Sequence[int]) -> list[int]:
    """Drafts of one step after the other, of which `kept` stay (at most those that were proposed)."""
    found = []
    for count in kept:
        (draft,) = drafter.propose([request], [99])
        found.append(len(draft))
        request.output += [1] * (min(count, len(draft)) + 1)
    return found


def test_drafts_that_fail_become_fewer_until_there_are_none() -> None:
    drafter = AdaptiveDrafter(inner := AsMany(), 7, patience=16)
    assert lengths(drafter, Asker([1]), [0] * 20) == [7, 3, 1, *[0] * 13, 1, 0, 0, 0]
    assert inner.asked == [[7], [3], [1], *[[]] * 13, [1], *[[]] * 3], "who has earned none is not asked"


def test_drafts_that_all_stay_become_twice_as_many() -> None:
    drafter = AdaptiveDrafter(AsMany(), 7)
    assert lengths(drafter, Asker([1]), [0, 0, 9, 9, 9, 9]) == [7, 3, 1, 2, 4, 7]
    assert lengths(drafter, Asker([1]), [3, 3, 6, 1]) == [7, 7, 7, 7], "some stay: as many again"


def test_each_request_earns_for_itself_and_is_forgotten_when_it_ends() -> None:
    drafter, lucky, unlucky = AdaptiveDrafter(AsMany(), 4), Asker([1]), Asker([2])
    for wanted in ([4, 4], [4, 2], [4, 1], [4, 0]):
        assert [len(d) for d in drafter.propose([lucky, unlucky], [9, 9])] == wanted
        lucky.output += [1] * 5
        unlucky.output += [1]
    lucky.finish_reason = "length"
    drafter.propose([unlucky], [9])
    assert len(drafter._earned) == 1


def test_a_request_that_gained_nothing_keeps_its_length() -> None:
    """Its drafts were thrown away, not refused."""
    drafter, request = AdaptiveDrafter(AsMany(), 4), Asker([1])
    assert [len(drafter.propose([request], [9])[0]) for _ in range(5)] == [4] * 5


def test_more_than_asked_for_is_cut() -> None:
    class TooMany(AsMany):
        def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
            return [Draft([7] * 20, [0] * 20) for _ in requests]

    (draft,) = AdaptiveDrafter(TooMany(), 4).propose([Asker([1])], [3])
    assert (len(draft), draft.parents, draft.depth) == (3, [0, 0, 0], 1)


def test_a_draft_tree_names_parents_first() -> None:
    for parents in ([1], [0, 2], [0], [-1, 0]):
        with pytest.raises(EngineError, match="precedes"):
            Draft([5, 6][: max(len(parents), 1)] + [7] * (parents == [0]), parents)


@pytest.mark.parametrize(("text", "most", "wanted"), [
    ([1, 2, 3, 9, 1, 2, 3], 4, [9, 1, 2, 3]),  # the longest match, then on through the text
    ([5, 1, 2, 8, 4, 1, 2, 7, 1, 2], 2, [7, 1]),  # the latest of equals
    ([8, 1, 2, 6, 1, 2, 7, 8, 1, 2], 1, [6]),  # a longer one before a later one
    ([3, 3, 3], 5, [3, 3, 3, 3, 3]),  # a match that runs into the end goes on with what it predicted
    ([9, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
    ([1, 2, 3, 4], 5, []), ([4], 3, []), ([2, 1, 3, 1], 3, []),  # one token is no match
])  # fmt: skip
def test_prompt_lookup(text: list[int], most: int, wanted: list[int]) -> None:
    (draft,) = NgramDrafter().propose([Asker(text)], [most])
    assert (list(draft.tokens), draft.parents) == (wanted, None)


def test_prompt_lookup_of_several_matches() -> None:
    (draft,) = NgramDrafter(topk=3).propose([Asker([5, 1, 2, 8, 4, 1, 2, 7, 1, 2])], [4])
    assert (list(draft.tokens), draft.parents) == ([7, 8, 1, 4], [0, 0, 1, 2])


def test_a_place_that_matches_twice_is_one_match() -> None:
    """Here by its three tokens before, and by two of them; the other place by two."""
    (draft,) = NgramDrafter(topk=2).propose([Asker([1, 2, 8, 7, 1, 2, 9, 7, 1, 2])], [2])
    assert (list(draft.tokens), draft.parents) == ([9, 8], [0, 0])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(1, 4), max_size=8), st.integers(1, 3))
def test_an_index_that_grows_finds_what_a_new_one_finds(text: list[int], cuts: list[int], topk: int) -> None:
    drafter, request = NgramDrafter(topk=topk), Asker(text[:1])
    for cut in [*cuts, len(text)]:
        request.output = text[1 : 1 + min(len(request.output) + cut, len(text) - 1)]
        (fresh,) = NgramDrafter(topk=topk).propose([Asker(list(request.tokens))], [5])
        assert drafter.propose([request], [5]) == [fresh]


def test_indices_of_finished_requests_go() -> None:
    drafter, request = NgramDrafter(), Asker([1, 2, 1, 2])
    drafter.propose([request], [3])
    request.finish_reason = "stop"
    drafter.propose([Asker([5])], [3])
    assert [index.request for index in drafter._indices.values()] != [request] and len(drafter._indices) == 1


def test_continuations_share_what_they_begin_with() -> None:
    assert merge([[1, 2, 3]], 9) == Draft([1, 2, 3])
    tree = merge([[1, 2, 3], [1, 4], [5]], 9)
    assert (tree.tokens, tree.parents) == ([1, 5, 2, 4, 3], [0, 0, 1, 1, 3])
    assert merge([[1, 2, 3], [1, 4], [5]], 3) == Draft([1, 5, 2], [0, 0, 1])
    assert with_siblings([1, 2], [[8], [9]], 4) == Draft([1, 8, 2, 9], [0, 0, 1, 1])
    assert merge([], 3) == merge([[]], 3) == Draft([])
