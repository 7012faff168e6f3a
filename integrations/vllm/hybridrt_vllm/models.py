"""vLLM's models with `ReplayModel`, and its layer with `ReplayLayer`, which importing this module registers.

vLLM imports it where it looks a model up.
"""

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.model_executor.models import qwen3_5, qwen3_next
from vllm.platforms import current_platform

from hybridrt_vllm.layer import ReplayLayer, ReplayModel


@QwenGatedDeltaNetAttention.register_oot
class ReplayGatedDeltaNetAttention(ReplayLayer, QwenGatedDeltaNetAttention):
    """What vLLM makes where a model asks for `QwenGatedDeltaNetAttention`."""

    on_cuda = current_platform.is_cuda()

    def step_metadata(self) -> Any:
        of_layers = get_forward_context().attn_metadata
        return of_layers.get(self.prefix) if isinstance(of_layers, dict) else None

    def apply_conv(self, qkv: Tensor, blocks: Tensor) -> Tensor:
        conv_state = self.kv_cache[0] if is_conv_state_dim_first() else self.kv_cache[0].transpose(-1, -2)
        weight = self.conv1d.weight.view(self.conv1d.weight.size(0), self.conv1d.weight.size(2))
        return causal_conv1d_update(
            qkv, conv_state, weight, self.conv1d.bias, self.activation, conv_state_indices=blocks, validate_data=False
        )


class _OnThisPlatform(ReplayModel):
    on_cuda = current_platform.is_cuda()


class Qwen3NextForCausalLM(_OnThisPlatform, qwen3_next.Qwen3NextForCausalLM):
    pass


class Qwen3_5ForCausalLM(_OnThisPlatform, qwen3_5.Qwen3_5ForCausalLM):
    pass


class Qwen3_5MoeForCausalLM(_OnThisPlatform, qwen3_5.Qwen3_5MoeForCausalLM):
    pass


class Qwen3_5ForConditionalGeneration(_OnThisPlatform, qwen3_5.Qwen3_5ForConditionalGeneration):
    pass


class Qwen3_5MoeForConditionalGeneration(_OnThisPlatform, qwen3_5.Qwen3_5MoeForConditionalGeneration):
    pass
