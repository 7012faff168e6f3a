"""Floors of a device: the fewest bytes of a decode step, and the useful flops of prompts and images."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch.nn import Parameter

from hybridrt.base.model_config import AttentionSpec, ModelConfig
from hybridrt.kinds.registry import state_shape
from hybridrt.mem_cache.pools.mamba_pool_spec import MambaPoolSpec, ring_width
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.mem_cache.pools.stored_states import stored_state
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import routed_experts
from hybridrt.models.vision.tower import Tower


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads and writes at least."""

    weights: float
    state: float
    kv: float

    @property
    def total(self) -> float:
        return self.weights + self.state + self.kv

    def floor_ms(self, bytes_per_s: float) -> float:
        return self.total / bytes_per_s * 1e3


def step_bytes(model: CausalLM, pools: Pools, batch: int, context: int) -> StepBytes:
    """The bytes that a plain decode step moves at least in the state mode of its pools, on one tensor-parallel rank.

    Weights: each matrix once, the embedding table only as the head; of routed experts those that `batch` tokens
    are expected to touch. KV: see `kv_bytes`. State: see `state_bytes`.
    """
    config, weights = model.config, 0.0
    for name, p in _text_parameters(model):
        share = _touched_share(config, len(p), batch) if ".experts." in name else 0.0 if name == "embed.weight" else 1.0
        weights += p.numel() * p.element_size() * share
    if config.tie_word_embeddings:
        weights += config.vocab_size * config.hidden_size * model.dtype.itemsize / model.tp.size
    pool = pools.req_to_token.mamba_pool
    state = state_bytes(pool.spec) if pool is not None else 0.0
    return StepBytes(weights, batch * state, float(batch * kv_bytes(pools.kv.specs.values(), context)))


def kv_bytes(layers: Iterable[AttentionSpec], context: int) -> int:
    """Bytes that one row's step reads of layers with these specs: the whole context once, or the
    part in a window."""
    return sum(spec.token_bytes * min(context, spec.sliding_window or context) for spec in layers)


def state_bytes(spec: MambaPoolSpec) -> float:
    """Bytes of one row and one token, over all layers.

    K - 1 columns of the conv ring are read and one is written. The state is read and written. With
    replay it is read, with the ring's entries (0 to W - 1, equally often), and an entry is written.
    Every W tokens a fold reads the ring and the state, and writes the state.
    """
    total = 0.0
    for shape, layers in spec.groups.items():
        conv = shape.conv_dim * shape.conv_kernel * spec.conv_dtype.itemsize if shape.segments else 0
        stored, dtype = stored_state(shape, spec.state_dtype)
        state = prod(stored) * dtype.itemsize
        moved = 2.0 * state
        if spec.mode == "replay":
            width = ring_width(spec.tokens_per_step)
            entry = sum(prod(dims) * dtype.itemsize for dims, dtype in spec.row_shapes(shape).values()) / width
            moved = state + 2 * state / width + entry * ((width - 1) / 2 + 1 + 1)
        total += len(layers) * (conv + moved)
    return total


def prefill_flops(model: CausalLM, count: int, length: int) -> float:
    """Useful flops of `count` prompts of `length` tokens, on one tensor-parallel rank.

    Two for each number of a matrix by which a token is multiplied: of routed experts those that it picks, and the
    output head for the last token alone. In attention, scores and values of the keys that a query sees. In recurrent
    layers, the outer product and the readout of each state.
    """
    config, tokens = model.config, count * length
    per_token = sum(
        2.0 * p.numel() * (_picked_share(config, len(p)) if ".experts." in name else 1.0)
        for name, p in _text_parameters(model)
        if p.ndim > 1 and not name.startswith(("embed.", "head."))
    )
    for kind, linear in config.linear.items():
        layers = sum(spec.linear == kind for spec in config.layers)
        per_token += 4.0 * layers * state_shape(linear).temporal_numel / model.tp.size
    seen = 0.0
    for i in config.full_attention_layer_ids:
        attention = config.attention_of(i)
        window, latent = min(attention.sliding_window or length, length), attention.latent
        keys = latent.nope_dim + latent.rope_dim if latent else attention.head_dim
        values = latent.value_dim if latent else attention.v_head_dim or attention.head_dim
        pairs = count * (length * window - window * (window - 1) / 2)
        seen += 2.0 * pairs * attention.num_heads * (keys + values) / model.tp.size
    return tokens * per_token + seen + 2.0 * count * config.vocab_size * config.hidden_size / model.tp.size


def encoder_flops(tower: Tower, grids: Sequence[tuple[int, int]]) -> float:
    """Flops of a tower for pictures of these grids of patches.

    Two for each number of a matrix by which a patch, or a token after the merge, is multiplied. In attention, scores
    and values of all pairs of patches of a picture.
    """
    spec, total = tower.spec, 0.0
    patches = [rows * columns for rows, columns in grids]
    inner = sum(patches) + spec.num_prefix * len(grids)
    for name, p in tower.named_parameters():
        part = name.partition(".")[0]
        if p.ndim > 1 and part not in ("table", "prefix"):
            met = {"patch": sum(patches), "blocks": inner}.get(part, sum(patches) // spec.merge**2)
            total += 2.0 * p.numel() * met
    layers = spec.num_layers - len(spec.convolutions)
    return total + layers * sum(4.0 * (n + spec.num_prefix) ** 2 * spec.hidden_size for n in patches)


def _text_parameters(model: CausalLM) -> list[tuple[str, Parameter]]:
    """All parameters but those of a tower, which text does not use."""
    return [(name, p) for name, p in model.named_parameters() if not name.startswith("tower.")]


def _picked_share(config: ModelConfig, stacked: int) -> float:
    """Share of `stacked` experts that one token meets: picked and shared ones."""
    return (stacked - routed_experts(config.hf) + config.hf.num_experts_per_tok) / stacked


def _touched_share(config: ModelConfig, stacked: int, batch: int) -> float:
    """Expected share of `stacked` experts that `batch` tokens meet, if they pick uniformly among routed
    ones."""
    routed = routed_experts(config.hf)
    untouched = routed * (1.0 - config.hf.num_experts_per_tok / routed) ** batch
    return 1.0 - untouched / stacked
