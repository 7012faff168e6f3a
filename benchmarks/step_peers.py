"""Operations by libraries, for comparison: bench_kernels times them next to ours, and tests on a GPU hold them to the
reference. The runtime takes whole steps of recurrent layers (`mamba2_decode`, `gdn_decode`), of which no library has a
kernel, and flashinfer's attention by its backend, which plans once for all layers.
"""

import torch
from torch import Tensor

from hybridrt.kernels.attention.paged_attention import attention_extend
from hybridrt.kernels.core.providers import By, register
from hybridrt.kernels.core.records import (
    AttentionPrompts,
    DeltaInputs,
    GateWeights,
    PagedKV,
    SSMInputs,
    SSMWeights,
    StateSlots,
)
from hybridrt.kernels.core.slots import pad_mask, read_rows, write_rows
from hybridrt.kernels.delta_rule.delta_rule import recurrent_gated_delta_rule
from hybridrt.kernels.libraries.common import refuse
from hybridrt.kernels.mamba.selective_state_update import selective_state_update


def register_peers() -> None:
    """Makes them providers of their operations."""
    register(selective_state_update.name, By("flashinfer", f"{__name__}:flashinfer_state_update", priority=5))
    register(selective_state_update.name, By("mamba_ssm", f"{__name__}:mamba_state_update", priority=4))
    register(recurrent_gated_delta_rule.name, By("fla", f"{__name__}:fla_recurrent_gated_delta_rule", priority=5))
    register(attention_extend.name, By("flashinfer", f"{__name__}:flashinfer_attention_extend", priority=4))


def flashinfer_attention_extend(q: Tensor, kv: PagedKV, batch: AttentionPrompts, out: Tensor | None = None) -> Tensor:
    """`attention_extend`, planned for this call alone."""
    from hybridrt.kernels.libraries.flashinfer import WORKSPACE_BYTES, HeadLayout, PagedAttention

    real = sum(batch.query_lens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    out[real:].zero_()
    if real == 0:
        return out
    _, page_size, kv_heads, _ = kv.k_cache.shape
    layout = HeadLayout(q.shape[1], kv_heads, q.shape[2], page_size, kv.scale, kv.sliding_window, q.dtype)
    attention = PagedAttention(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device))
    attention.plan(batch.query_lens, batch.seq_lens_host, layout)
    attention.fill_pages(kv.req_to_token, batch.rows, page_size)
    out[:real] = attention.run(q[:real], kv.k_cache, kv.v_cache)
    return out


def flashinfer_state_update(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, out: Tensor | None = None
) -> Tensor:
    """`selective_state_update` of chains, by flashinfer."""
    from flashinfer.mamba import selective_state_update as update

    (x, dt, B, C, z), (A, D, dt_bias, dt_limit) = inputs, weights
    states, read_slots, write_slots, intermediate = state
    stored, rows, parents = intermediate or (None, None, None)
    tokens, stores = x.shape[1], stored is not None
    refuse(
        "flashinfer", "state update",
        "it knows no draft trees" if parents is not None else None,
        "several tokens without intermediate states" if tokens > 1 and not stores else None,
        _clamped(dt_limit),
        "D is None" if D is None else None,
    )  # fmt: skip
    assert D is not None
    heads, dim, columns = states.shape[1:]
    several = {} if not stores else {
        "intermediate_states_buffer": stored, "intermediate_state_indices": rows,
        "disable_state_update": True, "cache_steps": tokens,
    }  # fmt: skip
    parts = [None if t is None else t if stores else t[:, 0] for t in (x, B, C, z)]
    y: Tensor = update(
        states, parts[0], _broadcast_heads(dt.to(D.dtype) if stores else dt[:, 0].to(D.dtype), dim),
        A[:, None, None].expand(heads, dim, columns), parts[1], parts[2], _broadcast_heads(D, dim), z=parts[3],
        dt_bias=None if dt_bias is None else _broadcast_heads(dt_bias, dim), dt_softplus=True,
        state_batch_indices=read_slots, pad_slot_id=-1, **several,
        **({} if stores or read_slots is write_slots else {"dst_state_batch_indices": write_slots}),
    )  # fmt: skip
    y = y.view(x.shape).masked_fill_(pad_mask(read_slots, 4), 0.0)
    return y if out is None else out.copy_(y)


def mamba_state_update(inputs: SSMInputs, weights: SSMWeights, state: StateSlots, out: Tensor | None = None) -> Tensor:
    """`selective_state_update` of one token, by mamba-ssm. It has no padding: such rows update the scratch slot 0."""
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update as update

    (x, dt, B, C, z), (A, D, dt_bias, dt_limit) = inputs, weights
    states, read_slots, write_slots, intermediate = state
    refuse(
        "mamba-ssm", "state update",
        "it takes one token" if x.shape[1] > 1 or intermediate is not None else None,
        "it reads and writes the same slot" if read_slots is not write_slots else None,
        _clamped(dt_limit),
    )  # fmt: skip
    heads, dim, columns = states.shape[1:]
    y: Tensor = update(
        states, x[:, 0], _broadcast_heads(dt[:, 0], dim), A[:, None, None].expand(heads, dim, columns), B[:, 0],
        C[:, 0],
        D=None if D is None else _broadcast_heads(D, dim), z=None if z is None else z[:, 0],
        dt_bias=None if dt_bias is None else _broadcast_heads(dt_bias, dim), dt_softplus=True,
        # int64: slot times state bytes passes 2^31.
        state_batch_indices=read_slots.clamp(min=0).long(),
    )  # fmt: skip
    y = y.unsqueeze(1).masked_fill_(pad_mask(read_slots, 4), 0.0)
    return y if out is None else out.copy_(y)


def fla_recurrent_gated_delta_rule(
    inputs: DeltaInputs, state: StateSlots, weights: GateWeights | None = None
) -> Tensor:
    """`recurrent_gated_delta_rule` of Kimi Delta Attention, by flash-linear-attention."""
    from fla.ops.kda import fused_recurrent_kda

    from hybridrt.kernels.libraries.fla import gate_arguments

    states, read_slots, write_slots, intermediate = state
    refuse(
        "flash-linear-attention", "recurrent step",
        None if inputs.g.ndim > inputs.beta.ndim else "it takes a decay for each channel",
        None if intermediate is None else "it stores no state after each token",
    )  # fmt: skip
    out, after = fused_recurrent_kda(
        *(t.contiguous() for t in inputs), initial_state=read_rows(states, read_slots).float(),
        output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=True, **gate_arguments(weights),
    )  # fmt: skip
    write_rows(states, write_slots, after)
    return out.masked_fill(pad_mask(read_slots, 4), 0.0)


def _clamped(dt_limit: tuple[float, float]) -> str | None:
    """The reason of a kernel that clamps no time step, where the limits would be felt: a step of 1e6 forgets all."""
    return f"dt_limit is {dt_limit}, it clamps nothing" if dt_limit[0] > 0 or dt_limit[1] < 1e6 else None


def _broadcast_heads(per_head: Tensor, dim: int) -> Tensor:
    """[..., H] as [..., H, dim] without memory of its own: how libraries are told that a head's channels share it."""
    return per_head.unsqueeze(-1).expand(*per_head.shape, dim)
