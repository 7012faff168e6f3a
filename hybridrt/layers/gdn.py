"""The Gated Delta Net mixer: projections, the backend's delta rule, gated norm (Yang et al. 2025)."""

import torch
from torch import nn

from hybridrt.forward_batch import ForwardBatch
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment, Summands, norm_linear
from hybridrt.layers.norm import GatedRMSNorm, RMSNorm
from hybridrt.layers.weights import Build, CheckpointTarget, Transform, parameter, whole


class GDNMixer(nn.Module):
    """Gated Delta Net over hidden states; its state lives in the backend's MambaPool, under `layer_id`."""

    kind = "gdn"
    conv_bias = None

    def __init__(
        self,
        name: str,
        config: GDNConfig,
        layer_id: int,
        hidden_size: int,
        norm_eps: float,
        *,
        build: Build,
    ) -> None:
        super().__init__()
        self.name, self.config, self.layer_id, self.tp = name, config, layer_id, build.tp
        self.shape = state_shape(config, self.tp.size)
        self.num_v_heads, self.head_v_dim, self.head_k_dim = self.shape.temporal
        self.num_k_heads, self.width = self.shape.groups, self.num_v_heads * self.head_v_dim
        qk, v = config.num_k_heads * config.head_k_dim, config.num_v_heads * config.head_v_dim
        device = build.device
        parts = [Segment("q", qk), Segment("k", qk), Segment("v", v), Segment("z", v)]
        parts += [Segment("b", config.num_v_heads), Segment("a", config.num_v_heads)]
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden_size, parts, build=build)
        self.out_proj = RowLinear(f"{name}.out_proj", [Segment("x", v)], hidden_size, build=build)
        self.conv_weight = parameter(self.shape.conv_dim, config.conv_kernel, dtype=build.dtype, device=device)
        self.A_log = parameter(self.num_v_heads, dtype=torch.float32, device=device, dummy="zeros")
        self.dt_bias = parameter(self.num_v_heads, dtype=torch.float32, device=device, dummy="dt_bias")
        # One weight of a head for all of them, written out for each: so the norm reads z where the projection left it.
        self.norm = GatedRMSNorm(
            f"{name}.norm", self.width, norm_eps, group_size=self.head_v_dim, norm_before_gate=True, build=build,
        )  # fmt: skip

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        """Mixer of norm(x + residual), and x + residual."""
        projected, residual = norm_linear(norm, self.in_proj, x, residual)
        widths = (self.shape.conv_dim, self.width, self.num_v_heads, self.num_v_heads)
        mixed_qkv, z, b, a = projected.split(widths, dim=-1)
        backend = batch.attn_backend.route(self)
        y = backend.run(self, batch, mixed_qkv=mixed_qkv, a=a, b=b)
        return self.out_proj.onto(residual, self.norm(y, z))

    def split_heads(self, conved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [..., Hk, K] and v [..., Hv, V] of the conv's output."""
        q, k, v = conved.split([width for _, width in self.shape.segments], dim=-1)
        key_heads = (self.num_k_heads, self.head_k_dim)
        return (
            q.unflatten(-1, key_heads),
            k.unflatten(-1, key_heads),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
        )

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        """Targets under `key` of a Qwen3-Next checkpoint, whose projections are interleaved by key head."""
        c, ratio = self.config, self.config.num_v_heads // self.config.num_k_heads
        dims = [c.head_k_dim, c.head_k_dim, ratio * c.head_v_dim, ratio * c.head_v_dim]
        qkvz = _deinterleave(c.num_k_heads, dims)
        ba = _deinterleave(c.num_k_heads, [ratio, ratio])

        def heads(name: str, dest: torch.Tensor) -> CheckpointTarget:
            return whole(f"{self.name}.{name}", dest, lambda t: self.tp.shard(t, 0))

        return {
            **self.in_proj.targets(f"{key}.in_proj_qkvz", ["q", "k", "v", "z"], rearrange=qkvz),
            **self.in_proj.targets(f"{key}.in_proj_ba", ["b", "a"], rearrange=ba),
            **self.out_proj.targets(f"{key}.out_proj", "x"),
            f"{key}.conv1d.weight": whole(f"{self.name}.conv.weight", self.conv_weight.data, self._conv_shard),
            f"{key}.A_log": heads("A_log", self.A_log.data),
            f"{key}.dt_bias": heads("dt_bias", self.dt_bias.data),
            f"{key}.norm.weight": whole(
                f"{self.name}.norm.weight", self.norm.weight.data, lambda t: t.repeat(self.num_v_heads)
            ),
        }

    def _conv_shard(self, t: torch.Tensor) -> torch.Tensor:
        """[conv_dim, 1, K] of the checkpoint to this rank's q, k and v rows."""
        c = self.config
        qk, v = c.num_k_heads * c.head_k_dim, c.num_v_heads * c.head_v_dim
        return torch.cat([self.tp.shard(part, 0) for part in t.squeeze(1).split([qk, qk, v])])


def _deinterleave(heads: int, dims: list[int]) -> Transform:
    """Rows ordered (head, part, dim) to (part, head, dim)."""

    def rearrange(t: torch.Tensor) -> torch.Tensor:
        parts = t.unflatten(0, (heads, sum(dims))).split(dims, dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    return rearrange
