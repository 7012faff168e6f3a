"""Zamba2: Mamba-2 blocks, some of which also read what a shared transformer block makes of the residual.

    x ─────────────────────────────────────────┬─ + ─ norm ─ Mamba-2 ─ + x
    x | embedding ─ norm ─ attention ─ norm ─ MLP ─ linear ─┘

The weights of a block are one set. Each place that uses it has its own KV cache, and low-rank adapters of the
projections q, k, v and of the MLP's first (Zyphra 2024, arXiv:2411.15242).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hybridrt.base.config import ModelConfig
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.linear import ColumnLinear, Segment, Summands, norm_linear
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.shared_block import SharedBlock
from hybridrt.layers.stack import ResidualPart, ResidualStack
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM
from hybridrt.recurrent.mamba2 import Mamba2Block

GATED_NORM_EPS = 1e-5  # of Mamba-2's own norm, whatever config.json says of the others


class HybridPart(nn.Module):
    """Hybrid layer `i`: a shared block (whose keys are the model's to name), a projection, and Mamba-2 behind them."""

    def __init__(self, name: str, i: int, block: SharedBlock, mamba: Mamba2Block, hidden: int, *, build: Build) -> None:
        super().__init__()
        self.i, self.block, self.mamba = i, block, mamba
        self.linear = ColumnLinear(f"{name}.linear", hidden, [Segment("x", hidden)], build=build.uncut)

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
        super().__init__(config, build, max_len)
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
            SharedBlock(
                f"shared.{b}",
                config.attention,
                config.hidden_size,
                hf.intermediate_size,
                each,
                adapter_rank=hf.adapter_rank,
                attention_adapters=hf.use_shared_attention_adapter,
                bias=hf.add_bias_linear,
                eps=hf.rms_norm_eps,
                cos_sin=table,
                build=self.build,
            )
            for b, each in enumerate(places)
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
