"""Kimi Delta Attention (Moonshot AI 2025, section 4): mixer and backend."""

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.core.records import ConvWeights, GateWeights
from hybridrt.kernels.core.slots import by_head
from hybridrt.kinds.kda import KDAConfig
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import GatedRMSNorm, RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import Build, CheckpointMap, Piece, parameter, whole
from hybridrt.recurrent.gdn import GDNAttnBackend, GDNInputs


class KDAMixer(nn.Module):
    """Kimi Delta Attention over hidden states. Its state is in MambaPool, under `layer_id`.

    Heads are sharded. Projections to the gates' rank (`f_a`, `g_a`) are whole on every rank.
    """

    kind = "kda"

    def __init__(
        self, name: str, config: KDAConfig, layer_id: int, hidden_size: int, norm_eps: float, *, build: Build
    ) -> None:
        super().__init__()
        self.name, self.config, self.layer_id, self.tp = name, config, layer_id, build.tp
        self.shape = state_shape(config, self.tp.size)
        self.num_heads, self.head_dim, _ = self.shape.temporal
        self.width, total, rank = self.num_heads * self.head_dim, config.num_heads * config.head_dim, config.gate_rank
        parts = [Segment(part, total) for part in "qkv"]
        parts += [Segment(part, total) if rank is None else Segment(f"{part}_a", rank, 1) for part in "fg"]
        parts.append(Segment("b", config.num_heads))
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden_size, parts, build=build, aligned=True)
        self.gate_projs = None
        if rank is not None:
            gates = [Segment(part, total) for part in ("f_b", "g_b")]
            self.gate_projs = ColumnLinear(f"{name}.gates", rank, gates, build=build)
        self.out_proj = RowLinear(f"{name}.out_proj", [Segment("x", total)], hidden_size, build=build)
        device = build.device
        self.conv_weight = parameter(self.shape.conv_dim, config.conv_kernel, dtype=build.dtype, device=device)
        self.A_log = parameter(self.num_heads, dtype=torch.float32, device=device, dummy="zeros")
        self.dt_bias = parameter(self.num_heads, self.head_dim, dtype=torch.float32, device=device, dummy="dt_bias")
        # Repeated: the norm can read its gate as a view.
        self.norm = GatedRMSNorm(
            self.width, norm_eps, group_size=self.head_dim, norm_before_gate=True,
            activation="sigmoid", build=build,
        )  # fmt: skip

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        projected, residual = self.in_proj.normed(norm, x, residual)
        mixed_qkv, decay, gate, b = projected.split([self.shape.conv_dim, *self.in_proj.sizes[3:]], dim=-1)
        if self.gate_projs is not None:
            decay, gate = self.gate_projs.method.apply_each((decay, gate))
        decay = by_head(decay, self.num_heads, self.head_dim)
        y = batch.attn_backend.run(self, batch, GDNInputs(mixed_qkv, decay, b))
        return self.out_proj.onto(residual, self.norm(y, gate))

    @property
    def conv_weights(self) -> ConvWeights:
        return ConvWeights(self.conv_weight)

    @property
    def weights(self) -> GateWeights:
        return GateWeights(self.A_log, self.dt_bias, lower_bound=self.config.lower_bound)

    def targets(self, key: str) -> CheckpointMap:
        """Targets under `key`, by Kimi-Linear's names: q_proj, k_proj, v_proj, b_proj, o_proj,
        q_conv1d, k_conv1d, v_conv1d, o_norm, A_log, dt_bias; f_a_proj, f_b_proj, g_a_proj,
        g_b_proj, or f_proj and g_proj without a `gate_rank`."""
        found = self.out_proj.targets(f"{key}.o_proj", "x")
        for linear in (self.in_proj, *([] if self.gate_projs is None else [self.gate_projs])):
            for part in linear.segments:
                found |= linear.targets(f"{key}.{part}_proj", [part])
        for part, dest in zip("qkv", self.conv_weight.data.split(self.width)):
            found[f"{key}.{part}_conv1d.weight"] = whole(
                f"{self.name}.conv.{part}", dest, lambda t: self.tp.shard(t.squeeze(1), 0)
            )
        found[f"{key}.o_norm.weight"] = whole(
            f"{self.name}.norm.weight", self.norm.weight.data, lambda t: t.repeat(self.num_heads)
        )
        for each in ("A_log", "dt_bias"):  # in some checkpoints these have dimensions of 1
            dest = getattr(self, each).data
            select = lambda t, dest=dest: self.tp.shard(t.flatten(), 0).view_as(dest)  # noqa: E731
            found[f"{key}.{each}"] = (Piece(f"{self.name}.{each}", dest, select),)
        return found


class KDAAttnBackend(GDNAttnBackend):
    """Conv over q|k|v, then the gated delta rule (Moonshot AI 2025). The mixer norms."""

    kind = "kda"
