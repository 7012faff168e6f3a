"""The parts of SGLang 0.5.23 that `integrations/sglang` calls, with the signatures that were published, in plain torch.

`PUBLISHED` has the file of each. `tests/integrations/test_interfaces.py` compares the signatures with SGLang's source
where that is at hand. What computes here is written from the formulas, row by row.
"""

import functools
import importlib
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

HOOKS = "srt/plugins/hook_registry.py"
PUBLISHED = {
    "HookType": HOOKS,
    "HookRegistry.register": HOOKS,
    "HookRegistry.apply_hooks": HOOKS,
    "TritonGDNKernel.packed_decode": "srt/layers/attention/linear/kernels/gdn_triton.py",
}


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks: ClassVar[dict[str, Callable[..., Any]]] = {}

    @classmethod
    def register(
        cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER, *, source: Any = None
    ) -> None:
        assert hook_type is HookType.AROUND, "the stub applies no other"
        cls._hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls._hooks.items():
            module, owner, name = target.rsplit(".", 2)
            found = getattr(importlib.import_module(module), owner)
            setattr(found, name, _around(getattr(found, name), hook))


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """As SGLang's `_wrap_fn`."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


class TritonGDNKernel:
    """Counts its own calls."""

    calls = 0

    def packed_decode(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
        ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int, **kwargs,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        out = mixed_qkv.new_zeros(1, len(mixed_qkv), num_v_heads, head_v_dim)
        for row, slot in enumerate(cache_indices.tolist()):
            if slot >= 0:
                ring = tuple(None if part is None else part[slot] for part in map(kwargs.get, RING[:3]))
                cursor = kwargs.get("replayssm_write_pos"), kwargs.get("replayssm_force_flush")
                inputs = Row(mixed_qkv[row], a[row], b[row], A_log, dt_bias, ssm_states[slot])
                out[0, row] = inputs.step(ring, *(0 if part is None else int(part[row]) for part in cursor))
        return out


RING = ("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_write_pos")


class Row:
    """One row: its state [Hv, V, K] and one token's inputs."""

    def __init__(self, qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor) -> None:
        heads, value_dim, key_dim = state.shape
        keys = (len(qkv) - heads * value_dim) // 2
        shared = heads // (keys // key_dim)
        q, k = (F.normalize(x.view(-1, key_dim).float(), dim=-1) for x in qkv[: 2 * keys].split(keys))
        self.key, self.state, self.shared = k, state, shared
        self.q = q.repeat_interleave(shared, 0) * key_dim**-0.5
        self.v, self.beta = qkv[2 * keys :].view(heads, value_dim).float(), torch.sigmoid(b.float())
        self.gate = -A_log.exp() * F.softplus(a.float() + dt_bias)

    def step(self, ring: tuple[Tensor | None, ...], written: int, forced: int) -> Tensor:
        d, keys, gates = ring
        state = self.state.float()
        for i in range(written):  # the state is rebuilt entry by entry
            state = self._added(state, gates[:, i], d[:, i], keys[:, i])
        decayed = state * self.gate.exp()[:, None, None]
        k = self.key.repeat_interleave(self.shared, 0)
        u = self.beta[:, None] * (self.v - torch.einsum("hvk,hk->hv", decayed, k))
        after = self._added(state, self.gate, u, self.key)
        if d is None or written == d.shape[1] - 1 or forced:
            self.state.copy_(after)
        else:
            d[:, written], keys[:, written], gates[:, written] = u, self.key, self.gate
        return torch.einsum("hvk,hk->hv", after, self.q)

    def _added(self, state: Tensor, gate: Tensor, value: Tensor, key: Tensor) -> Tensor:
        key = key.float().repeat_interleave(self.shared, 0)
        return state * gate.exp()[:, None, None] + value.float()[:, :, None] * key[:, None, :]


KERNELS = "sglang.srt.layers.attention.linear.kernels"
MODULES: dict[str, list[str]] = {
    **{KERNELS.rsplit(".", depth)[0]: [] for depth in range(5, 0, -1)},
    KERNELS: [],
    f"{KERNELS}.gdn_triton": ["TritonGDNKernel"],
    "sglang.srt.plugins": [],
    "sglang.srt.plugins.hook_registry": ["HookRegistry", "HookType"],
}
