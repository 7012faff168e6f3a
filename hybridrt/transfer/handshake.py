"""The handshake: two workers agree on everything that a state's bytes depend on."""

from pathlib import Path

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import HandshakeError
from hybridrt.kinds.registry import state_shape
from hybridrt.mem_cache.pools.kv_pool import ONES, LayerScales
from hybridrt.mem_cache.pools.mamba_pool_spec import ring_width
from hybridrt.runtime.load.state_identity import Identity, first_difference, state_identity
from hybridrt.runtime.load.target import RunTarget

VERSION = 5


Handshake = Identity


def handshake_of(config: EngineConfig, target: RunTarget, model_path: Path, kv_scales: LayerScales = ONES) -> Handshake:
    """All that the bytes and the meaning of a state depend on: `state_identity` with the scales of
    the model's layers, and

    version: of the messages and the image.
    draft_length: drafts that a verify step may hold.
    ring_width: columns of the conv ring and of the state ring.
    page_size: tokens in a KV page.
    """
    tokens = config.num_verify_tokens
    layers = target.model_config.full_attention_layer_ids  # images have none of a prediction head
    scales = {i: kv_scales[i] for i in layers if i in kv_scales}
    widths = [state_shape(c).conv_width(tokens) for c in target.model_config.linear.values()]
    return {
        "version": VERSION,
        **state_identity(config, target, model_path, scales),
        "draft_length": tokens - 1,
        "ring_width": f"conv {max(widths, default=0)}, state {ring_width(tokens)}",
        "page_size": config.page_size,
    }


def check_handshake(ours: Handshake, theirs: Handshake) -> None:
    """Raises HandshakeError with the first field that differs and both values."""
    name = first_difference(ours, theirs)
    if name is not None:
        raise HandshakeError(name, ours.get(name), theirs.get(name))
