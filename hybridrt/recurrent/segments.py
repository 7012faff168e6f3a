"""The metadata of recurrent layers: a decode segment, then an extend segment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridrt.base.forward_batch import ExtendPass, ForwardBatch
from hybridrt.kernels.core.chunk_plan import ChunkPlan
from hybridrt.kernels.core.launch import end_launches
from hybridrt.kernels.core.records import (
    ConvState,
    ConvWeights,
    FusedStep,
    IntermediateStates,
    Prompts,
    SavedStates,
    StateRing,
    StateSlots,
)
from hybridrt.kernels.core.slots import OWN_SLOT, PADDING_SLOT, SCRATCH
from hybridrt.kernels.mamba.mamba2_decode_cpu import PoolRows
from hybridrt.kernels.state.row_tables import DecodeBuffers
from hybridrt.kernels.state.state_codes import load_states, store_states
from hybridrt.mem_cache.pools.mamba_pool import LayerCache
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool


@dataclass(frozen=True)
class DecodeSegment:
    """n decode or verify rows of `tokens_per_row` tokens.

    Attributes:
        rows: request rows, [n] int32.
        buffers: slots, positions and cursors of the n rows, in tensors that graphs replay.
        predecessors: [n, T] int32 of a verify step with drafts that fork (IntermediateStates), else None.
        pool_rows: the rows if they are neighbours in the pools (one token a row, on a CPU).
    """

    rows: Tensor
    buffers: DecodeBuffers
    tokens_per_row: int
    predecessors: Tensor | None
    pool_rows: PoolRows | None = None

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0] * self.tokens_per_row

    def by_row(self, t: Tensor) -> Tensor:
        """[n * tokens_per_row, ...] as [n, tokens_per_row, ...]."""
        return t.view(self.rows.shape[0], self.tokens_per_row, *t.shape[1:])

    def state(self, cache: LayerCache) -> StateSlots:
        """A layer's states. In the state mode "intermediate" a verify step stores the state after each token, to be
        rolled back to; in "replay" cursors roll back."""
        intermediate, state_slots = None, self.buffers.state_slots
        if self.tokens_per_row > 1 and cache.intermediate_ssm is not None:
            intermediate = IntermediateStates(cache.intermediate_ssm, self.rows, self.predecessors)
        return StateSlots(cache.state, state_slots, state_slots, intermediate, cache.codes)

    def conv_state(self, cache: LayerCache) -> ConvState:
        state_slots = self.buffers.state_slots
        return ConvState(cache.conv, state_slots, state_slots, self.buffers.start_positions)

    def ring(self, cache: LayerCache) -> StateRing | None:
        """A layer's state ring; None if the layer has none: its state mode is not "replay", or it keeps
        only conv inputs."""
        if cache.ring_values is None:
            return None
        return StateRing(*cache.ring, self.rows, self.buffers.ring_start, self.buffers.ring_length)

    def conv_windows(self, cache: LayerCache) -> IntermediateStates | None:
        """Where the conv inputs up to each token are stored, if tokens have predecessors. Else None:
        conv inputs roll back by position."""
        if self.predecessors is None:
            return None
        assert cache.intermediate_conv_window is not None, "the pool was made for drafts that fork"
        return IntermediateStates(cache.intermediate_conv_window, self.rows, self.predecessors)

    def conv_rows(
        self, weights: ConvWeights, cache: LayerCache
    ) -> tuple[ConvWeights, ConvState, IntermediateStates | None]:
        """Arguments of `causal_conv1d_update` after the inputs."""
        return weights, self.conv_state(cache), self.conv_windows(cache)

    def fused_step(self, weights: ConvWeights, cache: LayerCache) -> FusedStep:
        windows = self.conv_windows(cache)
        stored = windows and windows.stored
        return FusedStep(weights, self.conv_state(cache), self.state(cache), self.ring(cache), stored)


@dataclass(frozen=True)
class ExtendSegment:
    """Packed prompt chunks of n rows.

    Attributes:
        read_state_slots, write_state_slots: [n] int32, of a row's state before and after; -1 is padding.
        start_positions: [n] int32, of the rows' first tokens.
        prompts: how the rows lie next to each other, and what is saved within them.
        later: segments that run after this one, from states that it keeps within chunks, with their
            tokens' places in this one, [t] int64.
        real: [t] bool, such a segment's tokens without padding; None: all.
    """

    read_state_slots: Tensor
    write_state_slots: Tensor
    start_positions: Tensor
    prompts: Prompts
    later: "Sequence[tuple[Tensor, ExtendSegment]]" = ()
    real: Tensor | None = None

    def state(self, cache: LayerCache) -> StateSlots:
        """A layer's states. Those with codes are copies in float32, which `round_states` stores after
        the scan. Their saves are passes, so that a request continues from what the cache keeps."""
        read_state_slots, write_state_slots = self.read_state_slots, self.write_state_slots
        if cache.codes is None:
            return StateSlots(cache.temporal, read_state_slots, write_state_slots)
        stored = StateSlots(cache.state, read_state_slots, write_state_slots, codes=cache.codes)
        states = load_states(stored, self.prompts.has_initial_state)
        end_launches(states.device)  # kernels of the scan may read states early
        places = torch.arange(1, len(states), device=states.device, dtype=torch.int32)
        return StateSlots(
            states,
            read_state_slots=places.masked_fill(read_state_slots < 0, PADDING_SLOT),
            write_state_slots=places.masked_fill(write_state_slots < 0, PADDING_SLOT),
        )

    def round_states(self, cache: LayerCache, scanned: StateSlots) -> None:
        """Stores the states with codes that a scan has left."""
        stored = StateSlots(cache.state, self.read_state_slots, self.write_state_slots, codes=cache.codes)
        starts = self.prompts.query_start_loc
        store_states(stored, scanned.states[1:], self.start_positions + starts[1:] - starts[:-1])

    def conv_chunks(
        self, weights: ConvWeights, cache: LayerCache
    ) -> tuple[ConvWeights, ConvState, Tensor, SavedStates | None]:
        """Arguments of `causal_conv1d_varlen` after the inputs."""
        state = ConvState(cache.conv, self.read_state_slots, self.write_state_slots, self.start_positions)
        return weights, state, self.prompts.query_start_loc, self.prompts.saves


@dataclass
class ForwardMetadata:
    """What the recurrent backends have planned for a batch, and its segments, which its first layer makes.

    Attributes:
        plans: chunk plans of extend rows, by chunk size.
        decode: None without decode rows.
        extends: extend segments by chunk size; empty without extend rows.
        begun: the segments exist.
        open: a commit has to come.
        previous: the last earlier step with a commit to come; None once it has come.
    """

    plans: Mapping[int, ChunkPlan]
    decode: DecodeSegment | None = None
    extends: Mapping[int, ExtendSegment] = field(default_factory=dict)
    begun: bool = False
    open: bool = False
    previous: "ForwardMetadata | None" = None

    @property
    def num_tokens(self) -> int:
        """Tokens of both segments, once they exist."""
        extend = next(iter(self.extends.values()), None)
        return (self.decode.num_tokens if self.decode else 0) + (extend.prompts.plan.num_tokens if extend else 0)


def extend_segments(
    batch: ForwardBatch, plans: Mapping[int, ChunkPlan], pools: HybridReqToTokenPool
) -> dict[int, ExtendSegment]:
    """The extend rows of a step by chunk size, with their present slots."""
    split, padded = batch.num_decode_rows, batch.num_real < batch.batch_size
    rows = batch.req_pool_indices[split:]
    state_slots = pools.state_slots(rows)
    if padded:
        state_slots.masked_fill_(rows == SCRATCH, PADDING_SLOT)
    if batch.extend_passes:
        return _pass_segments(batch.extend_passes, state_slots, padded)
    starts = batch.query_start_loc[split:]
    positions = batch.seq_lens[split:] - (starts[1:] - starts[:-1])
    read_state_slots = state_slots
    if batch.read_state_slots is not None:
        read_state_slots = torch.where(batch.read_state_slots > OWN_SLOT, batch.read_state_slots, state_slots)
    runs, saves = (starts - batch.num_decode_tokens, positions > 0), batch.saved_states
    slots = read_state_slots, state_slots, positions
    return {size: ExtendSegment(*slots, Prompts(*runs, plan, saves.get(size))) for size, plan in plans.items()}


def _pass_segments(passes: Sequence[ExtendPass], state_slots: Tensor, padded: bool) -> dict[int, ExtendSegment]:
    """The segments of the first pass by chunk size, with later passes attached. `padded`: token 0
    in a later pass is padding."""
    later: dict[int, list[tuple[Tensor, ExtendSegment]]] = {}
    found: dict[int, ExtendSegment] = {}
    for part in passes:
        own_state_slots, positions = state_slots.index_select(0, part.rows), part.start_positions
        read_state_slots = torch.where(part.read_state_slots == OWN_SLOT, own_state_slots, part.read_state_slots)
        write_state_slots = torch.where(part.write_state_slots == OWN_SLOT, own_state_slots, part.write_state_slots)
        runs = part.query_start_loc, positions > 0
        tokens = None if part.tokens is None else part.tokens.long()
        real = tokens > 0 if padded and tokens is not None else None
        for size, plan in part.chunk_plans.items():
            prompts = Prompts(*runs, plan)
            segment = ExtendSegment(read_state_slots, write_state_slots, positions, prompts, real=real)
            if tokens is None:
                later[size] = []
                found[size] = replace(segment, later=later[size])
            else:
                later[size].append((tokens, segment))
    return found
