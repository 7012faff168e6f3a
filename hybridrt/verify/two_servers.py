"""Sends the same requests to two servers, and reads their answers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from hybridrt.bench.http_load import Received, at_arrivals, events, new_event_loop, send_request
from hybridrt.bench.timing import Timing
from hybridrt.verify.trace import ComparedTarget, TracedRequest

BATCH = 512  # requests; their answers are held as bytes


@dataclass
class Answered:
    """One server's answer to one request.

    Attributes:
        ids: token ids; empty if the server does not tell them.
        tokens: their texts, as log-probabilities name them; empty likewise.
        scores: their log-probabilities.
        others: (text, log-probability) of likely tokens in their places.
    """

    timing: Timing
    text: str = ""
    ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    others: list[dict[str, float]] = field(default_factory=list)


def ask_both(
    targets: tuple[ComparedTarget, ComparedTarget], work: Sequence[TracedRequest], concurrency: int,
    took: Callable[[Sequence[Answered], Sequence[Answered]], object],
) -> None:  # fmt: skip
    """Calls `took` with the answers of both servers to each batch. Servers take turns, because they may
    share a machine. The first one changes with each batch.

    Raises:
        OSError: no server listens.
    """
    for i, start in enumerate(range(0, len(work), BATCH)):
        some = work[start : start + BATCH]
        order = (0, 1) if i % 2 == 0 else (1, 0)
        found = {side: ask(targets[side], some, concurrency) for side in order}
        took(found[0], found[1])


def ask(target: ComparedTarget, work: Sequence[TracedRequest], concurrency: int) -> list[Answered]:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        answers = runner.run(_ask(target, work, concurrency))
    return [_read(received, timing) for timing, received in answers]


async def _ask(
    target: ComparedTarget, work: Sequence[TracedRequest], concurrency: int
) -> list[tuple[Timing, Received]]:
    (await target.connect(asyncio.Protocol)).close()
    return await at_arrivals(work, partial(send_request, target), concurrency)


def _read(received: Received, timing: Timing) -> Answered:
    answer = Answered(timing)
    try:
        for now, event in events(received.parts):
            _read_chunk(msgspec.json.decode(event), answer, now)
        if not timing.gains:
            raise ValueError("the answer has no tokens")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, msgspec.MsgspecError) as e:
        failure = received.failure or e
        timing.error = f"{type(failure).__name__}: {failure}"[:300]
    timing.output_tokens = max(timing.output_tokens, len(answer.ids), len(answer.tokens))
    return answer


def _read_chunk(chunk: dict[str, Any], answer: Answered, now: float) -> None:
    if "error" in chunk:
        raise ValueError(str(chunk["error"]))
    if chunk.get("usage"):
        answer.timing.output_tokens = int(chunk["usage"]["completion_tokens"])
    if not chunk.get("choices"):
        return
    choice = chunk["choices"][0]
    ids, before = choice.get("token_ids") or [], len(answer.tokens)
    answer.ids += ids
    _read_scores(choice.get("logprobs"), answer)
    delta = choice.get("delta") or {}
    text = choice.get("text") or "".join(delta.get(name) or "" for name in ("reasoning_content", "content"))
    answer.text += text
    if count := len(ids) or len(answer.tokens) - before or int(bool(text)):
        answer.timing.gains.append((now, count))


def _read_scores(scores: Any, answer: Answered) -> None:
    """Reads log-probabilities of completions or chat completions. ValueError, TypeError or LookupError
    for any other form."""
    if not scores:
        return
    if scores.get("content") is not None:
        found = [
            (entry["token"], entry["logprob"], {o["token"]: o["logprob"] for o in entry.get("top_logprobs") or []})
            for entry in scores["content"]
        ]
    else:
        tokens = scores.get("tokens") or []
        told = scores.get("token_logprobs") or [], scores.get("top_logprobs") or [{}] * len(tokens)
        found = list(zip(tokens, *told, strict=True))
    for token, score, others in found:
        answer.tokens.append(str(token))
        answer.scores.append(0.0 if score is None else float(score))
        answer.others.append({other: float(value) for other, value in (others or {}).items()})
