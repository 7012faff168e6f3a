"""Calls of attention over KV caches of e4m3 codes, for bench_kernels: its cases, with the caches encoded."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from benchmarks.kernel_cases import Case, Load, attention_decode, attention_extend, decode_op, prefill_op
from benchmarks.latent_cases import latent_decode, latent_extend
from benchmarks.library_cases import Args
from hybridrt.base.model_config import ModelConfig
from hybridrt.kernels.attention.kv_codes import encode

SCALE = 0.02


@decode_op("coded_decode")
def coded_decode(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    yield from map(_coded, chain(attention_decode(config, load, device), latent_decode(config, load, device)))


@prefill_op("coded_extend")
def coded_extend(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    yield from map(_coded, chain(attention_extend(config, load, device), latent_extend(config, load, device)))


def _coded(case: Case) -> Case:
    """The case with codes. It counts half of the bytes: most bytes that attention moves are those of the caches."""

    def make() -> Args:
        args = case.make()
        keys = encode(args["k_cache"], SCALE)
        latent = args["v_cache"].shape != args["k_cache"].shape
        values = keys[..., : args["v_cache"].shape[3]] if latent else encode(args["v_cache"], SCALE)
        return args | {"k_cache": keys, "v_cache": values, "k_scale": SCALE, "v_scale": SCALE}

    return replace(case, shape=f"{case.shape}, e4m3", make=make, bytes=case.bytes / 2, baselines={})
