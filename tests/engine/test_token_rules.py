"""min_tokens, logit_bias, allowed_token_ids, bad_words and prompt_logprobs of whole requests: alone, in company, with
drafts, retracted, and in chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.request.outputs import RequestOutput
from hybridrt.mem_cache.pools.page_groups import GroupPages
from tests.support.levels import sweep

PROMPT = "def main():\n    import "
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunked_prefill_size": 5},
    "retracted": {"page_size": 4, "memory_pages": 18},
    "ngram": {"speculative": SpeculativeConfig("ngram", num_draft_tokens=3)},
    "chain": {"speculative": SpeculativeConfig("draft", draft_model="embedded_draft", num_draft_tokens=3)},
    "tree": {"speculative": SpeculativeConfig("draft", draft_model="embedded_draft", num_draft_tokens=5, topk=2)},
}


def load(**options: Any) -> LLM:
    options = {"device": "cpu", "dtype": "float32", "max_running_requests": 6, "max_model_len": 128} | options
    return LLM("embedded", **options)


def hold_pages(llm: LLM, left: int) -> GroupPages:
    """Takes all KV pages but `left` and those of three slabs, which states need."""
    pages = llm.engine._coordinator.pages
    slabs = 0 if pages.slabs is None else 3 * pages.shares[0].per_slab
    return pages.alloc([pages.num_free - left - slabs])


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with load() as llm:
        yield llm


def cases(llm: LLM) -> list[SamplingParams]:
    """One of each kind, and all at once; their words are what the model writes without them."""
    base = SamplingParams(temperature=0, max_tokens=24, logprobs=64)
    written = llm.generate(PROMPT, base)[0]
    likely = list(written.logprobs[0])[:8]  # type: ignore[index]
    tokenizer, ids = llm.tokenizer, written.token_ids
    assert tokenizer is not None
    pairs = [ids[i : i + 2] for i in range(20)]
    words = [text for text in map(tokenizer.decode, pairs) if text.strip() == text]
    assert any(tokenizer.encode_bare(word) in pairs for word in words), "the model writes one of the words"
    stops = ids[3:6]
    everything = {"bad_words": words, "min_tokens": 12, "stop_token_ids": stops}
    return [
        base,
        replace(base, min_tokens=9, stop_token_ids=stops),
        replace(base, logit_bias={likely[1]: 4.5, likely[0]: -90.5, written.token_ids[5]: -100}),
        replace(base, bad_words=words),
        replace(base, **everything, logit_bias={likely[2]: 1.5}),
        replace(base, **everything, temperature=0.9, seed=3, top_p=0.9, repetition_penalty=1.2, logprobs=None, n=2),
    ]


def forbidden(params: SamplingParams, words: Sequence[Sequence[int]], stops: set[int], before: list[int]) -> set[int]:
    found = set(stops) if len(before) < params.min_tokens else set()
    for *prefix, last in words:
        if len(prefix) <= len(before) and before[len(before) - len(prefix) :] == prefix:
            found.add(last)
    return found


def check(llm: LLM, output: RequestOutput, params: SamplingParams) -> None:
    """Each token is the best of those that are allowed, among the 64 likeliest."""
    assert llm.tokenizer is not None
    words = [llm.tokenizer.encode_bare(space + word.lstrip()) for word in params.bad_words for space in ("", " ")]
    plain, spaced = words[::2], words[1::2]
    words = plain + [s for p, s in zip(plain, spaced) if len(p) == len(s) and p[0] != s[0]]
    stops = {*params.stop_token_ids, *llm.model_config.eos_token_ids}
    for i, token in enumerate(output.token_ids):
        without = forbidden(params, words, stops, output.token_ids[:i])
        assert token not in without
        if output.logprobs is not None:
            scores = {t: x + (params.logit_bias or {}).get(t, 0) for t, x in output.logprobs[i].items()}
            assert token == max(scores.keys() - without, key=lambda t: scores[t]), i
    assert len(output.token_ids) >= min(params.min_tokens, 24)


def test_tokens_are_the_best_allowed_ones(plain: LLM) -> None:
    outputs = plain.generate([PROMPT] * 6, cases(plain))
    free = outputs[0]
    for output, params in zip(outputs, cases(plain), strict=True):
        for sample in output.outputs:
            check(plain, sample, params)
    assert all(output.token_ids != free.token_ids for output in outputs[2:])
    assert len(outputs[1].token_ids) > 4 and outputs[1].token_ids[:4] != free.token_ids[:4]


def test_only_allowed_tokens_are_drawn(plain: LLM) -> None:
    allowed = [5, 40, 41, 99]
    for more in ({"temperature": 0.0}, {"temperature": 5.0, "seed": 1, "top_k": 50}):
        params = SamplingParams(max_tokens=20, allowed_token_ids=allowed, ignore_eos=True, **more)
        (output,) = plain.generate(PROMPT, params)
        assert len(output.token_ids) == 20 and set(output.token_ids) <= set(allowed)
    (output,) = plain.generate(PROMPT, SamplingParams(allowed_token_ids=[7], max_tokens=3, ignore_eos=True))
    assert output.token_ids == [7, 7, 7]


@pytest.fixture(scope="module")
def alone(plain: LLM) -> list[tuple[SamplingParams, RequestOutput]]:
    """What each case becomes without company."""
    return [(params, plain.generate(PROMPT, params)[0]) for params in cases(plain)]


@pytest.mark.parametrize("mode", sweep(list(MODES)[1:], len(MODES), thin=4))
def test_every_way_of_running_gives_the_same_tokens(
    alone: list[tuple[SamplingParams, RequestOutput]], mode: str
) -> None:
    options = dict(MODES[mode])
    pages = options.pop("memory_pages", None)
    params, want = zip(*alone, strict=True)
    with load(**options) as llm:
        if pages is not None:  # too few for all of them together
            held = hold_pages(llm, pages)
        got = llm.generate([PROMPT] * len(params), params)
        if pages is not None:
            assert llm.engine.counters().retractions > 0
            llm.engine._coordinator.pages.free(held)
    for one, other in zip(want, got, strict=True):
        assert [s.token_ids for s in one.outputs] == [s.token_ids for s in other.outputs]


def test_min_tokens_holds_stop_strings_back(plain: LLM) -> None:
    base = SamplingParams(temperature=0, max_tokens=24)
    text = plain.generate(PROMPT, base)[0].text
    early = plain.generate(PROMPT, replace(base, stop=[text[0], text[9]]))[0]
    late = plain.generate(PROMPT, replace(base, stop=[text[0], text[9]], min_tokens=6))[0]
    assert len(early.token_ids) < 6 and early.text == "" and len(late.token_ids) > 6


SCORED = SamplingParams(temperature=0, max_tokens=12, logprobs=3)


@pytest.mark.parametrize("mode", sweep(["plain", "chunked", "retracted", "chain"], 2))
def test_prompts_have_the_log_probabilities_that_generation_gave(plain: LLM, mode: str) -> None:
    written = plain.generate(PROMPT, SCORED)[0]
    start, whole = len(written.prompt_token_ids), written.prompt_token_ids + written.token_ids
    options = dict(MODES[mode])
    pages = options.pop("memory_pages", None)
    prompts = [whole, whole[:1], [*whole, 9, 9], PROMPT]
    params = [replace(SCORED, prompt_logprobs=k, n=n) for k, n in ((3, 2), (3, 1), (0, 1))] + [SCORED]
    with load(**options) as llm:
        if pages is not None:
            held = hold_pages(llm, 14)
        first, short, none, without = llm.generate(prompts, params)
        if pages is not None:
            assert llm.engine.counters().retractions > 0
            llm.engine._coordinator.pages.free(held)
    assert without.prompt_logprobs is None and short.prompt_logprobs == [None]
    assert none.prompt_logprobs is not None and first.prompt_logprobs is not None
    assert [list(e) for e in none.prompt_logprobs[1:] if e] == [[t] for t in [*whole, 9, 9][1:]]
    for output in first.outputs:
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(whole)
        assert output.prompt_logprobs[0] is None
        for got, want in zip(output.prompt_logprobs[start:], written.logprobs or (), strict=True):
            assert got == pytest.approx(want, abs=1e-4)


def test_a_cached_prompt_is_computed_again_for_its_log_probabilities(plain: LLM) -> None:
    prompt = [5 + i % 50 for i in range(70)]
    params = replace(SCORED, prompt_logprobs=2)
    first, again = (plain.generate(prompt, params)[0].prompt_logprobs for _ in range(2))
    assert first is not None and again is not None and len(again) == len(first) == 70
    assert again[69] == pytest.approx(first[69], abs=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", [10**6]), ("logit_bias", {10**6: 1.0}), ("prompt_logprobs", 65),
        ("bad_words", ["a" * 257]),
        ("min_tokens", 200), ("min_tokens", -1), ("logit_bias", {5: 101}), ("logit_bias", {5: float("nan")}),
        ("logit_bias", {"x": 1}), ("logit_bias", [5]), ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("bad_words", [""]), ("bad_words", [" "]),
        ("bad_words", "a"), ("bad_words", ["a"] * 129), ("bad_words", ["\ud800"]), ("bad_words", [3]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_it_is_queued(plain: LLM, field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as info:
        plain.engine.prepare([5], SamplingParams(**{field: value}))
    assert info.value.field == field
    assert not plain.engine.has_unfinished()
