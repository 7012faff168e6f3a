"""Multi-head latent attention (DeepSeek-AI 2024, section 2.1) with its projections."""

import torch
from torch import nn

from hybridrt.attention.base import AttentionInputs
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionConfig, LatentConfig
from hybridrt.kernels.core.records import LatentWeights, Rope
from hybridrt.kernels.dense.norm_activation import sigmoid_mul
from hybridrt.layers.attention import attention_spec
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import Build, CheckpointTarget, Piece, Transform, parameter

NORM_EPS = 1e-6  # epsilon of latent vectors and compressed queries; rms_norm_eps is for other norms


class LatentAttentionLayer:
    """What a backend reads of a layer."""

    def __init__(self, config: AttentionConfig, layer_id: int, weights: LatentWeights, build: Build) -> None:
        self.layer_id, self.weights = layer_id, weights
        self.spec = attention_spec(config, build.tp, build.dtype, build.kv_codes)


class LatentAttention(nn.Module):
    """Attention over latent vectors, whole on each rank. Query heads are sharded.

    Args:
        config: with `latent`.
        cos_sin: rotary table; None rotates nothing. Rotated pairs are neighbours in checkpoints and
            half a head apart in our kernels: loading sorts the rows.
        bias: whether there is one in the projections to latent vectors and compressed queries, and
            of the output.
        gated: the sigmoid of one projected number multiplies each head's output (Ling 3).
    """

    def __init__(
        self, name: str, config: AttentionConfig, layer_id: int, hidden_size: int, *, build: Build,
        cos_sin: torch.Tensor | None = None, bias: bool = False, gated: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        assert config.latent is not None
        self.name, self.tp, self.heads, self.dims = name, build.tp, config.num_heads, config.latent
        self.gated = gated
        self.rope = None if cos_sin is None else Rope(cos_sin)
        dims, local = self.dims, build.tp.divide("attention heads", config.num_heads)
        query = Segment("q", config.num_heads * (dims.nope_dim + dims.rope_dim))
        first = query if dims.query_rank is None else Segment("q_latent", dims.query_rank, 1, bias)
        parts = [first, Segment("latent", dims.rank, 1, bias), Segment("tail", dims.rope_dim, 1, bias)]
        parts += [Segment("gate", config.num_heads)] if gated else []
        self.into = ColumnLinear(f"{name}.into", hidden_size, parts, build=build)
        self.sizes = (self.into.sizes[0], dims.rank + dims.rope_dim, *self.into.sizes[3:])
        self.q_norm = self.q_up = None
        if dims.query_rank is not None:
            self.q_norm = RMSNorm(f"{name}.q_norm", dims.query_rank, NORM_EPS, device=build.device)
            self.q_up = ColumnLinear(f"{name}.q_up", dims.query_rank, [query], build=build)
        self.norm = RMSNorm(f"{name}.norm", dims.rank, NORM_EPS, device=build.device)
        self.up_k = parameter(local, dims.nope_dim, dims.rank, dtype=build.dtype, device=build.device)
        self.up_v = parameter(local, dims.rank, dims.value_dim, dtype=build.dtype, device=build.device)
        values = [Segment("x", config.num_heads * dims.value_dim, bias=bias)]
        self.o_proj = RowLinear(f"{name}.o_proj", values, hidden_size, build=build)
        weights = LatentWeights(self.up_k, self.up_v, self.norm.weight, NORM_EPS)
        self.attn = LatentAttentionLayer(config, layer_id, weights, build)

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        projected, residual = self.into.normed(norm, x, residual)
        q, k, *gate = projected.split(self.sizes, dim=-1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up.normed(self.q_norm, q, None)[0]
        out = batch.attn_backend.run(self.attn, batch, AttentionInputs(q, k, rope=self.rope))
        return self.o_proj.onto(residual, sigmoid_mul(out, *gate) if gate else out)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        sort, dims = neighbours_to_halves if self.rope else (lambda t: t), self.dims
        heads_sorted: Transform = lambda t: sort_tails(t, self.heads, dims, sort)  # noqa: E731
        found: dict[str, CheckpointTarget] = {}
        if self.q_norm is None or self.q_up is None:
            found |= self.into.targets(f"{key}.q_proj", ["q"], rearrange=heads_sorted)
        else:
            found |= self.into.targets(f"{key}.q_a_proj", ["q_latent"])
            found |= self.q_norm.targets(f"{key}.q_a_layernorm")
            found |= self.q_up.targets(f"{key}.q_b_proj", ["q"], rearrange=heads_sorted)
        found |= self.into.targets(
            f"{key}.kv_a_proj_with_mqa",
            ["latent", "tail"],
            rearrange=lambda t: torch.cat((t[: dims.rank], sort(t[dims.rank :]))),
        )
        if self.gated:
            found |= self.into.targets(f"{key}.g_proj", ["gate"])
        found |= self.norm.targets(f"{key}.kv_a_layernorm")
        found[f"{key}.kv_b_proj.weight"] = (
            Piece(f"{self.name}.up_k", self.up_k.data, lambda t: self._heads_of(t)[0]),
            Piece(f"{self.name}.up_v", self.up_v.data, lambda t: self._heads_of(t)[1].transpose(1, 2)),
        )
        return found | self.o_proj.targets(f"{key}.o_proj", "x")

    def _heads_of(self, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cuts kv_b_proj to this rank's [H, nope, rank] and [H, value, rank]."""
        sizes = (self.dims.nope_dim, self.dims.value_dim)
        heads = t.unflatten(0, (self.heads, -1))
        return self.tp.shard(heads, 0).split(sizes, dim=1)


def neighbours_to_halves(t: torch.Tensor) -> torch.Tensor:
    """[rope, ...]: rotated pairs from neighbours to rope / 2 apart."""
    return torch.cat((t[0::2], t[1::2]))


def sort_tails(t: torch.Tensor, heads: int, dims: LatentConfig, sort: Transform) -> torch.Tensor:
    """[heads * (nope + rope), ...] with the last rope rows of each head sorted."""
    nope, tail = t.unflatten(0, (heads, -1)).split((dims.nope_dim, dims.rope_dim), dim=1)
    return torch.cat((nope, sort(tail.transpose(0, 1)).transpose(0, 1)), dim=1).flatten(0, 1)
