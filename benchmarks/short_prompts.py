"""The first token of a short prompt, and a step with decode rows and a chunk: their times with graphs and without."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.common import HBM_BYTES_PER_S, PRODUCT_FLOPS_PER_S, plain_vocab, prompts
from hybridrt import LLM, SamplingParams
from hybridrt.bench.floor import prefill_flops, step_bytes
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.models.base import CausalLM

WARM, MIXED_STEPS = 3, 24


def first_token_ms(llm: LLM, prompt: Any) -> float:
    """Milliseconds from `add_request` to the first token on the host; nothing else runs."""
    engine, start = llm.engine, time.perf_counter()
    request = engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    while not any(delta.request_id == request and delta.token_ids for delta in engine.step()):
        pass
    elapsed = time.perf_counter() - start
    engine.drain()
    return elapsed * 1e3


@contextmanager
def decoding(llm: LLM, running: list[list[int]], steps: int) -> Iterator[None]:
    """All of `running` decode, for at least `steps` steps inside."""
    engine = llm.engine
    long = SamplingParams(max_tokens=steps + 64, temperature=0.0, ignore_eos=True)
    ids = [engine.add_request(prompt, long) for prompt in running]
    while min(engine.gained(request) or 0 for request in ids) < 2:
        engine.step()
    yield
    for request in ids:
        engine.abort(request)
    engine.drain()


def add_chunks(llm: LLM, chunks: list[list[int]]) -> None:
    """A step for each of `chunks`, a whole prompt, launched before the tokens of the one in front are read."""
    for chunk in chunks:
        llm.engine.add_request(chunk, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        llm.engine.step()


def mixed_ms(llm: LLM, running: list[list[int]], chunks: list[list[int]]) -> float:
    """Milliseconds of a step in which all of `running` decode and one of `chunks` is computed: the mean of one step for
    each chunk."""
    with decoding(llm, running, len(chunks)):
        start = time.perf_counter()
        add_chunks(llm, chunks)
        return (time.perf_counter() - start) / len(chunks) * 1e3


@contextmanager
def without_graphs(runner: Any, on: bool) -> Iterator[None]:
    """Steps with prompts run without graphs inside, unless `on`."""
    graphs = runner.prompt_graphs
    runner.prompt_graphs = graphs if on else None
    try:
        yield
    finally:
        runner.prompt_graphs = graphs


def chunk_floor_ms(model: CausalLM, pools: Pools, decoding: int, length: int) -> float:
    """The least time of a step of a prompt and of `decoding` other tokens: the weights that they need read once, or the
    products of the prompt, whichever is more."""
    read = step_bytes(model, pools, decoding + length, 1).weights / HBM_BYTES_PER_S
    return max(read, prefill_flops(model, 1, length) / PRODUCT_FLOPS_PER_S) * 1e3


def measure_short(
    llm: LLM, first_tokens: Sequence[int], mixed: Sequence[tuple[int, int]], context: int, repeats: int
) -> list[dict[str, Any]]:
    """Rows of `bench_offline`, two of each kind: with the graphs of steps with prompts and without.

    Args:
        first_tokens: lengths of prompts. mixed: (decode rows around `context` tokens of context, tokens of the chunk).
    """
    runner: Any = llm.engine.executor
    vocab, rows = plain_vocab(llm.model_config), list[dict[str, Any]]()

    def note(what: str, times: list[float], *shape: int) -> None:
        ms, floor = statistics.median(times), chunk_floor_ms(runner.model, runner.pools, *shape)
        rows.append({"what": what, "ms": ms, "floor_ms": floor})
        print(f"{what:36} {ms:9.3f} ms  floor {floor:7.3f} ms ({ms / floor:5.2f} times)  fastest {min(times):.3f}  "
              f"slowest {max(times):.3f}", flush=True)  # fmt: skip

    for graphs in (True, False) if runner.prompt_graphs else (False,):
        name = "graphs" if graphs else "no graphs"
        with without_graphs(runner, graphs):
            for length in first_tokens:
                several = prompts(WARM + max(repeats, 20), length, vocab, seed=length)
                note(f"first token of {length}, {name}", [first_token_ms(llm, p) for p in several][WARM:], 0, length)
            for count, chunk in mixed:
                running, chunks = prompts(count, context, vocab), prompts(MIXED_STEPS, chunk, vocab, seed=2)
                times = [mixed_ms(llm, running, chunks) for _ in range(1 + repeats)][1:]
                note(f"{count} rows and {chunk} tokens, {name}", times, count, chunk)
    return rows
