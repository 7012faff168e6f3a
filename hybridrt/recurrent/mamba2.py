"""Mamba-2 (arXiv:2405.21060, figure 6): mixer, block with projections, and backend."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import nn

from hybridrt.attention.base import RecurrentLayer
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.core.records import ConvWeights, SSMInputs, SSMWeights
from hybridrt.kernels.core.slots import by_head
from hybridrt.kernels.mamba.mamba2_decode import mamba2_decode
from hybridrt.kernels.mamba.mamba2_decode_cpu import mamba2_in_place
from hybridrt.kernels.mamba.mamba2_scan import mamba2_chunk_scan, split_conv_channels
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_varlen, check_conv_ring
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import GatedRMSNorm, RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import Build, CheckpointTarget, parameter, sharded, whole
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.recurrent.backend import MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


def mamba2_segments(config: Mamba2Config, tp: TPGroup, bias: bool = False) -> list[Segment]:
    """Output segments z, x, B, C, dt of the input projection. All ranks share a single group of B
    and C.

    Raises:
        ConfigError: the heads or the groups cannot be split over the ranks.
    """
    bc_shards = config.n_groups // state_shape(config, tp.size).groups
    bc = config.n_groups * config.state_size
    return [
        Segment("z", config.intermediate_size, bias=bias),
        Segment("x", config.intermediate_size, bias=bias),
        Segment("B", bc, bc_shards, bias),
        Segment("C", bc, bc_shards, bias),
        Segment("dt", config.num_heads, bias=bias),
    ]


class Mamba2Inputs(NamedTuple):
    """xBC [T, x | B | C] before the conv, dt [T, H], z [T, H * P] or None: with z the result is
    y * silu(z). Strided views are fine."""

    xBC: torch.Tensor
    dt: torch.Tensor
    z: torch.Tensor | None = None


class Mamba2Layer(RecurrentLayer, Protocol):
    """What the backend reads of a mixer."""

    heads: int
    head_dim: int

    @property
    def conv_weights(self) -> ConvWeights: ...

    @property
    def weights(self) -> SSMWeights: ...


class Mamba2Mixer(nn.Module):
    """Mamba-2 between its projections: conv, scan and norm.

    Args:
        gated_norm: (epsilon, gate after the norm) of an RMS norm over each group's channels. None:
            the scan gates, y * silu(z).
    """

    kind = "mamba2"

    def __init__(
        self, name: str, config: Mamba2Config, layer_id: int, *, conv_bias: bool,
        gated_norm: tuple[float, bool] | None, build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.config, self.layer_id, self.tp = name, config, layer_id, build.tp
        self.shape = state_shape(config, self.tp.size)
        self.heads, self.head_dim, _ = self.shape.temporal
        self.width = self.heads * self.head_dim
        conv_dim, device = self.shape.conv_dim, build.device
        self.sizes = (self.width, conv_dim, self.heads)
        self.conv_weight = parameter(conv_dim, config.conv_kernel, dtype=build.dtype, device=device)
        self.conv_bias = parameter(conv_dim, dtype=build.dtype, device=device, dummy="zeros") if conv_bias else None
        # A rounded decay would change what the state forgets.
        self.A = parameter(self.heads, dtype=torch.float32, device=device, dummy="decay")
        self.D = parameter(self.heads, dtype=torch.float32, device=device, dummy="ones")
        self.dt_bias = parameter(self.heads, dtype=torch.float32, device=device, dummy="dt_bias")
        self.conv_weights = ConvWeights(self.conv_weight, self.conv_bias)
        self.weights = SSMWeights(self.A, self.D, self.dt_bias, config.dt_limit)
        self.norm = None
        if gated_norm is not None:
            (eps, before), group = gated_norm, config.intermediate_size // config.n_groups
            self.norm = GatedRMSNorm(self.width, eps, group_size=group, norm_before_gate=before, build=build)

    def forward(self, projected: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, z | x | B | C | dt], maybe a strided view, to [T, width], decode rows first. Without
        a norm, the result is in `out`."""
        z, xBC, dt = projected.split_with_sizes(self.sizes, dim=-1)
        if self.norm is None:
            gated: torch.Tensor = batch.attn_backend.run(self, batch, Mamba2Inputs(xBC, dt, z), out)
            return gated
        return self.norm(batch.attn_backend.run(self, batch, Mamba2Inputs(xBC, dt), z.new_empty(z.shape)), z)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        found = {
            f"{key}.conv1d.weight": whole(f"{self.name}.conv.weight", self.conv_weight.data, self._conv_shard),
            f"{key}.A_log": sharded(self.tp, f"{self.name}.A", self.A.data, lambda t: -torch.exp(t.float())),
            f"{key}.D": sharded(self.tp, f"{self.name}.D", self.D.data),
            f"{key}.dt_bias": sharded(self.tp, f"{self.name}.dt_bias", self.dt_bias.data),
        }
        if self.conv_bias is not None:
            found[f"{key}.conv1d.bias"] = whole(f"{self.name}.conv.bias", self.conv_bias.data, self._conv_shard)
        if self.norm is not None:
            found[f"{key}.norm.weight"] = sharded(self.tp, f"{self.name}.norm.weight", self.norm.weight.data)
        return found

    def _conv_shard(self, t: torch.Tensor) -> torch.Tensor:
        """Cuts [conv_dim, 1, K] or [conv_dim] to this rank's x, B and C rows."""
        _, *segments, _ = mamba2_segments(self.config, self.tp)
        parts = t.split([s.size for s in segments])
        shard = torch.cat([self.tp.shard(part, 0, s.shards) for part, s in zip(parts, segments)])
        return shard.squeeze(1) if shard.dim() == 3 else shard


class Mamba2Block(nn.Module):
    """A Mamba-2 mixer with its two projections.

    Args:
        bias: whether the projections have one.
        out_scale: multiplier of the output, applied to its weights.
    """

    def __init__(
        self, name: str, config: Mamba2Config, layer_id: int, hidden_size: int, *, bias: bool, conv_bias: bool,
        gated_norm: tuple[float, bool] | None, build: Build, out_scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.out_scale, parts = out_scale, mamba2_segments(config, build.tp, bias)
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden_size, parts, build=build, aligned=True)
        self.mixer = Mamba2Mixer(name, config, layer_id, conv_bias=conv_bias, gated_norm=gated_norm, build=build)
        output = [Segment("x", config.intermediate_size, bias=bias)]
        self.out_proj = RowLinear(f"{name}.out_proj", output, hidden_size, build=build)

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        projected, residual = self.in_proj.normed(norm, x, residual)
        return self.out_proj.onto(residual, self.mixer(projected, batch))

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        return {
            **self.in_proj.targets(f"{key}.in_proj", list(self.in_proj.segments)),
            **self.out_proj.targets(f"{key}.out_proj", "x", scale=self.out_scale),
            **self.mixer.targets(key),
        }


class Mamba2AttnBackend(MambaAttnBackendBase[Mamba2Layer, Mamba2Inputs]):
    """Conv over x|B|C, time steps from dt, scan or step (arXiv:2405.21060). The mixer norms."""

    inputs = Mamba2Inputs
    kind, scan, saves_at_chunks, extend_in_graphs = "mamba2", "mamba2_chunk_scan", True, True

    def __init__(
        self, *, layers: Mapping[int, Mamba2Layer], req_to_token_pool: HybridReqToTokenPool, chunk_size: int
    ) -> None:
        super().__init__(layers=layers, req_to_token_pool=req_to_token_pool, chunk_size=chunk_size)
        for layer_id, layer in layers.items():
            if (conv := self.layer_cache(layer_id).conv).numel():
                check_conv_ring(conv, layer.conv_weights.weight.shape[1], 1)
        self._conv = causal_conv1d_varlen.for_device(self.device, checked=True)
        self._scan = mamba2_chunk_scan.for_device(self.device)

    def decode(
        self, layer: Mamba2Layer, inputs: Mamba2Inputs, segment: DecodeSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        cache, rows, conv_weights = self.layer_cache(layer.layer_id), segment.pool_rows, layer.conv_weights
        # On a CPU, neighbouring slots are updated where they are stored, once each row has K - 1 conv inputs.
        if rows and cache.ring_values is None and rows.first >= conv_weights.weight.shape[1] - 1:
            pools = cache.conv, cache.temporal
            if inputs.xBC.dtype == cache.conv.dtype == cache.temporal.dtype == torch.float32:
                return mamba2_in_place(*inputs, conv_weights, layer.weights, *pools, rows, out)
        xBC, dt, gate = segment.by_row(inputs.xBC), segment.by_row(inputs.dt), None
        if inputs.z is not None:
            gate = segment.by_row(inputs.z).unflatten(2, (layer.heads, layer.head_dim))
        place = None if out is None else out.view(*dt.shape, layer.head_dim)
        step = segment.fused_step(conv_weights, cache)
        y = mamba2_decode(xBC, dt, gate, weights=layer.weights, step=step, out=place)
        return y.reshape(segment.num_tokens, -1)

    def extend(
        self, layer: Mamba2Layer, inputs: Mamba2Inputs, segment: ExtendSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        cache = self.layer_cache(layer.layer_id)
        conved, state = self.conved_chunks(layer, segment, inputs.xBC), segment.state(cache)
        x, B, C = split_conv_channels(conved, state.states.shape)
        z = None if inputs.z is None else by_head(inputs.z, layer.heads, layer.head_dim)
        place = None if out is None else out.view(x.shape)
        tokens = SSMInputs(x, inputs.dt, B, C, z)
        y = self._scan(tokens, layer.weights, state, segment.prompts, out=place)
        if cache.codes is not None:
            segment.round_states(cache, state)
        return y.flatten(1)

    def conved_chunks(self, layer: Mamba2Layer, segment: ExtendSegment, xBC: torch.Tensor) -> torch.Tensor:
        """Prompt chunks of xBC after the conv."""
        cache = self.layer_cache(layer.layer_id)
        return self._conv(xBC, *segment.conv_chunks(layer.conv_weights, cache))

    @staticmethod
    def ring_decay(layer: Mamba2Layer) -> torch.Tensor:
        """Gates of the ring are time steps; A makes log decays of them."""
        return layer.weights.A
