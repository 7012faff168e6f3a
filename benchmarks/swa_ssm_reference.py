"""swa_ssm in plain PyTorch, whole sequences, differentiable: what the recall study trains, and the tests' oracle.

Parameters are named as checkpoints name them, so that a state dict is a checkpoint.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridrt.models.swa_ssm import SwaSsmConfig


class RMSNorm(nn.Module):
    """x / rms(x) * w."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary; a token sees the last `sliding_window` keys, its own included."""

    def __init__(self, config: SwaSsmConfig) -> None:
        super().__init__()
        self.config = config
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        dim, length = self.config.head_dim, x.shape[1]
        q, k, v = (p(x).unflatten(-1, (-1, dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (_rotate(t, self.config.rope_theta) for t in (q, k))
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        seen = seen.triu(1 - self.config.sliding_window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [batch, heads, length, dim]; dimension i is paired with i + dim / 2 (Su et al. 2021)."""
    half = x.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, device=x.device) / half)
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device), frequency)
    cos, sin, a, b = angle.cos().to(x.dtype), angle.sin().to(x.dtype), x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Mamba1(nn.Module):
    """Mamba-1 (Gu & Dao 2023), its scan a loop over tokens."""

    def __init__(self, config: SwaSsmConfig) -> None:
        super().__init__()
        inner, states, rank = config.ssm_intermediate_size, config.ssm_state_size, config.ssm_time_step_rank
        self.widths = (rank, states, states)
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, config.ssm_conv_kernel, groups=inner, padding=config.ssm_conv_kernel - 1)
        self.x_proj = nn.Linear(inner, sum(self.widths), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)
        with torch.no_grad():  # as Mamba does: time steps between 0.001 and 0.1
            dt = torch.exp(torch.empty(inner).uniform_(math.log(1e-3), math.log(1e-1)))
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        dt, b, c = self.x_proj(x).split(self.widths, dim=-1)
        dt = F.softplus(self.dt_proj(dt)).float()  # the recurrence is float32 whatever the rest is
        decay = torch.exp(dt[..., None] * -self.A_log.float().exp())
        added = (dt * x)[..., None] * b[..., None, :]
        state, states = torch.zeros_like(added[:, 0]), []
        for keep, new in zip(decay.unbind(1), added.unbind(1), strict=True):
            state = keep * state + new
            states.append(state)
        y = torch.einsum("blin,bln->bli", torch.stack(states, 1), c.float()) + self.D * x
        return self.out_proj((y * F.silu(z)).to(x.dtype))


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: SwaSsmConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(config.hidden_size, config.intermediate_size, bias=False) for _ in range(2)
        )
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention plus history branch, then an MLP, each after a norm and added to its input."""

    def __init__(self, config: SwaSsmConfig, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.self_attn, self.mlp = Attention(config), MLP(config)
        if mode in ("enabled", "benchmark"):
            self.history = Mamba1(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        mixed = self.self_attn(h)
        if self.mode == "enabled":
            mixed = mixed + self.history(h)
        elif self.mode == "prefix_sum":
            mixed = mixed + h.float().cumsum(1).to(h.dtype)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, config: SwaSsmConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, mode) for mode in config.history_modes)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class SwaSsmReference(nn.Module):
    """ids [batch, length] to logits [batch, length, vocab]."""

    def __init__(self, config: SwaSsmConfig) -> None:
        super().__init__()
        self.config, self.model = config, Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.model(ids))
