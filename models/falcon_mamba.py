"""Falcon-Mamba: a stack of Mamba-1 blocks and nothing else, no attention and no MLP.

    x ─ norm ─ Mamba-1 ─ +

dt, B and C are RMS-normed without weights (TII 2024, arXiv:2410.05355).
"""

from typing import Any, cast

import torch
from torch import nn

from hybridrt.config import ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.layers.mamba1 import Mamba1Mixer
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM


class FalconMambaForCausalLM(CausalLM):
    """Falcon-Mamba (TII 2024)."""

    def __init__(
        self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> None:
        super().__init__(config, tp=tp, dtype=dtype, device=device, max_len=max_len)
        hf, build, hidden = config.hf, Build(tp, dtype, device), config.hidden_size
        self.make_tables(build)
        ids, mamba = range(len(config.layers)), config.linear_of(Mamba1Config)
        norms = nn.ModuleList(RMSNorm(f"layers.{i}.norm", hidden, hf.layer_norm_epsilon, device=device) for i in ids)
        mixers = nn.ModuleList(
            Mamba1Mixer(
                f"layers.{i}.mixer", mamba, i, hidden, conv_bias=hf.use_conv_bias, proj_bias=hf.use_bias,
                norm_eps=hf.mixer_rms_eps, learned_norms=False, build=build,
            )
            for i in ids
        )  # fmt: skip
        self.norms, self.mixer_layers = cast(list[RMSNorm], norms), cast(list[Mamba1Mixer], mixers)
        self.norm = RMSNorm("norm", hidden, hf.layer_norm_epsilon, device=device)
        self.residual_dtype = torch.float32 if hf.residual_in_fp32 else dtype

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embed(batch.input_ids)
        x, residual = torch.zeros_like(x), x.to(self.residual_dtype)
        for norm, mixer in zip(self.norms, self.mixer_layers):
            x, residual = mixer(norm, x, residual, batch)
        return self.norm(x, residual)[0]

    def mixers(self) -> dict[int, Any]:
        return dict(enumerate(self.mixer_layers))

    def checkpoint_map(self) -> CheckpointMap:
        found = {**self.embed.targets("backbone.embeddings"), **self.norm.targets("backbone.norm_f")}
        if self.head is not self.embed:
            found |= self.head.targets("lm_head")
        for i, (norm, mixer) in enumerate(zip(self.norms, self.mixer_layers)):
            found |= {**norm.targets(f"backbone.layers.{i}.norm"), **mixer.targets(f"backbone.layers.{i}.mixer")}
        return found
