"""Host time of an engine step: scheduling, packing, reading tokens and handing out outputs, without a model.

    python -m benchmarks.bench_host

The model, the backend, the graphs and the sampler are replaced by doubles that return at once. What remains is the work
of the host: `launch` packs the step and keeps the books of the pools, `rest` schedules, consumes and hands out outputs.
Each figure is the median over steps in which all requests decode, on a CPU, in milliseconds. Rows with "text" have a
tokenizer. Rows that begin with "prefill" are of steps that admit and prefill prompts. Rows that begin with "prefix" are
of the prefix cache: what it adds to one prompt, the least of all repeats. Rows that begin with "tree" are of its radix
tree alone, with many states, and rows that begin with "memory" of the memory that pages and states share: what room
there is, which each prompt asks several times, and lending and freeing a prompt's pages.
"""

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import environment, save, settle
from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.base.interrupts import Interrupts
from hybridrt.engine.cache.answer_states import MOST
from hybridrt.mem_cache.pools.entries import Handle, keys_of
from hybridrt.mem_cache.pools.page_groups import PageSets
from hybridrt.mem_cache.pools.slabs import SlabAllocator, Slabs, SlabShare
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_node import StateKind
from hybridrt.runtime.load.model_path import ASSETS
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.sampling.sampler import Accepted, Verification

VOCAB, HIDDEN = 512, 16
SHAPE = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
    "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    "mamba_d_conv": 4, "mamba_chunk_size": 16, "max_position_embeddings": 40960, "eos_token_id": 2,
}  # fmt: skip


class NullModel:
    """Stands for the model: hidden states and logits are there at once."""

    def __init__(self, model: Any) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self._hidden = torch.zeros(1, HIDDEN)
        self._logits = torch.zeros(1, VOCAB)

    def __call__(self, batch: Any) -> torch.Tensor:
        return self._hidden.expand(batch.input_ids.shape[0], -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(hidden.shape[0], -1)


class NullBackend:
    """Stands for the attention backend: every hook returns at once."""

    needs_host_lens, saves_at_chunks, seq_len_fill = False, False, 1

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class NullSampler:
    """Stands for the sampler: every row draws token 5."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __call__(self, logits: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.full((logits.shape[0],), 5, dtype=torch.int64)

    def verify(self, logits: torch.Tensor, step: Verification, *args: Any) -> Accepted:
        rows, width = step.positions.shape
        return Accepted(torch.full((rows, width), 5), torch.ones(rows, dtype=torch.int32))


def build(
    directory: str, rows: int, context: int, steps: int, drafts: int = 0, text: bool = False, prefix_pages: int = 0
) -> LLM:
    """An LLM of one tiny layer whose executor packs every step and computes nothing; `text`: with a tokenizer;
    `prefix_pages`: with a prefix cache of pages of so many tokens."""
    (Path(directory) / "config.json").write_text(json.dumps(SHAPE))
    for name in ("tokenizer.json", "tokenizer_config.json") if text else ():
        shutil.copy(ASSETS / "embedded" / name, directory)
    speculative = SpeculativeConfig(num_draft_tokens=drafts) if drafts else None
    llm = LLM(
        directory, device="cpu", load_format="dummy", max_model_len=context + steps + 64, max_running_requests=rows,
        chunked_prefill_size=2**20, speculative=speculative, prefix_cache=prefix_pages > 0,
        **({"page_size": prefix_pages} if prefix_pages else {}),
    )  # fmt: skip
    runner: Any = llm.engine.executor
    runner.model, runner.backend, runner.sampler = NullModel(runner.model), NullBackend(), NullSampler(None)
    runner.sampling_table.enter_rows = lambda *args: None
    for tokens in {1, drafts + 1}:
        graphs = GraphRunner(
            model=runner.model, backend=runner.backend, req_to_token_pool=runner.pools.req_to_token,
            last_tokens=runner.last_tokens, max_bs=rows, tokens_per_row=tokens,
            recorder=lambda *_: lambda: None,
        )  # fmt: skip
        graphs.capture(sizes=[rows])
        graphs.poisoned = False
        runner.graphs[tokens] = graphs
    return llm


@contextmanager
def clock(owner: Any, name: str, seconds: list[float]) -> Iterator[None]:
    """Appends the time of every call of a method while the block runs."""
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, method)


def measure(rows: int, context: int, steps: int, stream: bool, drafts: int, text: bool) -> dict[str, Any]:
    """Medians over `steps` decode steps of `rows` requests that have `context` tokens of context."""
    with tempfile.TemporaryDirectory() as directory, build(directory, rows, context, steps, drafts, text) as llm:
        engine = llm.engine
        generator = torch.Generator().manual_seed(0)
        params = SamplingParams(max_tokens=steps + 32, temperature=0.0, ignore_eos=True)
        for prompt in torch.randint(3, VOCAB, (rows, context), generator=generator).tolist():
            engine.add_request(prompt, params, stream=stream)
        while engine.counters().waiting or engine.counters().output_tokens < 4 * rows:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
        settle()
        launches: list[float] = []
        totals: list[float] = []
        with Interrupts(), clock(engine.executor, "launch", launches):  # `LLM.generate` holds it, too
            for _ in range(steps):
                start = time.perf_counter()
                engine.step()
                totals.append(time.perf_counter() - start)
    launch, total = (statistics.median(seconds) * 1e3 for seconds in (launches, totals))
    what = f"{rows} rows, {context} tokens, {'streams' if stream else 'no streams'}"
    what += (", n-gram" if drafts else "") + (", text" if text else "")
    return {"what": what, "launch_ms": launch, "rest_ms": total - launch, "total_ms": total}


def measure_prefill(prompts: int, length: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` steps, each of which admits `prompts` prompts of `length` tokens, prefills them, and ends
    them with their first token."""
    with tempfile.TemporaryDirectory() as directory, build(directory, prompts, length, 8) as llm:
        engine, params = llm.engine, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        generator = torch.Generator().manual_seed(0)
        batch = torch.randint(3, VOCAB, (prompts, length), generator=generator).tolist()
        settle()
        adds: list[float] = []
        launches: list[float] = []
        totals: list[float] = []
        with clock(engine.executor, "launch", launches), clock(engine, "add_request", adds):
            for _ in range(repeats):
                for prompt in batch:
                    engine.add_request(prompt, params, stream=False)
                start = time.perf_counter()
                while engine.has_unfinished():
                    engine.step()
                totals.append(time.perf_counter() - start)
    launch, total = (statistics.median(seconds) * 1e3 for seconds in (launches, totals))
    what = f"prefill {prompts}x{length}, {statistics.median(adds) * 1e3:.3f} ms a request before"
    return {"what": what, "launch_ms": launch, "rest_ms": total - launch, "total_ms": total}


def measure_prefix(page_size: int, length: int, repeats: int) -> dict[str, Any]:
    """Least times over `repeats` new prompts of `length` tokens, and over as many that go on from them: of
    `CacheCoordinator.admit_request` (match, locks, pages, the plan), `settle` (the prompt is shared) and `release` (the
    request is donated), and of the prefix tree's part of them."""
    with tempfile.TemporaryDirectory() as directory, build(directory, 2, length, 8, prefix_pages=page_size) as llm:
        engine, params = llm.engine, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        pools: Any = engine._coordinator
        owners = {"match": pools.prefixes.tree, "insert": pools.prefixes.tree}
        owners |= dict.fromkeys(("admit_request", "settle", "release"), pools)
        generator = torch.Generator().manual_seed(0)
        found: dict[str, Any] = {"what": f"prefix of {length} tokens, pages of {page_size}"}
        for _ in range(repeats):
            prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            for kind, tokens in (("new", prompt), ("hit", [*prompt, 3, 4, 5])):
                with ExitStack() as stack:
                    times: dict[str, list[float]] = {name: [] for name in owners}
                    for name, owner in owners.items():
                        stack.enter_context(clock(owner, name, times[name]))
                    engine.add_request(tokens, params, stream=False)
                    while engine.has_unfinished():
                        engine.step()
                for name, seconds in times.items():
                    found[key] = min(found.get(key := f"{kind} {name} ms", math.inf), max(seconds) * 1e3)
    return found


def measure_tree(page_size: int, length: int, count: int, repeats: int) -> dict[str, Any]:
    """Least times over `repeats` new trees: of inserting a text of `length` tokens with `count` states, evenly spaced,
    all but the first and the last within its answer, of matching a prompt that goes on from it, and of inserting that
    prompt with one more state."""
    tokens = np.random.default_rng(0).integers(3, VOCAB, length + 16, np.int32)
    handles = [Handle(i, 0) for i in range(length + count + 18)]
    pages: PageSets = keys_of(handles[: -(-length // page_size) + 16])[:, None]
    states = {length * i // count: handles[-i] for i in range(1, count + 1)}
    kinds = dict.fromkeys(sorted(states)[1:-1], StateKind.ANSWER)
    found: dict[str, Any] = {"what": f"tree of {length} tokens, pages of {page_size}, {count} states"}
    for _ in range(repeats):
        tree, times = RadixCache(page_size, True), dict[str, list[float]]()
        with ExitStack() as stack:
            for name in ("insert", "match"):
                stack.enter_context(clock(tree, name, times.setdefault(name, [])))
            tree.insert(tokens[:length], pages, states, kinds=kinds)
            tree.match(tokens)
            tree.insert(tokens, pages, {len(tokens): handles[-count - 1]})
        (new, longer), (match,) = times["insert"], times["match"]
        for name, seconds in (("insert ms", new), ("match ms", match), ("insert longer ms", longer)):
            found[name] = min(found.get(name, math.inf), seconds * 1e3)
    return found


def measure_memory(slabs: int, pages: int, repeats: int) -> dict[str, Any]:
    """Least times over `repeats` in `slabs` slabs, each of one state or of `pages` pages. A third is in use."""
    memory, found = Slabs(slabs), dict[str, Any](what=f"memory of {slabs} states or {slabs * pages} pages")
    lent = SlabAllocator(memory, SlabShare(pages, pages), "KV page")
    states = SlabAllocator(memory, SlabShare(1, 1), "state")
    lent.alloc(slabs * pages // 4)
    states.alloc(slabs // 12)
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for owner, name in ((memory, "room"), (lent, "alloc"), (lent, "free")):
            stack.enter_context(clock(owner, name, times.setdefault(name, [])))
        for _ in range(repeats):
            taken = lent.alloc(40)
            memory.room()
            lent.free(taken)
    return found | {f"{name} ms": min(seconds) * 1e3 for name, seconds in times.items()}


def show_prefix(row: dict[str, Any]) -> dict[str, Any]:
    print(row["what"], *(f"{name[:-3]} {ms:.3f}" for name, ms in row.items() if name != "what"), sep="  ", flush=True)
    return row


def show(row: dict[str, Any]) -> dict[str, Any]:
    print(f"{row['what']:48} launch {row['launch_ms']:7.3f}  rest {row['rest_ms']:7.3f}  "
          f"total {row['total_ms']:7.3f} ms", flush=True)  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--contexts", type=lambda t: [int(x) for x in t.split(",")], default=[1000, 33000])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    args = parser.parse_args()
    print(environment())
    torch.set_num_threads(1)  # operations on a CPU stand for launches, which have no threads to wait for
    rows = [
        show(measure(args.rows, context, args.steps, stream, drafts, text))
        for context in args.contexts
        for stream, drafts, text in ((False, 0, False), (True, 0, False), (True, 0, True), (False, 4, False))
    ]
    rows += [show(measure_prefill(prompts, length, args.steps)) for prompts, length in ((1, 2048), (4, 2048))]
    rows += [show_prefix(measure_prefix(page_size, 32_000, args.steps)) for page_size in (1, 16, 64)]
    rows += [
        show_prefix(measure_tree(page_size, 32_000, count, args.steps))
        for page_size in (1, 16)
        for count in (0, 2, MOST + 2, 1872)
    ]
    rows += [show_prefix(measure_memory(slabs, 96, args.steps)) for slabs in (150, 1500)]
    if args.name:
        print(save(args.name, rows))


if __name__ == "__main__":
    main()
