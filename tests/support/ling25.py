"""Ling 2.5 in plain PyTorch, whole sequences without a cache, and checkpoints of it: transformers has no class of it.

Modules have the names of modeling_bailing_moe_v2_5.py (inclusionAI/Ring-V2.5), from which the formulas are. Layers are
counted for the decays as in SGLang and in vLLM: that file counts from one layer earlier.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from tests.support.newer_checkpoints import known
from tests.support.published_minimax import slopes
from tests.support.sizes import LENGTH, TOKENS, VOCAB, Make

FIELDS: dict[str, Any] = {
    "architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid", "vocab_size": VOCAB,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-3, "layer_group_size": 2,
    "group_norm_size": 2, "first_k_dense_replace": 1, "num_experts": 8, "num_experts_per_tok": 2,
    "num_shared_experts": 1, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.7, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "topk_method": "noaux_tc", "kv_lora_rank": 20,
    "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "rope_interleave": True,
    "partial_rotary_factor": 0.5, "rotary_dim": 4, "rope_theta": 10000.0, "rope_scaling": None, "use_qk_norm": True,
    "use_qkv_bias": False, "use_bias": False, "linear_silu": False, "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False, "max_position_embeddings": LENGTH, "torch_dtype": "float32", **TOKENS,
}  # fmt: skip


class Config(SimpleNamespace):
    """FIELDS and what a case changes of them."""

    def save_pretrained(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        fields = {name: getattr(self, name) for name in FIELDS}
        (path / "config.json").write_text(json.dumps(fields | {"architectures": FIELDS["architectures"]}))


class Norm(nn.Module):
    """RMS norm over each of `groups` parts."""

    def __init__(self, size: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight, self.eps, self.groups = nn.Parameter(torch.ones(size)), eps, groups

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.groups, -1))
        return (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight


def linear(size: int, out: int) -> nn.Linear:
    return nn.Linear(size, out, bias=False)


def turns(c: Config, size: int, count: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, size / 2]. With YaRN (Peng et al. 2023) slow frequencies are divided by its factor."""
    freq = c.rope_theta ** -(torch.arange(0, size, 2) / size)
    scale, yarn = 1.0, c.rope_scaling
    if yarn:

        def pair(turns: float) -> float:
            """The pair that turns so often within the length of pretraining."""
            length = yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)
            return size * math.log(length) / (2 * math.log(c.rope_theta))

        low, high = max(math.floor(pair(32.0)), 0), min(math.ceil(pair(1.0)), size - 1)
        kept = 1 - ((torch.arange(size // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
        freq = freq * kept + freq / yarn["factor"] * (1 - kept)
        scale = 0.1 * math.log(yarn["factor"]) + 1
    angles = torch.outer(torch.arange(count), freq)
    return angles.cos() * scale, angles.sin() * scale


class Linear(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.c, size = c, c.num_attention_heads * c.head_dim
        self.query_key_value, self.g_proj = linear(c.hidden_size, 3 * size), linear(c.hidden_size, size)
        self.query_layernorm, self.key_layernorm = Norm(c.head_dim, c.rms_norm_eps), Norm(c.head_dim, c.rms_norm_eps)
        self.g_norm, self.dense = Norm(size, c.rms_norm_eps, c.group_norm_size), linear(size, c.hidden_size)
        self.rates = torch.tensor(slopes(c.num_attention_heads))
        self.rates *= 1 - layer / (c.num_hidden_layers - 1) + 1e-5

    def rotated(self, x: Tensor) -> Tensor:
        """The first half of the rotated part with its second half, [T, H, D]."""
        size = int(self.c.head_dim * self.c.partial_rotary_factor)
        cos, sin = (t[:, None] for t in turns(self.c, size, len(x)))
        a, b, rest = x.split((size // 2, size // 2, x.shape[-1] - size), dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).unflatten(-1, (3, self.c.num_attention_heads, -1)).unbind(1)
        q, k = self.rotated(self.query_layernorm(parts[0])), self.rotated(self.key_layernorm(parts[1]))
        state, out = torch.zeros(q.shape[1], q.shape[2], q.shape[2]), []
        for query, key, value in zip(q, k, parts[2], strict=True):
            state = torch.exp(-self.rates)[:, None, None] * state + key[:, :, None] * value[:, None]
            out.append(torch.einsum("hk,hkv->hv", query, state) * self.c.head_dim**-0.5)
        return self.dense(self.g_norm(torch.stack(out).flatten(1)) * self.g_proj(x).sigmoid())


class Latent(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, heads = c, c.num_attention_heads
        width = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        if c.q_lora_rank is None:
            self.q_proj = linear(c.hidden_size, width)
        else:
            self.q_a_proj, self.q_b_proj = linear(c.hidden_size, c.q_lora_rank), linear(c.q_lora_rank, width)
            self.q_a_layernorm = Norm(c.q_lora_rank, 1e-6)
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, 1e-6)
        self.kv_b_proj = linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.dense = linear(heads * c.v_head_dim, c.hidden_size)

    def rotated(self, x: Tensor) -> Tensor:
        """Neighbours are a pair, [T, ..., rope]."""
        cos, sin = turns(self.c, x.shape[-1], len(x))
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        c, heads = self.c, self.c.num_attention_heads
        raw = self.q_proj(x) if c.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_rot = raw.unflatten(-1, (heads, -1)).split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        latent, k_rot = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        k, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, k)
        scores += torch.einsum("qhd,kd->hqk", self.rotated(q_rot), self.rotated(k_rot))
        scores *= (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
        weights = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf).softmax(-1)
        return self.dense(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


class MLP(nn.Module):
    def __init__(self, c: Config, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(c.hidden_size, size), linear(c.hidden_size, size)
        self.down_proj = linear(size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(c.num_experts))


class MoE(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, self.gate = c, Gate(c)
        self.experts = nn.ModuleList(MLP(c, c.moe_intermediate_size) for _ in range(c.num_experts))
        self.shared_experts = MLP(c, c.moe_intermediate_size * c.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        c, out = self.c, []
        for token in x:
            scores = (self.gate.weight @ token).sigmoid()
            chosen = (scores + self.gate.expert_bias).view(c.n_group, -1)
            best = chosen.topk(2, dim=-1).values.sum(-1).topk(c.topk_group).indices
            kept = torch.full_like(chosen, -torch.inf)
            kept[best] = chosen[best]
            ids = kept.flatten().topk(c.num_experts_per_tok).indices
            weights = scores[ids] / scores[ids].sum() * c.routed_scaling_factor
            out.append(sum(w * self.experts[e](token) for w, e in zip(weights, ids.tolist(), strict=True)))
        return torch.stack(out) + self.shared_experts(x)  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        count, group = c.num_hidden_layers, c.layer_group_size
        full = (layer + 1) % group == 0 or layer >= count // group * group
        self.attention = Latent(c) if full else Linear(c, layer)
        self.mlp = MoE(c) if layer >= c.first_k_dense_replace else MLP(c, c.intermediate_size)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        if layer >= count:  # the prediction head, whose formulas are those of Ling 3's
            self.enorm, self.hnorm = Norm(c.hidden_size, c.rms_norm_eps), Norm(c.hidden_size, c.rms_norm_eps)
            self.eh_proj, self.final_layernorm = linear(2 * c.hidden_size, c.hidden_size), Norm(c.hidden_size, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Ling25ForCausalLM(nn.Module):
    """The model, with the few methods of transformers that tests call."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, c = config, config
        blocks = [Block(c, i) for i in range(c.num_hidden_layers + c.num_nextn_predict_layers)]
        self.model = nn.ModuleDict({
            "word_embeddings": nn.Embedding(c.vocab_size, c.hidden_size),
            "layers": nn.ModuleList(blocks), "norm": Norm(c.hidden_size, c.rms_norm_eps),
        })  # fmt: skip
        self.lm_head = linear(c.hidden_size, c.vocab_size)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model["word_embeddings"].weight  # type: ignore[assignment]
        self.generation_config: Any = None

    def forward(self, ids: Tensor, use_cache: bool = False) -> Any:
        x = self.model["word_embeddings"](ids[0])
        for block in list(self.model["layers"])[: self.config.num_hidden_layers]:
            x = block(x)
        return SimpleNamespace(logits=self.lm_head(self.model["norm"](x))[None])

    def save_pretrained(self, path: Path, max_shard_size: str = "5GB") -> None:
        self.config.save_pretrained(path)
        tensors = self.state_dict()
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_torch_state_dict(tensors, path, max_shard_size=max_shard_size)
        self.generation_config.save_pretrained(path)


def ling25(**changes: Any) -> Make:
    """One layer of latent attention in two, a dense layer first. Its fields are read as those of Ling 3."""

    def make() -> Any:
        known("BailingHybridConfig")
        return Config(**(FIELDS | changes)), Ling25ForCausalLM

    return make


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, Make] = {
    "plain": ling25(),
    "one_group_tied": ling25(group_norm_size=1, q_lora_rank=None, tie_word_embeddings=True, n_group=1, topk_group=1,
                             num_shared_experts=2, num_hidden_layers=2),
    "yarn": ling25(rope_scaling=YARN, num_hidden_layers=2, max_position_embeddings=256),
    "odd_sizes": ling25(
        hidden_size=28, num_attention_heads=6, num_key_value_heads=6, head_dim=10, partial_rotary_factor=0.25,
        rotary_dim=2, group_norm_size=3, kv_lora_rank=7, qk_nope_head_dim=3, qk_rope_head_dim=6, v_head_dim=5,
        layer_group_size=3, num_hidden_layers=5, first_k_dense_replace=2, num_experts=5, n_group=1, topk_group=1,
    ),
}  # fmt: skip
SPLIT = ling25(num_attention_heads=8, num_key_value_heads=8, group_norm_size=4, num_hidden_layers=2)
