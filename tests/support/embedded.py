"""Tiny models behind hybridrt.embedding, and single steps over them."""

from collections.abc import Callable
from typing import Any

import torch

from hybridrt.embedding import EmbeddedRuntime, ForwardBatch, LoadedModel, Scratch, build, plan_memory

ROWS, PAGE, LENGTH = 3, 4, 32
PROMPT = [5, 6, 7, 8, 9]
Models = Callable[..., LoadedModel]


def make(loaded: LoadedModel, scratch: Scratch | None = None) -> EmbeddedRuntime:
    return build(loaded, plan_memory(loaded, budget_bytes=2**24, cache_slots=2), scratch)


def start(runtime: EmbeddedRuntime, row: int = 0, slot: int = 0, first_page: int = 0) -> torch.Tensor:
    """Prefills PROMPT; logits of its last token."""
    runtime.admit([row], [slot])
    runtime.write_pages([row] * 8, range(8), range(first_page, first_page + 8))
    batch = runtime.batch(input_ids=PROMPT, rows=[row], seq_lens=[5], query_lens=[5])
    return run(runtime, batch)[-1]


def run(runtime: EmbeddedRuntime, batch: ForwardBatch, accepted: Any = None) -> torch.Tensor:
    runtime.prepare(batch)
    logits = runtime.logits(runtime.forward(batch))
    if batch.num_decode_rows:
        runtime.commit(batch, accepted)
    return logits


def decode(runtime: EmbeddedRuntime, token: int, length: int, row: int = 0) -> torch.Tensor:
    return run(runtime, runtime.batch(input_ids=[token], rows=[row], seq_lens=[length]))[0]


def continuation(runtime: EmbeddedRuntime, first: torch.Tensor, length: int, count: int, row: int = 0) -> torch.Tensor:
    """Logits of `count` greedy tokens, the first among them: [count, vocab]."""
    logits = [first]
    for i in range(count - 1):
        logits.append(decode(runtime, int(logits[-1].argmax()), length + i + 1, row))
    return torch.stack(logits)
