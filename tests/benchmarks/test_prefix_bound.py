"""The clairvoyant bound against the best of all ways to keep states and pages."""

from functools import cache
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.prefix_bound import Served, bound, program

Text = tuple[int, ...]
PAGE = 2


def in_common(a: Text, b: Text) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def best(texts: list[tuple[Text, int]], slots: int, pages: int | None, free_states: bool = False) -> int:
    """Most tokens that requests, one after the other, can skip; each is (text, length of its prompt). `free_states`:
    also states before the place that a request has begun at come for nothing."""
    ends = [{min(in_common(t, u), n - 1) for t, _ in texts[:j]} for j, (u, n) in enumerate(texts)]

    def pages_of(text: Text) -> frozenset[Text]:
        return (
            frozenset(text[: i + PAGE] for i in range(0, len(text) - PAGE + 1, PAGE))
            if pages is not None
            else frozenset()
        )

    def useful(j: int) -> tuple[frozenset[Text], frozenset[Text]]:
        states = frozenset(texts[k][0][:end] for k in range(j + 1, len(texts)) for end in ends[k] if end)
        return states, frozenset(
            p for k in range(j + 1, len(texts)) for p in pages_of(texts[k][0][: max(ends[k], default=0)])
        )

    @cache
    def gain(j: int, kept: frozenset[Text], kept_pages: frozenset[Text]) -> int:
        if j == len(texts):
            return 0
        text, prompt = texts[j]
        later, later_pages = useful(j)
        found = 0
        for hit in [(), *(s for s in kept if s == text[: len(s)] and len(s) < prompt)]:
            read = pages_of(hit)
            if not read <= kept_pages:
                continue
            fresh = {text[:i] for i in range(1 if free_states else len(hit) + 1, len(text) + 1)}
            for states in subsets((kept | fresh) & later, slots):
                held = (states - fresh) | ({hit} if hit else set())
                own = {s for s in states & fresh if len(s) >= prompt + (len(text) > prompt + 1)}
                if max(len(held), len(states - own)) > slots - 1:  # as it is admitted, and while it decodes
                    continue
                written = pages_of(text)
                for some in subsets((kept_pages | written) & later_pages, pages or 0):
                    if pages is not None and len((some - written) | read | pages_of(text[:prompt])) > pages:
                        continue
                    found = max(found, len(hit) + gain(j + 1, states, some))
        return found

    return gain(0, frozenset(), frozenset())


def subsets(things: frozenset[Text], most: int) -> list[frozenset[Text]]:
    sizes = range(min(most, len(things)) + 1)
    return list(map(frozenset, chain.from_iterable(combinations(sorted(things), n) for n in sizes)))


@st.composite
def runs(draw: st.DrawFn, most: int, length: int) -> list[tuple[Text, int]]:
    """Texts that continue one another."""
    texts = list[tuple[Text, int]]()
    for _ in range(draw(st.integers(2, most))):
        base = draw(st.sampled_from([(), *(text for text, _ in texts)]))
        prompt = base[: draw(st.integers(0, len(base)))] + tuple(
            draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        )
        prompt = prompt[:length]
        answer = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
        texts.append((prompt + answer, len(prompt)))
    return texts


def zeros(count: int) -> Text:
    return (0,) * count


def served(texts: list[tuple[Text, int]]) -> list[Served]:
    return [Served(np.array(t, np.int32), n, i, i + 0.3, i + 0.6) for i, (t, n) in enumerate(texts)]


EXAMPLES = pytest.mark.parametrize(
    "examples", [2, pytest.param(5, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.soak)]
)


@EXAMPLES
def test_bounds_the_best_choice_of_states(examples: int) -> None:
    @settings(deadline=None, max_examples=examples)
    @given(runs(12, 8), st.integers(1, 3))
    def bounds(texts: list[tuple[Text, int]], slots: int) -> None:
        problem = program(served(texts), 0, slots, 0)
        found, exact = bound(problem, 400), best(texts, slots, None)
        relaxed = best(texts, slots, None, free_states=True)
        assert exact <= relaxed <= found <= problem.unlimited
        assert found <= relaxed * 1.02 + 1, "the program's optimum is whole"

    bounds()


@EXAMPLES
def test_bounds_the_best_choice_of_states_and_pages(examples: int) -> None:
    @settings(deadline=None, max_examples=examples)
    @example([(zeros(5), 3), ((0,), 1), ((1, 0), 1), (zeros(6), 6), ((1, 0, 0), 3), ((0,), 1), ((1, 0), 2)], 3, 3)
    @given(runs(7, 6), st.integers(1, 3), st.integers(3, 6))
    def bounds(texts: list[tuple[Text, int]], slots: int, pages: int) -> None:
        problem = program(served(texts), PAGE, slots, pages)
        exact, found = best(texts, slots, pages), bound(problem, 400)
        assert exact <= found <= problem.unlimited

    bounds()
