"""What drafters propose, and how long the drafts are that a request has earned."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.base.errors import EngineError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.speculative.draft import merge, with_others
from hybridrt.speculative.drafter import AdaptiveDrafter, Draft, Drafter, DraftRequest, tokens_between
from hybridrt.speculative.ngram import TOKENS_A_STEP, NgramDrafter


@dataclass(eq=False)
class Asker:
    """A request as drafters see it."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    arrival: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    rules: Any = None
    row: Handle | None = None
    computed: int = 0
    pending: int = 0
    end_page: int = 0


class AsMany(Drafter):
    """Proposes as many as it may, and notes how many that were."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
        self.asked.append(list(most))
        return [Draft([7] * n) for n in most]


def lengths(drafter: AdaptiveDrafter, request: Asker, kept: Sequence[int]) -> list[int]:
    """Drafts of one step after the other, of which `kept` stay (at most those that were proposed)."""
    found = []
    drafter.begin_request(request)
    for count in kept:
        (draft,) = drafter.propose([request], [99])
        found.append(len(draft))
        gain(drafter, [request], [min(count, len(draft)) + 1])
    return found


def proposed(drafter: Drafter, request: Asker, most: int) -> Draft:
    """The first proposal for a request."""
    drafter.begin_request(request)
    (draft,) = drafter.propose([request], [most])
    return draft


def gain(drafter: Drafter, requests: Sequence[Asker], gained: Sequence[int]) -> None:
    """A step is over."""
    for request, tokens in zip(requests, gained, strict=True):
        request.output += [1] * tokens
    drafter.after_step(requests, gained)


def test_drafts_that_fail_become_fewer_until_there_are_none() -> None:
    drafter = AdaptiveDrafter(inner := AsMany(), 7, patience=16)
    assert lengths(drafter, Asker([1]), [0] * 20) == [7, 3, 1, *[0] * 13, 1, 0, 0, 0]
    assert inner.asked == [[7], [3], [1], *[[]] * 13, [1], *[[]] * 3], "who has earned none is not asked"


def test_drafts_that_all_stay_become_twice_as_many() -> None:
    drafter = AdaptiveDrafter(AsMany(), 7)
    assert lengths(drafter, Asker([1]), [0, 0, 9, 9, 9, 9]) == [7, 3, 1, 2, 4, 7]
    assert lengths(drafter, Asker([1]), [3, 3, 6, 1]) == [7, 7, 7, 7], "some stay: as many again"


def test_a_request_that_has_earned_no_drafts_waits_for_no_tokens() -> None:
    """Until the token at which one draft is tried again, pending ones counted."""
    drafter, request = AdaptiveDrafter(AsMany(), 4, patience=8), Asker([1])
    drafter.begin_request(request)
    waits = []
    for _ in range(12):
        drafter.propose([request], [9])
        request.pending = 1
        waits.append(drafter.waits(request))
        request.pending = 0
        gain(drafter, [request], [1])
    assert waits == [True, True, True, *[False] * 4, True, True, False, False, False]


def test_each_request_earns_for_itself_and_is_forgotten_when_it_ends() -> None:
    drafter, lucky, unlucky = AdaptiveDrafter(AsMany(), 4), Asker([1]), Asker([2], arrival=1)
    drafter.begin_request(lucky)
    drafter.begin_request(unlucky)
    for wanted in ([4, 4], [4, 2], [4, 1], [4, 0]):
        assert [len(d) for d in drafter.propose([lucky, unlucky], [9, 9])] == wanted
        gain(drafter, [lucky, unlucky], [5, 1])
    drafter.end_request(lucky)
    assert list(drafter._earned) == [unlucky.arrival]
    drafter.begin_request(lucky)
    assert [len(d) for d in drafter.propose([lucky, unlucky], [9, 9])] == [4, 0]


def test_a_request_that_gained_nothing_keeps_its_length() -> None:
    """Its drafts were thrown away, not refused."""
    drafter, request = AdaptiveDrafter(AsMany(), 4), Asker([1])
    drafter.begin_request(request)
    assert [len(drafter.propose([request], [9])[0]) for _ in range(5)] == [4] * 5


def test_more_than_asked_for_is_cut() -> None:
    class TooMany(AsMany):
        def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
            return [Draft([7] * 20, [0] * 20) for _ in requests]

    draft = proposed(AdaptiveDrafter(TooMany(), 4), Asker([1]), 3)
    assert (len(draft), draft.parents, draft.depth) == (3, [0, 0, 0], 1)


def test_a_draft_tree_names_parents_first() -> None:
    for parents in ([1], [0, 2], [0], [-1, 0]):
        with pytest.raises(EngineError, match="precedes"):
            Draft([5, 6][: max(len(parents), 1)] + [7] * (parents == [0]), parents)


@pytest.mark.parametrize(("text", "most", "wanted"), [
    ([1, 2, 3, 9, 1, 2, 3], 4, [9, 1, 2, 3]),  # the longest match, then on through the text
    ([5, 1, 2, 8, 4, 1, 2, 7, 1, 2], 2, [7, 1]),  # the latest of equals
    ([8, 1, 2, 6, 1, 2, 7, 8, 1, 2], 1, [6]),  # a longer one before a later one
    ([3, 3, 3], 5, [3, 3, 3, 3, 3]),  # a match that reaches the end continues with its own predictions
    ([9, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
    ([1, 2, 3, 4], 5, []), ([4], 3, []), ([2, 1, 3, 1], 3, []),  # one token is no match
])  # fmt: skip
def test_prompt_lookup(text: list[int], most: int, wanted: list[int]) -> None:
    draft = proposed(NgramDrafter(), Asker(text), most)
    assert (list(draft.tokens), draft.parents) == (wanted, None)


def test_prompt_lookup_of_several_matches() -> None:
    draft = proposed(NgramDrafter(topk=3), Asker([5, 1, 2, 8, 4, 1, 2, 7, 1, 2]), 4)
    assert (list(draft.tokens), draft.parents) == ([7, 8, 1, 4], [0, 0, 1, 2])


def test_a_place_that_matches_twice_is_one_match() -> None:
    """Here by its three tokens before, and by two of them; the other place by two."""
    draft = proposed(NgramDrafter(topk=2), Asker([1, 2, 8, 7, 1, 2, 9, 7, 1, 2]), 2)
    assert (list(draft.tokens), draft.parents) == ([9, 8], [0, 0])


def scanned(text: list[int], most: int, topk: int) -> Draft:
    """Prompt lookup without an index: the whole text is read for each size of n-gram."""
    found: list[int] = []
    for size in range(min(4, len(text) - 1), 1, -1):
        ends = [end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == text[-size:]]
        found += [end for end in ends[:topk] if end not in found]
    chains = []
    for after in found[:topk]:
        longer = list(text)
        for position in range(after, after + most):
            longer.append(longer[position])
        chains.append(longer[after : after + most])
    return merge(chains, most)


@settings(deadline=None)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    steps=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["", "retracted", "not asked"])), max_size=12),
    topk=st.integers(1, 3),
)
def test_an_index_finds_what_a_scan_of_the_whole_text_finds(
    text: list[int], steps: list[tuple[int, str]], topk: int
) -> None:
    """However many tokens a step gains, across retractions, and where a request is not asked in some steps."""
    drafter, request = NgramDrafter(topk=topk), Asker(text[: len(text) // 2 + 1])
    drafter.begin_request(request)
    for gained, event in [(0, ""), *steps]:
        done = len(request.prompt) + len(request.output)
        request.output += text[done : done + gained]
        drafter.after_step([request], [gained])
        if event == "retracted":
            drafter.end_request(request)
            drafter.begin_request(request)
        if event != "not asked":
            known = [*request.prompt, *request.output]
            assert drafter.propose([request], [5]) == [scanned(known, 5, topk)]


def test_prompt_lookup_reads_the_new_tokens_alone() -> None:
    """A step at 10,000 tokens reads no more of the text than one at 100."""

    class Counted(list[int]):
        """Counts what is read of it."""

        read = 0

        def __getitem__(self, item: Any) -> Any:
            part = super().__getitem__(item)
            self.read += len(part) if isinstance(item, slice) else 1
            return part

        def __iter__(self) -> Any:
            raise AssertionError("the whole text is read")

    costs = []
    for length in (100, 10_000):
        drafter, request = NgramDrafter(), Asker(Counted(i % 7 for i in range(length)))
        output = request.output = Counted()
        drafter.begin_request(request)
        for _ in range(0, length, TOKENS_A_STEP):
            drafter.propose([request], [4])
        prompt = request.prompt
        assert isinstance(prompt, Counted)
        before = prompt.read
        for i in range(50):
            output.append((length + i) % 7)
            assert drafter.propose([request], [4])[0]
        costs.append(prompt.read - before + output.read)
    assert costs[0] == costs[1]


def test_indices_of_finished_requests_go() -> None:
    drafter, request = NgramDrafter(), Asker([1, 2, 1, 2])
    drafter.begin_request(request)
    drafter.end_request(request)
    drafter.end_request(request)
    assert not drafter._indices


def test_tokens_between_two_positions() -> None:
    request = Asker([1, 2, 3], [4, 5])
    ranges = [(-2, 2), (0, 3), (1, 4), (3, 5), (4, 9), (5, 5), (7, 9)]
    wanted = [[1, 2], [1, 2, 3], [2, 3, 4], [4, 5], [5], [], []]
    assert [tokens_between(request, *positions) for positions in ranges] == wanted


def test_continuations_share_what_they_begin_with() -> None:
    assert merge([[1, 2, 3]], 9) == Draft([1, 2, 3])
    tree = merge([[1, 2, 3], [1, 4], [5]], 9)
    assert (tree.tokens, tree.parents) == ([1, 5, 2, 4, 3], [0, 0, 1, 1, 3])
    assert merge([[1, 2, 3], [1, 4], [5]], 3) == Draft([1, 5, 2], [0, 0, 1])
    assert with_others([1, 2], [[8], [9]], 4) == Draft([1, 8, 2, 9], [0, 0, 1, 1])
    assert merge([], 3) == merge([[]], 3) == Draft([])


@pytest.mark.parametrize(
    ("draft", "left"),
    [
        (Draft([4, 5, 6]), Draft([4, 5, 6])),
        (Draft([4, 9, 6]), Draft([4, 9])),
        (Draft([9]), Draft([9])),
        (Draft([4, 9, 5, 6, 7], [0, 0, 1, 2, 3]), Draft([4, 9, 5, 7], [0, 0, 1, 3])),
        (Draft([4, 9, 5], [0, 0, 2]), Draft([4, 9], [0, 0])),
        (Draft([4, 5, 9, 6], [0, 1, 1, 3]), Draft([4, 5, 9], [0, 1, 1])),
    ],
)
def test_a_draft_until_its_end(draft: Draft, left: Draft) -> None:
    assert draft.until(lambda tokens: 9 in tokens) == left


def test_long_prompts_are_indexed_over_several_steps_and_nothing_is_proposed_before() -> None:
    """A prompt of a million tokens took seven seconds of one step."""
    drafter, length = NgramDrafter(), 2 * TOKENS_A_STEP
    long, short = (Asker([i % 7 for i in range(n)], arrival=n) for n in (length, 9))
    for request in (long, short):
        drafter.begin_request(request)
    indices, added, found = drafter._indices, [0], list[list[int]]()
    for _ in range(4):
        found.append([len(draft) for draft in drafter.propose([long, short], [3, 3])])
        added.append(sum(len(index[-1].earlier) for index in indices.values()))
        long.output.append((length + len(long.output)) % 7)
    assert found == [[0, 3], [0, 3], [3, 3], [3, 3]]
    assert max(b - a for a, b in pairwise(added)) <= TOKENS_A_STEP + 9
