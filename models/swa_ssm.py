"""swa_ssm: sliding-window attention, a Mamba-1 history branch over all tokens, an MLP.

    x ─ norm ─┬─ attention(window) ─ out ─┬─ + ─ norm ─ MLP ─ +
              └─ Mamba-1(history) ────────┘

Our own small family for hybridrt.models.hybrid_attention (docs/hybrid-layer.md).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hybridrt.base.config_fields import (
    ATTENTION,
    COMMON,
    EPSILON,
    LAYERS,
    POSITIONS,
    ROPE,
    SIZE,
    STATE,
    TAPS,
    FieldTypes,
)
from hybridrt.base.config_json import NULL, check_fields, either, list_of, one_of
from hybridrt.base.errors import ConfigError, shown
from hybridrt.base.model_config import AttentionConfig, LayerSpec, LinearConfig, ModelConfig
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.prefix_sum import PrefixSumConfig
from hybridrt.layers.linear import MLP
from hybridrt.layers.norm import ResidualPart
from hybridrt.layers.weights import Build
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import Family, FamilyFields, check_heads
from hybridrt.models.hybrid_attention import HISTORY_MODES, HybridAttentionLayer, HybridSSMAdapter
from hybridrt.models.window_history import WindowHistoryBackend

ARCHITECTURE = "SwaSsmForCausalLM"
_COMMON = frozenset(
    {
        "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "eos_token_id", "bos_token_id",
        "pad_token_id",
    }
)  # fmt: skip
FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    "num_hidden_layers": LAYERS,
    "sliding_window": POSITIONS,
    "rope_theta": ROPE["rope_theta"],
    **dict.fromkeys(("ssm_intermediate_size", "ssm_time_step_rank"), either(NULL, SIZE)),
    "ssm_state_size": STATE,
    "ssm_conv_kernel": TAPS,
    "history_mode": either(one_of(*HISTORY_MODES), list_of(one_of(*HISTORY_MODES))),
    "rms_norm_eps": EPSILON,
}


@dataclass(frozen=True, kw_only=True)
class SwaSsmConfig:
    """A swa_ssm model, before sharding.

    Attributes:
        sliding_window: keys that a token sees, itself included.
        history_mode: mode of all history branches, or a list by layer
            (hybridrt.models.hybrid_attention.HybridSSMAdapter).
        head_dim, ssm_intermediate_size, ssm_time_step_rank: None for hidden_size /
            num_attention_heads, 2 x hidden_size and hidden_size / 16.
        intermediate_size: channels within the MLP.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    sliding_window: int
    head_dim: int = None  # type: ignore[assignment]  # filled in below
    rope_theta: float = 10000.0
    ssm_intermediate_size: int = None  # type: ignore[assignment]
    ssm_state_size: int = 16
    ssm_conv_kernel: int = 4
    ssm_time_step_rank: int = None  # type: ignore[assignment]
    history_mode: str | Sequence[str] = "enabled"
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        defaults = {
            "head_dim": self.hidden_size // self.num_attention_heads,
            "ssm_intermediate_size": 2 * self.hidden_size,
            "ssm_time_step_rank": -(-self.hidden_size // 16),
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.sliding_window < 1:
            raise ConfigError(f"sliding_window is {self.sliding_window}; it must be at least 1, the token itself")
        check_heads(self)
        unknown = sorted(set(self.history_modes) - set(HISTORY_MODES))
        if unknown or len(self.history_modes) != self.num_hidden_layers:
            raise ConfigError(
                f"history_mode is {shown(self.history_mode)}; it must be one of {', '.join(HISTORY_MODES)}, or a list "
                f"of {self.num_hidden_layers} of them"
            )

    @property
    def history_modes(self) -> tuple[str, ...]:
        mode = self.history_mode
        return (mode,) * self.num_hidden_layers if isinstance(mode, str) else tuple(mode)

    def describe(self) -> FamilyFields:
        """The family's part of a ModelConfig."""
        kinds = [HISTORY_MODES[mode] for mode in self.history_modes]
        states: tuple[LinearConfig, ...] = (
            Mamba1Config(
                self.ssm_intermediate_size, self.ssm_state_size, self.ssm_conv_kernel, self.ssm_time_step_rank
            ),
            PrefixSumConfig(self.hidden_size),
        )
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        heads = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        return {
            "layers": tuple(LayerSpec(True, kind, "mlp") for kind in kinds),
            "linear": {state.kind: state for state in states if state.kind in kinds},
            "attention": AttentionConfig(*heads, rope, self.sliding_window),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], file: Path = Path("config.json")) -> "SwaSsmConfig":
        """From config.json's object, read from `file`. ConfigError if fields are missing, unknown
        or out of bounds."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(raw) - known - _COMMON)
        if unknown:
            raise ConfigError(f"config.json of {ARCHITECTURE} holds {unknown}; known are {sorted(known)}")
        check_fields(raw, FIELDS, file)
        try:
            return cls(**{name: value for name, value in raw.items() if name in known})
        except TypeError as e:
            raise ConfigError(f"config.json of {ARCHITECTURE}: {e}") from e

    def save(self, path: Path, **more: Any) -> None:
        """Writes `path`/config.json. `more`: further fields, such as dtype or eos_token_id."""
        path.mkdir(parents=True, exist_ok=True)
        found = {"architectures": [ARCHITECTURE], "model_type": "swa_ssm", **asdict(self), **more}
        (path / "config.json").write_text(json.dumps(found, indent=2) + "\n")


FAMILY = Family(
    model=f"hybridrt.models.swa_ssm:{ARCHITECTURE}",
    read=SwaSsmConfig.from_json,
    fields={},  # `read` checks them
    describe=SwaSsmConfig.describe,
)


class SwaSsmForCausalLM(CausalLM):
    """The decoder. History branches that a layer's mode does not use are skipped."""

    composite = WindowHistoryBackend

    def __init__(self, config: ModelConfig, build: Build, max_len: int) -> None:
        super().__init__(config, build, max_len)
        unused = [i for i, adapter in self.mixers().items() if not adapter.targets("")]
        self.skipped_keys = tuple(re.escape(f"model.layers.{i}.history.") + ".*" for i in unused)

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        hf, hidden, own = self.config.hf, self.config.hidden_size, self.config.attention_of(layer_id)
        history = HybridSSMAdapter(
            hidden, hf.ssm_state_size, hf.ssm_conv_kernel, hf.ssm_intermediate_size,
            time_step_rank=hf.ssm_time_step_rank, mode=hf.history_modes[layer_id], layer_id=layer_id,
            name=f"{name}.history", build=self.build,
        )  # fmt: skip
        mixer = HybridAttentionLayer(
            f"{name}.attn", own, layer_id, hidden, history, cos_sin=self.cos_sin(own), build=self.build
        )
        mlp = MLP(f"{name}.mlp", hidden, hf.intermediate_size, build=self.build)
        return [ResidualPart("input_layernorm", "", mixer), ResidualPart("post_attention_layernorm", "mlp", mlp)]

    def mixers(self) -> dict[int, Any]:
        adapters = [m for m in self.stack.modules() if isinstance(m, HybridSSMAdapter)]
        return {adapter.layer_id: adapter for adapter in adapters}
