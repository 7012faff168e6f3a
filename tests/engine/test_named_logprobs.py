"""Log-probabilities of tokens that a request names, compared with those of the likeliest, request by request."""

from dataclasses import replace

import pytest

from hybridrt import LLM, RequestError, SamplingParams, SpeculativeConfig
from hybridrt.base.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS

PROMPTS = ["def f(a):\n    return a\n\ndef f(a):\n", "import os\nimport", "x = [1, 2, 3]\nx = [1, 2"]
LIKELY = SamplingParams(max_tokens=12, temperature=0.8, seed=7, logprobs=MAX_LOGPROBS, ignore_eos=True)
NAMED = ([5], [9, 4, 300, 17], list(range(40, 90)))


@pytest.fixture(scope="module", params=[None, SpeculativeConfig(method="ngram", num_draft_tokens=3)])
def llm(request: pytest.FixtureRequest) -> LLM:
    with LLM("embedded", device="cpu", max_model_len=128, max_running_requests=8, speculative=request.param) as made:
        yield made


def test_each_row_gets_its_own_tokens(llm: LLM) -> None:
    """Next to rows that name others, rows that want the likeliest, and rows without log-probabilities. What is named
    first is the output's likeliest tokens, so that most values are known."""
    likeliest = llm.generate(PROMPTS, LIKELY)
    named = [[*ids, *(t for found in out.logprobs or () for t in [*found][:3])] for ids, out in zip(NAMED, likeliest)]
    asked = [replace(LIKELY, logprobs=0, logprob_token_ids=ids) for ids in named]
    others = [replace(LIKELY, logprobs=2), replace(LIKELY, logprobs=None)]
    found = llm.generate([*PROMPTS, *PROMPTS[:2]], [*asked, *others])
    for ids, before, now in zip(named, likeliest, found):
        assert now.token_ids == before.token_ids and now.logprobs and before.logprobs
        compared = 0
        for token, new, old in zip(now.token_ids, now.logprobs, before.logprobs):
            assert list(new) == list(dict.fromkeys([token, *ids]))
            common = new.keys() & old.keys()
            assert [new[t] for t in common] == pytest.approx([old[t] for t in common], abs=1e-4)
            assert all(new[t] <= min(old.values()) + 1e-4 for t in new.keys() - common)
            compared += len(common)
        assert compared > 3 * len(now.token_ids)
    for token, new, old in zip(found[3].token_ids, found[3].logprobs or (), likeliest[0].logprobs or (), strict=True):
        assert new.keys() == {token, *sorted(old, key=lambda t: -old[t])[:2]}
    assert found[4].logprobs is None


def test_a_row_that_is_used_again_names_none(llm: LLM) -> None:
    params = replace(LIKELY, max_tokens=2, n=2, logprobs=0, logprob_token_ids=(11, 12))
    for out in llm.generate(PROMPTS * 2, params):
        assert all({11, 12} <= found.keys() for found in out.logprobs or ())
    for out in llm.generate(PROMPTS * 3, replace(LIKELY, logprobs=0, max_tokens=2)):
        assert [[*found] for found in out.logprobs or ()] == [[token] for token in out.token_ids]


@pytest.mark.parametrize(
    ("ids", "logprobs", "text"),
    [
        ([], 0, "at least one"),
        ([1], None, "set, such as to 0"),
        ([-1], 0, "integers >= 0"),
        ("ab", 0, "a sequence"),
        ([1] * (MAX_LOGPROB_TOKEN_IDS + 1), 0, f"at most {MAX_LOGPROB_TOKEN_IDS}"),
    ],
)
def test_bad_values_are_refused(ids: object, logprobs: int | None, text: str) -> None:
    with pytest.raises(RequestError, match=text) as info:
        SamplingParams(logprobs=logprobs, logprob_token_ids=ids)  # type: ignore[arg-type]
    assert info.value.field in ("logprobs", "logprob_token_ids")


def test_tokens_beyond_the_vocabulary_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="logprob_token_ids holds 4103"):
        llm.generate("x", SamplingParams(logprobs=0, logprob_token_ids=[4103]))
