"""Prefill and mixed steps of few tokens as graphs: launching their kernels would take too long.

A graph has a fixed number of decode rows, prompts and tokens: its bucket. `PaddedStep` pads a step
to it. A graph is captured with one padding row that has all of the bucket's tokens. Kernels see
only these bounds on the host, so their grids fit every step; what differs between steps is in
tensors.

The graph contains the table changes and the planning of prompts (`prepare_in_graph`). One copy of
integers and the planning of decode rows come before it, sampling after it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from tqdm.auto import tqdm

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.device import free_device_bytes
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.core.packed import unpack
from hybridrt.kernels.core.records import TokenInputs
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.models.base import CausalLM
from hybridrt.runtime.replay.graph_runner import POISON, Recorder, make_recorder
from hybridrt.runtime.sampling.sampler import SampledLines
from hybridrt.runtime.step.pack import StagingRing, StepArrays, TableChanges, fill_decode, make_batch
from hybridrt.runtime.step.pack_padded import (
    DECODE_ROWS,
    PROMPT_ROWS,
    PROMPT_TOKENS,
    TOKENS_OF_ONE,
    Bucket,
    PaddedStep,
    StateSaves,
    make_buckets,
)
from hybridrt.runtime.step.plan import StepPlan
from hybridrt.runtime.step.recurrent_arrays import set_recurrent


@dataclass
class PromptGraph:
    """One bucket.

    Attributes:
        host, packed: the arrays that a replay fills, on the host and on the device; `arrays` are
            views of `packed`.
        inputs: the tokens, which the graph derives from `arrays`.
        batch: over these tensors.
        logits: its part of the logits.
    """

    bucket: Bucket
    host: PaddedStep
    packed: torch.Tensor
    arrays: StepArrays[torch.Tensor]
    inputs: TokenInputs
    batch: ForwardBatch
    logits: torch.Tensor
    replay: Callable[[], None] | None = None


class PromptGraphs:
    """Captures one step for each bucket and replays the smallest that holds a step.

    Args:
        last_tokens: [R + 1] int32, last sampled token of each request row: the input of a decode
            row.
        max_bs: most decode rows of a bucket; capped by the request rows.
        max_tokens: most prompt tokens of a step: larger buckets are left out.
        saves: steps may save states within their prompts.
        enter_tables: changes the tables; recorded at the start of each graph.
        recorder: how a step is recorded; by the device's kind if None.
        sizes: decode rows and prompt tokens of the buckets.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        backend: AttentionBackend,
        req_to_token_pool: HybridReqToTokenPool,
        last_tokens: torch.Tensor,
        max_bs: int,
        max_tokens: int,
        saves: bool,
        enter_tables: Callable[[TableChanges[torch.Tensor]], None],
        recorder: Recorder | None = None,
        sizes: tuple[Sequence[int], Sequence[int]] = (DECODE_ROWS, PROMPT_TOKENS),
    ) -> None:
        self.model, self.backend, self.pool, self.last_tokens = model, backend, req_to_token_pool, last_tokens
        self.enter_tables, self.poisoned = enter_tables, model.device.type != "cuda"
        self.saves = StateSaves.of(backend.saves_at_chunks) if saves else StateSaves.NONE
        self.exact_lens = self.poisoned  # the reference operations of a CPU need each step's own lengths on the host
        self.recorder = recorder or make_recorder(model.device)
        rows, longest = min(max_bs, req_to_token_pool.num_rows), req_to_token_pool.max_context
        self.buckets = needed_buckets(rows, max_tokens, longest, sizes)
        most = max((bucket.decode_rows for bucket in self.buckets), default=0)
        self._logits = torch.zeros(most + PROMPT_ROWS, model.config.vocab_size, dtype=model.dtype, device=model.device)
        self._view = backend.prompt_graph_state(most)
        self._staging = StagingRing(model.device)
        self._graphs: dict[Bucket, PromptGraph] = {}
        self.captured_bytes = 0

    @torch.inference_mode()
    def capture(self, progress: bool = False) -> None:
        """Records every bucket, the largest first: smaller ones reuse its memory
        (`captured_bytes`)."""
        free, stack = free_device_bytes(self.model.device), self.model.stack
        largest_first = sorted(self.buckets, key=lambda bucket: (bucket.tokens, bucket.decode_rows), reverse=True)
        for bucket in tqdm(largest_first, desc="capturing prompt graphs", disable=not progress):
            graph = self._allocate(bucket)
            self._fill(graph, StepPlan())
            self._set_host_lengths(graph)
            self.backend.prepare(graph.batch, graph=self._view)
            # A run before the capture takes as long: one per number of decode rows.
            warm = any(known.decode_rows == bucket.decode_rows for known in self._graphs)
            with stack.calling(splits(len(stack.parts)), self.recorder.split):
                graph.replay = self.recorder(self._bind(graph), warm)
            self._graphs[bucket] = graph
        self._graphs = dict(sorted(self._graphs.items(), key=lambda made: sum(made[0])))  # `bucket` takes the first
        self.captured_bytes = free - free_device_bytes(self.model.device)

    @property
    def captured(self) -> list[Bucket]:
        """The sizes of the captured graphs."""
        return list(self._graphs)

    def bucket(self, plan: StepPlan) -> Bucket | None:
        """The captured bucket of the fewest tokens that holds a step, if the graphs have room for its
        contexts. None: it runs eagerly."""
        found = next((bucket for bucket in self._graphs if bucket.holds(plan, self.saves)), None)
        most = self._view.most_context
        if found is None or most is None or found.tokens < self._view.limited_from:
            return found
        return found if sum([row.computed for row in plan.extend]) + found.tokens <= most else None

    def replay(self, plan: StepPlan, bucket: Bucket) -> SampledLines:
        """One step up to its logits, in inference mode. The bucket holds it and enters its table
        changes. The next replay overwrites what is returned."""
        graph = self._graphs[bucket]
        assert graph.replay is not None
        if self.poisoned:
            self._poison(graph)
        self._fill(graph, plan)
        if self.exact_lens:
            self._set_host_lengths(graph)
        self.backend.prepare(graph.batch, graph=self._view)
        graph.replay()
        m = len(plan.decode) + sum(row.sample for row in plan.extend)
        on_device, on_host = graph.arrays, graph.host.arrays
        indices, known = on_device.output_indices[:m], (on_host.sample_rows[:m], on_host.output_indices[:m])
        return SampledLines(on_device.sample_rows[:m], indices, known, graph.logits[:m])

    def _allocate(self, bucket: Bucket) -> PromptGraph:
        (rows, tokens), device = bucket, self.model.device
        mrope, of_backend = self.pool.mrope_deltas is not None, (self.saves, self.backend.seq_len_fill)
        host = PaddedStep(bucket, self.backend.chunk_sizes, *of_backend, self.pool.num_groups, mrope=mrope)
        packed = torch.zeros(len(host.flat), dtype=torch.int32, device=device)
        arrays: StepArrays[torch.Tensor] = unpack(host.arrays, packed)
        assert arrays.prompts is not None
        inputs = TokenInputs.allocate(rows + tokens, device, self.pool.num_groups, mrope=mrope)
        starts = arrays.prompts.query_start_loc
        batch = make_batch(self.backend, arrays.rows, arrays.seq_lens, starts, inputs, rows, None, 0)
        return PromptGraph(bucket, host, packed, arrays, inputs, batch, self._logits[: rows + bucket.prompts])

    def _fill(self, graph: PromptGraph, plan: StepPlan) -> None:
        graph.host.pack(plan)
        self._staging.copy_packed(graph.packed, graph.host.flat)
        graph.batch.num_real = len(plan.decode)

    def _set_host_lengths(self, graph: PromptGraph) -> None:
        """Bounds for all replays: a capture has one row with all tokens."""
        batch, arrays, prompts = graph.batch, graph.host.arrays, graph.host.arrays.prompts
        assert prompts is not None and graph.arrays.prompts is not None
        batch.query_lens_cpu = np.diff(prompts.query_start_loc).tolist()
        batch.seq_lens_cpu = arrays.seq_lens.tolist() if self.exact_lens else None
        set_recurrent(batch, prompts.recurrent, graph.arrays.prompts.recurrent, self.backend.chunk_sizes)

    @staticmethod
    def _poison(graph: PromptGraph) -> None:
        for tensor in (graph.packed, *graph.inputs):
            if tensor is not None:
                tensor.fill_(POISON)
        graph.logits.fill_(float("nan"))

    def _bind(self, graph: PromptGraph) -> Callable[[], None]:
        """The closure holds neither this object nor the graph: a cycle would keep the pools until
        garbage is collected."""
        arrays, batch, decoded = graph.arrays, graph.batch, graph.bucket.decode_rows
        extend, changes = arrays.prompts, arrays.tables
        assert extend is not None and changes is not None
        prompts = graph.inputs.from_token(decoded)
        decoding, logits, enter_tables = graph.inputs.first(decoded), graph.logits, self.enter_tables
        model, backend, pool, last_tokens = self.model, self.backend, self.pool, self.last_tokens

        def step() -> None:
            enter_tables(changes)
            if decoded:
                fill_decode(decoding, arrays, decoded, None, last_tokens, pool)
            found = extend.input_ids, extend.positions, pool.token_slots(extend.rows, extend.positions)
            for into, values in zip(prompts[:3], found, strict=True):
                into.copy_(values)
            if prompts.mrope_positions is not None and extend.mrope is not None:
                prompts.mrope_positions.copy_(extend.mrope)
            backend.prepare_in_graph(batch)
            hidden = model(batch)
            model.logits_into(logits, hidden.index_select(0, extend.sample_at))
            if decoded:
                backend.commit(batch)

        return step


def splits(parts: int) -> list[int]:
    """Before which of a stack's parts a graph is split.

    Launching a graph takes the host a microsecond per kernel, a tenth of their run time, and no
    kernel starts before the end of the launch. After a small first piece, each piece is launched
    while the one before it runs.
    """
    return sorted({parts // 24, parts // 4} - {0})


MANY_PROMPTS = PROMPT_ROWS * TOKENS_OF_ONE  # tokens of a bucket that has room for as many prompts as any


def needed_buckets(
    rows: int, max_tokens: int, longest: int = 0, sizes: Sequence[Sequence[int]] = (DECODE_ROWS, PROMPT_TOKENS)
) -> list[Bucket]:
    """Buckets of up to `rows` decode rows that a step of up to `max_tokens` prompt tokens may need.

    The padding row may have all tokens, so a page table must have as many positions: it has
    `longest`, 0 without attention. A large bucket has no more tokens than a step may have. Those of the
    largest size are for requests of at least twice as many tokens: graphs have room for the keys of one
    (`GraphView.most_context`), and a bucket's own tokens count.
    """
    numbers = [n for n in sizes[1] if n < max(PROMPT_TOKENS) or not longest or longest >= 2 * n]
    made, most = make_buckets((min(size, rows) for size in sizes[0]), numbers), longest or max(numbers)
    large = min(max(max_tokens, MANY_PROMPTS), most)
    buckets = sorted({bucket._replace(tokens=min(bucket.tokens, large)) for bucket in made})
    return [
        bucket
        for smaller, bucket in pairwise((Bucket(-1, 0), *buckets))
        if smaller.decode_rows < bucket.decode_rows or smaller.tokens < max_tokens
    ]
