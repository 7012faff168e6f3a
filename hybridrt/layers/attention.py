"""Softmax attention with its projections, and what a backend reads of it."""

import torch
from torch import nn

from hybridrt.attention.base import AttentionInputs
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionConfig, AttentionSpec
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.core.records import Rope
from hybridrt.kernels.dense.norm_activation import sigmoid_mul
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import Build, CheckpointTarget, parameter, sharded, unchanged


def attention_spec(
    config: AttentionConfig, tp: TPGroup, dtype: torch.dtype, kv_codes: torch.dtype | None = None
) -> AttentionSpec:
    """The attention of one rank, with a KV cache of `dtype`, or of codes. Ranks share KV heads if
    there are fewer.

    Raises:
        ConfigError: the heads or the KV heads cannot be split over the ranks.
    """
    return AttentionSpec(
        num_heads=tp.divide("attention heads", config.num_heads),
        num_kv_heads=tp.divide("KV heads", config.num_kv_heads, min(config.num_kv_heads, tp.size)),
        head_dim=config.head_dim,
        v_head_dim=config.v_head_dim or config.head_dim,
        sliding_window=config.sliding_window,
        scale=config.head_dim**-0.5 if config.scale is None else config.scale,
        dtype=kv_codes or dtype,
        query_dtype=None if kv_codes is None else dtype,
        variant="gqa" if config.latent is None else "mla",
        sinks=config.sinks,
    )


class AttentionLayer:
    """What `backend.forward` needs as its layer. Keys and values are in the KV pool, under
    `layer_id`.

    Args:
        sinks: [heads of this rank] float32, if the configuration has sinks.

    Raises:
        ConfigError: the heads or the KV heads cannot be split over the ranks.
    """

    sinks: torch.Tensor

    def __init__(self, config: AttentionConfig, layer_id: int, build: Build, sinks: torch.Tensor | None = None) -> None:
        self.layer_id = layer_id
        self.spec = attention_spec(config, build.tp, build.dtype, build.kv_codes)
        if sinks is not None:
            self.sinks = sinks


def qkv_segments(config: AttentionConfig, tp: TPGroup, bias: bool = False) -> list[Segment]:
    """Output segments q, k, v of a merged projection. Ranks share KV heads if there are fewer."""
    kv_shards = min(config.num_kv_heads, tp.size)
    kv_size = config.num_kv_heads * config.head_dim
    q_size = config.num_heads * config.head_dim
    keys, values = (Segment(name, kv_size, kv_shards, bias) for name in ("k", "v"))
    return [Segment("q", q_size, bias=bias), keys, values]


class Attention(nn.Module):
    """Grouped-query attention with its projections.

    Args:
        cos_sin: rotary table (hybridrt.layers.rotary); None rotates nothing.
        bias: whether all projections have one.
        qk_norm: (epsilon, zero-centred) of RMS norms of each head of q and k; None: no norms. Needs
            `cos_sin`.
        gated: the sigmoid of a fourth projection multiplies the output. Its rows follow those of q,
            head by head, in the checkpoint (Qwen3-Next).
        head_gated: the sigmoid of one projected number multiplies each head's output (LFM3). Without
            a bias.
        out_scale: multiplier of the output, applied to its weights.
    """

    def __init__(
        self, name: str, config: AttentionConfig, layer_id: int, hidden_size: int, *, build: Build,
        cos_sin: torch.Tensor | None = None, bias: bool = False, qk_norm: tuple[float, bool] | None = None,
        gated: bool = False, head_gated: bool = False, out_scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.gated, self.head_gated, self.out_scale = config, gated, head_gated, out_scale
        self.name, self.tp = name, build.tp
        self.sinks: nn.Parameter | None = None
        if config.sinks:
            heads = build.tp.divide("attention heads", config.num_heads)
            self.sinks = parameter(heads, dtype=torch.float32, device=build.device)
        self.attn = AttentionLayer(config, layer_id, build, self.sinks)
        width = config.num_heads * config.head_dim
        parts = qkv_segments(config, build.tp, bias) + [Segment("gate", width, bias=bias)] * gated
        parts += [Segment("gate", config.num_heads)] * head_gated
        self.qkv = ColumnLinear(f"{name}.qkv", hidden_size, parts, build=build)
        self.sizes = self.qkv.sizes
        self.o_proj = RowLinear(f"{name}.o_proj", [Segment("x", width, bias=bias)], hidden_size, build=build)
        sections = config.mrope_section or (0, 0, 0)
        self.rope = None if cos_sin is None else Rope(cos_sin, sections=sections)
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            eps, zero_centered = qk_norm
            self.q_norm, self.k_norm = (
                RMSNorm(f"{name}.{part}_norm", config.head_dim, eps, device=build.device, zero_centered=zero_centered)
                for part in ("q", "k")
            )
            if cos_sin is not None:
                self.rope = Rope(cos_sin, self.q_norm.weight, self.k_norm.weight, eps, sections)

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        projected, residual = self.qkv.normed(norm, x, residual)
        return self.o_proj.onto(residual, self._attend(projected, batch))

    def output(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attention of normed tokens, summed over all ranks: [T, hidden] to [T, hidden]."""
        return self.o_proj(self._attend(self.qkv(x), batch))

    def _attend(self, projected: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, k, v, *gate = projected.split_with_sizes(self.sizes, dim=-1)
        out = batch.attn_backend.run(self.attn, batch, AttentionInputs(q, k, v, rope=self.rope))
        return sigmoid_mul(out, *gate) if gate else out

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        shape = (self.config.num_heads, 2, self.config.head_dim)
        names, rearrange = ["q"], unchanged
        if self.gated:  # q_proj holds each head's query, then its gate
            names, rearrange = ["q", "gate"], lambda t: t.unflatten(0, shape).transpose(0, 1).flatten(0, 2)
        found = self.qkv.targets(f"{key}.q_proj", names, rearrange=rearrange)
        for name in ("k", "v"):
            found |= self.qkv.targets(f"{key}.{name}_proj", [name])
        if self.head_gated:
            found |= self.qkv.targets(f"{key}.g_proj", ["gate"])
        if self.q_norm is not None and self.k_norm is not None:
            found |= {**self.q_norm.targets(f"{key}.q_norm"), **self.k_norm.targets(f"{key}.k_norm")}
        if self.sinks is not None:
            found[f"{key}.sinks"] = sharded(self.tp, f"{self.name}.sinks", self.sinks.data)
        return found | self.o_proj.targets(f"{key}.o_proj", "x", scale=self.out_scale)
