"""Gated Delta Net (Yang et al. 2024, arXiv:2412.06464): mixer and backend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.attention.base import RecurrentLayer
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.core.records import ConvWeights, DeltaInputs, GateWeights
from hybridrt.kernels.delta_rule.decode import gdn_decode, split_qkv
from hybridrt.kernels.delta_rule.delta_rule import chunk_gated_delta_rule
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_varlen
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import GatedRMSNorm, RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import Build, CheckpointTarget, Piece, Transform, parameter, sharded, unchanged, whole
from hybridrt.recurrent.backend import MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


@dataclass(frozen=True)
class GDNKeys:
    """A checkpoint's names for the tensors of the mixer.

    Attributes:
        projections: tensor -> its segments (q, k, v, z, b, a).
        by_key_head: rows of a projection are sorted by key head, then by segment.
        convs: tensor -> its segments. One tensor for all, or one each.
        norm, out: the gated norm and the output projection.
    """

    projections: Mapping[str, Sequence[str]]
    by_key_head: bool = False
    convs: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"conv1d": "qkv"})
    norm: str = "norm"
    out: str = "out_proj"


class GDNInputs(NamedTuple):
    """mixed_qkv [T, q | k | v] before the conv, a [T, Hv] (KDA: [T, H, K]), b [T, Hv]. Strided
    views are fine."""

    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


class GDNLayer(RecurrentLayer, Protocol):
    """What the backend reads of a mixer. `weights`: for gates."""

    @property
    def conv_weights(self) -> ConvWeights: ...

    @property
    def weights(self) -> GateWeights: ...


class GDNMixer(nn.Module):
    """Gated Delta Net over hidden states. Its state is in MambaPool, under `layer_id`."""

    kind = "gdn"

    def __init__(
        self,
        name: str,
        config: GDNConfig,
        layer_id: int,
        hidden_size: int,
        norm_eps: float,
        *,
        keys: GDNKeys,
        build: Build,
    ) -> None:
        super().__init__()
        self.name, self.config, self.layer_id, self.tp, self.keys = name, config, layer_id, build.tp, keys
        self.shape = state_shape(config, self.tp.size)
        self.num_v_heads, head_dim, _ = self.shape.temporal
        self.width = self.num_v_heads * head_dim
        qk, v = config.num_k_heads * config.head_k_dim, config.num_v_heads * config.head_v_dim
        device = build.device
        parts = [Segment("q", qk), Segment("k", qk), Segment("v", v), Segment("z", v)]
        parts += [Segment("b", config.num_v_heads), Segment("a", config.num_v_heads)]
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden_size, parts, build=build, aligned=True)
        self.out_proj = RowLinear(f"{name}.out_proj", [Segment("x", v)], hidden_size, build=build)
        self.conv_weight = parameter(self.shape.conv_dim, config.conv_kernel, dtype=build.dtype, device=device)
        if len(keys.convs) > 1:  # each adds its part
            self.conv_weight.data.zero_()
        self.A_log = parameter(self.num_v_heads, dtype=torch.float32, device=device, dummy="zeros")
        self.dt_bias = parameter(self.num_v_heads, dtype=torch.float32, device=device, dummy="dt_bias")
        # Repeated: the norm can read z as a view of the projection.
        self.norm = GatedRMSNorm(self.width, norm_eps, group_size=head_dim, norm_before_gate=True, build=build)

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        projected, residual = self.in_proj.normed(norm, x, residual)
        mixed_qkv, z, b, a = projected.split([self.shape.conv_dim, *self.in_proj.sizes[3:]], dim=-1)
        y = batch.attn_backend.run(self, batch, GDNInputs(mixed_qkv, a, b))
        return self.out_proj.onto(residual, self.norm(y, z))

    @property
    def conv_weights(self) -> ConvWeights:
        return ConvWeights(self.conv_weight)

    @property
    def weights(self) -> GateWeights:
        return GateWeights(self.A_log, self.dt_bias, self.config.beta_scale)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        keys, key_heads = self.keys, self.config.num_k_heads
        found = {
            **self.out_proj.targets(f"{key}.{keys.out}", "x"),
            f"{key}.A_log": sharded(self.tp, f"{self.name}.A_log", self.A_log.data),
            f"{key}.dt_bias": sharded(self.tp, f"{self.name}.dt_bias", self.dt_bias.data),
            f"{key}.{keys.norm}.weight": whole(
                f"{self.name}.norm.weight", self.norm.weight.data, lambda t: t.repeat(self.num_v_heads)
            ),
        }
        for name, parts in keys.projections.items():
            rows = [self.in_proj.segments[part].size // key_heads for part in parts]
            order = _deinterleave(key_heads, rows) if keys.by_key_head else unchanged
            found |= self.in_proj.targets(f"{key}.{name}", list(parts), rearrange=order)
        return found | {f"{key}.{name}.weight": self._conv_target(parts) for name, parts in keys.convs.items()}

    def _conv_target(self, names: Sequence[str]) -> CheckpointTarget:
        """Accepts q, k and v [channels, 1, K] joined, one of them, or a third of all three joined,
        as transformers' save_pretrained writes."""
        sizes = [self.in_proj.segments[name].size for name in "qkv"]
        first, total = "qkv".index(names[0]), sum(sizes)
        third = -(-total // 3)
        known = {total: 0} if len(names) == 3 else {
            min(third, total - first * third): first * third, sizes[first]: sum(sizes[:first]),
        }  # fmt: skip

        def select(t: torch.Tensor) -> torch.Tensor:
            if t.shape[0] not in known:
                raise RuntimeError(f"{'|'.join(names)} has {sum(sizes[first : first + len(names)])} channels")
            rows = t.squeeze(1)
            before = known[t.shape[0]]
            whole_rows = F.pad(rows, (0, 0, before, total - before - len(rows)))
            return torch.cat([self.tp.shard(part, 0) for part in whole_rows.split(sizes)])

        name = f"{self.name}.conv.{''.join(names)}"
        return (Piece(name, self.conv_weight.data, select, accumulate=len(names) < 3),)


def _deinterleave(heads: int, dims: list[int]) -> Transform:
    def rearrange(t: torch.Tensor) -> torch.Tensor:
        parts = t.unflatten(0, (heads, sum(dims))).split(dims, dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    return rearrange


class GDNAttnBackend(MambaAttnBackendBase[GDNLayer, GDNInputs]):
    """Conv over q|k|v, gates from a and b, gated delta rule (arXiv:2412.06464). The mixer norms."""

    inputs = GDNInputs
    kind, scan, extend_in_graphs = "gdn", "chunk_gated_delta_rule", True

    def decode(
        self, layer: GDNLayer, inputs: GDNInputs, segment: DecodeSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        qkv, a, b = segment.by_row(inputs.mixed_qkv), segment.by_row(inputs.a), segment.by_row(inputs.b)
        step = segment.fused_step(layer.conv_weights, self.layer_cache(layer.layer_id))
        y = gdn_decode(qkv, a, b, weights=layer.weights, step=step)
        return y.flatten(0, 1).flatten(1)

    def extend(
        self, layer: GDNLayer, inputs: GDNInputs, segment: ExtendSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        cache = self.layer_cache(layer.layer_id)
        conved = causal_conv1d_varlen(inputs.mixed_qkv, *segment.conv_chunks(layer.conv_weights, cache))
        state = segment.state(cache)
        tokens = DeltaInputs(*split_qkv(conved, state.states), inputs.a, inputs.b)
        y = chunk_gated_delta_rule(tokens, state, segment.prompts, layer.weights)
        if cache.codes is not None:
            segment.round_states(cache, state)
        return y.flatten(1)
