"""Zamba2: a stack of Mamba-2 blocks. Some take the output of a transformer block beside the residual, which it leaves
alone; a few such blocks serve all these places in turn.

    x ─────────────────────────────────────────┬─ + ─ norm ─ Mamba-2 ─ + x
    x | embedding ─ norm ─ attention ─ norm ─ MLP ─ linear ─┘

The weights of a block are one set. Each place that uses it has its own KV cache, and low-rank adapters of the
projections q, k, v and of the MLP's first (Zyphra 2024, arXiv:2411.15242).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.config import ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.records import Rope
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.attention import AttentionLayer, qkv_segments
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment, Summands, norm_linear
from hybridrt.layers.mamba2 import Mamba2Block
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.stack import ResidualPart, ResidualStack
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM

GATED_NORM_EPS = 1e-5  # of Mamba-2's own norm, whatever config.json says of the others


class Adapter(nn.Module):
    """What a place adds to a shared projection: for each of the checkpoint's matrices a product of two thin ones.

    Args:
        matrices: the segments of the projection that each matrix of the checkpoint holds.
    """

    def __init__(
        self, name: str, size: int, rank: int, matrices: dict[str, list[Segment]], *, build: Build
    ) -> None:  # fmt: skip
        super().__init__()
        # Every rank needs all of the low-rank vectors, so that they are not cut.
        uncut = replace(build, tp=TPGroup())
        self.down = ColumnLinear(f"{name}.down", size, [Segment(each, rank) for each in matrices], build=uncut)
        self.ups = nn.ModuleDict(
            {each: ColumnLinear(f"{name}.{each}", rank, parts, build=build) for each, parts in matrices.items()}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.down(x).chunk(len(self.ups), dim=-1)
        return torch.cat([up(part) for up, part in zip(self.ups.values(), low, strict=True)], dim=-1)

    def targets(self, key: str) -> CheckpointMap:
        """Under `key`, in which {} stands for the name of a matrix."""
        found: CheckpointMap = {}
        for each, up in self.ups.items():
            assert isinstance(up, ColumnLinear)
            found |= self.down.targets(f"{key.format(each)}.0", [each]) | up.targets(
                f"{key.format(each)}.1", list(up.segments)
            )
        return found


class SharedBlock(nn.Module):
    """Attention over x | embedding, and an MLP. `places` are the hybrid layers that use it: number among the hybrid
    layers to layer id."""

    def __init__(
        self, name: str, config: ModelConfig, places: dict[int, int], cos_sin: torch.Tensor | None, *, build: Build
    ) -> None:  # fmt: skip
        super().__init__()
        hf, hidden, attention = config.hf, config.hidden_size, config.attention
        self.has_bias, self.rope = hf.add_bias_linear, None if cos_sin is None else Rope(cos_sin)
        self.attn = {i: AttentionLayer(attention, layer_id, build) for i, layer_id in places.items()}
        inner, qkv = attention.num_heads * attention.head_dim, qkv_segments(attention, build.tp)
        gate_up = [Segment(part, hf.intermediate_size) for part in ("gate", "up")]
        norm = {"eps": hf.rms_norm_eps, "device": build.device}
        self.norm, self.ff_norm = (
            RMSNorm(f"{name}.norm", 2 * hidden, **norm),
            RMSNorm(f"{name}.ff_norm", hidden, **norm),
        )
        self.qkv = ColumnLinear(f"{name}.qkv", 2 * hidden, qkv, build=build)
        self.o_proj = RowLinear(f"{name}.o_proj", [Segment("x", inner)], hidden, build=build)
        biased = [part.name for part in gate_up if self.has_bias]
        self.up = ColumnLinear(f"{name}.gate_up", hidden, gate_up, bias=biased, build=build)
        down = [Segment("x", hf.intermediate_size)]
        self.down = RowLinear(f"{name}.down", down, hidden, bias=self.has_bias, build=build)
        self.qkv_adapters, self.up_adapters = nn.ModuleDict(), nn.ModuleDict()
        for i in places:
            thin, each = hf.adapter_rank, {part.name: [part] for part in qkv}
            if hf.use_shared_attention_adapter:
                self.qkv_adapters[str(i)] = Adapter(f"{name}.qkv.{i}", 2 * hidden, thin, each, build=build)
            self.up_adapters[str(i)] = Adapter(f"{name}.up.{i}", hidden, thin, {"gate_up": gate_up}, build=build)

    def forward(self, i: int, x: torch.Tensor, embedded: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """At hybrid layer `i`: [T, hidden] each to [T, hidden]."""
        attn, h = self.attn[i], self.norm(torch.cat((x, embedded), dim=-1))[0]
        projected = self.qkv(h)
        if self.qkv_adapters:
            projected += self.qkv_adapters[str(i)](h)
        q, k, v = projected.split((attn.q_size, attn.kv_size, attn.kv_size), dim=-1)
        h = self.o_proj(batch.attn_backend.forward(q, k, v, attn, batch, rope=self.rope))
        h = self.ff_norm(h)[0]
        gate, up = self.up(h).add_(self.up_adapters[str(i)](h)).chunk(2, dim=-1)
        out: torch.Tensor = self.down(F.gelu(gate).mul_(up))
        return out

    def targets(self, key: str) -> CheckpointMap:
        attention, mlp = f"{key}.self_attn", f"{key}.feed_forward"
        found = {
            **self.norm.targets(f"{key}.input_layernorm"),
            **self.ff_norm.targets(f"{key}.pre_ff_layernorm"),
            **self.o_proj.targets(f"{attention}.o_proj", "x"),
            **self.up.targets(f"{mlp}.gate_up_proj", ["gate", "up"], bias=self.has_bias),
            **self.down.targets(f"{mlp}.down_proj", "x", bias=self.has_bias),
        }
        for part in self.qkv.segments:
            found |= self.qkv.targets(f"{attention}.{part}_proj", [part])
        for adapters, below in (
            (self.qkv_adapters, f"{attention}.linear_{{}}_adapter_list"),
            (self.up_adapters, f"{mlp}.{{}}_proj_adapter_list"),
        ):
            for i, adapter in adapters.items():
                assert isinstance(adapter, Adapter)
                found |= adapter.targets(f"{below}.{i}")
        return found


class HybridPart(nn.Module):
    """Hybrid layer `i`: a shared block (whose keys are the model's to name), a projection, and Mamba-2 behind them."""

    def __init__(self, name: str, i: int, block: SharedBlock, mamba: Mamba2Block, hidden: int, *, build: Build) -> None:
        super().__init__()
        uncut = replace(build, tp=TPGroup())
        self.i, self.block, self.mamba = i, block, mamba
        self.linear = ColumnLinear(f"{name}.linear", hidden, [Segment("x", hidden)], build=uncut)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch, embedded: torch.Tensor
    ) -> Summands:
        """Mamba-2 of norm(x + residual + what the block makes of it), and x + residual."""
        x = x if residual is None else x + residual
        seen = self.linear(self.block(self.i, x, embedded, batch)).add_(x)
        projected, _ = norm_linear(norm, self.mamba.in_proj, seen, None)
        return self.mamba.out_proj.onto(x, self.mamba.mixer(projected, batch))

    def targets(self, key: str) -> CheckpointMap:
        return {**self.linear.targets(f"{key}.linear", ["x"]), **self.mamba.targets(f"{key}.mamba_decoder.mamba")}


class Zamba2ForCausalLM(CausalLM):
    """Zamba2 (Zyphra 2024): `num_mem_blocks` shared blocks, one for each hybrid layer where embeddings are not tied."""

    norm_key = "model.final_layernorm"

    def __init__(self, config: ModelConfig, build: Build, max_len: int) -> None:
        super().__init__(config, build, max_len, eps=config.hf.rms_norm_eps)
        # A checkpoint may repeat a block at each layer that uses it, and a block that only one layer uses may have
        # adapters for others.
        again = "|".join(map(str, config.full_attention_layer_ids[len(self.blocks) :])) or r"\d+"
        part = ".*" if len(self.blocks) < len(config.full_attention_layer_ids) else r".*_adapter_list\..*"
        self.skipped_keys = (*self.skipped_keys, rf"model\.layers\.({again})\.shared_transformer\.{part}")

    def make_stack(self, layer_ids: Iterable[int]) -> ResidualStack:
        config, hf = self.config, self.config.hf
        hybrid = list(enumerate(config.full_attention_layer_ids))
        # As in transformers: without tied embeddings nothing is tied, and each hybrid layer has a block of its own.
        count = hf.num_mem_blocks if hf.tie_word_embeddings else len(hybrid)
        table = self.cos_sin(config.attention)
        places = [dict(hybrid[b::count]) for b in range(min(count, len(hybrid)))]
        self.blocks = nn.ModuleList(
            SharedBlock(f"shared.{b}", config, each, table, build=self.build) for b, each in enumerate(places)
        )
        return super().make_stack(layer_ids)

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, hidden = self.config, self.config.hf, self.config.hidden_size
        mamba = Mamba2Block(
            f"{name}.mamba", config.linear_of(Mamba2Config), layer_id, hidden, bias=hf.add_bias_linear, conv_bias=True,
            gated_norm=(GATED_NORM_EPS, False), build=self.build,
        )  # fmt: skip
        if not config.layer(layer_id).attention:
            return [ResidualPart("input_layernorm", "mamba", mamba)]
        i = config.full_attention_layer_ids.index(layer_id)
        block = self.blocks[i % len(self.blocks)]
        assert isinstance(block, SharedBlock)
        return [
            ResidualPart(
                "mamba_decoder.input_layernorm", "", HybridPart(name, i, block, mamba, hidden, build=self.build)
            )
        ]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        embedded = self.embed(batch.input_ids)
        # Blocks read the embedding to the end, and the residual may be overwritten.
        x, residual = embedded.clone(), None
        for norm, part in self.stack:
            more = (embedded,) if isinstance(part, HybridPart) else ()
            x, residual = part(norm, x, residual, batch, *more)
        return self.norm(x, residual)[0]

    def checkpoint_map(self) -> CheckpointMap:
        found = super().checkpoint_map()
        for layer_id, block in zip(self.config.full_attention_layer_ids, self.blocks):
            assert isinstance(block, SharedBlock)
            found |= block.targets(f"model.layers.{layer_id}.shared_transformer")
        return found
