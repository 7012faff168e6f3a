"""Reads traces: recorded requests, or lengths alone."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from hybridrt.base.errors import ConfigError
from hybridrt.base.files import read_lines
from hybridrt.bench.http_load import Target
from hybridrt.bench.workload import Work, WorkloadConfig, make_work

ALTERNATIVES = 5  # other tokens with log-probabilities
MAX_REQUESTS = 1_000_000
# Fields of a recorded body that would change the form of the answer, or its length.
_DROPPED = ("n", "best_of", "stream", "stream_options", "logprobs", "top_logprobs", "model", "user")


@dataclass(frozen=True)
class TracedRequest(Work):
    """A request of a trace. `body`: the fields of a recorded one, a chat if they have `messages`; empty for
    one of random tokens."""

    body: Mapping[str, Any] = field(default_factory=dict)


def read_trace(file: str, requests: int | None, vocab: int) -> list[TracedRequest]:
    """The requests of a file, a JSON object a line: bodies of OpenAI's completions or chat
    completions, or the lengths of `hybridrt bench --data FILE`, with random tokens.

    Raises:
        ConfigError: it cannot be read, or has no such lines.
    """
    try:
        first = next((line for line in read_lines(file) if line.strip()), "")
        recorded = bool({"prompt", "messages"} & json.loads(first).keys())
    except (OSError, ValueError, AttributeError, RecursionError) as e:
        raise ConfigError(f"the trace {file} cannot be read: {e}; each line must be a JSON object") from e
    if recorded:
        return list(islice(_recorded(file), requests or MAX_REQUESTS))
    load = WorkloadConfig(data=file, requests=requests or MAX_REQUESTS, vocab=vocab)
    return [TracedRequest(work.prompt, work.max_tokens, work.seed) for work in make_work(load)]


def _recorded(file: str) -> Iterator[TracedRequest]:
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{file}, line {number}: {e}") from e
        if not (isinstance(body, dict) and {"prompt", "messages"} & body.keys()):
            raise ConfigError(f"{file}, line {number} has neither prompt nor messages")
        yield TracedRequest([], 0, number, body={k: v for k, v in body.items() if k not in _DROPPED})


@dataclass(frozen=True)
class ComparedTarget(Target):
    """A server that is asked for tokens and their log-probabilities. Sampling is greedy."""

    def fields(self, work: Work) -> dict[str, Any]:
        usual = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "seed": work.seed}
        body = dict(work.body) if isinstance(work, TracedRequest) else {}
        if not body:
            body = {"prompt": work.prompt, "max_tokens": work.max_tokens, "ignore_eos": True}
        chat = {"logprobs": True, "top_logprobs": ALTERNATIVES}
        more: dict[str, Any] = chat if "messages" in body else {"logprobs": ALTERNATIVES}
        return body | usual | more | {"model": self.model, "return_token_ids": True} | (self.extra or {})

    def request(self, work: Work) -> bytes:
        fields = self.fields(work)
        return self.post("chat/completions" if "messages" in fields else "completions", msgspec.json.encode(fields))
