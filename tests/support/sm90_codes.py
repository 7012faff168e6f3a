"""Calls of attention over caches of e4m3 codes, whose kernels are compiled for sm_90: those of the plain tables."""

from itertools import chain

import torch
from torch import Tensor

from tests.support.sm90_cases import Args, Cases, absorbed_prompts, attention, latent_attention

CACHES = {"k_cache", "v_cache", "cache"}


def coded_attention() -> Cases:
    yield from map(_coded, chain(attention(), latent_attention(), absorbed_prompts()))


def _coded(case: tuple[str, Args]) -> tuple[str, Args]:
    op, args = case
    return op, {name: _codes(value) if name in CACHES else value for name, value in args.items()}


def _codes(plain: Tensor) -> Tensor:
    return plain.new_empty_strided(plain.shape, plain.stride(), dtype=torch.float8_e4m3fn)
