"""The parts of vLLM 0.33.0 that `integrations/vllm` calls, with the signatures that were published, in plain torch.

`PUBLISHED` has the file of each. `tests/integrations/test_interfaces.py` compares the signatures with vLLM's source
where that is at hand. What computes here is written from the formulas, token by token.
"""

from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PUBLISHED = {
    "ModelRegistry.register_model": "model_executor/models/registry.py:_ModelRegistry.register_model",
    "ForwardContext": "forward_context.py",
    "get_forward_context": "forward_context.py",
    "is_conv_state_dim_first": "model_executor/layers/mamba/mamba_utils.py",
    "causal_conv1d_update": "model_executor/layers/mamba/ops/causal_conv1d.py",
    "PluggableLayer.register_oot": "model_executor/custom_op.py",
    "MambaBase.bind_kv_cache": "model_executor/layers/mamba/abstract.py",
    "MambaBase.get_kv_cache_spec": "model_executor/layers/mamba/abstract.py",
    "MambaSpec": "v1/kv_cache_interface.py",
    "GDNAttentionMetadata": "v1/attention/backends/gdn_attn.py",
    "QwenGatedDeltaNetAttention.__init__": "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py",
    "QwenGatedDeltaNetAttention.get_state_shape": "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py",
    "QwenGatedDeltaNetAttention._forward_core": "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py",
    "GatedDeltaNetAttention.get_state_dtype": "model_executor/layers/mamba/gdn/base.py",
    "Qwen3NextForCausalLM.get_mamba_state_shape_from_config": "model_executor/models/qwen3_next.py",
    "Qwen3NextForCausalLM.get_mamba_state_dtype_from_config": "model_executor/models/qwen3_next.py",
    "Qwen3_5ForCausalLMBase.get_mamba_state_shape_from_config": "model_executor/models/qwen3_5.py",
    "Qwen3_5ForCausalLMBase.get_mamba_state_dtype_from_config": "model_executor/models/qwen3_5.py",
    "Qwen3_5ForConditionalGeneration.get_mamba_state_shape_from_config": "model_executor/models/qwen3_5.py",
    "Qwen3_5ForConditionalGeneration.get_mamba_state_dtype_from_config": "model_executor/models/qwen3_5.py",
}
NULL_BLOCK_ID = 0
op_registry_oot: dict[str, type] = {}
current_platform = SimpleNamespace(is_cuda=lambda: True)
context = SimpleNamespace(attn_metadata=None)


class _ModelRegistry:
    def __init__(self) -> None:
        self.models: dict[str, Any] = {}

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str) -> None:
        self.models[model_arch] = model_cls


ModelRegistry = _ModelRegistry()


@dataclass
class ForwardContext:
    attn_metadata: Any


def get_forward_context() -> Any:
    return context


def is_conv_state_dim_first() -> bool:
    return False


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = NULL_BLOCK_ID,
    validate_data=False,
    out: Tensor | None = None,
) -> Tensor:
    """x [B, C]; conv_state [N, C, taps - 1], oldest first."""
    assert activation == "silu" and conv_state_indices is not None and len(conv_state_indices) == len(x)
    result = torch.zeros_like(x)
    for row, block in enumerate(conv_state_indices.tolist()):
        if block != null_block_id:
            window = torch.cat([conv_state[block], x[row][:, None]], 1)
            result[row] = F.silu((window * weight).sum(1) + (0 if bias is None else bias))
            conv_state[block] = window[:, 1:]
    return result


class PluggableLayer(nn.Module):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_layer_cls=None, name: str | None = None) -> Any:
        op_registry_oot[name or cls.__name__] = _decorated_layer_cls
        return _decorated_layer_cls


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None
    mamba_cache_mode: str = "none"

    @property
    def page_size_bytes(self) -> int:
        size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes))
        assert self.page_size_padded is None or self.page_size_padded >= size
        return self.page_size_padded or size


class MambaBase:
    kv_cache: tuple[Tensor, ...]

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        pages, states, offset = kv_cache.squeeze(dim=(1, 2)), [], 0
        for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype()):  # type: ignore[attr-defined]
            size = prod(shape) * dtype.itemsize
            states.append(pages[:, offset : offset + size].view(dtype).view(-1, *shape))
            offset += size
        self.kv_cache = tuple(states)

    def get_kv_cache_spec(self, vllm_config: Any) -> MambaSpec:
        shapes, dtypes = tuple(self.get_state_shape()), self.get_state_dtype()  # type: ignore[attr-defined]
        return MambaSpec(shapes=shapes, dtypes=dtypes, page_size_padded=vllm_config.cache_config.mamba_page_size_padded)


class GatedDeltaNetAttention(PluggableLayer, MambaBase):
    def __init__(self, config: Any, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.prefix, self.activation = prefix, config.hidden_act
        self.tp_size = vllm_config.parallel_config.tensor_parallel_size
        self.model_config, self.cache_config = vllm_config.model_config, vllm_config.cache_config

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return state_dtypes(self.model_config, self.cache_config)


@dataclass
class GDNAttentionMetadata:
    num_prefills: int
    num_decodes: int
    num_actual_tokens: int
    has_initial_state: Tensor | None = None
    non_spec_query_start_loc: Tensor | None = None
    non_spec_state_indices_tensor: Tensor | None = None
    spec_sequence_masks: Tensor | None = None


class QwenGatedDeltaNetAttention(GatedDeltaNetAttention):
    def __init__(
        self, config: Any, vllm_config: Any, prefix: str = "", gqa_interleaved_layout=False, reduce_results: bool = True
    ) -> None:
        super().__init__(config, vllm_config, prefix)
        self.num_k_heads, self.num_v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.conv_kernel_size = config.linear_conv_kernel_dim
        _, _ = self.get_state_dtype()  # vLLM's layer asks here, and takes two
        channels = 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim
        self.conv1d = nn.Linear(1, 1, bias=False)
        self.conv1d.weight = nn.Parameter(torch.randn(channels, 1, self.conv_kernel_size), requires_grad=False)
        self.A_log = nn.Parameter(torch.randn(self.num_v_heads) - 3, requires_grad=False)
        self.dt_bias = nn.Parameter(torch.randn(self.num_v_heads), requires_grad=False)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return state_shapes(self, self.tp_size)

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Token by token, each row from its block, which a prompt without earlier tokens finds zeroed."""
        metadata = context.attn_metadata.get(self.prefix) if isinstance(context.attn_metadata, dict) else None
        if metadata is None:
            return
        conv, states = self.kv_cache[0].transpose(-1, -2), self.kv_cache[1]
        starts, blocks = metadata.non_spec_query_start_loc.tolist(), metadata.non_spec_state_indices_tensor
        for row in range(metadata.num_decodes + metadata.num_prefills):
            block = blocks[row : row + 1]
            if row >= metadata.num_decodes and not metadata.has_initial_state[row]:
                conv[block.item()], states[block.item()] = 0, 0
            for token in range(starts[row], starts[row + 1]):
                conved = causal_conv1d_update(
                    mixed_qkv[token : token + 1], conv, self.conv1d.weight.squeeze(1), None, "silu", block
                )
                core_attn_out[token] = self._recur(states, block.item(), conved[0], a[token], b[token])

    def _recur(self, states: Tensor, block: Any, conved: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if block == NULL_BLOCK_ID:
            return torch.zeros(self.num_v_heads, self.head_v_dim)
        keys = self.num_k_heads * self.head_k_dim
        q, k = (x.view(self.num_k_heads, -1).float() for x in conved[: 2 * keys].split(keys))
        q, k = (
            F.normalize(x, dim=-1, eps=1e-6).repeat_interleave(self.num_v_heads // self.num_k_heads, 0) for x in (q, k)
        )
        v = conved[2 * keys :].view(self.num_v_heads, -1).float()
        decay = torch.exp(-self.A_log.exp() * F.softplus(a.float() + self.dt_bias))[:, None, None]
        state = states[block].float() * decay
        u = torch.sigmoid(b.float())[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
        state = state + u[:, :, None] * k[:, None, :]
        states[block] = state.to(states.dtype)
        return torch.einsum("hvk,hk->hv", state, q) * self.head_k_dim**-0.5


def state_shapes(of: Any, ranks: int = 1) -> tuple[tuple[int, ...], ...]:
    """As MambaStateShapeCalculator.gated_delta_net_state_shape of "SD" conv states."""
    channels = 2 * of.num_k_heads * of.head_k_dim + of.num_v_heads * of.head_v_dim
    return (of.conv_kernel_size - 1, channels // ranks), (of.num_v_heads // ranks, of.head_v_dim, of.head_k_dim)


def state_dtypes(model: Any, cache: Any) -> tuple[torch.dtype, ...]:
    given = cache.mamba_ssm_cache_dtype
    return model.dtype, model.dtype if given == "auto" else getattr(torch, given)


class Qwen3NextForCausalLM(nn.Module):
    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        hf = vllm_config.model_config.hf_text_config
        sizes = SimpleNamespace(
            num_k_heads=hf.linear_num_key_heads, num_v_heads=hf.linear_num_value_heads,
            head_k_dim=hf.linear_key_head_dim, head_v_dim=hf.linear_value_head_dim,
            conv_kernel_size=hf.linear_conv_kernel_dim,
        )  # fmt: skip
        return state_shapes(sizes, vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return state_dtypes(vllm_config.model_config, vllm_config.cache_config)


class Qwen3_5ForCausalLMBase(Qwen3NextForCausalLM):
    pass


class Qwen3_5ForCausalLM(Qwen3_5ForCausalLMBase):
    pass


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLMBase):
    pass


class Qwen3_5ForConditionalGeneration(Qwen3NextForCausalLM):
    pass


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    pass


LAYERS = "vllm.model_executor.layers.mamba"
MODULES = {
    "vllm": ["ModelRegistry"],
    "vllm.forward_context": ["get_forward_context"],
    "vllm.platforms": ["current_platform"],
    "vllm.model_executor": [],
    "vllm.model_executor.layers": [],
    LAYERS: [],
    f"{LAYERS}.gdn": [],
    f"{LAYERS}.gdn.qwen_gdn_linear_attn": ["QwenGatedDeltaNetAttention"],
    f"{LAYERS}.mamba_utils": ["is_conv_state_dim_first"],
    f"{LAYERS}.ops": [],
    f"{LAYERS}.ops.causal_conv1d": ["causal_conv1d_update"],
    "vllm.model_executor.models": [],
    "vllm.model_executor.models.qwen3_next": ["Qwen3NextForCausalLM"],
    "vllm.model_executor.models.qwen3_5": [
        "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ],
}  # fmt: skip
