"""Mamba and Mamba-2: a stack of blocks of one kind and nothing else, no attention and no MLP.

    x ─ norm ─ Mamba ─ +

Gu & Dao 2023 (arXiv:2312.00752), Dao & Gu 2024 (arXiv:2405.21060).
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from hybridrt.base.config import ModelConfig
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.stack import ResidualPart
from hybridrt.layers.weights import Build
from hybridrt.models.base import CausalLM
from hybridrt.recurrent.mamba1 import Mamba1Mixer
from hybridrt.recurrent.mamba2 import Mamba2Block


class PureMamba(CausalLM):
    """A stack of mixers, whose residuals may be float32."""

    embed_key, norm_key, layers_key = "backbone.embeddings", "backbone.norm_f", "backbone.layers"
    spellings: ClassVar[dict[str, str]] = {"backbone.embedding.": "backbone.embeddings."}
    eps_field = "layer_norm_epsilon"

    def __init__(self, config: ModelConfig, build: Build, max_len: int) -> None:
        super().__init__(config, build, max_len)
        self.residual_dtype = torch.float32 if config.hf.residual_in_fp32 else build.dtype

    @abstractmethod
    def mixer(self, layer_id: int, name: str) -> Any:
        """The mixer of a layer."""

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        return [ResidualPart("norm", "mixer", self.mixer(layer_id, f"{name}.mixer"))]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embed(batch.input_ids)
        x, residual = torch.zeros_like(x), x.to(self.residual_dtype)
        for norm, part in self.stack:
            x, residual = part(norm, x, residual, batch)
        return self.norm(x, residual)[0]


class MambaForCausalLM(PureMamba):
    """Mamba (Gu & Dao 2023)."""

    def mixer(self, layer_id: int, name: str) -> Mamba1Mixer:
        hf, config = self.config.hf, self.config
        return Mamba1Mixer(
            name, config.linear_of(Mamba1Config), layer_id, config.hidden_size, conv_bias=hf.use_conv_bias,
            proj_bias=hf.use_bias, build=self.build,
        )  # fmt: skip


class Mamba2ForCausalLM(PureMamba):
    """Mamba-2 (Dao & Gu 2024)."""

    def mixer(self, layer_id: int, name: str) -> Mamba2Block:
        hf, config = self.config.hf, self.config
        return Mamba2Block(
            name, config.linear_of(Mamba2Config), layer_id, config.hidden_size, bias=hf.use_bias,
            conv_bias=hf.use_conv_bias, gated_norm=(hf.layer_norm_epsilon, False), build=self.build,
        )  # fmt: skip
