"""The kernels that fill the shared memory or the registers of smaller GPUs, and those with instructions of new ones."""

from itertools import chain

from hybridrt.kernels.dense.moe import ExpertStack
from tests.support.quant_weights import empty_weight
from tests.support.sm90_cases import (
    MAMBA2_SHAPES,
    Cases,
    absorbed_prompts,
    attention,
    delta_net,
    f32,
    int32,
    kimi_delta,
    latent_attention,
    mamba2_prefill,
    quant,
    skinny_linear,
)


def demanding() -> Cases:
    """Wide heads, prompts of delta rules and of Mamba-2, weights of 4 bits, and float32 products; one size of each."""
    decodes = (case for case in attention() if case[0] == "attention_decode" and case[1]["q"].shape[3] == 256)
    latent = [case for case in latent_attention() if case[0] == "attention_decode"]
    passes = [case for case in chain(delta_net(), kimi_delta()) if case[0] == "chunk_gated_delta_rule"]
    scans = (case for case in mamba2_prefill(MAMBA2_SHAPES[0], 512, 256) if case[0] == "mamba2_chunk_scan")
    yield from [case for case in decodes if case[1]["q"].shape[1] > 1][:1]
    yield from (latent[2], latent[5])  # verified drafts of 32 heads; single tokens of eight, of many rows
    yield from absorbed_prompts()
    yield from (passes[1], passes[-1])
    yield from scans
    yield from [case for case in skinny_linear() if len(case[1]["x"]) == 64][:1]
    fp4 = [case for case in quant() if case[1].get("weight", case[1].get("up")).code == "e2m1"]
    yield from [case for case in fp4 if _tokens(case) >= 128 and not _has_e4m3(case)]
    yield "quant_linear", {"x": f32(128, 3072), "weight": empty_weight("int8 zeros", 24576, 3072)}
    stack = ExpertStack(f32(16, 1024, 2048), f32(16, 2048, 512), "silu")
    yield "fused_experts", {"x": f32(512, 2048), "experts": stack, "weights": f32(512, 8), "ids": int32(512, 8)}


def _tokens(case: tuple[str, dict[str, object]]) -> int:
    x = case[1].get("x")  # none of a weight that is decoded
    return 0 if x is None else len(x)  # type: ignore[arg-type]


def _has_e4m3(case: tuple[str, dict[str, object]]) -> bool:
    """Scales of e4m3 need sm_89."""
    weight = case[1].get("weight", case[1].get("up"))
    return "float8" in str(weight.scale.dtype)  # type: ignore[union-attr]
