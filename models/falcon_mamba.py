"""Falcon-Mamba: a stack of Mamba-1 blocks and nothing else, no attention and no MLP.

    x ─ norm ─ Mamba-1 ─ +

dt, B and C are RMS-normed without weights (TII 2024, arXiv:2410.05355).
"""

from collections.abc import Sequence

import torch

from hybridrt.config import ModelConfig
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.layers.mamba1 import Mamba1Mixer
from hybridrt.layers.stack import ResidualPart
from hybridrt.layers.weights import Build
from hybridrt.models.base import CausalLM


class FalconMambaForCausalLM(CausalLM):
    """Falcon-Mamba (TII 2024)."""

    embed_key, norm_key, layers_key = "backbone.embeddings", "backbone.norm_f", "backbone.layers"

    def __init__(self, config: ModelConfig, build: Build, max_len: int) -> None:
        super().__init__(config, build, max_len, eps=config.hf.layer_norm_epsilon)
        self.residual_dtype = torch.float32 if config.hf.residual_in_fp32 else build.dtype

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        hf, hidden, mamba = self.config.hf, self.config.hidden_size, self.config.linear_of(Mamba1Config)
        mixer = Mamba1Mixer(
            f"{name}.mixer", mamba, layer_id, hidden, conv_bias=hf.use_conv_bias, proj_bias=hf.use_bias,
            norm_eps=hf.mixer_rms_eps, learned_norms=False, build=self.build,
        )  # fmt: skip
        return [ResidualPart("norm", "mixer", mixer)]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embed(batch.input_ids)
        x, residual = torch.zeros_like(x), x.to(self.residual_dtype)
        for norm, part in self.stack:
            x, residual = part(norm, x, residual, batch)
        return self.norm(x, residual)[0]
