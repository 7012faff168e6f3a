"""Calls of latent attention for bench_kernels, next to flashinfer's and FlashMLA's where they are installed."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import Case, Load, decode_op, int32, normal, page_table, prefill_op
from benchmarks.library_cases import Args, Peers, beside
from hybridrt.base.model_config import AttentionConfig, ModelConfig

PAGE = 64  # the only one that FlashMLA takes
WORKSPACE_BYTES = 128 << 20


def latent_of(config: ModelConfig) -> AttentionConfig | None:
    """The model's latent attention; None if it has none."""
    return config.attention if config.full_attention_layer_ids and config.attention.latent else None


def paged(attention: AttentionConfig, load: Load, device: str) -> Args:
    """A cache with shuffled pages for `load`, the table and the rows."""
    pages, places = page_table(load, device)
    vectors = normal(device, pages, PAGE, 1, attention.head_dim)
    caches = {"k_cache": vectors, "v_cache": vectors[..., : attention.v_head_dim]}
    return caches | places | {"scale": attention.scale}


def _flashinfer(args: Args) -> Callable[[], Tensor]:
    """flashinfer's decode of these arguments, planned."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    q, cache, device = args["q"], args["k_cache"], args["q"].device
    rows, rank, pages = len(q), args["v_cache"].shape[3], args["req_to_token"][1:, ::PAGE] // PAGE
    wrapper: Any = BatchMLAPagedAttentionWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=device))
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        starts, starts * pages.shape[1], pages.flatten().contiguous(), args["seq_lens"], q.shape[2], rank,
        q.shape[3] - rank, PAGE, False, args["scale"], q.dtype, cache.dtype,
    )  # fmt: skip
    parts = (*q[:, 0].split((rank, q.shape[3] - rank), -1), *cache[:, :, 0].split((rank, q.shape[3] - rank), -1))
    return lambda: wrapper.run(*parts)


def _flash_mla(args: Args) -> Callable[[], Tensor]:
    """FlashMLA's decode of these arguments, planned: of its own package, or of sglang-kernel."""
    try:
        import flash_mla
    except ModuleNotFoundError:
        from sgl_kernel import flash_mla

    q, lens, rank = args["q"], args["seq_lens"], args["v_cache"].shape[3]
    pages = (args["req_to_token"][1:, ::PAGE] // PAGE).contiguous()
    plan = flash_mla.get_mla_metadata(lens, q.shape[2], 1)
    return lambda: flash_mla.flash_mla_with_kvcache(
        q, args["k_cache"], pages, lens, rank, *plan, softmax_scale=args["scale"], causal=True
    )[0]


def _flashinfer_prompts(args: Args) -> Callable[[], Tensor]:
    """flashinfer's prefill, as serving runtimes call it: one product makes keys and values of all heads from latent
    vectors that are contiguous already, then attention over ragged keys."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    q, up_k, up_v, starts = args["q"], args["up_k"], args["up_v"], args["query_start_loc"]
    (heads, nope, rank), value_dim = up_k.shape, up_v.shape[2]
    wrapper: Any = BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=q.device), "NHD"
    )
    wrapper.plan(
        starts, starts, heads, heads, q.shape[2], value_dim, causal=True, sm_scale=args["scale"], q_data_type=q.dtype
    )
    slots = args["req_to_token"][args["rows"], : args["seq_lens_host"][0]].flatten()
    latents, tails = args["k_cache"].flatten(0, 2)[slots].split((rank, q.shape[2] - nope), -1)
    latents, tails = latents.contiguous(), tails.unsqueeze(1).expand(-1, heads, -1)
    matrices = torch.cat((up_k, up_v.transpose(1, 2)), 1).flatten(0, 1).t()

    def call() -> Tensor:
        keys, values = (latents @ matrices).view(-1, heads, nope + value_dim).split((nope, value_dim), -1)
        return wrapper.run(q, torch.cat((keys, tails), -1), values.contiguous())

    return call


PROMPT_PEERS: Peers = {"flashinfer": (("flashinfer",), _flashinfer_prompts)}
PEERS: Peers = {
    "flashinfer": (("flashinfer",), _flashinfer),
    "flash_mla": (("flash_mla", "sgl_kernel"), _flash_mla),
}


@decode_op("latent_decode")
def latent_decode(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """Absorbed queries over the cache."""
    attention = latent_of(config)
    if attention is None:
        return

    def make() -> Args:
        q = normal(device, load.rows, 1, attention.num_heads, attention.head_dim)
        return paged(attention, load, device) | {"q": q}

    moved = 2 * sum(load.lengths) * attention.head_dim
    shape = (
        f"{attention.num_heads} heads of {attention.v_head_dim} + {attention.head_dim - (attention.v_head_dim or 0)}"
    )
    made_with, peers = beside(make, device, PEERS)
    yield Case("attention_decode", shape, made_with, moved, baselines=peers)


@prefill_op("latent_extend")
def latent_extend(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """Whole prompts. The products are those of decompressed heads, whichever way is taken."""
    attention, whole = latent_of(config), Load(load.rows, load.tokens, 0)
    if attention is None or attention.latent is None:
        return
    heads, dims = attention.num_heads, attention.latent

    def make() -> Args:
        starts = [i * load.tokens for i in range(load.rows + 1)]
        lens = [load.tokens] * load.rows
        lengths = {"query_lens": lens, "seq_lens_host": lens, "query_start_loc": int32(device, starts)}
        q = normal(device, starts[-1], heads, dims.nope_dim + dims.rope_dim)
        weights = {
            "up_k": normal(device, heads, dims.nope_dim, dims.rank, scale=dims.rank**-0.5),
            "up_v": normal(device, heads, dims.rank, dims.value_dim, scale=dims.rank**-0.5),
            "norm": torch.ones(dims.rank, device=device), "norm_eps": 1e-6,
        }  # fmt: skip
        return paged(attention, whole, device) | {"q": q} | lengths | weights

    seen, made = load.rows * load.tokens * (load.tokens + 1) / 2, load.rows * load.tokens * dims.rank
    flops = seen * (dims.nope_dim + dims.rope_dim + dims.value_dim) + made * (dims.nope_dim + dims.value_dim)
    made_with, peers = beside(make, device, PROMPT_PEERS)
    shape = f"{heads} heads of {dims.nope_dim} + {dims.rope_dim}"
    yield Case("latent_extend", shape, made_with, flops=2 * heads * flops, baselines=peers)
