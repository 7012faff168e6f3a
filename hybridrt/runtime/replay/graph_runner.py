"""Decode and verify steps as graphs over static buffers, one per bucket of batch sizes.

Without CUDA a bucket is a closure over the same buffers, which are poisoned before every replay: a
stale value is NaN or an index out of range. Both use the same backend hooks, so a CPU test of the
closure tests the metadata of the graph.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from tqdm.auto import tqdm

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.device import GraphCapture, free_device_bytes
from hybridrt.base.errors import ConfigError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import ModelConfig
from hybridrt.kernels.core.launch import reserve_counters
from hybridrt.kernels.core.packed import arrays_of, map_arrays, pack_arrays, packed_size, section_starts, unpack
from hybridrt.kernels.core.records import TokenInputs
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.runtime.step.pack import StagingRing, StepArrays, fill_decode, make_batch, pack_rows, spec_info_of
from hybridrt.runtime.step.plan import NO_INTEGERS, NO_ROWS, DecodeRow, DecodeRows, PageWrite

POISON = -(2**30)  # out of the range of every index


class StepModel(Protocol):
    """What a graph records of a model: a CausalLM, or its prediction head."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden]."""

    def logits_into(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        """[T, hidden] to `out` [T, vocab], contiguous."""


class StaticBuffers:
    """The tensors that a replay fills and a graph reads, for max_bs rows of T `tokens_per_row`.

    Args:
        groups: page groups.
        seq_len_fill: length of a padding row, as if it had one new token.
        forks: drafts may be trees.
        mrope: tokens have positions on three axes.
        keep_hidden: also the final hidden states, `hidden` [max_bs * T, hidden] (else empty).

    Attributes:
        padding: [packed_size] int32, max_bs padding rows; starts: where each array's section begins
            there.
        packed: one copy fills it; `arrays` are its views (hybridrt.runtime.step.pack.pack_rows).
        inputs: inputs of all tokens, which the graph derives from `arrays`.
        spec_info: the SpecInfo of a verify step, over these buffers; None if T is 1.
        drawn: [max_bs] int64, the tokens that the second graphs draw.
    """

    def __init__(
        self, model: StepModel, max_bs: int, tokens_per_row: int, *, groups: int, seq_len_fill: int, forks: bool,
        mrope: bool, keep_hidden: bool,
    ) -> None:  # fmt: skip
        device, dtype = model.device, model.dtype
        scratch = DecodeRow(row=0, computed=seq_len_fill - 1, output_index=0)
        row = pack_rows(DecodeRows.from_rows([scratch]), tokens_per_row, forks, np.full((1, groups), -1, np.int32))
        step = map_arrays(lambda array: array.repeat(max_bs, 0), row)
        arrays = arrays_of(step)
        self.padding, self.starts = np.empty(packed_size(arrays), np.int32), section_starts(arrays)
        pack_arrays(arrays, self.padding)
        self.packed = torch.zeros(len(self.padding), dtype=torch.int32, device=device)
        self.arrays: StepArrays[torch.Tensor] = unpack(step, self.packed)
        self.inputs = TokenInputs.allocate(max_bs * tokens_per_row, device, groups, mrope=mrope)
        self.spec_info = spec_info_of(self.arrays.drafts, tokens_per_row)
        self.logits = torch.zeros(max_bs * tokens_per_row, model.config.vocab_size, dtype=dtype, device=device)
        self.drawn = torch.zeros(max_bs, dtype=torch.int64, device=device)
        kept = max_bs * tokens_per_row if keep_hidden else 0
        self.hidden = torch.zeros(kept, model.config.hidden_size, dtype=dtype, device=device)

    def poison(self) -> None:
        """Makes every value that a replay forgets to fill a visible mistake."""
        for tensor in (self.packed, *self.inputs):
            if tensor is not None:
                tensor.fill_(POISON)
        if self.spec_info is not None and self.spec_info.mask is not None:
            self.spec_info.mask.fill_(True)
        self.logits.fill_(float("nan"))
        self.drawn.fill_(POISON)
        self.hidden.fill_(float("nan"))


class GraphRows(NamedTuple):
    """Views of the static buffers: n rows of a step.

    Attributes:
        output_indices: [n] int32.
        logits: [n * T, vocab].
        hidden: [n * T, hidden]; empty unless hidden states are kept.
        drawn: [n] int64.
    """

    batch: ForwardBatch
    output_indices: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor
    drawn: torch.Tensor


class Recorder(Protocol):
    """Makes a function over static buffers replayable. It may call `split` to divide the replay
    into two launches. `warm`: similar functions of other sizes were recorded before."""

    def __call__(self, step: Callable[[], None], warm: bool = False) -> Callable[[], None]: ...

    def split(self) -> None: ...


class ClosureRecorder:
    """For machines without CUDA: a replay calls the function again."""

    def __call__(self, step: Callable[[], None], warm: bool = False) -> Callable[[], None]:
        step()
        return step

    def split(self) -> None: ...


class CudaGraphRecorder:
    """CUDA graphs in one memory pool, shared because buckets are captured from the largest down."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._capture = device, GraphCapture()

    def __call__(self, step: Callable[[], None], warm: bool = False) -> Callable[[], None]:
        if not warm:
            step()  # Triton compiles, and cuBLAS picks its workspaces
        reserve_counters(self._device)
        # Other threads' calls (NCCL's watchdog) are not captured. "relaxed": a new function may
        # load its kernels.
        with _no_collection():
            return self._capture.record(step, "relaxed" if warm else "thread_local")

    def split(self) -> None:
        self._capture.split()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection, which might destroy another engine's graph. That would end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Draws a token from each row's logits and makes it the row's next input: request rows [n] int32,
# logits [n, vocab], and tokens [n] int64 that it fills.
Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def make_recorder(device: torch.device) -> Recorder:
    return CudaGraphRecorder(device) if device.type == "cuda" else ClosureRecorder()


def buckets(max_bs: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, every 8 up to 64, every 16 up to 256, every 64 above,
    and max_bs."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_bs + 1, 64)]
    return sorted({min(size, max_bs) for size in (*sizes, max_bs)})


class GraphRunner:
    """Captures one step per bucket and replays the smallest that holds a batch.

    Args:
        last_tokens: [R + 1] int32, last sampled token of each request row: the first input of each
            row.
        max_bs: largest batch captured; capped by the request rows.
        tokens_per_row: T: 1 for plain decode, more for verify steps.
        forks: drafts may fork, as `pack_rows` takes it.
        keep_hidden: `buffers.hidden` gets the final hidden states.
        recorder: how a step is recorded; by the device's kind if None.
        draw: recorded as a second graph of each bucket, of steps with one token a row; None: no
            second graphs.

    Attributes:
        prepared: the prepared batch of the last captured or replayed bucket.
    """

    def __init__(
        self,
        *,
        model: StepModel,
        backend: AttentionBackend,
        req_to_token_pool: HybridReqToTokenPool,
        last_tokens: torch.Tensor,
        max_bs: int,
        tokens_per_row: int = 1,
        forks: bool = False,
        keep_hidden: bool = False,
        recorder: Recorder | None = None,
        draw: Draw | None = None,
    ) -> None:
        if max_bs < 1:
            raise ConfigError(f"max_bs is {max_bs}; a graph needs at least one row")
        if draw is not None and tokens_per_row > 1:
            raise ConfigError(
                f"tokens are verified, not drawn, in steps of {tokens_per_row} tokens a row: leave draw out"
            )
        self.model, self.backend, self.pool, self.last_tokens = model, backend, req_to_token_pool, last_tokens
        self.tokens_per_row, self.forks, device = tokens_per_row, forks, model.device
        self.max_bs = min(max_bs, req_to_token_pool.num_rows)
        self.poisoned = device.type != "cuda"
        self.recorder = recorder or make_recorder(device)
        self.buffers = StaticBuffers(
            model,
            self.max_bs,
            tokens_per_row,
            groups=req_to_token_pool.num_groups,
            seq_len_fill=backend.seq_len_fill,
            forks=forks,
            mrope=req_to_token_pool.mrope_deltas is not None,
            keep_hidden=keep_hidden,
        )
        self._staging = StagingRing(device)
        self._starts = torch.arange(self.max_bs + 1, dtype=torch.int32, device=device) * tokens_per_row
        self._view = backend.init_cuda_graph_state(self.max_bs, self.max_bs * tokens_per_row)
        self._replays: dict[int, Callable[[], None]] = {}  # graphs by batch size
        self._draw, self._draws = draw, dict[int, Callable[[], None]]()  # the second graphs
        self._sizes: list[int] = []  # of these, the smallest first
        self._cached_views: dict[int, GraphRows] = {}
        self.captured_bytes = 0

    @torch.inference_mode()
    def capture(self, progress: bool = False, sizes: Sequence[int] = ()) -> None:
        """Records every bucket, or those of `sizes`, the largest first: smaller ones reuse its
        memory, of which `captured_bytes` has the size."""
        free = free_device_bytes(self.model.device)
        with tqdm(sorted(sizes or buckets(self.max_bs))[::-1], desc="capturing graphs", disable=not progress) as bar:
            for bs in bar:
                self._upload(NO_ROWS, NO_INTEGERS)
                self._prepare(bs, 0, None)
                # Only the largest step runs once before its capture: that run takes as long as the capture.
                self._replays[bs] = self.recorder(self._bind(bs), bool(self._replays))
                if self._draw is not None:
                    self._draws[bs] = self.recorder(self._bind_draw(bs, self._draw), bool(self._draws))
                self.captured_bytes = free - free_device_bytes(self.model.device)
                bar.set_postfix_str(f"{self.captured_bytes / 2**30:.2f} GiB")
        self._sizes = sorted(self._replays)

    def bucket(self, rows: int) -> int | None:
        """The smallest captured batch size that holds `rows`; None: the step runs eagerly."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else None

    def replay(self, decode: DecodeRows, new_pages: np.ndarray = NO_INTEGERS, least: int = 0) -> torch.Tensor:
        """One step, in inference mode: one host-to-device copy, the backends' metadata, the graph.

        Args:
            new_pages: [n, G] int32, KV page of each row's last draft (its one token if T is 1) in
                each page group where it is new, else -1; empty: none is.
            least: rows of the graph, at least; those that the step has not are padding.

        Returns:
            [n * T, vocab] logits, a view that the next replay overwrites.
        """
        n = len(decode.rows)
        bs = self.bucket(max(n, least))
        assert bs is not None, "bucket() says which batches have a graph"
        if self.poisoned:
            self.buffers.poison()
        self._upload(decode, new_pages)
        lens = (decode.computed + self.tokens_per_row).tolist() if self.backend.needs_host_lens else None
        self._prepare(bs, n, lens)
        self._replays[bs]()
        if not n:
            return self.buffers.logits[:0]
        views = self.views_of(n)
        views.batch.metadata = self.prepared.metadata
        return views.logits

    @property
    def draws(self) -> bool:
        """Whether there are second graphs, which `draw` replays."""
        return bool(self._draws)

    def draw(self, n: int) -> torch.Tensor:
        """Draws tokens [n] int64 for the n rows of the last replay, in one launch. On a GPU it returns
        a view that the next draw overwrites."""
        self._draws[self.prepared.batch_size]()
        drawn = self.views_of(n).drawn
        return drawn.clone() if self.poisoned else drawn

    def _upload(self, decode: DecodeRows, new_pages: np.ndarray) -> None:
        step = pack_rows(decode, self.tokens_per_row, self.forks, new_pages)
        arrays = arrays_of(step) if self.tokens_per_row > 1 else step[:4]  # without drafts
        self._staging.copy_rows(self.buffers.packed, arrays, self.buffers.padding, self.buffers.starts)

    def _prepare(self, bs: int, num_real: int, lens: list[int] | None) -> None:
        batch = self.prepared = self.views_of(bs).batch
        batch.num_real, batch.seq_lens_cpu = num_real, lens
        self.backend.prepare(batch, graph=self._view)

    def views_of(self, n: int) -> GraphRows:
        """Views of the first n rows of the buffers. Cached, because making them takes the host 20 microseconds."""
        if n in self._cached_views:
            return self._cached_views[n]
        buffers, total = self.buffers, n * self.tokens_per_row
        rows, lens = buffers.arrays.rows[:n], buffers.arrays.seq_lens[:n]
        batch = make_batch(
            self.backend, rows, lens, self._starts[: n + 1], buffers.inputs.first(total), n, buffers.spec_info
        )
        indices = buffers.arrays.output_indices[:n]
        of_model = buffers.logits[:total], buffers.hidden[:total]
        self._cached_views[n] = GraphRows(batch, indices, *of_model, buffers.drawn[:n])
        return self._cached_views[n]

    def _bind(self, bs: int) -> Callable[[], None]:
        """The closure holds static buffers alone: a cycle with this object would keep the pools
        until garbage is collected."""
        buffers, total, batch = self.buffers, bs * self.tokens_per_row, self.views_of(bs).batch
        model, backend, pool, last_tokens = self.model, self.backend, self.pool, self.last_tokens

        def step() -> None:
            inputs = buffers.inputs.first(total)
            fill_decode(inputs, buffers.arrays, bs, buffers.spec_info, last_tokens, pool)
            hidden = model(batch)
            if buffers.hidden.numel():
                buffers.hidden[:total].copy_(hidden)
            model.logits_into(buffers.logits[:total], hidden)
            if buffers.spec_info is None:
                backend.commit(batch)

        return step

    def _bind_draw(self, bs: int, draw: Draw) -> Callable[[], None]:
        """As `_bind`: static buffers alone."""
        views = self.views_of(bs)
        return partial(draw, views.batch.req_pool_indices, views.logits, views.drawn)


def split_page_writes(
    decode: DecodeRows, writes: Sequence[PageWrite], plan: MemoryPlan
) -> tuple[np.ndarray, list[PageWrite]] | None:
    """Splits page writes into those of a graph and the rest.

    A graph writes one page per row: that of the row's last token.

    Returns:
        ([n, G] int32 pages of each decode row, -1 for none; the writes of other rows), or None if a
            decode row needs any other page.
    """
    index_of_row = np.full(plan.num_rows + 1, -1)
    index_of_row[decode.rows] = np.arange(len(decode))
    pages, others = np.full((len(decode), max(len(plan.groups), 1)), -1, np.int32), []
    for write in writes:
        i = index_of_row[write.row]
        if i < 0:
            others.append(write)
            continue
        last_page = (decode.computed[i] + decode.num_drafts[i]) // plan.page_size
        if len(write.pages) != 1 or write.first_page != last_page:
            return None
        pages[i] = write.pages[0]
    return pages, others
