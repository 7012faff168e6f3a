"""The gated delta rule token by token and head by head, in float64, from the formula; and inputs to try it on."""

from dataclasses import dataclass

import torch

from hybridrt.kernels.core.records import GateWeights
from hybridrt.kernels.delta_rule.delta_rule import gdn_gates


@dataclass
class Tokens:
    """Inputs of n tokens: q, k [n, Hk, K], v [n, Hv, V], g, beta [n, Hv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def __getitem__(self, index):
        return Tokens(*(x[index] for x in self.tensors))

    @property
    def tensors(self):
        return self.q, self.k, self.v, self.g, self.beta


def random_tokens(*lead, key_heads=2, value_heads=4, key_dim=6, value_dim=5, dtype=torch.float32):
    """Tokens with leading dims `lead`; q, k, v are slices of one merged projection; slow decays (g around -0.01)."""
    q_width, v_width = key_heads * key_dim, value_heads * value_dim
    merged = torch.randn(*lead, 2 * q_width + v_width + 3).to(dtype)
    q, k, v, _ = merged.split([q_width, q_width, v_width, 3], -1)
    gate_inputs = torch.randn(*lead, 2 * value_heads).to(dtype)
    a, b = gate_inputs.chunk(2, -1)
    g, beta = gdn_gates(a, b, GateWeights(torch.randn(value_heads) - 4, torch.randn(value_heads)))
    heads = (q.unflatten(-1, (key_heads, key_dim)), k.unflatten(-1, (key_heads, key_dim)))
    return Tokens(*heads, v.unflatten(-1, (value_heads, value_dim)), g, beta)


def slow_delta_rule(state, tokens):
    """state [Hv, V, K]. Returns outputs [n, Hv, V] and the states after each token [n, Hv, V, K]."""
    state, outputs, states = state.double().clone(), [], []
    heads, count = state.shape[0], tokens.v.shape[0]
    for t in range(count):
        output = torch.zeros(state.shape[:2], dtype=torch.float64)
        for head in range(heads):
            key_head = head // (heads // tokens.k.shape[1])
            k, q = (
                x[t, key_head].double() / (x[t, key_head].double() @ x[t, key_head].double() + 1e-6).sqrt()
                for x in (tokens.k, tokens.q)
            )
            decayed = state[head] * tokens.g[t, head].double().exp()
            corrected = tokens.beta[t, head].double() * (tokens.v[t, head].double() - decayed @ k)
            state[head] = decayed + torch.outer(corrected, k)
            output[head] = state[head] @ q / len(q) ** 0.5
        outputs.append(output)
        states.append(state.clone())
    return torch.stack(outputs), torch.stack(states)


def relative_error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
