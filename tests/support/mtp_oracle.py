"""Prediction heads by the formulas, a whole sequence at once and without a cache, and checkpoints that have one."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import Make, nemotron, qwen, write
from tests.support.newer_checkpoints import ling, qwen35, qwen35_moe

Weights = dict[str, Tensor]
HEAD_KEYS = ("mtp.", LING := "model.layers.2.")  # Ling's head follows its layers, of which these models have two

# By name: a model, and what of its head differs from the plainest.
HEADS: dict[str, Make] = {
    "qwen": qwen(num_hidden_layers=2, full_attention_interval=2),
    "qwen-dense_tied": qwen(
        num_hidden_layers=2, full_attention_interval=2, num_experts=0, tie_word_embeddings=True, num_key_value_heads=1,
        partial_rotary_factor=0.5, attention_bias=True,
    ),
    "qwen-not_renormalized": qwen(num_hidden_layers=1, layer_types=["linear_attention"], norm_topk_prob=False),
    "qwen35": qwen35(num_hidden_layers=2, full_attention_interval=2, mtp_num_hidden_layers=1),
    "qwen35-experts": qwen35_moe(num_hidden_layers=2, full_attention_interval=2, mtp_num_hidden_layers=1),
    "nemotron": nemotron("M*E", num_nextn_predict_layers=1, routed_scaling_factor=2.5),
    "nemotron-latent_groups": nemotron(
        "ME", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E", moe_latent_size=20, n_group=4,
        topk_group=2, norm_topk_prob=False, mlp_bias=True,
    ),
    "ling": ling(num_hidden_layers=2, num_mtp_layers=1),
    "nemotron-longer": nemotron("M-", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="-*E*"),
}  # fmt: skip


def write_with_head(make: Make, path: Path, *, seed: int = 0) -> Any:
    """A checkpoint as transformers writes it, and random `mtp.*` weights next to it; returns transformers' model."""
    model = write(make, path, seed=seed)
    of_family = {"nemotron_h": _nemotron_shapes, "bailing_hybrid": _ling_shapes}
    config = model.config.get_text_config()
    shapes = of_family.get(config.model_type, _qwen_shapes)(config)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    file = path / "model.safetensors"
    save_file({**load_file(file), **weights}, file)
    return model


def is_qwen(config: Any) -> bool:
    """Whether the head is one block of the Qwen families."""
    return bool(config.model_type.startswith("qwen3"))


def without_head(path: Path, copy: Path) -> Path:
    """A copy of a checkpoint that has lost the weights of its head."""
    shutil.copytree(path, copy)
    kept = {k: t for k, t in load_file(path / "model.safetensors").items() if not k.startswith(HEAD_KEYS)}
    save_file(kept, copy / "model.safetensors")
    return copy


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return noise * 0.2 + (0.0 if "bias" in name else 1.0)
    return noise * (0.9 / shape[-1] ** 0.5)


def _attention_shapes(c: Any, key: str, query_width: int, bias: bool) -> dict[str, tuple[int, ...]]:
    kv = c.num_key_value_heads * c.head_dim
    found: dict[str, tuple[int, ...]] = {
        f"{key}.q_proj.weight": (query_width, c.hidden_size),
        f"{key}.k_proj.weight": (kv, c.hidden_size),
        f"{key}.v_proj.weight": (kv, c.hidden_size),
        f"{key}.o_proj.weight": (c.hidden_size, c.num_attention_heads * c.head_dim),
    }
    if bias:
        found |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in found.items()}
    return found


def _mlp_shapes(key: str, size: int, width: int, names: tuple[str, ...], bias: bool = False) -> Any:
    found: dict[str, tuple[int, ...]] = {f"{key}.{name}_proj.weight": (width, size) for name in names}
    found[f"{key}.down_proj.weight"] = (size, width)
    if bias:
        found |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in found.items()}
    return found


def _qwen_shapes(c: Any) -> dict[str, tuple[int, ...]]:
    size, layer, gated = c.hidden_size, "mtp.layers.0", ("gate", "up")
    query_and_gate = 2 * c.num_attention_heads * c.head_dim
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", f"{layer}.input_layernorm")
    found: dict[str, tuple[int, ...]] = {f"{n}.weight": (size,) for n in (*norms, f"{layer}.post_attention_layernorm")}
    found["mtp.fc.weight"] = (size, 2 * size)
    found |= _attention_shapes(c, f"{layer}.self_attn", query_and_gate, c.attention_bias)
    found |= {f"{layer}.self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
    if not getattr(c, "num_experts", 0):
        return found | _mlp_shapes(f"{layer}.mlp", size, c.intermediate_size, gated)
    found |= {f"{layer}.mlp.gate.weight": (c.num_experts, size), f"{layer}.mlp.shared_expert_gate.weight": (1, size)}
    found |= _mlp_shapes(f"{layer}.mlp.shared_expert", size, c.shared_expert_intermediate_size, gated)
    for e in range(c.num_experts):
        found |= _mlp_shapes(f"{layer}.mlp.experts.{e}", size, c.moe_intermediate_size, gated)
    return found


def _ling_shapes(c: Any) -> dict[str, tuple[int, ...]]:
    size, heads, rank, tail = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
    norms = ("enorm", "hnorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    found: dict[str, tuple[int, ...]] = {f"{LING}{n}.weight": (size,) for n in norms}
    found |= {f"{LING}eh_proj.weight": (size, 2 * size)}
    shapes = {
        "q_proj": (heads * (c.qk_nope_head_dim + tail), size), "kv_a_proj_with_mqa": (rank + tail, size),
        "kv_a_layernorm": (rank,), "kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), rank),
        "g_proj": (heads, size), "dense": (size, heads * c.v_head_dim),
    }  # fmt: skip
    found |= {f"{LING}attention.{name}.weight": shape for name, shape in shapes.items()}
    count, gated = c.num_local_experts, ("gate", "up")
    found |= {f"{LING}mlp.gate.weight": (count, size), f"{LING}mlp.gate.expert_bias": (count,)}
    for part in ("shared_experts", *(f"experts.{e}" for e in range(count))):
        found |= _mlp_shapes(f"{LING}mlp.{part}", size, c.moe_intermediate_size, gated)
    return found


def _nemotron_shapes(c: Any) -> dict[str, tuple[int, ...]]:
    size, last = c.hidden_size, len(c.mtp_layers_block_type) - 1
    norms = ("0.enorm", "0.hnorm", f"{last}.final_layernorm", *(f"{i}.norm" for i in range(last + 1)))
    found: dict[str, tuple[int, ...]] = {f"mtp.layers.{name}.weight": (size,) for name in norms}
    found["mtp.layers.0.eh_proj.weight"] = (size, 2 * size)
    for i, kind in enumerate(c.mtp_layers_block_type):
        key = f"mtp.layers.{i}.mixer"
        if kind == "full_attention":
            found |= _attention_shapes(c, key, c.num_attention_heads * c.head_dim, False)
        elif kind == "mlp":
            found |= _mlp_shapes(key, size, c.intermediate_size, ("up",), c.mlp_bias)
        else:
            found |= _expert_shapes(c, key)
    return found


def _expert_shapes(c: Any, key: str) -> dict[str, tuple[int, ...]]:
    size, latent = c.hidden_size, getattr(c, "moe_latent_size", None)
    found: dict[str, tuple[int, ...]] = {
        f"{key}.gate.weight": (c.n_routed_experts, size),
        f"{key}.gate.e_score_correction_bias": (c.n_routed_experts,),
    }
    found |= _mlp_shapes(f"{key}.shared_experts", size, c.moe_shared_expert_intermediate_size, ("up",), c.mlp_bias)
    if latent:
        found |= {f"{key}.fc1_latent_proj.weight": (latent, size), f"{key}.fc2_latent_proj.weight": (size, latent)}
        if c.mlp_bias:
            found |= {f"{key}.fc1_latent_proj.bias": (latent,), f"{key}.fc2_latent_proj.bias": (size,)}
    for e in range(c.n_routed_experts):
        found |= _mlp_shapes(f"{key}.experts.{e}", latent or size, c.moe_intermediate_size, ("up",))
    return found


@dataclass
class NaiveHead:
    """Of the checkpoint at `path`; `model` is transformers' own of the model that the head belongs to."""

    path: Path
    model: Any

    def __post_init__(self) -> None:
        self.config = self.model.config.get_text_config()
        self.weights: Weights = load_file(self.path / "model.safetensors")
        self.is_qwen, self.is_ling = is_qwen(self.config), self.config.model_type == "bailing_hybrid"

    @torch.no_grad()
    def logits(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """What each draft after `tokens` is drawn from, the drafts before it given: [len(drafts) + 1, vocab]."""
        states = list(self.states(tokens)[:-1])
        behind, found = tokens[1:], []
        for draft in [*drafts, None]:
            states.append(self.hidden(torch.stack(states[: len(behind)]), behind)[-1])
            found.append(self.model.lm_head(states[-1]))
            # The head's own output takes the place of the hidden state that only the model could give.
            behind = [*behind, draft]  # type: ignore[list-item]
        return torch.stack(found)

    def states(self, tokens: list[int]) -> Tensor:
        """The model's hidden states, [n, hidden]."""
        found: Tensor = self.model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return found

    def embedded(self, tokens: list[int]) -> Tensor:
        """Embeddings of tokens from the second on."""
        found: Tensor = self.model.get_input_embeddings()(torch.tensor(tokens))
        return found

    def angles(self, count: int, turns: Tensor) -> Tensor:
        """[count, pairs] of the first tokens, whose pairs turn by `turns` at each position."""
        return torch.arange(count)[:, None] * turns

    def hidden(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """The head over [n, hidden] states and the tokens after them."""
        names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        if self.is_ling:
            names = tuple(f"{LING}{part}" for part in ("enorm", "hnorm", "eh_proj", "final_layernorm"))  # type: ignore[assignment]
        elif not self.is_qwen:
            last = len(self.config.mtp_layers_block_type) - 1
            parts = ("0.enorm", "0.hnorm", "0.eh_proj", f"{last}.final_layernorm")
            names = tuple(f"mtp.layers.{part}" for part in parts)  # type: ignore[assignment]
        both = torch.cat((self.norm(self.embedded(tokens), names[0]), self.norm(hidden, names[1])), -1)
        x = self.linear(both, names[2])
        block = self.ling_block if self.is_ling else self.qwen_block if self.is_qwen else self.nemotron_blocks
        return self.norm(block(x), names[3])

    def norm(self, x: Tensor, key: str) -> Tensor:
        eps = self.config.rms_norm_eps if self.is_qwen or self.is_ling else self.config.layer_norm_epsilon
        scale = self.weights[f"{key}.weight"] + (1.0 if self.is_qwen else 0.0)
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * scale

    def linear(self, x: Tensor, key: str) -> Tensor:
        return F.linear(x, self.weights[f"{key}.weight"], self.weights.get(f"{key}.bias"))

    def qwen_block(self, x: Tensor) -> Tensor:
        key = "mtp.layers.0"
        x = x + self.qwen_attention(self.norm(x, f"{key}.input_layernorm"), f"{key}.self_attn")
        y = self.norm(x, f"{key}.post_attention_layernorm")
        experts = getattr(self.config, "num_experts", 0)
        return x + (self.qwen_experts(y, f"{key}.mlp") if experts else self.swiglu(y, f"{key}.mlp"))

    def qwen_attention(self, x: Tensor, key: str) -> Tensor:
        c, n = self.config, len(x)
        q, gate = self.linear(x, f"{key}.q_proj").view(n, c.num_attention_heads, 2, c.head_dim).unbind(2)
        k, v = (self.linear(x, f"{key}.{name}_proj").view(n, c.num_key_value_heads, c.head_dim) for name in "kv")
        q, k = (self.rotate(self.norm(t, f"{key}.{name}_norm")) for t, name in ((q, "q"), (k, "k")))
        return self.linear((causal_attention(q, k, v) * torch.sigmoid(gate)).flatten(1), f"{key}.o_proj")

    def rotate(self, x: Tensor) -> Tensor:
        """Pairs (i, i + rot / 2) of the first `rot` numbers of [n, heads, head_dim] turn by position times theta^(-2i /
        rot)."""
        rope = self.config.rope_parameters
        rot = int(self.config.head_dim * rope["partial_rotary_factor"])
        angles = self.angles(len(x), rope["rope_theta"] ** (-torch.arange(0, rot, 2) / rot))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second, rest = x.split((rot // 2, rot // 2, x.shape[-1] - rot), -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def ling_block(self, x: Tensor) -> Tensor:
        x = x + self.latent_attention(self.norm(x, f"{LING}input_layernorm"), f"{LING}attention")
        y, key = self.norm(x, f"{LING}post_attention_layernorm"), f"{LING}mlp"
        weights, ids = self.chosen(y, f"{key}.gate", "expert_bias")
        routed = mixed(y, weights, ids, lambda t, e: self.swiglu(t, f"{key}.experts.{e}"))
        return x + routed + self.swiglu(y, f"{key}.shared_experts")

    def latent_attention(self, x: Tensor, key: str) -> Tensor:
        """Keys and values of all heads are made from the latent vectors; neighbours are rotated."""
        c, heads = self.config, self.config.num_attention_heads
        latent, tail = self.linear(x, f"{key}.kv_a_proj_with_mqa").split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
        made = self.linear(self.norm(latent, f"{key}.kv_a_layernorm"), f"{key}.kv_b_proj").unflatten(-1, (heads, -1))
        k, v = made.split((c.qk_nope_head_dim, c.v_head_dim), -1)
        q, q_tail = self.linear(x, f"{key}.q_proj").unflatten(-1, (heads, -1)).split(
            (c.qk_nope_head_dim, c.qk_rope_head_dim), -1
        )  # fmt: skip
        q, k = (torch.cat((part, self.turned(end).expand(-1, heads, -1)), -1) for part, end in (
            (q, q_tail), (k, tail[:, None])))  # fmt: skip
        gate = torch.sigmoid(self.linear(x, f"{key}.g_proj"))[..., None]
        return self.linear((causal_attention(q, k, v) * gate).flatten(1), f"{key}.dense")

    def turned(self, x: Tensor) -> Tensor:
        """Pairs (2 i, 2 i + 1) of [n, heads, rot] turn by position times theta^(-2 i / rot)."""
        rot, theta = x.shape[-1], self.config.rope_parameters["rope_theta"]
        angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, rot, 2) / rot)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)

    def swiglu(self, x: Tensor, key: str) -> Tensor:
        hidden = F.silu(self.linear(x, f"{key}.gate_proj")) * self.linear(x, f"{key}.up_proj")
        return self.linear(hidden, f"{key}.down_proj")

    def qwen_experts(self, x: Tensor, key: str) -> Tensor:
        shared = torch.sigmoid(self.linear(x, f"{key}.shared_expert_gate")) * self.swiglu(x, f"{key}.shared_expert")
        scores = self.linear(x, f"{key}.gate").softmax(-1)
        weights, ids = scores.topk(self.config.num_experts_per_tok)
        if getattr(self.config, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return shared + mixed(x, weights, ids, lambda t, e: self.swiglu(t, f"{key}.experts.{e}"))

    def nemotron_blocks(self, x: Tensor) -> Tensor:
        for i, kind in enumerate(self.config.mtp_layers_block_type):
            parts = {"full_attention": self.plain_attention, "mlp": self.squared_relu, "moe": self.nemotron_experts}
            x = x + parts[kind](self.norm(x, f"mtp.layers.{i}.norm"), f"mtp.layers.{i}.mixer")
        return x

    def plain_attention(self, x: Tensor, key: str) -> Tensor:
        q, k, v = (self.linear(x, f"{key}.{name}_proj").unflatten(-1, (-1, self.config.head_dim)) for name in "qkv")
        return self.linear(causal_attention(q, k, v).flatten(1), f"{key}.o_proj")

    def squared_relu(self, x: Tensor, key: str) -> Tensor:
        return self.linear(F.relu(self.linear(x, f"{key}.up_proj")).square(), f"{key}.down_proj")

    def nemotron_experts(self, x: Tensor, key: str) -> Tensor:
        c = self.config
        weights, ids = self.chosen(x, f"{key}.gate", "e_score_correction_bias")
        latent = self.linear(x, f"{key}.fc1_latent_proj") if getattr(c, "moe_latent_size", None) else x
        routed = mixed(latent, weights, ids, lambda t, e: self.squared_relu(t, f"{key}.experts.{e}"))
        if latent is not x:
            routed = self.linear(routed, f"{key}.fc2_latent_proj")
        return routed + self.squared_relu(x, f"{key}.shared_experts")

    def chosen(self, x: Tensor, key: str, correction: str) -> tuple[Tensor, Tensor]:
        """Weights and ids [n, k] of the experts with the best corrected scores in the best groups."""
        c = self.config
        scores = torch.sigmoid(self.linear(x, key))
        choice = scores + self.weights[f"{key}.{correction}"]
        groups = choice.view(len(x), c.n_group, -1)
        best = groups.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
        allowed = torch.zeros(len(x), c.n_group).scatter_(1, best, 1.0)[:, :, None].expand_as(groups).flatten(1) > 0
        ids = choice.masked_fill(~allowed, -torch.inf).topk(c.num_experts_per_tok).indices
        weights = scores.gather(1, ids)
        if c.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * c.routed_scaling_factor, ids


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[n, heads, dim] queries, [n, kv_heads, dim] keys and values to [n, heads, dim]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def mixed(x: Tensor, weights: Tensor, ids: Tensor, expert: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Each token's chosen experts, one after the other."""
    lines = [sum(w * expert(t, int(e)) for w, e in zip(ws, es)) for t, ws, es in zip(x, weights, ids)]
    return torch.stack(lines)  # type: ignore[arg-type]
