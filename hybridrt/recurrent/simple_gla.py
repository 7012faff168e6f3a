"""Simple gated linear attention: normed and rotated heads, a fixed decay a head."""

from typing import NamedTuple

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.attention.paged_attention import qk_norm_rotary
from hybridrt.kernels.core.records import Rope, SSMInputs, SSMWeights
from hybridrt.kernels.core.slots import by_head
from hybridrt.kernels.mamba.mamba2_scan import mamba2_chunk_scan
from hybridrt.kernels.mamba.selective_state_update import selective_state_update
from hybridrt.kinds.base import check_divides
from hybridrt.kinds.registry import state_shape
from hybridrt.kinds.simple_gla import SimpleGLAConfig
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import GatedRMSNorm, RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import Build, CheckpointTarget, sharded
from hybridrt.recurrent.backend import MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


class SimpleGLAInputs(NamedTuple):
    """v, k, q [T, H, P], normed and rotated. Strided views are fine."""

    v: torch.Tensor
    k: torch.Tensor
    q: torch.Tensor


class SimpleGLAMixer(nn.Module):
    """Simple GLA with its projections. Its state is in MambaPool, under `layer_id`.

        h ─ q, k, v, gate ─ norm and rotation of each head of q, k ─ S = decay S + v k^T, y = S q
          ─ norm in groups ─ x sigmoid(gate) ─ out

    The published layer divides y by sqrt(head_dim). The norm cancels every factor but for its
    epsilon, so here the epsilon is multiplied by head_dim instead.

    Args:
        rates: [all heads] float32: a head's state decays by exp(-rate) a token.
        cos_sin: rotary table (hybridrt.layers.rotary).
        eps: epsilon of all norms.
        groups: groups of the norm after the state. A rank holds whole groups, or a part of the only
            one.
    """

    kind = "simple_gla"
    A: torch.Tensor
    steps: torch.Tensor

    def __init__(
        self, name: str, config: SimpleGLAConfig, layer_id: int, hidden_size: int, *, rates: torch.Tensor,
        cos_sin: torch.Tensor, eps: float, groups: int, build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.config, self.layer_id, self.tp = name, config, layer_id, build.tp
        self.heads, self.head_dim, _ = state_shape(config, build.tp.size).temporal
        self.width, size = self.heads * self.head_dim, config.num_heads * config.head_dim
        check_divides("groups of the norm", groups, "channels", size)
        if groups > 1:
            build.tp.divide("groups of the norm", groups)
        parts = [Segment(part, size) for part in ("q", "k", "v", "gate")]
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden_size, parts, build=build)
        self.q_norm, self.k_norm = (
            RMSNorm(f"{name}.{part}_norm", config.head_dim, eps, device=build.device) for part in ("q", "k")
        )
        self.rope = Rope(cos_sin, self.q_norm.weight, self.k_norm.weight, eps)
        self.norm = GatedRMSNorm(
            self.width, eps * config.head_dim, group_size=size // groups, norm_before_gate=True, activation="sigmoid",
            build=build,
        )  # fmt: skip
        self.out_proj = RowLinear(f"{name}.out_proj", [Segment("x", size)], hidden_size, build=build)
        self.register_buffer("A", -build.tp.shard(rates, 0).to(build.device))
        self.register_buffer("steps", torch.zeros_like(self.A))

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        projected, residual = self.in_proj.normed(norm, x, residual)
        *parts, gate = projected.split(self.width, dim=-1)
        q, k, v = (by_head(part, self.heads, self.head_dim) for part in parts)
        q, k = qk_norm_rotary(q, k, batch.positions, self.rope)
        y = batch.attn_backend.run(self, batch, SimpleGLAInputs(v, k, q))
        return self.out_proj.onto(residual, self.norm(y, gate))

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        """Targets under `key`, by the names of Ling 2.5: query_key_value, query_layernorm,
        key_layernorm, g_proj, g_norm, o_proj."""
        return {
            **self.in_proj.targets(f"{key}.query_key_value", ["q", "k", "v"]),
            **self.in_proj.targets(f"{key}.g_proj", ["gate"]),
            **self.q_norm.targets(f"{key}.query_layernorm"),
            **self.k_norm.targets(f"{key}.key_layernorm"),
            f"{key}.g_norm.weight": sharded(self.tp, f"{self.name}.norm.weight", self.norm.weight.data),
            **self.out_proj.targets(f"{key}.o_proj", "x"),
        }


class SimpleGLAAttnBackend(MambaAttnBackendBase[SimpleGLAMixer, SimpleGLAInputs]):
    """S_t = exp(A) S_{t-1} + v_t k_t^T and y_t = S_t q_t in each head.

    It runs as a selective state space model with x = v, B = k, C = q, one group a head and time
    step 1.
    """

    inputs = SimpleGLAInputs
    kind, scan, saves_at_chunks, extend_in_graphs = "simple_gla", "mamba2_chunk_scan", True, True

    def decode(
        self, layer: SimpleGLAMixer, inputs: SimpleGLAInputs, segment: DecodeSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens = _tokens(layer, *(segment.by_row(each) for each in inputs))
        state = segment.state(self.layer_cache(layer.layer_id))
        return selective_state_update(tokens, _weights(layer), state).flatten(0, 1).flatten(1)

    def extend(
        self, layer: SimpleGLAMixer, inputs: SimpleGLAInputs, segment: ExtendSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens = _tokens(layer, *inputs)
        state = segment.state(self.layer_cache(layer.layer_id))
        return mamba2_chunk_scan(tokens, _weights(layer), state, segment.prompts).flatten(1)


def _tokens(layer: SimpleGLAMixer, v: torch.Tensor, k: torch.Tensor, q: torch.Tensor) -> SSMInputs:
    return SSMInputs(v, layer.steps.expand(v.shape[:-1]), k, q)


def _weights(layer: SimpleGLAMixer) -> SSMWeights:
    """The limits make every time step 1."""
    return SSMWeights(layer.A, dt_limit=(1.0, 1.0))
