"""A family as another package brings it, whose attention differs from layer to layer, and the model in plain torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from hybridrt.base import plugins
from hybridrt.base.model_config import AttentionConfig, LayerSpec
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import MLP
from hybridrt.layers.norm import ResidualPart
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import Family, FamilyFields
from hybridrt.models.config.family_registry import family_of
from tests.support.sizes import VOCAB

ARCHITECTURE = "MixedForCausalLM"
HIDDEN, MLP_SIZE, EPS = 24, 32, 1e-5
ROPE = {"rope_type": "default", "rope_theta": 100.0}
# Two head dims, a window on some layers and none on others, other numbers of heads, no positions, another scale.
LAYERS = (
    AttentionConfig(4, 2, 8, ROPE, sliding_window=5),
    AttentionConfig(4, 2, 8, ROPE),
    AttentionConfig(2, 1, 12, None, scale=0.2),
    AttentionConfig(4, 2, 8, ROPE, sliding_window=5),
    AttentionConfig(4, 4, 12, ROPE, sliding_window=9),
)


class MixedForCausalLM(CausalLM):
    """norm, attention with q/k norm where there is rotary, norm, MLP."""

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        own, build = self.config.attention_of(layer_id), self.build
        qk_norm = (EPS, False) if own.rope else None
        attention = Attention(
            f"{name}.attn", own, layer_id, HIDDEN, cos_sin=self.cos_sin(own), qk_norm=qk_norm, build=build
        )
        mlp = MLP(f"{name}.mlp", HIDDEN, MLP_SIZE, build=build)
        return [ResidualPart("norm1", "attn", attention), ResidualPart("norm2", "mlp", mlp)]


def _read(raw: Mapping[str, Any], file: Path) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "max_position_embeddings": 256}
    return SimpleNamespace(**sizes, tie_word_embeddings=False, rms_norm_eps=EPS)


def _describe(hf: Any) -> FamilyFields:
    layers = tuple(LayerSpec(own, None, "mlp") for own in LAYERS)
    return {"layers": layers, "linear": {}, "attention": LAYERS[0]}


FAMILY = Family(model=f"{__name__}:{ARCHITECTURE}", read=_read, fields={}, describe=_describe)


@contextmanager
def installed() -> Iterator[None]:
    """The family is found, as if its package were installed."""
    points = [SimpleNamespace(name=ARCHITECTURE, value=f"{__name__}:FAMILY")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plugins, "entry_points", lambda group: points if group == "hybridrt.families" else [])
        family_of.cache_clear()
        yield
    family_of.cache_clear()


def write_checkpoint(path: Path) -> "Reference":
    """Random weights, and the model that computes with them."""
    generator = torch.Generator().manual_seed(5)
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (HIDDEN,), **dict.fromkeys(tables, (VOCAB, HIDDEN))}
    for i, own in enumerate(LAYERS):
        key, q, kv = f"model.layers.{i}", own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
        shapes |= {f"{key}.norm{n}.weight": (HIDDEN,) for n in (1, 2)}
        shapes |= {f"{key}.attn.{n}_proj.weight": (rows, HIDDEN) for n, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{key}.attn.o_proj.weight": (HIDDEN, q), f"{key}.mlp.down_proj.weight": (HIDDEN, MLP_SIZE)}
        shapes |= {f"{key}.mlp.{n}_proj.weight": (MLP_SIZE, HIDDEN) for n in ("gate", "up")}
        if own.rope:
            shapes |= {f"{key}.attn.{n}_norm.weight": (own.head_dim,) for n in ("q", "k")}
    weights = {
        name: torch.randn(shape, generator=generator) * (0.5 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    path.mkdir(exist_ok=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"architectures": [ARCHITECTURE], "tie_word_embeddings": False}))
    return Reference(weights)


class Reference:
    """The model over whole sequences, a request at a time."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def logits(self, ids: list[int]) -> Tensor:
        """Of every position, [n, vocab]."""
        w = self.weights
        x = w["model.embed_tokens.weight"][ids]
        for i, own in enumerate(LAYERS):
            key = f"model.layers.{i}"
            x = x + self._attention(F.rms_norm(x, (HIDDEN,), w[f"{key}.norm1.weight"], EPS), own, f"{key}.attn")
            h = F.rms_norm(x, (HIDDEN,), w[f"{key}.norm2.weight"], EPS)
            gated = F.silu(h @ w[f"{key}.mlp.gate_proj.weight"].T) * (h @ w[f"{key}.mlp.up_proj.weight"].T)
            x = x + gated @ w[f"{key}.mlp.down_proj.weight"].T
        return F.rms_norm(x, (HIDDEN,), w["model.norm.weight"], EPS) @ w["lm_head.weight"].T

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def _attention(self, h: Tensor, own: AttentionConfig, key: str) -> Tensor:
        n, dim = len(h), own.head_dim
        q, k, v = ((h @ self.weights[f"{key}.{p}_proj.weight"].T).view(n, -1, dim) for p in ("q", "k", "v"))
        if own.rope:
            q, k = (F.rms_norm(t, (dim,), self.weights[f"{key}.{p}_norm.weight"], EPS) for t, p in ((q, "q"), (k, "k")))
            q, k = (_rotated(t, own.rope["rope_theta"]) for t in (q, k))
        k, v = (t.repeat_interleave(own.num_heads // own.num_kv_heads, 1) for t in (k, v))
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        if own.sliding_window:
            mask = mask.triu(1 - own.sliding_window)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (own.scale or dim**-0.5)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1) @ self.weights[f"{key}.o_proj.weight"].T


def _rotated(t: Tensor, theta: float) -> Tensor:
    n, _, dim = t.shape
    angles = torch.outer(torch.arange(n).float(), 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = t.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
