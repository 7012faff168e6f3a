"""The Mamba-2 mixer between its projections: conv, scan and gate (Dao & Gu 2024, figure 6)."""

import torch
from torch import nn

from hybridrt.attention.linear import DecodeSegment, ExtendSegment
from hybridrt.attention.mamba2 import Mamba2Metadata
from hybridrt.config import Mamba2Config
from hybridrt.distributed.groups import TPGroup
from hybridrt.kernels.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kernels.mamba2_decode import mamba2_decode
from hybridrt.kernels.mamba2_scan import mamba2_chunk_scan
from hybridrt.kernels.selective_state_update import selective_state_update
from hybridrt.layers.linear import Segment
from hybridrt.layers.norm import GatedRMSNorm
from hybridrt.layers.weights import Build, Target, Transform, parameter, whole
from hybridrt.mem_cache.mamba_pool import LayerCache
from hybridrt.state_shape import state_shape


def mamba2_segments(config: Mamba2Config, tp: TPGroup) -> list[Segment]:
    """Output segments z, x, B, C, dt of the input projection; one group of B and C is shared by all ranks.

    Raises:
        ConfigError: the heads or the groups cannot be split over the ranks.
    """
    bc_shards = config.n_groups // state_shape(config, tp.size).groups
    bc = config.n_groups * config.state_size
    return [
        Segment("z", config.intermediate_size),
        Segment("x", config.intermediate_size),
        Segment("B", bc, bc_shards),
        Segment("C", bc, bc_shards),
        Segment("dt", config.num_heads),
    ]


class Mamba2Mixer(nn.Module):
    """Reads the projected z | x | B | C | dt of a step and leaves what the output projection reads.

    Args:
        norm: gates and norms the scan's output; None gates inside the scan (y * silu(z)).
    """

    kind = "mamba2"

    def __init__(
        self,
        name: str,
        config: Mamba2Config,
        layer_id: int,
        *,
        conv_bias: bool,
        norm: GatedRMSNorm | None,
        build: Build,
    ) -> None:
        super().__init__()
        self.name, self.config, self.layer_id, self.tp, self.norm = name, config, layer_id, build.tp, norm
        self.shape = state_shape(config, self.tp.size)
        self.heads, self.head_dim, self.state_size = self.shape.temporal
        self.intermediate_size = self.heads * self.head_dim
        conv_dim, device = self.shape.conv_dim, build.device
        self.conv_weight = parameter(conv_dim, config.conv_kernel, dtype=build.dtype, device=device)
        self.conv_bias = parameter(conv_dim, dtype=build.dtype, device=device, dummy="zeros") if conv_bias else None
        # The recurrence's own numbers stay float32: rounding a decay of 0.999 would change what the state forgets.
        self.A = parameter(self.heads, dtype=torch.float32, device=device, dummy="decay")
        self.D = parameter(self.heads, dtype=torch.float32, device=device, dummy="ones")
        self.dt_bias = parameter(self.heads, dtype=torch.float32, device=device, dummy="dt_bias")

    def forward(
        self, projected: torch.Tensor, cache: LayerCache, metadata: Mamba2Metadata, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, z | x | B | C | dt], which may be a strided view, to [T, intermediate], decode rows first; in `out`
        where a step is all of one kind, no tree, and no norm follows."""
        z, conv_in, dt = projected.split((self.intermediate_size, self.shape.conv_dim, self.heads), dim=-1)
        split, parts = metadata.decode.num_tokens if metadata.decode else 0, []
        place = None if (metadata.decode and metadata.extend) or self.norm is not None else out
        if metadata.decode:
            y = self._decode(z[:split], conv_in[:split], dt[:split], cache, metadata.decode, metadata.replay, place)
            parts.append(y if self.norm is None else self.norm(y, z[:split]))
        if metadata.extend:
            y = self._extend(z[split:], conv_in[split:], dt[split:], cache, metadata.extend, place)
            parts.append(y if self.norm is None else self.norm(y, z[split:]))
        return parts[0] if len(parts) == 1 else torch.cat([z[:0], *parts])

    def _decode(
        self,
        z: torch.Tensor,
        conv_in: torch.Tensor,
        dt: torch.Tensor,
        cache: LayerCache,
        seg: DecodeSegment,
        replay: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        buf, rows, tokens = seg.buffers, seg.rows.shape[0], seg.tokens_per_row
        xBC, dt = conv_in.view(rows, tokens, -1), dt.view(rows, tokens, self.heads)
        shape = (rows, tokens, self.heads, self.head_dim)
        gate = z.view(shape) if self.norm is None else None
        if seg.parents is not None:
            return self._verify_tree(xBC, dt, gate, cache, seg)
        ring = dict(zip(("values", "keys", "gates"), cache.ring)) if replay else {}
        y = mamba2_decode(
            xBC, dt, gate, weight=self.conv_weight, bias=self.conv_bias, A=self.A, D=self.D, dt_bias=self.dt_bias,
            dt_limit=self.config.dt_limit, conv=cache.conv, states=cache.temporal, read_slots=buf.slots,
            write_slots=buf.slots, start_positions=buf.start_positions, start=buf.ring_start, length=buf.ring_length,
            # One token is final at once; only a verify step may have to go back.
            intermediate_states=cache.intermediate_ssm if tokens > 1 else None, rows=seg.rows,
            out=None if out is None else out.view(shape), **ring,
        )  # fmt: skip
        return y.reshape(rows * tokens, -1)

    def _verify_tree(
        self, xBC: torch.Tensor, dt: torch.Tensor, gate: torch.Tensor | None, cache: LayerCache, seg: DecodeSegment
    ) -> torch.Tensor:
        """Draft trees follow parent pointers, which the fused kernel does not."""
        slots = seg.buffers.slots
        conved = causal_conv1d_update(
            xBC, self.conv_weight, self.conv_bias, cache.conv, slots, slots, seg.buffers.start_positions,
            parents=seg.parents, windows=cache.intermediate_conv_window, rows=seg.rows,
        )  # fmt: skip
        x, B, C = self._heads(conved)
        y = selective_state_update(
            cache.temporal, x, dt, self.A, B, C, D=self.D, dt_bias=self.dt_bias, dt_limit=self.config.dt_limit,
            z=gate, read_slots=slots, write_slots=slots, intermediate_states=cache.intermediate_ssm, rows=seg.rows,
            parents=seg.parents,
        )  # fmt: skip
        return y.flatten(0, 1).flatten(1)

    def _extend(
        self,
        z: torch.Tensor,
        conv_in: torch.Tensor,
        dt: torch.Tensor,
        cache: LayerCache,
        seg: ExtendSegment,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        starts = (seg.query_start_loc, seg.start_positions)
        conved = causal_conv1d_varlen(
            conv_in, self.conv_weight, self.conv_bias, cache.conv, seg.slots, seg.slots, *starts
        )
        x, B, C = self._heads(conved)
        y = mamba2_chunk_scan(
            x, dt, self.A, B, C, D=self.D, dt_bias=self.dt_bias, dt_limit=self.config.dt_limit,
            z=z.view(-1, self.heads, self.head_dim) if self.norm is None else None, states=cache.temporal,
            read_slots=seg.slots, write_slots=seg.slots, has_initial_state=seg.has_initial_states,
            query_start_loc=seg.query_start_loc, plan=seg.plan,
            out=None if out is None else out.view(x.shape),
        )  # fmt: skip
        return y.flatten(1)

    def _heads(self, conved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [..., H, P], B and C [..., G, N] of the conv's output."""
        x, B, C = conved.split([width for _, width in self.shape.segments], dim=-1)
        groups = (self.shape.groups, self.state_size)
        return x.unflatten(-1, (self.heads, self.head_dim)), B.unflatten(-1, groups), C.unflatten(-1, groups)

    def targets(self, key: str) -> dict[str, Target]:
        """Targets of the conv, A_log, D, dt_bias and the norm under `key` (the projections are the model's)."""

        def heads(name: str, dest: torch.Tensor, select: Transform = lambda t: t) -> Target:
            return whole(f"{self.name}.{name}", dest, lambda t: self.tp.shard(select(t), 0))

        found = {
            f"{key}.conv1d.weight": whole(f"{self.name}.conv.weight", self.conv_weight.data, self._conv_shard),
            f"{key}.A_log": heads("A", self.A.data, lambda t: -torch.exp(t.float())),
            f"{key}.D": heads("D", self.D.data),
            f"{key}.dt_bias": heads("dt_bias", self.dt_bias.data),
        }
        if self.conv_bias is not None:
            found[f"{key}.conv1d.bias"] = whole(f"{self.name}.conv.bias", self.conv_bias.data, self._conv_shard)
        if self.norm is not None:
            found[f"{key}.norm.weight"] = heads("norm.weight", self.norm.weight.data)
        return found

    def _conv_shard(self, t: torch.Tensor) -> torch.Tensor:
        """[conv_dim, 1, K] or [conv_dim] of the checkpoint to this rank's x, B and C rows."""
        segments = [s for s in mamba2_segments(self.config, self.tp) if s.name in ("x", "B", "C")]
        parts = t.split([s.size for s in segments])
        shards = [self.tp.shard(part, 0, s.shards) for part, s in zip(parts, segments)]
        whole_shard = torch.cat(shards)
        return whole_shard.squeeze(1) if whole_shard.dim() == 3 else whole_shard
