"""ForwardBatch, the tensors of one step, and the backend interface that it carries.

Shapes: N tokens, B rows (requests), T tokens verified a row. A batch is a *decode segment*, rows
[0, num_decode_rows) of `tokens_per_row` tokens each, then an *extend segment*: rows of any length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import torch


class ForwardMode(Enum):
    """What the rows of a step do."""

    EXTEND = auto()  # prefill: whole prompts or chunks, with or without a computed prefix
    DECODE = auto()  # one token a row
    MIXED = auto()  # decode (or verify) rows first, then extend rows
    TARGET_VERIFY = auto()  # drafts + 1 tokens a row, checked at once
    DRAFT_EXTEND = auto()  # a drafter that is a model catches up on accepted tokens
    IDLE = auto()


@dataclass(frozen=True)
class SpecInfo:
    """The inputs of a verify step: T a row, the last known token (the root) and its drafts.

    Attributes:
        tokens_per_row: T, drafts + 1.
        predecessors: [B, T] int32, the input of its row that each input follows (in a draft tree:
            its parent), -1 for the root. None: the one before it.
        mask: [B, T, T] bool, True where an input sees another (itself included). Given if
            `predecessors` are. None: it sees those before it.
        num_drafts: [B] int32, drafts after a row's root; the rest is padding, with out_cache_loc 0.
            None: all are drafts.
    """

    tokens_per_row: int
    predecessors: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    num_drafts: torch.Tensor | None = None

    def relations(self, n: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`predecessors` and `mask` of the first n rows."""
        if self.predecessors is None or self.mask is None:
            return None, None
        return self.predecessors[:n], self.mask[:n]

    def positions(self, places: torch.Tensor) -> torch.Tensor:
        """Positions [n * T] of the inputs of the first n rows, which lie in the KV slots of positions
        `places` [n * T]: the root's plus the number of other inputs that an input sees."""
        if self.mask is None:
            return places
        order = torch.arange(self.tokens_per_row, dtype=torch.int32, device=places.device)
        mask = self.mask[: len(places) // self.tokens_per_row]
        return places + (mask.sum(-1, dtype=torch.int32) - 1 - order).view(-1)


class RoutedLayer(Protocol):
    """What a composite needs of a layer. Recurrent layers also have a `kind`."""

    @property
    def layer_id(self) -> int: ...


class AttentionBackendLike(Protocol):
    """What a layer needs of its batch's backend (whole interface: hybridrt.attention.base)."""

    @property
    def linear_attn_backend(self) -> Any: ...

    def route(self, layer: RoutedLayer) -> Any: ...

    @property
    def run(self) -> Callable[..., torch.Tensor]: ...


@dataclass
class GraphView:
    """Static buffers for the metadata of captured steps (`init_cuda_graph_state` makes it).

    A view serves one launched step at a time: its buffers are refilled in stream order. So the next
    step is prepared after this step's graph, and after its commit if one follows the graph, was
    launched. All batch sizes up to `max_bs` share a view; a graph reads the first entries of the
    buffers.

    Attributes:
        max_bs: most decode rows of a batch.
        tokens_per_row: tokens of each of them.
        prompts: the batches have extend rows too.
        buffers: each backend's buffers, in a form of its own.
        most_context: tokens for which the buffers have room: those before the chunks of all prompts, and
            all tokens of the graph's prompts and padding; None: any number.
        limited_from: tokens of prompts in the smallest graph that uses these buffers.
    """

    max_bs: int
    tokens_per_row: int
    prompts: bool = False
    buffers: dict[Any, Any] = field(default_factory=dict)
    most_context: int | None = None
    limited_from: int = 0


@dataclass(frozen=True)
class ExtendPass:
    """n runs of extend tokens, each within one row, that recurrent layers compute at once.

    Used by steps that keep states within chunks. Passes run in order.

    Attributes:
        rows: [n] int32, the run's row in the extend segment.
        read_state_slots, write_state_slots: [n] int32, slots of the run's state before and after; 0
            for the row's own slot, -1 for a run that the pass does not compute.
        query_start_loc: [n + 1] int32 offsets of the runs' tokens in the pass.
        start_positions: [n] int32, position of each run's first token.
        tokens: [t] int32, places of the pass's tokens in the segment; None: all of them.
        chunk_plans: hybridrt.kernels.core.chunk_plan.ChunkPlan of the runs by chunk size.
    """

    rows: torch.Tensor
    read_state_slots: torch.Tensor
    write_state_slots: torch.Tensor
    query_start_loc: torch.Tensor
    start_positions: torch.Tensor
    tokens: torch.Tensor | None
    chunk_plans: Mapping[int, Any]


class Embeddings(NamedTuple):
    """Embeddings of prompt tokens that an encoder made (`CausalLM.encode`).

    Attributes:
        rows: [n, hidden_size] in the model's dtype.
        places: [n] int32, their tokens in the batch; none of a decode row.
    """

    rows: torch.Tensor
    places: torch.Tensor


@dataclass
class ForwardBatch:
    """One step of the model, as tensors on its device and the host copies of the lengths.

    Attributes:
        input_ids, positions: [N] int32; positions count from 0 in each request.
        req_pool_indices: [B] int32 request rows; 0 for padding rows.
        seq_lens: [B] int32 tokens of each request after this step.
        query_start_loc: [B + 1] int32 offsets of the rows' tokens.
        out_cache_loc: [N] int32 token slots of the new tokens; those of page 0 are padding and not
            written. [G, N] for a model with G > 1 page groups.
        num_real: rows that are not padding; they come first. In a graph with extend rows it counts
            decode rows only; there an extend row is padding if its request row is 0.
        num_decode_rows: rows of the decode segment, padding included.
        seq_lens_cpu, query_lens_cpu: host copies; upper bounds where only the device has the exact
            lengths. None in a graph, except query_lens_cpu with extend rows: bounds for all
            replays.
        chunk_plans: hybridrt.kernels.core.chunk_plan.ChunkPlan of the extend rows by chunk size;
            None: recurrent backends plan their chunks themselves.
        read_state_slots: [B - num_decode_rows] int32, the state slot that each extend row starts
            from, 0 for its own; None: all start from their own. A row always writes its own slot.
        extend_passes: passes of a step that keeps states within its chunks; then chunk_plans and
            read_state_slots are not read. Empty: each chunk is computed at once.
        saved_states: `kernels.core.records.SavedStates` of the extend rows by chunk size, for
            backends that save states without a further pass (`saves_at_chunks`).
        embeddings: tokens that do not take their embeddings from the table; None: all do. Not in a
            graph.
        mrope_positions: int32, where rotary embeddings place the tokens if not at `positions`: [N],
            or [3, N] for a place in time, a row and a column (Qwen team 2025, arXiv:2502.13923).
            None: at `positions`. Decode rows have three equal numbers.
        metadata: what each backend planned for this batch, by backend; `prepare` fills it.
            hybridrt.embedding stores its rows here too. A copy by `dataclasses.replace` starts
            without any.
        batch_size: B.
        tokens_per_row: tokens of each row of the decode segment: 1, or T when verifying.
        num_decode_tokens, num_extend_rows: sizes of the two segments.
    """

    forward_mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    out_cache_loc: torch.Tensor
    num_real: int
    num_decode_rows: int
    attn_backend: AttentionBackendLike
    seq_lens_cpu: Sequence[int] | None = None
    query_lens_cpu: Sequence[int] | None = None
    spec_info: SpecInfo | None = None
    chunk_plans: Mapping[int, Any] | None = None
    read_state_slots: torch.Tensor | None = None
    extend_passes: Sequence[ExtendPass] = ()
    saved_states: Mapping[int, Any] = field(default_factory=dict)
    embeddings: Embeddings | None = None
    mrope_positions: torch.Tensor | None = None
    metadata: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    batch_size: int = field(init=False, repr=False, compare=False)
    tokens_per_row: int = field(init=False, repr=False, compare=False)
    num_decode_tokens: int = field(init=False, repr=False, compare=False)
    num_extend_rows: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.batch_size = self.req_pool_indices.shape[0]
        self.tokens_per_row = self.spec_info.tokens_per_row if self.spec_info else 1
        self.num_decode_tokens = self.num_decode_rows * self.tokens_per_row
        self.num_extend_rows = self.batch_size - self.num_decode_rows

    @property
    def rope_positions(self) -> torch.Tensor:
        """[N] or [3, N] int32: by what rotary embeddings turn."""
        return self.positions if self.mrope_positions is None else self.mrope_positions

    @property
    def padded_rows(self) -> torch.Tensor | None:
        """req_pool_indices if rows may be padding (row 0) and all have `tokens_per_row` tokens,
        else None."""
        return None if self.num_extend_rows else self.req_pool_indices

    @property
    def extend_seq_lens_cpu(self) -> Sequence[int]:
        assert self.query_lens_cpu is not None, "a batch with extend rows carries host lengths"
        return self.query_lens_cpu[self.num_decode_rows :]

    @property
    def extend_prefix_lens_cpu(self) -> list[int]:
        """Tokens of each extend row that earlier steps computed."""
        assert self.seq_lens_cpu is not None, "a batch with extend rows carries host lengths"
        totals = self.seq_lens_cpu[self.num_decode_rows :]
        return [total - new for total, new in zip(totals, self.extend_seq_lens_cpu)]
