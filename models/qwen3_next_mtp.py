"""The multi-token-prediction head of Qwen3-Next: one more block of gated attention and experts (Qwen team 2025)."""

from dataclasses import replace

import torch

from hybridrt.forward_batch import ForwardBatch
from hybridrt.layers.linear import Summands
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import MTPHead
from hybridrt.models.qwen3_next import Qwen3NextBlock, Qwen3NextForCausalLM


class Qwen3NextMTP(MTPHead):
    """Keys `mtp.*`. Norms are zero-centred, as the model's are."""

    def __init__(self, model: Qwen3NextForCausalLM) -> None:
        config, build = model.config, Build(model.tp, model.dtype, model.device)
        super().__init__(config, build, eps=config.hf.rms_norm_eps, zero_centered=True)
        longer = replace(config, layers=(*config.layers, *config.mtp_layers))
        self.block = Qwen3NextBlock(longer, len(config.layers), build)
        self.cos_sin = model.cos_sin

    def layers_of(self, x: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        mixed: Summands = self.block(x, None, self.cos_sin, batch)
        return mixed

    def checkpoint_map(self) -> CheckpointMap:
        return {
            **self.embedding_norm.targets("mtp.pre_fc_norm_embedding"),
            **self.hidden_norm.targets("mtp.pre_fc_norm_hidden"),
            **self.fuse.targets("mtp.fc", "both"),
            **self.block.checkpoint_map("mtp.layers.0"),
            **self.norm.targets("mtp.norm"),
        }
