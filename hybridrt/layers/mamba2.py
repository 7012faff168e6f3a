"""The Mamba-2 mixer between its projections: weights of conv and scan, gate and norm (Dao & Gu 2024, figure 6)."""

import torch
from torch import nn

from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.linear import Segment
from hybridrt.layers.norm import GatedRMSNorm
from hybridrt.layers.weights import Build, CheckpointTarget, Transform, parameter, whole


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
        self.width = self.heads * self.head_dim
        conv_dim, device = self.shape.conv_dim, build.device
        self.conv_weight = parameter(conv_dim, config.conv_kernel, dtype=build.dtype, device=device)
        self.conv_bias = parameter(conv_dim, dtype=build.dtype, device=device, dummy="zeros") if conv_bias else None
        # The recurrence's own numbers stay float32: rounding a decay of 0.999 would change what the state forgets.
        self.A = parameter(self.heads, dtype=torch.float32, device=device, dummy="decay")
        self.D = parameter(self.heads, dtype=torch.float32, device=device, dummy="ones")
        self.dt_bias = parameter(self.heads, dtype=torch.float32, device=device, dummy="dt_bias")

    def forward(self, projected: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, z | x | B | C | dt], which may be a strided view, to [T, width], decode rows first; in `out` where a step
        has one segment, no draft tree, and no norm follows."""
        z, xBC, dt = projected.split((self.width, self.shape.conv_dim, self.heads), dim=-1)
        place = out if self.norm is None else None
        backend = batch.attn_backend.route(self)
        y: torch.Tensor = backend.run(self, batch, z=z, xBC=xBC, dt=dt, out=place)
        return y if self.norm is None else self.norm(y, z)

    def split_heads(self, conved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [..., H, P], B and C [..., G, N] of the conv's output."""
        x, B, C = conved.split([width for _, width in self.shape.segments], dim=-1)
        groups = (self.shape.groups, self.state_size)
        return x.unflatten(-1, (self.heads, self.head_dim)), B.unflatten(-1, groups), C.unflatten(-1, groups)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        """Targets of the conv, A_log, D, dt_bias and the norm under `key` (the projections are the model's)."""

        def heads(name: str, dest: torch.Tensor, select: Transform = lambda t: t) -> CheckpointTarget:
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
