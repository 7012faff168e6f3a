"""Decode and verify steps as graphs over static buffers, one for each bucket of batch sizes.

On CUDA a bucket is a torch.cuda.CUDAGraph. Elsewhere it is a closure over the same buffers, which are poisoned before
every replay: whatever a graph would read stale, the closure reads as NaN or an index out of range. Both go through
the same backend hooks, so a CPU test of the closure tests the metadata of the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from tqdm import tqdm

from hybridrt.attention.base import AttentionBackend
from hybridrt.attention.hybrid_linear import HybridLinearAttnBackend
from hybridrt.errors import ConfigError
from hybridrt.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.mem_cache.req_to_token_pool import HybridReqToTokenPool
from hybridrt.models.base import CausalLM

POISON = -(2**30)  # as an index it is out of every range


@dataclass
class StaticBuffers:
    """What a replay fills and a graph reads, for max_bs rows of T tokens."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    input_ids: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def allocate(cls, max_bs: int, tokens: int, vocab: int, dtype: torch.dtype, device: torch.device) -> "StaticBuffers":
        ints = {name: torch.zeros(max_bs, dtype=torch.int32, device=device) for name in ("rows", "seq_lens")}
        ids = torch.zeros(max_bs * tokens, dtype=torch.int32, device=device)
        return cls(**ints, input_ids=ids, logits=torch.zeros(max_bs * tokens, vocab, dtype=dtype, device=device))

    def poison(self) -> None:
        for field in fields(self):
            tensor = getattr(self, field.name)
            tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)


class Recorder(Protocol):
    """Turns a function over static buffers into something that replays it."""

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]: ...


class ClosureRecorder:
    """For machines without CUDA: a replay calls the function again."""

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        return step


class CudaGraphRecorder:
    """torch.cuda.CUDAGraph in one memory pool, shared because buckets are captured from the largest down."""

    def __init__(self) -> None:
        self._pool: object | None = None

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        for _ in range(2):  # Triton compiles and cuBLAS picks its workspaces outside the capture
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self._pool = self._pool or graph.pool()
        return graph.replay


def buckets(max_bs: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, then every 8 up to 64, every 16 up to 256, every 64 above, and max_bs."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_bs + 1, 64)]
    return sorted({min(size, max_bs) for size in sizes})


class GraphRunner:
    """Captures one step per bucket and replays the smallest that holds a batch.

    Args:
        max_bs: largest batch captured; more rows than request rows or state slots cannot exist, so it is capped there.
        spec_info: None for plain decode; for verify steps T and, for trees, static parent and mask tensors.
        recorder: how a step is recorded; by the device's kind if None.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        backend: AttentionBackend,
        req_to_token_pool: HybridReqToTokenPool,
        max_bs: int,
        spec_info: SpecInfo | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        if max_bs < 1:
            raise ConfigError(f"max_bs is {max_bs}; a graph needs at least one row")
        self.model, self.backend, self.pool = model, backend, req_to_token_pool
        self.device, self.spec_info = model.device, spec_info
        self.tokens = spec_info.tokens_per_row if spec_info else 1
        self.mode = ForwardMode.TARGET_VERIFY if spec_info else ForwardMode.DECODE
        self.max_bs = min(max_bs, req_to_token_pool.num_rows)
        on_cuda = self.device.type == "cuda"
        self.poisoned = not on_cuda
        self.recorder: Recorder = recorder or (CudaGraphRecorder() if on_cuda else ClosureRecorder())
        self.buffers = StaticBuffers.allocate(
            self.max_bs, self.tokens, model.config.vocab_size, model.dtype, self.device
        )
        self._fill = backend.get_cuda_graph_seq_len_fill_value() + self.tokens - 1
        backend.init_cuda_graph_state(self.max_bs, self.max_bs * self.tokens)
        self._replays: dict[int, Callable[[], None]] = {}

    @torch.inference_mode()
    def capture(self, progress: bool = False) -> None:
        """Records every bucket, the largest first: smaller ones reuse its memory."""
        for bs in tqdm(buckets(self.max_bs)[::-1], desc="capturing graphs", disable=not progress):
            self.buffers.rows.zero_()
            self.buffers.seq_lens.fill_(self._fill)
            self.buffers.input_ids.zero_()
            self._replays[bs] = self.recorder(self._bind(bs))

    def bucket(self, rows: int) -> int | None:
        """The smallest captured batch size that holds `rows`, or None: then the step runs eagerly."""
        return min((bs for bs in self._replays if bs >= rows), default=None)

    @torch.inference_mode()
    def replay(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, input_ids: torch.Tensor, seq_lens_cpu: Sequence[int]
    ) -> torch.Tensor:
        """One step for n rows.

        Args:
            rows, seq_lens: [n] int32; seq_lens counts the step's tokens.
            input_ids: [n * T] int32.
        Returns:
            [n * T, vocab], a view that the next replay overwrites.
        """
        n, buffers = rows.shape[0], self.buffers
        bs = self.bucket(n)
        assert bs is not None, "bucket() says which batches have a graph"
        if self.poisoned:
            buffers.poison()
        buffers.rows[:n] = rows
        buffers.rows[n:bs] = 0
        buffers.seq_lens[:n] = seq_lens
        buffers.seq_lens[n:bs] = self._fill
        buffers.input_ids[: n * self.tokens] = input_ids
        buffers.input_ids[n * self.tokens : bs * self.tokens] = 0
        self.backend.init_forward_metadata_replay_cuda_graph(
            bs, n, buffers.rows, buffers.seq_lens, self.mode, self.spec_info, list(seq_lens_cpu)
        )
        self._replays[bs]()
        return buffers.logits[: n * self.tokens]

    def _bind(self, bs: int) -> Callable[[], None]:
        """The step of one bucket, over views of the static buffers."""
        buffers, tokens = self.buffers, self.tokens
        rows, seq_lens = buffers.rows[:bs], buffers.seq_lens[:bs]
        input_ids, logits = buffers.input_ids[: bs * tokens], buffers.logits[: bs * tokens]
        offsets = torch.arange(-tokens, 0, dtype=torch.int32, device=self.device)
        starts = torch.arange(bs + 1, dtype=torch.int32, device=self.device) * tokens
        capture = self.backend.init_forward_metadata_capture_cuda_graph
        capture(bs, bs * tokens, buffers.rows, buffers.seq_lens, self.mode, self.spec_info)

        def step() -> None:
            positions = (seq_lens[:, None] + offsets).view(-1)
            token_rows = rows.repeat_interleave(tokens, output_size=bs * tokens)
            batch = ForwardBatch(
                self.mode, input_ids, positions, rows, seq_lens, starts, self.pool.token_slots(token_rows, positions),
                bs, bs, self.backend, spec_info=self.spec_info,
            )  # fmt: skip
            logits.copy_(self.model.logits(self.model(batch)))
            if tokens == 1 and isinstance(self.backend, HybridLinearAttnBackend):
                self.backend.commit_decode()

        return step
