"""The checkpoint under check, and options of the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridrt.base.config_json import read_object
from hybridrt.base.device import resolve_device
from hybridrt.base.dtypes import resolve_dtype
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.model_config import ModelConfig
from hybridrt.models.config.read_config import read_model_config
from hybridrt.runtime.load.model_path import resolve_model_path
from hybridrt.verify.early_kernels import EarlyKernels
from hybridrt.verify.results import Parts

if TYPE_CHECKING:
    from hybridrt.engine.api.llm import LLM
    from hybridrt.verify.oracle import OracleAnswer


@dataclass(frozen=True)
class Doubt:
    """A field of a rotary embedding with an unusual value.

    Attributes:
        usual: the value that models of this type have.
    """

    text: str
    field: str
    usual: Any


@dataclass
class Subject:
    """A checkpoint on this machine.

    Args:
        model: directory or hub name.
        quick: fewer and shorter runs; large tensors are read at some places.
        progress: gets a text before each part of a long check.

    Attributes:
        config: what hybridrt reads of config.json; None until it could be read.
        raw: the fields of config.json.
        hashes: sha256 by name, of files and of tensors.
        doubts: what config.json alone cannot settle about rotary embeddings.
        broken: why no model can be made of the checkpoint; "" if one can.
        parts: seconds of the parts of the check that runs.
        exact: transformers' answers in float32, if it has run.
        limits: by dtype, how much log-probabilities may differ, and those of a tie.
        fits_float32: whether the device holds the model in float32; None: not asked yet.
        kept: options of the engine that a quick run keeps for its next check, and the engine.
        early: compiles kernels of a quick run's engines.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    quick: bool = False
    progress: Callable[[str], None] = lambda text: None
    path: Path = field(init=False)
    raw: dict[str, Any] = field(init=False)
    config: ModelConfig | None = None
    hashes: dict[str, dict[str, str]] = field(default_factory=lambda: {"files": {}, "tensors": {}})
    broken: str = ""
    tokenizer: Any = None
    doubts: list[Doubt] = field(default_factory=list)
    parts: Parts = field(default_factory=Parts)
    exact: "list[OracleAnswer]" = field(default_factory=list)
    limits: dict[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    fits_float32: bool | None = None
    kept: "tuple[dict[str, Any], LLM] | None" = None
    early: EarlyKernels = field(default_factory=EarlyKernels)

    def __post_init__(self) -> None:
        self.path = resolve_model_path(self.model)
        self.raw = read_object(self.path / "config.json")

    def begin(self, part: str) -> None:
        """A part of the check begins: it is shown, and its seconds go to the report."""
        self.progress(part)
        self.parts.begin(part)

    def close(self) -> None:
        """Gives the memory of a kept engine back."""
        kept, self.kept = self.kept, None
        if kept is not None:
            kept[1].close()

    def read_config(self) -> ModelConfig:
        self.config = read_model_config(self.path)
        return self.config

    @property
    def torch_device(self) -> torch.device:
        return resolve_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        assert self.config is not None, "it was read"
        return resolve_dtype(self.dtype, self.config.dtype, self.torch_device)

    def engine_config(self, **options: Any) -> EngineConfig:
        return EngineConfig(str(self.path), **{"device": self.device, "dtype": self.dtype, **options})

    @property
    def text_fields(self) -> Mapping[str, Any]:
        """The fields of the text part."""
        for name in ("text_config", "llm_config"):
            if isinstance(part := self.raw.get(name), dict):
                return part
        return self.raw
