"""Log-probabilities of an answer: how many there may be, and that they are made in slices off the event loop."""

import json
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.request.outputs import Delta
from hybridrt.runtime.step.token_scores import TokenScores
from hybridrt.server.core import answer_size
from hybridrt.server.core.text_tokens import TextTokens
from hybridrt.server.wire import sse
from tests.support.http_server import Served

BODY = {"model": "tested", "max_tokens": 1, "temperature": 0}
PROMPT = [5 + i % 50 for i in range(200)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [PROMPT] * 64, "prompt_logprobs": 64}, "prompt_logprobs"),
        ({"prompt": [PROMPT] * 64, "logprobs": 64, "echo": True}, "prompt_logprobs"),
        ({"prompt": PROMPT, "prompt_logprobs": 32, "n": 64}, "prompt_logprobs"),
        ({"prompt": [PROMPT] * 16, "prompt_logprobs": 50, "echo": True, "logprobs": 50}, "prompt_logprobs"),
        ({"prompt": [5], "logprobs": 64, "n": 500, "max_tokens": 200}, "logprobs"),
        ({"prompt": [PROMPT] * 128, "return_token_ids": True, "n": 8}, "return_token_ids"),
        ({"prompt": ["a" * 200] * 128, "echo": True, "n": 8}, "echo"),
    ],
)
def test_answers_a_thousand_times_their_request_are_refused(
    fields: dict[str, Any], param: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_size, "MAX_REPEATED", 100000)
    answer = served.post("/v1/completions", BODY | fields)
    assert answer.status_code == 400, answer.text[:300]
    assert answer.json()["error"]["param"] == param


def test_running_requests_share_a_limit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_size, "MAX_RUNNING_ENTRIES", 1000)
    room, asked = served.service.entry_room, BODY | {"prompt": PROMPT, "prompt_logprobs": 2}
    held = DeltaStream(None)  # type: ignore[arg-type]
    room.hold(held, 500)
    answer = served.post("/v1/completions", asked)
    assert answer.status_code == 429 and "Retry-After" in answer.headers
    assert served.post("/v1/completions", asked | {"prompt_logprobs": None}).status_code == 200
    del held
    for _ in range(3):
        assert served.post("/v1/completions", asked).status_code == 200, "nothing is held after an answer"


@pytest.mark.parametrize("stream", [False, True])
def test_large_answers_are_made_in_slices_in_threads(
    stream: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, made = sse.encode, list[tuple[str, int]]()

    def note(value: Any) -> bytes:
        text = encode(value)
        made.append((threading.current_thread().name, len(text)))
        return text

    asked = BODY | {"prompt": [PROMPT] * 4, "prompt_logprobs": 64, "stream": stream}
    monkeypatch.setattr(sse, "encode", note)
    answer = served.post("/v1/completions", asked)
    assert answer.status_code == 200
    large = [(name, size) for name, size in made if size > 20000]
    assert len(large) >= 4 and all(name.startswith("hybridrt-answer") for name, _ in large)
    assert max(size for _, size in large) < 120 * 65 * sse.SLICE
    want = served.llm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=64))[0]
    events = answer.text.split("\n\n") if stream else [f"data: {answer.text}"]
    choices = [c for e in events if e.startswith("data: {") for c in json.loads(e[6:])["choices"]]
    for each in (c["prompt_logprobs"] for c in choices if "prompt_logprobs" in c):
        assert each[0] is None and len(each) == len(PROMPT)
        for token, found, entry in zip(PROMPT[1:], each[1:], want.prompt_logprobs[1:], strict=True):  # type: ignore[index]
            ranked = sorted(entry, key=lambda t: -entry[t])[:64]  # type: ignore[index]
            assert [found[str(t)]["rank"] for t in ranked] == pytest.approx(range(1, 65), abs=1)
            assert str(token) in found


def test_the_engine_keeps_arrays(served: Served) -> None:
    """8 bytes an entry, and no dictionary is made in its thread."""
    scores = list[TokenScores]()
    take = DeltaStream.put

    def note(stream: DeltaStream, delta: Delta) -> None:
        assert delta.prompt_logprobs is None
        scores.extend(delta.prompt_scores or ())
        take(stream, delta)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeltaStream, "put", note)
        served.post("/v1/completions", BODY | {"prompt": PROMPT, "prompt_logprobs": 64})
    assert sum(map(len, scores)) == len(PROMPT) - 1
    held = sum(part.nbytes for s in scores for part in (s.tokens, s.own, s.ids, s.best))
    assert held <= 8 * 65 * len(PROMPT)


def test_scores_become_dictionaries() -> None:
    ids, best = np.array([[3, 1], [2, 9]], np.int32), np.array([[-0.5, -1], [-0.25, -3]], np.float32)
    scores = TokenScores(np.array([1, 5], np.int32), np.array([-1, -7], np.float32), ids, best)
    assert scores.entries() == [{1: -1.0, 3: -0.5}, {5: -7.0, 2: -0.25, 9: -3.0}]
    assert scores.part(1).entries() == scores.entries()[1:] and scores.width == 3 and scores.finite


def test_json_in_pieces_is_the_json_at_once() -> None:
    def value() -> dict[str, Any]:
        slices = sse.Slices(iter([[1], [], [{"a": 2}, None], []]))
        choices = sse.Parts(iter([{"index": 0, "of": slices}, {"index": 1, "of": sse.Slices([])}]))
        return {"é": 1, "choices": choices, "none": sse.Parts([]), "usage": lambda: {"n": 3}, "empty": {}}

    want = {"é": 1, "choices": [{"index": 0, "of": [1, {"a": 2}, None]}, {"index": 1, "of": []}], "none": [],
            "usage": {"n": 3}, "empty": {}}  # fmt: skip
    assert msgspec.json.decode(b"".join(sse.pieces(value()))) == want == msgspec.json.decode(sse.encode(value()))


def test_text_is_cut_into_tokens_in_linear_time() -> None:
    """Thread time of a long text, compared with that of a sixteenth of it."""

    class Spelled:
        def spelled(self, token: int) -> bytes:
            return b"abcdefgh"

        def entry(self, token: int, found: Any, most: int) -> Any:
            return token

    def seconds(tokens: int) -> float:
        reader = TextTokens(Spelled(), 0)  # type: ignore[arg-type]
        delta = Delta("r", 0, [1] * tokens, "abcdefgh" * tokens, logprobs=[{}] * tokens, finish_reason="stop")
        began = time.thread_time()
        for text, ids, _ in reader.pieces(delta):
            assert not ids or reader.tokens_of_text(text) == [1]
        return time.thread_time() - began

    assert seconds(64000) < 60 * min(seconds(4000) for _ in range(3))
