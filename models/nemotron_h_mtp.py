"""The multi-token-prediction head of Nemotron 3: a few of the model's own blocks, attention and mixture of experts."""

from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from hybridrt.forward_batch import ForwardBatch
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import MTPHead
from hybridrt.models.nemotron_h import NemotronHForCausalLM, Part, make_part


class NemotronHMTP(MTPHead):
    """Keys `mtp.layers.<i>.*`: the fusion stands with the first block, the final norm with the last."""

    def __init__(self, model: NemotronHForCausalLM) -> None:
        config, build = model.config, Build(model.tp, model.dtype, model.device)
        eps, hidden = config.hf.layer_norm_epsilon, config.hidden_size
        super().__init__(config, build, eps=eps)
        longer, first = replace(config, layers=(*config.layers, *config.mtp_layers)), len(config.layers)
        ids = range(first, len(longer.layers))
        norms = nn.ModuleList(RMSNorm(f"layers.{i}.norm", hidden, eps, device=build.device) for i in ids)
        parts = nn.ModuleList(make_part(longer, i, f"layers.{i}.mixer", build) for i in ids)
        self.norms, self.parts = cast(list[RMSNorm], norms), cast(list[Part], parts)

    def layers_of(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        residual: Tensor | None = None
        for norm, part in zip(self.norms, self.parts):
            x, residual = part(norm, x, residual, batch)
        return x, residual

    def checkpoint_map(self) -> CheckpointMap:
        found = {
            **self.embedding_norm.targets("mtp.layers.0.enorm"),
            **self.hidden_norm.targets("mtp.layers.0.hnorm"),
            **self.fuse.targets("mtp.layers.0.eh_proj", "both"),
            **self.norm.targets(f"mtp.layers.{len(self.parts) - 1}.final_layernorm"),
        }
        for i, (norm, part) in enumerate(zip(self.norms, self.parts)):
            found |= {**norm.targets(f"mtp.layers.{i}.norm"), **part.checkpoint_map(f"mtp.layers.{i}.mixer")}
        return found
