"""The Kimi Delta Attention backend: that of the Gated Delta Net, with a decay for each channel of a key."""

from typing import Any

from hybridrt.attention.gdn import GDNAttnBackend
from hybridrt.kernels.core.records import GateWeights


class KDAAttnBackend(GDNAttnBackend):
    """Kimi Delta Attention layers (Moonshot AI 2025): conv over q|k|v, then the gated delta rule.

    Inputs: mixed_qkv [T, q | k | v] before the conv, a [T, H, K] and b [T, H]; strided views will do. The norm comes
    after.
    """

    kind = "kda"

    @staticmethod
    def weights(layer: Any) -> GateWeights:
        return GateWeights(layer.A_log, layer.dt_bias, lower_bound=layer.config.lower_bound)
