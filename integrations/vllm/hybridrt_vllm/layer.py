"""vLLM's Gated Delta Net layer with replay decode, and the models that plan memory for its rings.

Both are mixins in front of vLLM's classes, and only `models.py` imports vLLM's.
"""

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from hybridrt.kernels.core.records import GateWeights
from hybridrt_vllm.replay import ReplayBlocks, Shapes, ring_dtypes, ring_shapes, split_pages
from hybridrt_vllm.settings import ReplaySettings, resolve


class ReplayModel:
    """In front of a model class of vLLM: a block of its layers holds a ring next to the states."""

    on_cuda: bool

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> Shapes:
        shapes: Shapes = super().get_mamba_state_shape_from_config(vllm_config)  # type: ignore[misc]
        settings = resolve(vllm_config, on_cuda=cls.on_cuda)
        if settings is None:
            return shapes
        key_heads = vllm_config.model_config.hf_text_config.linear_num_key_heads
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return (*shapes, *ring_shapes(shapes[1], key_heads // ranks, settings.columns))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        dtypes: tuple[torch.dtype, ...] = super().get_mamba_state_dtype_from_config(vllm_config)  # type: ignore[misc]
        if resolve(vllm_config, on_cuda=cls.on_cuda) is None:
            return dtypes
        return (*dtypes, *ring_dtypes(vllm_config.model_config.dtype))


class ReplayLayer:
    """In front of vLLM's `QwenGatedDeltaNetAttention`: steps of decode rows alone use a ring.

    Every other step is vLLM's, after the states of its rows were written. `get_state_shape` and
    `get_state_dtype` stay as they are, because vLLM's layer expects two of each; the ring joins in
    `get_kv_cache_spec` and `bind_kv_cache`.
    """

    on_cuda: bool
    replay: ReplaySettings | None = None  # until vLLM's __init__ is done
    blocks: ReplayBlocks

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self.replay = resolve(vllm_config, on_cuda=self.on_cuda)
        self.model_dtype = vllm_config.model_config.dtype
        self.max_rows = vllm_config.scheduler_config.max_num_seqs

    def _ring(self) -> tuple[Shapes, tuple[torch.dtype, ...]]:
        assert self.replay is not None
        key_heads = self.num_k_heads // self.tp_size  # type: ignore[attr-defined]
        shapes = ring_shapes(self.get_state_shape()[1], key_heads, self.replay.columns)  # type: ignore[attr-defined]
        return shapes, ring_dtypes(self.model_dtype)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        if self.replay is None:
            return spec
        shapes, dtypes = self._ring()
        return replace(spec, shapes=(*spec.shapes, *shapes), dtypes=(*spec.dtypes, *dtypes))

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """kv_cache: [blocks, 1, 1, bytes] int8."""
        super().bind_kv_cache(kv_cache)  # type: ignore[misc]
        if self.replay is None:
            return
        sizes = zip(self.get_state_shape(), self.get_state_dtype())  # type: ignore[attr-defined]
        first = sum(prod(shape) * dtype.itemsize for shape, dtype in sizes)
        ring = split_pages(kv_cache.squeeze(dim=(1, 2)), first, *self._ring())
        self.blocks = ReplayBlocks(self.kv_cache[1], ring, self.max_rows)  # type: ignore[attr-defined]

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """What vLLM's custom op calls: the conv and the recurrence of a step."""
        metadata = None if self.replay is None else self.step_metadata()
        if metadata is None or metadata.non_spec_state_indices_tensor is None:
            return super()._forward_core(mixed_qkv, b, a, core_attn_out)  # type: ignore[misc]
        blocks, decodes = metadata.non_spec_state_indices_tensor, metadata.num_decodes
        if metadata.num_prefills or not decodes:
            prefilling = blocks[decodes : decodes + metadata.num_prefills]
            self.blocks.write_states(blocks[:decodes], prefilling)
            return super()._forward_core(mixed_qkv, b, a, core_attn_out)  # type: ignore[misc]
        self._decode(mixed_qkv, b, a, core_attn_out, blocks, metadata.num_actual_tokens)

    def _decode(self, qkv: Tensor, b: Tensor, a: Tensor, out: Tensor, blocks: Tensor, tokens: int) -> None:
        rows = self.blocks.rows(blocks[:tokens])
        conved = self.apply_conv(qkv[:tokens], rows.blocks)
        weights = GateWeights(self.A_log, self.dt_bias)  # type: ignore[attr-defined]
        out[:tokens] = self.blocks.decode(conved, a[:tokens], b[:tokens], weights, rows)

    def step_metadata(self) -> Any:
        """vLLM's `GDNAttentionMetadata` of this layer and step; None in runs that only measure memory."""
        raise NotImplementedError

    def apply_conv(self, qkv: Tensor, blocks: Tensor) -> Tensor:
        """vLLM's conv of one token a row, [B, C], which moves the conv's state."""
        raise NotImplementedError
