"""A step as the recurrent layers see it: a decode segment, then an extend segment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hybridrt.kernels.core.chunk_plan import ChunkPlan
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
from hybridrt.kernels.mamba.mamba2_decode_cpu import PoolRows, pool_rows
from hybridrt.kernels.state.decode_metadata import DecodeBuffers
from hybridrt.mem_cache.pools.mamba_pool import LayerCache


@dataclass(frozen=True)
class DecodeSegment:
    """Decode or verify rows: n rows of `tokens_per_row` tokens. `rows` are request rows, [n] int32."""

    rows: torch.Tensor
    buffers: DecodeBuffers
    tokens_per_row: int
    parents: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0] * self.tokens_per_row

    def by_row(self, t: torch.Tensor) -> torch.Tensor:
        """[n * tokens_per_row, ...] as [n, tokens_per_row, ...]."""
        return t.view(self.rows.shape[0], self.tokens_per_row, *t.shape[1:])

    @cached_property
    def pool_rows(self) -> PoolRows | None:
        """Of one token a row on a CPU: the rows as neighbours in the pools, the same in all layers. Else None."""
        if self.tokens_per_row > 1:
            return None
        return pool_rows(self.buffers.state_slots, self.buffers.start_positions)

    def state(self, cache: LayerCache) -> StateSlots:
        """A layer's recurrent states, read and written at the same slots. One token is final at once: only a verify
        step may have to go back, and stores the state after each token."""
        intermediate, state_slots = None, self.buffers.state_slots
        if self.tokens_per_row > 1 and cache.intermediate_ssm is not None:
            intermediate = IntermediateStates(cache.intermediate_ssm, self.rows, self.parents)
        return StateSlots(cache.temporal, state_slots, state_slots, intermediate)

    def conv_state(self, cache: LayerCache) -> ConvState:
        state_slots = self.buffers.state_slots
        return ConvState(cache.conv, state_slots, state_slots, self.buffers.start_positions)

    def ring(self, cache: LayerCache) -> StateRing | None:
        """A layer's state ring; None of a pool that keeps none."""
        if cache.ring_values is None:
            return None
        return StateRing(*cache.ring, self.rows, self.buffers.ring_start, self.buffers.ring_length)

    def conv_windows(self, cache: LayerCache) -> IntermediateStates | None:
        """Where the conv inputs up to each node of a tree go. Those of a chain roll back by position."""
        if self.parents is None:
            return None
        assert cache.intermediate_conv_window is not None, "a pool for trees has them"
        return IntermediateStates(cache.intermediate_conv_window, self.rows, self.parents)

    def conv_rows(
        self, weights: ConvWeights, cache: LayerCache
    ) -> tuple[ConvWeights, ConvState, IntermediateStates | None]:
        """The arguments of `causal_conv1d_update`, behind the inputs."""
        return weights, self.conv_state(cache), self.conv_windows(cache)

    def fused_step(self, weights: ConvWeights, cache: LayerCache) -> FusedStep:
        """The conv and the states of a layer."""
        nodes = self.conv_windows(cache)
        return FusedStep(weights, self.conv_state(cache), self.state(cache), self.ring(cache), nodes and nodes.stored)


@dataclass(frozen=True)
class ExtendSegment:
    """Prompt chunks of n rows, packed: `prompts`, which count from the segment's first token. A row starts from the
    state in its `read_state_slots` entry and leaves its own in `write_state_slots`; -1 marks padding rows.

    `later` are segments that are computed after this one, each with
    the places of its tokens in this one [t] int64: a step that keeps states within chunks continues from them there.
    `live` [t] bool: which tokens of such a segment are not padding; None: all.
    """

    read_state_slots: torch.Tensor
    write_state_slots: torch.Tensor
    start_positions: torch.Tensor
    prompts: Prompts
    later: "Sequence[tuple[torch.Tensor, ExtendSegment]]" = ()
    live: torch.Tensor | None = None

    def state(self, cache: LayerCache) -> StateSlots:
        return StateSlots(cache.temporal, self.read_state_slots, self.write_state_slots)

    def conv_state(self, cache: LayerCache) -> ConvState:
        return ConvState(cache.conv, self.read_state_slots, self.write_state_slots, self.start_positions)

    def conv_chunks(
        self, weights: ConvWeights, cache: LayerCache
    ) -> tuple[ConvWeights, ConvState, torch.Tensor, SavedStates | None]:
        """The arguments of `causal_conv1d_varlen`, behind the inputs."""
        return weights, self.conv_state(cache), self.prompts.query_start_loc, self.prompts.saves


@dataclass
class ForwardMetadata:
    """One step: the plan of `prepare`, and its segments, which are made when its first layer begins.

    Attributes:
        plans: of the extend rows, by chunk size.
        decode: None without decode rows.
        extends: by chunk size; empty without extend rows.
        begun: the segments are there.
        open: the step leaves its state to a commit that has not come yet.
        previous: the last step in front of this one that leaves its state to a commit; None once it has come.
    """

    plans: Mapping[int, ChunkPlan]
    decode: DecodeSegment | None = None
    extends: Mapping[int, ExtendSegment] = field(default_factory=dict)
    begun: bool = False
    open: bool = False
    previous: "ForwardMetadata | None" = None

    @property
    def num_tokens(self) -> int:
        """Of both segments, once they are made."""
        extend = next(iter(self.extends.values()), None)
        return (self.decode.num_tokens if self.decode else 0) + (extend.prompts.plan.num_tokens if extend else 0)
