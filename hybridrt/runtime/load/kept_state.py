"""What a model's layers keep for a request: recurrent states, and keys and values in pages."""

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.model_config import AttentionSpec, ModelConfig
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.attention import attention_spec
from hybridrt.mem_cache.pools.kv_pool import layer_groups, page_bytes
from hybridrt.mem_cache.pools.mamba_pool_spec import MambaPoolSpec
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.runtime.load.draft_needs import draft_needs
from hybridrt.runtime.load.target import RunTarget


def pool_spec(config: EngineConfig, target: RunTarget) -> MambaPoolSpec:
    """The state that the model's recurrent layers keep."""
    mc, spec = target.model_config, config.speculative
    groups = {state_shape(c, target.tp.size): mc.linear_layer_ids(kind) for kind, c in mc.linear.items()}
    groups = {shape: ids for shape, ids in groups.items() if ids}
    forks = spec is not None and spec.forks
    return MambaPoolSpec(
        groups, target.dtype, target.state_dtype, config.num_verify_tokens, target.state_mode, forks,
        config.rounds_stochastically, target.tp.rank,
    )  # fmt: skip


def kv_layers(config: EngineConfig, target: RunTarget) -> dict[AttentionSpec, list[int]]:
    """Layers with keys and values by their spec: the model's attention layers, then its drafter's."""
    mc = target.model_config
    layers: dict[AttentionSpec, list[int]] = {}
    for layer_id in mc.full_attention_layer_ids + draft_needs(config).kv_layers(mc):
        spec = attention_spec(mc.attention_of(layer_id), target.tp, target.dtype, target.kv_codes)
        layers.setdefault(spec, []).append(layer_id)
    return layers


def page_demands(config: EngineConfig, target: RunTarget) -> list[PageDemand]:
    """How many pages of each page group a request holds."""
    mc = target.model_config
    # Without recurrent layers, a prefix is usable at whole pages alone: one more page makes its last one usable.
    back = config.page_size - 1 if config.prefix_cache and not recurs(mc) else 0
    sizes = config.chunked_prefill_size, config.num_verify_tokens
    windows = [group.window for group in layer_groups(kv_layers(config, target))]
    return [PageDemand(config.page_size, window, *sizes, 0 if window is None else back) for window in windows]


def recurs(model_config: ModelConfig) -> bool:
    """Whether a model has recurrent layers."""
    return any(map(model_config.linear_layer_ids, model_config.linear))


def keeps_prefixes(config: EngineConfig, model_config: ModelConfig) -> bool:
    """Whether requests leave prefixes for others. None do if no layer keeps anything."""
    attends = bool(model_config.full_attention_layer_ids or model_config.mtp_attention_layer_ids)
    return config.prefix_cache and (recurs(model_config) or attends)


def set_bytes(config: EngineConfig, target: RunTarget) -> int:
    """Bytes of a KV page of each page group, together."""
    return sum(page_bytes(kv_layers(config, target), config.page_size))


def table_length(config: EngineConfig, target: RunTarget, max_len: int) -> int:
    """Tokens of a row in the table, with the drafts of a last verify step; 0 without attention layers."""
    return max_len + config.num_verify_tokens - 1 if kv_layers(config, target) else 0
