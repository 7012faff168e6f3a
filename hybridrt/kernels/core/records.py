"""Arguments of operations that always travel together, with their shapes and dtypes.

Shapes: B rows, T new tokens a row (prompts are packed: T tokens in all), S state slots, R running requests, C conv
channels, K conv taps, Wc columns of a conv ring, W columns of a state ring. A state of Mamba-2 is [H, P, N] (H heads of
P channels, N state columns, G groups of keys), of a Gated Delta Net [Hv, V, K] (Hv value heads, Hk key heads), of
Mamba-1 [I, N] (I channels). Softmax attention has Hq query heads and Hkv key heads of dim D. Entry 0 of every pool is
scratch. A row whose state slots are -1 is padding: it gets zeros and touches no state. Indices are int32. Activations,
conv rings, values and keys of state rings share the model's dtype; pools of states are float32, bfloat16 or float16;
the rest is float32 where nothing else is said. Token-wise tensors may have any row and token stride, so that they can
be column slices of one projection.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import ChunkPlan

Activation = Literal["silu"] | None
NO_LIMIT = (0.0, math.inf)
L2_NORM_EPS = 1e-6  # added to the squared norm of a query or a key, in references and kernels


class TokenInputs(NamedTuple):
    """What a model reads of each token, [T] int32 each; see ForwardBatch."""

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor

    @classmethod
    def allocate(cls, count: int, device: torch.device) -> "TokenInputs":
        return cls(*torch.zeros(3, count, dtype=torch.int32, device=device))

    def first(self, count: int) -> "TokenInputs":
        """Views of the first `count` tokens."""
        return TokenInputs(*(part[:count] for part in self))

    def then(self, other: "TokenInputs") -> "TokenInputs":
        """These tokens, then those of `other`."""
        return TokenInputs(*(torch.cat(pair) for pair in zip(self, other)))


class DecodeRowInputs(NamedTuple):
    """B decode rows of T tokens, as the host packed them.

    Attributes:
        rows: [B] request rows; seq_lens: [B] lengths that count the step's tokens.
        new_pages: [B], the KV page that holds the row's last draft (its one token if T is 1) if that page is new, else
            -1.
        drafts: [B, T - 1] tokens after the last sampled one, of which num_drafts [B] are drafts. The rest is padding.
            Both None if T is 1.
    """

    rows: Tensor
    seq_lens: Tensor
    new_pages: Tensor
    drafts: Tensor | None = None
    num_drafts: Tensor | None = None


class RowTables(NamedTuple):
    """By request row, [R + 1] each: the state slot, and the cursors of the state ring."""

    req_to_state_slot: Tensor
    ring_start: Tensor
    ring_length: Tensor


class ConvWeights(NamedTuple):
    """A depthwise convolution: weight [C, K], bias [C] or None, and what follows it. With K = 0 there is no conv: the
    activation follows the inputs themselves (`mamba2_decode` alone takes that)."""

    weight: Tensor
    bias: Tensor | None = None
    activation: Activation = "silu"


class ConvState(NamedTuple):
    """Raw conv inputs of B rows: the one of position p is in column p mod Wc of its slot.

    Attributes:
        conv: [S+1, C, Wc] rings; Wc is a power of two, at least K - 1 + T for steps of T tokens.
        read_state_slots, write_state_slots: [B], where inputs before the step stand and where new ones go.
        start_positions: [B] absolute position of each row's first new token.
    """

    conv: Tensor
    read_state_slots: Tensor
    write_state_slots: Tensor
    start_positions: Tensor


class IntermediateStates(NamedTuple):
    """Where a verify step leaves what it would make of the state, so that the pool keeps the state before it.

    Attributes:
        stored: [R+1, T or more, *state] in the dtype of the states: stored[rows[b], t] is the state after token t of
            row b. For a conv [R+1, T, C, K-1]: the raw inputs that end at token t, oldest first.
        rows: [B].
        parents: [B, T] a draft tree: the parent (< t) of each node, -1 for the state in the pool. None for a chain.
    """

    stored: Tensor
    rows: Tensor
    parents: Tensor | None = None


class StateSlots(NamedTuple):
    """The recurrent states of B rows.

    Attributes:
        states: [S+1, *state] pool.
        read_state_slots, write_state_slots: [B], the slots of the state before and after the step.
        intermediate: of a verify step: where the state after each token is stored. The pool is not written then.
    """

    states: Tensor
    read_state_slots: Tensor
    write_state_slots: Tensor
    intermediate: IntermediateStates | None = None


class StateRing(NamedTuple):
    """Inputs of each row's tokens since its state was written, of one layer (`state_ring.py`).

    Attributes:
        values: [R+1, H, W, P]; keys: [R+1, G, W, N]; gates: [R+1, H, W] float32, or [R+1, H, W, N] in Kimi Delta
            Attention.
        rows: [B] ring of each row.
        start, length: [B] column of its oldest entry and number of its entries, at the head of the step.
    """

    values: Tensor
    keys: Tensor
    gates: Tensor
    rows: Tensor
    start: Tensor
    length: Tensor


class FusedStep(NamedTuple):
    """The conv and the states of a decode step that one operation does from the projection on.

    Attributes:
        conv_weights: with SiLU behind the conv.
        conv_state, state: of the same slots; those read and written are equal with a ring.
        ring: the inputs since the state in the pool, which is a checkpoint then.
        windows: of a draft tree, which `state.intermediate` describes: [R+1, T, C, K-1], the raw conv inputs that end
            at each node. None for a chain.
    """

    conv_weights: ConvWeights
    conv_state: ConvState
    state: StateSlots
    ring: StateRing | None = None
    windows: Tensor | None = None

    @property
    def conv_nodes(self) -> IntermediateStates | None:
        """What the conv of a draft tree stores, and where; None for a chain."""
        tree = self.state.intermediate
        return None if self.windows is None or tree is None else tree._replace(stored=self.windows)


class SavedStates(NamedTuple):
    """States within prompts that stay behind in slots of their own, at most one of a prompt. A chunk ends there.

    Attributes:
        chunk_slots: [n] int32, of each chunk of the plan the slot for the state behind it; 0 for none.
        row_slots, row_lengths: [B] int32, the same by prompt: the slot, 0 for none, and how many of the prompt's new
            tokens the state has seen.
    """

    chunk_slots: Tensor
    row_slots: Tensor
    row_lengths: Tensor


class Prompts(NamedTuple):
    """New tokens of B prompts, packed along one axis.

    Attributes:
        query_start_loc: [B+1]; row b has the tokens from query_start_loc[b] to query_start_loc[b + 1]. Tokens past the
            last entry get zeros.
        has_initial_state: [B] bool, False where a row starts from zeros instead of what its slot holds.
        plan: the chunks of the same rows.
        saves: states that stay behind within rows; None for none. Not every operation leaves them.
    """

    query_start_loc: Tensor
    has_initial_state: Tensor
    plan: ChunkPlan
    saves: SavedStates | None = None


class SSMInputs(NamedTuple):
    """What tokens bring to a selective state space model, after the conv. Last dimensions are contiguous.

    Mamba-2: x, z [..., H, P], dt [..., H], B, C [..., G, N]; Mamba-1: x, z, dt [..., I], B, C [..., N]. dt is raw;
    without z the output is not gated. The leading dimensions are [B, T], or [T] of packed prompts.
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    z: Tensor | None = None


class SSMWeights(NamedTuple):
    """Numbers of each head of Mamba-2 [H], or of each channel of Mamba-1 [I].

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
    """What tokens bring to the gated delta rule: q, k [..., Hk, K], v [..., Hv, V]; g, beta [..., Hv] float32 from
    `gdn_gates`. A gate g is from 0 to -inf, which closes the state: nothing of before is left. In Kimi Delta Attention
    Hk is Hv, and g is [..., Hv, K], a decay for each channel of a key. Next to GateWeights g and beta are raw, as
    projections gave them. The leading dimensions are [B, T], or [T] of packed prompts."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class GateWeights(NamedTuple):
    """Numbers of each value head of a Gated Delta Net: [Hv] float32; in Kimi Delta Attention dt_bias is [Hv, K].

    Attributes:
        beta_scale: of beta, 1 or 2. With 2 a step's matrix I - beta k k^T may have negative eigenvalues (Grazzi et al.
            2024).
        lower_bound: of the log of the decay, below 0, in Kimi Delta Attention with a safe gate. None: there is none.
    """

    A_log: Tensor
    dt_bias: Tensor
    beta_scale: float = 1.0
    lower_bound: float | None = None


class PagedKV(NamedTuple):
    """A softmax attention layer's keys and values in pages, and how it weighs them (`paged_attention.py`).

    Attributes:
        k_cache, v_cache: [pages, page, Hkv, D] and [pages, page, Hkv, Dv]. Dv is D, or less where a cache of latent
            vectors has one head and its values are the first Dv numbers of the keys.
        req_to_token: [R+1, max_context] int32 table of KV slots.
        scale: of the scores.
        sliding_window: a token at position p sees keys at positions > p - window; None for all keys before it.
    """

    k_cache: Tensor
    v_cache: Tensor
    req_to_token: Tensor
    scale: float
    sliding_window: int | None = None


class LatentWeights(NamedTuple):
    """What multi-head latent attention does with its latent vectors (`latent_attention.py`).

    Attributes:
        up_k, up_v: [H, nope, rank] and [H, rank, value]: to each head's keys, transposed, and to its values.
        norm, norm_eps: [rank] float32 weight and epsilon of the RMS norm of a latent vector before it is stored.
    """

    up_k: Tensor
    up_v: Tensor
    norm: Tensor
    norm_eps: float


class AttentionRows(NamedTuple):
    """B rows of T new tokens each, whose keys are in the cache already.

    Attributes:
        rows: [B] request rows.
        seq_lens: [B] the keys that the last of the T tokens sees; 0 for padding.
        tree_mask: [B, T, T] bool, what each node of a draft tree sees of the T: its ancestors and itself. None for a
            chain.
        num_drafts: [B] int32; tokens after the first 1 + num_drafts[b] of a row are padding without keys in the cache.
            None where all T are real.
        max_len: an upper bound of seq_lens known on the host; None means the table's width.
    """

    rows: Tensor
    seq_lens: Tensor
    tree_mask: Tensor | None = None
    num_drafts: Tensor | None = None
    max_len: int | None = None


class AttentionPrompts(NamedTuple):
    """New tokens of B prompts, packed along one axis, whose keys are in the cache already.

    Attributes:
        rows: [B] request rows.
        query_start_loc: [B+1] int32; row b has the tokens from query_start_loc[b] to query_start_loc[b + 1].
        seq_lens: [B] int32 length that counts the new tokens.
        query_lens, seq_lens_host: new tokens and lengths, on the host. In a graph seq_lens_host is empty, and
            query_lens has one row with all T tokens: bounds of what the rows have on the device.
    """

    rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    query_lens: Sequence[int]
    seq_lens_host: Sequence[int]


class KVPlaces(NamedTuple):
    """Where keys and values go: caches [pages, page, Hkv, D], and the slot of each token, out_cache_loc [T] int32."""

    k_cache: Tensor
    v_cache: Tensor
    out_cache_loc: Tensor


class Rope(NamedTuple):
    """Rotary embedding of a layer's queries and keys, after an optional RMS norm of each head.

    Attributes:
        cos_sin: [max_len, rot] float32 (`hybridrt.layers.rotary`): rot/2 cosines, then rot/2 sines.
        q_weight, k_weight: [head_dim] float32, None for no norm; eps belongs to it.
    """

    cos_sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
