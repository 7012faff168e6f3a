"""Lightning attention (Qin et al. 2024): linear attention with a fixed decay a head."""

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.core.records import ConvWeights, SSMWeights
from hybridrt.kernels.dense.norm_activation import sigmoid_mul
from hybridrt.kinds.lightning import LightningConfig
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import SharedRMSNorm
from hybridrt.layers.weights import Build, CheckpointTarget
from hybridrt.recurrent.mamba2 import Mamba2AttnBackend, Mamba2Inputs, Mamba2Layer
from hybridrt.recurrent.segments import ExtendSegment


def decay_rates(num_heads: int) -> torch.Tensor:
    """[num_heads] float32: a head's state decays by exp(-rate) a token. From 2^(-8 / heads) to
    2^-8."""
    return torch.exp2(-8.0 / num_heads * torch.arange(1, num_heads + 1, dtype=torch.float64)).float()


def alibi_rates(num_heads: int) -> torch.Tensor:
    """[num_heads] float32: `decay_rates` of a power of two of heads, then every second one of twice
    as many, as ALiBi (Press et al. 2022) and published lightning models do."""
    power = 1 << (num_heads.bit_length() - 1)
    return torch.cat((decay_rates(power), decay_rates(2 * power)[::2]))[:num_heads]


class LightningMixer(nn.Module):
    """Lightning attention with its projections. Its state is in MambaPool, under `layer_id`.

        h ─ q, k, v, gate ─ SiLU(q, k, v) ─ S = decay S + v k^T, y = S q ─ norm over all heads ─ x
            sigmoid(gate) ─ out

    Args:
        rates: [all heads] float32; `decay_rates` by default.
        eps: epsilon of the norm.
        out_scale: multiplier of the output, applied to its weights.
    """

    kind = "lightning"
    A: torch.Tensor
    no_taps: torch.Tensor
    steps: torch.Tensor

    def __init__(
        self, name: str, config: LightningConfig, layer_id: int, hidden_size: int, *,
        rates: torch.Tensor | None = None, eps: float = 1e-5, out_scale: float = 1.0, build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.config, self.layer_id, self.out_scale = name, config, layer_id, out_scale
        self.heads, self.head_dim, _ = state_shape(config, build.tp.size).temporal
        self.width, size = self.heads * self.head_dim, config.num_heads * config.head_dim
        parts = [Segment(part, size) for part in ("v", "k", "q", "gate")]
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden_size, parts, build=build)
        self.norm = SharedRMSNorm(f"{name}.norm", size, eps, shards=build.tp.size, build=build)
        self.out_proj = RowLinear(f"{name}.out_proj", [Segment("x", size)], hidden_size, build=build)
        # Computed, not loaded: a decay of 0.999 in bfloat16 would be 1.
        rates = decay_rates(config.num_heads) if rates is None else rates
        self.register_buffer("A", -build.tp.shard(rates, 0).to(build.device))
        self.register_buffer("steps", torch.zeros_like(self.A))
        self.register_buffer("no_taps", torch.empty(3 * self.width, 0, dtype=build.dtype, device=build.device))

    def output(self, h: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Of normed tokens, summed over all ranks: [T, hidden] to [T, hidden]."""
        vkq, gate = self.in_proj(h).split((3 * self.width, self.width), dim=-1)
        y = batch.attn_backend.run(self, batch, Mamba2Inputs(vkq, self.steps.expand(len(h), -1)))
        return self.out_proj(sigmoid_mul(self.norm(y)[0], gate))

    @property
    def conv_weights(self) -> ConvWeights:
        return ConvWeights(self.no_taps)

    @property
    def weights(self) -> SSMWeights:
        """The limits make every time step 1."""
        return SSMWeights(self.A, dt_limit=(1.0, 1.0))

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        """Targets under `key`; qkv_proj holds q, k and v head by head."""
        heads, dim = self.config.num_heads, self.config.head_dim
        return {
            **self.in_proj.targets(
                f"{key}.qkv_proj",
                ["q", "k", "v"],
                rearrange=lambda t: t.unflatten(0, (heads, 3, dim)).transpose(0, 1).flatten(0, 2),
            ),
            **self.in_proj.targets(f"{key}.output_gate", ["gate"]),
            **self.norm.targets(f"{key}.norm"),
            **self.out_proj.targets(f"{key}.out_proj", "x", scale=self.out_scale),
        }


class LightningAttnBackend(Mamba2AttnBackend):
    """S_t = exp(A) S_{t-1} + v_t k_t^T and y_t = S_t q_t in each head, with SiLU on q, k and v.

    It runs as Mamba-2 with x = v, B = k, C = q, one group a head and time step 1. Inputs: xBC [T, v
    | k | q] before SiLU, and dt [T, H] of any values. Strided views are fine.
    """

    kind = "lightning"

    def conved_chunks(self, layer: Mamba2Layer, segment: ExtendSegment, xBC: torch.Tensor) -> torch.Tensor:
        return sigmoid_mul(xBC, xBC)  # PyTorch's SiLU is slow on strided rows
