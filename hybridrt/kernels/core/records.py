"""Records of arguments that travel together, with shapes and dtypes.

B rows, T new tokens a row (in all, for packed prompts), S state slots, R running requests, C conv
channels, K conv taps (in records of a conv), Wc columns of a conv ring, W columns of a state ring.
States: Mamba-2 [H, P, N] (H heads of P channels, N state columns, G groups of keys), Gated Delta
Net [Hv, V, K] (Hv value heads, Hk key heads, K numbers of a key), Mamba-1 [I, N] (I channels).
Softmax attention: Hq query heads, Hkv key heads of dim D. Entry 0 of every pool is scratch. A row
with state slots -1 is padding: it gets zeros and touches no state. Indices are int32. Activations,
conv rings, and values and keys of state rings have the model's dtype; state pools are float32,
bfloat16, float16 or codes of 8 bits; the rest is float32 unless stated. Token-wise tensors may have
any row and token stride.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import ChunkPlan

Activation = Literal["silu"] | None
NO_LIMIT = (0.0, math.inf)
# States that the scans and convs of one pass save within a prompt: one near its end, where the next
# turn of a conversation continues, and one at an even distance, where another prompt may part.
SAVES_PER_PROMPT = 2
L2_NORM_EPS = 1e-6  # added to squared norms


class TokenInputs(NamedTuple):
    """The model's inputs by token, [T] int32 each; see ForwardBatch. out_cache_loc is [G, T] with
    G > 1 page groups. mrope_positions: None, [T] or [3, T]."""

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    mrope_positions: Tensor | None = None

    @classmethod
    def allocate(cls, count: int, device: torch.device, groups: int = 1, *, mrope: bool = False) -> "TokenInputs":
        made = torch.zeros(2 + groups + mrope, count, dtype=torch.int32, device=device)
        return cls(made[0], made[1], made[2] if groups == 1 else made[2 : 2 + groups], made[-1] if mrope else None)

    def first(self, count: int) -> "TokenInputs":
        return TokenInputs(*(None if part is None else part[..., :count] for part in self))  # type: ignore[arg-type]

    def from_token(self, start: int) -> "TokenInputs":
        return TokenInputs(*(None if part is None else part[..., start:] for part in self))  # type: ignore[arg-type]

    def then(self, other: "TokenInputs") -> "TokenInputs":
        """Both, or neither, have mrope_positions."""
        ids, positions, places = (torch.cat(pair, -1) for pair in zip(self[:3], other[:3]))
        mrope, others = self.mrope_positions, other.mrope_positions
        if mrope is None or others is None:
            return TokenInputs(ids, positions, places)
        if others.dim() == 2:
            mrope = mrope.expand(3, -1)
        return TokenInputs(ids, positions, places, torch.cat((mrope, others), -1))


class DecodeRowInputs(NamedTuple):
    """B decode rows of T tokens, as the host packed them.

    Attributes:
        rows: [B] request rows; seq_lens: [B] lengths that count the step's tokens.
        new_pages: [B, G], in each page group the KV page of the row's last draft (of its token if T
            is 1) if it is new, else -1.
        drafts: [B, T - 1] tokens after the last sampled one; num_drafts: [B], how many of them are
            drafts. The rest is padding. Both None if T is 1.
    """

    rows: Tensor
    seq_lens: Tensor
    new_pages: Tensor
    drafts: Tensor | None = None
    num_drafts: Tensor | None = None


class RowTables(NamedTuple):
    """The state slot and the cursors of the state ring by request row, [R + 1] each."""

    req_to_state_slot: Tensor
    ring_start: Tensor
    ring_length: Tensor


class ConvWeights(NamedTuple):
    """A depthwise convolution: weight [C, K], bias [C] or None, and the activation after it.

    K = 0: there is no conv, and the activation is applied to the inputs (`mamba2_decode` only).
    K = 0 and no activation: conv and activation were applied to the inputs before (`gdn_decode`
    only).
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: Activation = "silu"

    @property
    def applied_before(self) -> bool:
        return self.weight.shape[1] == 0 and self.activation is None


class ConvState(NamedTuple):
    """Raw conv inputs of B rows: position p is in column p mod Wc of its slot.

    Attributes:
        conv: [S+1, C, Wc] rings; Wc is a power of two, at least K - 1 + T for steps of T tokens.
        read_state_slots, write_state_slots: [B], slots of earlier inputs and of new ones.
        start_positions: [B] absolute position of each row's first new token.
    """

    conv: Tensor
    read_state_slots: Tensor
    write_state_slots: Tensor
    start_positions: Tensor


class IntermediateStates(NamedTuple):
    """Where a verify step stores the states after its tokens; the pool keeps the state before it.

    Attributes:
        stored: [R+1, T or more, *state] in the states' dtype: stored[rows[b], t] is the state after
            token t of row b. For a conv [R+1, T, C, K-1]: the raw inputs that end at token t,
            oldest first.
        rows: [B].
        predecessors: [B, T] the token (< t) that each token follows, -1 for the state in the pool.
            None: the token before it.
    """

    stored: Tensor
    rows: Tensor
    predecessors: Tensor | None = None


class StateCodes(NamedTuple):
    """What belongs to states in 8 bits, or rounded stochastically (`state_codes.py`).

    Attributes:
        state_lengths: [S+1] int32, tokens that the state in each slot includes.
        element_keys: [H] int32, from which the rounding of each head's elements begins.
        state_scales: [S+1, H, P, n] int16, upper halves of float32 scales of 8-bit codes; None for
            floats.
    """

    state_lengths: Tensor
    element_keys: Tensor
    state_scales: Tensor | None = None

    def of_layer(self, layer: int) -> "StateCodes":
        """One of several layers' codes, which have a dimension more in keys and scales."""
        scales = None if self.state_scales is None else self.state_scales[layer]
        return StateCodes(self.state_lengths, self.element_keys[layer], scales)


class StateSlots(NamedTuple):
    """The recurrent states of B rows.

    Attributes:
        states: [S+1, *state] pool; with scales in `codes` the codes, int8 or float8_e4m3fn.
        read_state_slots, write_state_slots: [B], slots of the state before and after the step.
        intermediate: buffers of a verify step, which stores states there and does not write the
            pool.
        codes: of states that `store_states` and `fold_ring` round; None for others.
    """

    states: Tensor
    read_state_slots: Tensor
    write_state_slots: Tensor
    intermediate: IntermediateStates | None = None
    codes: StateCodes | None = None


class StateRing(NamedTuple):
    """One layer's inputs of each row's tokens since its state was written (`state_ring.py`).

    Attributes:
        values: [R+1, H, W, P]; keys: [R+1, G, W, N]; gates: [R+1, H, W] float32, or [R+1, H, W, N]
            in Kimi Delta Attention.
        rows: [B] ring of each row.
        start, length: [B] column of the oldest entry and number of entries, before the step.
    """

    values: Tensor
    keys: Tensor
    gates: Tensor
    rows: Tensor
    start: Tensor
    length: Tensor


class FusedStep(NamedTuple):
    """The conv and the states of a decode step in one operation, from the projection on.

    Attributes:
        conv_weights: with SiLU after the conv.
        conv_state, state: states in the same slots; with a ring, read and write slots are equal.
        ring: the inputs since the checkpoint in the pool.
        windows: with predecessors in `state.intermediate`: [R+1, T, C, K-1], the raw conv inputs
            that end at each token.
    """

    conv_weights: ConvWeights
    conv_state: ConvState
    state: StateSlots
    ring: StateRing | None = None
    windows: Tensor | None = None

    @classmethod
    def after_conv(cls, qkv: Tensor, state: StateSlots, ring: StateRing | None = None) -> "FusedStep":
        """A step of `gdn_decode` whose inputs `qkv` [B, T, C] went through a conv and SiLU before, for engines that
        keep the conv's state."""
        channels, slots = qkv.shape[2], state.read_state_slots
        none = ConvWeights(qkv.new_empty((channels, 0)), activation=None)
        return cls(none, ConvState(qkv.new_empty((1, channels, 1)), slots, state.write_state_slots, slots), state, ring)

    @property
    def conv_windows(self) -> IntermediateStates | None:
        """Where the conv stores its inputs; None: in the ring."""
        states = self.state.intermediate
        return None if self.windows is None or states is None else states._replace(stored=self.windows)


class SavedStates(NamedTuple):
    """States within prompts that are saved to slots of their own, at most SAVES_PER_PROMPT a prompt.
    A chunk ends at each.

    Attributes:
        chunk_slots: [n] int32, slot of the state after each chunk; 0 for none.
        row_slots, row_lengths: [B, SAVES_PER_PROMPT] int32, the prompt's slots, 0 for none, and the
            numbers of its new tokens in the states, in ascending order; 0 for none, at the end.
    """

    chunk_slots: Tensor
    row_slots: Tensor
    row_lengths: Tensor


class Prompts(NamedTuple):
    """New tokens of B prompts, packed along one axis.

    Attributes:
        query_start_loc: [B+1]; row b has tokens query_start_loc[b] to query_start_loc[b + 1].
            Tokens past the last entry get zeros.
        has_initial_state: [B] bool, False if a row starts from zeros instead of its slot.
        plan: the chunks of the same rows.
        saves: states to save within rows; None for none. Not every operation supports it.
    """

    query_start_loc: Tensor
    has_initial_state: Tensor
    plan: ChunkPlan
    saves: SavedStates | None = None


class SSMInputs(NamedTuple):
    """Inputs of a selective state space model, after the conv. Last dimensions are contiguous.

    Mamba-2: x, z [..., H, P], dt [..., H], B, C [..., G, N]; Mamba-1: x, z, dt [..., I], B, C [...,
    N]. dt is raw; without z the output is not gated. Leading dimensions: [B, T], or [T] of packed
    prompts.
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    z: Tensor | None = None


class SSMWeights(NamedTuple):
    """Weights of each Mamba-2 head [H] or Mamba-1 channel [I].

    Attributes:
        A: float32, negative rates; [I, N] in Mamba-1.
        D: the skip connection, or None.
        dt_bias: added to raw dt, or None.
        dt_limit: time steps are clamped to it (Mamba-2).
    """

    A: Tensor
    D: Tensor | None = None
    dt_bias: Tensor | None = None
    dt_limit: tuple[float, float] = NO_LIMIT


class BCNorms(NamedTuple):
    """Weights [N] of the RMS norms of Mamba-1's B and C, and their epsilon."""

    B_weight: Tensor
    C_weight: Tensor
    eps: float


class DeltaInputs(NamedTuple):
    """Inputs of the gated delta rule. Leading dimensions: [B, T], or [T] of packed prompts.

    Attributes:
        q, k: [..., Hk, K].
        v: [..., Hv, V].
        g: [..., Hv] float32 log decays from `gdn_gates`, from 0 to -inf, which erases the state. Kimi
            Delta Attention: Hk is Hv, and g [..., Hv, K] decays each key channel.
        beta: [..., Hv] float32, how much of a correction is written.

    For an operation that is given GateWeights, g and beta are the raw projections a and b instead, in
    the model's dtype: it computes the gates.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class GateWeights(NamedTuple):
    """Gate parameters of each value head of a Gated Delta Net, [Hv] float32; in Kimi Delta
    Attention dt_bias is [Hv, K].

    Attributes:
        beta_scale: 1 or 2. With 2, I - beta k k^T may have negative eigenvalues (Grazzi et al.
            2024).
        lower_bound: negative bound of the log decay, in Kimi Delta Attention with a safe gate; None
            for no bound.
    """

    A_log: Tensor
    dt_bias: Tensor
    beta_scale: float = 1.0
    lower_bound: float | None = None


class PagedKV(NamedTuple):
    """A softmax attention layer's paged keys and values, and its score parameters
    (`paged_attention.py`).

    Attributes:
        k_cache, v_cache: [pages, page, Hkv, D] and [pages, page, Hkv, Dv]. Dv is D, or
            less in a latent cache of one head: its values are the first Dv numbers of the keys.
            Float8_e4m3fn: codes of numbers that were divided by `k_scale` or `v_scale`.
        req_to_token: [R+1, max_context] int32 table of token slots.
        scale: factor of the scores.
        sliding_window: position p sees keys at positions > p - window; None for all earlier keys.
        sinks: [Hq] float32 scores of a key that every token sees and whose value is zero (Xiao et al.
            2024; gpt-oss); None for none.
    """

    k_cache: Tensor
    v_cache: Tensor
    req_to_token: Tensor
    scale: float
    sliding_window: int | None = None
    sinks: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def score_scale(self) -> float:
        """Factor of a query's product with the numbers in `k_cache`."""
        return self.scale * self.k_scale

    @property
    def coded(self) -> bool:
        """Whether the caches hold e4m3 codes."""
        return self.k_cache.dtype == torch.float8_e4m3fn


class LatentWeights(NamedTuple):
    """Weights that multi-head latent attention applies to latent vectors (`latent_attention.py`).

    Attributes:
        up_k, up_v: [H, nope, rank] and [H, rank, value], to each head's keys (transposed) and
            values.
        norm, norm_eps: [rank] float32 weight and epsilon of the RMS norm before a vector is stored.
    """

    up_k: Tensor
    up_v: Tensor
    norm: Tensor
    norm_eps: float


class AttentionRows(NamedTuple):
    """B rows of T new tokens each, with keys in the cache already.

    Attributes:
        rows: [B] request rows.
        seq_lens: [B] lengths with the T tokens, padding drafts included; 0 for padding.
        mask: [B, T, T] bool, which of the T tokens each of them sees, itself included. None: itself and
            those before it. A token's position is that of the first plus the number of others it sees.
        num_drafts: [B] int32; tokens after the first 1 + num_drafts[b] are padding without keys.
            None if all T are real.
        max_len: upper bound of seq_lens known on the host; None for the table's width.
    """

    rows: Tensor
    seq_lens: Tensor
    mask: Tensor | None = None
    num_drafts: Tensor | None = None
    max_len: int | None = None


class AttentionPrompts(NamedTuple):
    """New tokens of B prompts, packed along one axis, with keys in the cache already.

    Attributes:
        rows: [B] request rows.
        query_start_loc: [B+1] int32; row b has tokens query_start_loc[b] to query_start_loc[b + 1].
        seq_lens: [B] int32 lengths that count the new tokens.
        query_lens, seq_lens_host: new tokens and lengths, on the host. In a graph they are bounds:
            seq_lens_host is empty, and query_lens has all T tokens in its first entry and 0 in the others.
        copies: in a graph, [n] of q's dtype: room for copies of a layer's keys and values, in which the
            contexts of every replay fit. None: they are read in place.
    """

    rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    query_lens: Sequence[int]
    seq_lens_host: Sequence[int]
    copies: Tensor | None = None


class KVPlaces(NamedTuple):
    """Where keys and values go: caches [pages, page, Hkv, D], and token slots out_cache_loc [T]
    int32. Scales are those of PagedKV."""

    k_cache: Tensor
    v_cache: Tensor
    out_cache_loc: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


class Rope(NamedTuple):
    """Rotary embedding of queries and keys, after an optional RMS norm of each head.

    Attributes:
        cos_sin: [max_len, rot] float32 (`hybridrt.layers.rotary`): rot/2 cosines, then rot/2 sines.
        q_weight, k_weight: [head_dim] float32, None for no norm; eps is the norm's.
        sections: pairs of a head that turn by time, row and column, where positions have three axes.
            The axes take turns: pair i is a row's if i % 3 is 1, a column's if i % 3 is 2, while
            i < 3 * section (Qwen3-VL's interleaved M-RoPE). Others are time's.
    """

    cos_sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    sections: tuple[int, int, int] = (0, 0, 0)
