"""Fields of vLLM about single tokens, and log-probabilities of prompts, over HTTP."""

from typing import Any

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.request.outputs import Delta
from tests.support.http_server import Served

PROMPT = "import os"
USER = [{"role": "user", "content": "Hi"}]
CHAT_PROMPT = "# user: Hi\n# assistant:"
BODY = {"model": "tested", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}


def choice(served: Served, **changes: Any) -> dict[str, Any]:
    answer = served.post("/v1/completions", BODY | changes)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["choices"]
    return dict(found)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"40": 100, "41": 99.5}}, {"allowed_token_ids": [40, 99]}, {"bad_words": ["os", "("]},
        {"min_tokens": 5, "stop_token_ids": [40], "logit_bias": {"40": 100}},
    ],
)  # fmt: skip
def test_rules_are_those_of_the_library(served: Served, fields: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, **fields)
    assert choice(served, **fields)["text"] == served.llm.generate(PROMPT, params)[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_echo_brings_the_log_probabilities_of_the_prompt(served: Served, stream: bool) -> None:
    want = served.llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=2))[0]
    tokens = want.prompt_token_ids + want.token_ids
    scores = [*(want.prompt_logprobs or []), *(want.logprobs or [])]
    text, logprobs = "", {name: list[Any]() for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    client = served.client()
    answers: Any = client.completions.create(**BODY, echo=True, logprobs=2, stream=stream)  # type: ignore[call-overload]
    for answer in answers if stream else [answers]:
        (found,) = answer.choices
        text += found.text
        for name, values in logprobs.items():
            values += getattr(found.logprobs, name) if found.logprobs else []
    assert text == PROMPT + want.text
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    own = [found and found[token] for token, found in zip(tokens, scores, strict=True)]
    assert logprobs["token_logprobs"][1:] == pytest.approx(own[1:], abs=1e-4)
    assert [len(found) >= 2 for found in logprobs["top_logprobs"][1:]] == [True] * (len(tokens) - 1)
    assert "".join(logprobs["tokens"][: len(want.prompt_token_ids)]) == PROMPT
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_named_tokens_are_those_of_the_library(served: Served, stream: bool) -> None:
    ids = [300, 17, 40, 41]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, logprob_token_ids=ids)
    (want,), (chat,) = served.llm.generate(PROMPT, params), served.llm.generate(CHAT_PROMPT, params)
    names = served.service.token_text
    client, more = served.client(), {"extra_body": {"logprob_token_ids": ids}}
    answers: Any = client.completions.create(**BODY, logprobs=0, stream=stream, **more)  # type: ignore[call-overload]
    found = [e for a in (answers if stream else [answers]) for e in a.choices[0].logprobs.top_logprobs]
    assert found == [
        pytest.approx({names.text(t): value for t, value in each.items()}, abs=1e-4) for each in want.logprobs or ()
    ]
    body: Any = {"model": "tested", "messages": USER, "max_tokens": 6, "temperature": 0, "top_logprobs": 2}
    answers = client.chat.completions.create(**body, logprobs=True, stream=stream, **more)
    parts = [a.choices[0].logprobs for a in (answers if stream else [answers])]
    entries = [entry for part in parts if part is not None for entry in part.content or ()]
    for entry, each in zip(entries, chat.logprobs or (), strict=True):
        likeliest = sorted(each.items(), key=lambda found: -found[1])
        assert [top.token for top in entry.top_logprobs] == [names.text(token) for token, _ in likeliest]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([v for _, v in likeliest], abs=1e-4)


def test_named_tokens_go_with_log_probabilities(served: Served) -> None:
    for path, body, scored in (("/v1/completions", BODY, 0), ("/v1/chat/completions", {"messages": USER}, True)):
        for wrong in ({"logprob_token_ids": [5]}, {"logprob_token_ids": [9999], "logprobs": scored}):
            answer = served.post(path, body | wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprob_token_ids"), answer.text


@pytest.mark.parametrize("late", [False, True])
def test_an_echo_of_several_samples_with_log_probabilities_streams(
    late: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what the answer without a stream is, also if sample 0, which brings the prompt's, comes last."""
    if late:
        put, first = DeltaStream.put, dict[str, Delta]()

        def later(stream: DeltaStream, delta: Delta) -> None:
            if delta.prompt_scores is not None and delta.finish_reason is None:
                first[delta.request_id] = delta
                return
            held = [first.pop(delta.request_id)] if delta.request_id in first else []
            for each in (delta, *held) if delta.index else (*held, delta):
                put(stream, each)

        monkeypatch.setattr(DeltaStream, "put", later)
    asked = BODY | {"prompt": [PROMPT, "def "], "n": 3, "temperature": 1.0, "seed": 4, "echo": True, "logprobs": 1}
    client = served.client()
    want = client.completions.create(**asked)  # type: ignore[call-overload]
    scores, tokens, text = dict[int, list[Any]](), dict[int, list[str]](), dict.fromkeys(range(6), "")
    for chunk in client.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        (found,) = chunk.choices
        text[found.index] += found.text
        scores.setdefault(found.index, []).extend(found.logprobs.token_logprobs)
        tokens.setdefault(found.index, []).extend(found.logprobs.tokens)
    for each in want.choices:
        assert text[each.index] == each.text and tokens[each.index] == each.logprobs.tokens
        assert scores[each.index][0] is None
        assert scores[each.index][1:] == pytest.approx(each.logprobs.token_logprobs[1:], abs=1e-4)


def test_the_log_likelihood_of_a_continuation_as_lm_eval_requests_it(served: Served) -> None:
    """Prompts of token ids, one token more than is read, and a continuation that is greedy if each of its tokens has
    exactly the best log-probability."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=1)
    written = served.llm.generate(PROMPT, params)[0]
    start, likely = len(written.prompt_token_ids), written.prompt_token_ids + written.token_ids
    unlikely = [*likely[:-1], next(t for t in range(9, 99) if t not in written.logprobs[-1])]  # type: ignore[index]
    asked = {
        "model": "tested",
        "prompt": [likely, unlikely],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1,
    }
    answer = served.post("/v1/completions", asked | {"echo": True}).json()
    found = [choice["logprobs"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    sums = [sum(each["token_logprobs"][start:-1]) for each in found]
    own = [scores[token] for scores, token in zip(written.logprobs or [], written.token_ids, strict=True)]
    assert sums[0] == pytest.approx(sum(own), abs=1e-3) and sums[1] < sums[0]
    best = [[max(top.values()) for top in each["top_logprobs"][start:-1]] for each in found]
    assert [each["token_logprobs"][start:-1] == top for each, top in zip(found, best, strict=True)] == [True, False]


def test_prompt_logprobs_have_vllms_form(served: Served) -> None:
    found = choice(served, prompt_logprobs=1)
    want = served.llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))[0]
    first, *rest = found["prompt_logprobs"]
    assert first is None and found["logprobs"] is None and len(rest) == len(want.prompt_token_ids) - 1
    for token, entry in zip(want.prompt_token_ids[1:], rest, strict=True):
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"} and len(entry) in (1, 2)
        assert [e["rank"] for e in entry.values()] in ([1], [None, 1])
    assert choice(served)["prompt_logprobs"] is None
    chat = {"model": "tested", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "prompt_logprobs": 1}
    answer = served.post("/v1/chat/completions", chat).json()
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
