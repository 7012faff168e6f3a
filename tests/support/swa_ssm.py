"""swa_ssm for tests that write checkpoints as transformers does: the reference model with the few methods they call."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor

from benchmarks.swa_ssm_reference import SwaSsmReference
from hybridrt.models.swa_ssm import SwaSsmConfig


class Config:
    """Fields of a SwaSsmConfig, and those that every config.json has."""

    def __init__(self, **fields: Any) -> None:
        self.more = {name: fields.pop(name) for name in list(fields) if name.endswith("_token_id")}
        self.fields = fields
        self.dtype = "float32"

    def save_pretrained(self, path: Path) -> None:
        SwaSsmConfig(**self.fields).save(path, dtype=self.dtype, **self.more)


class SwaSsmForCausalLM(SwaSsmReference):
    def __init__(self, config: Config) -> None:
        super().__init__(SwaSsmConfig(**config.fields))
        self.saved, self.generation_config = config, None

    def forward(self, ids: Tensor, use_cache: bool = False) -> Any:  # type: ignore[override]
        return SimpleNamespace(logits=super().forward(ids))

    def save_pretrained(self, path: Path, max_shard_size: str = "5GB") -> None:
        self.saved.save_pretrained(path)
        tensors = self.state_dict()
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_torch_state_dict(tensors, path, max_shard_size=max_shard_size)
        self.generation_config.save_pretrained(path)  # type: ignore[attr-defined]
