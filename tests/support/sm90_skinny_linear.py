"""Prints what the kernels of few tokens use on sm_90 for the linear layers of Falcon-H1-7B, one JSON object a line."""

import json
from dataclasses import asdict

import torch
from torch import Tensor

from hybridrt.kernels.skinny_linear_triton import skinny_linear_triton
from tests.support.sm90 import compiled_only


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def block(tokens: int) -> None:
    x, norm = meta(tokens, 3072), meta(3072, dtype=torch.float32)
    skinny_linear_triton(x, meta(8728, 3072), norm_weight=norm, eps=1e-5, residual=x)
    skinny_linear_triton(meta(tokens, 1536), meta(3072, 4608), tail=meta(tokens, 3072))
    skinny_linear_triton(x, meta(24576, 3072), norm_weight=norm, eps=1e-5, residual=x, activation="silu_and_mul")
    skinny_linear_triton(meta(tokens, 12288), meta(3072, 12288))


def main() -> None:
    with compiled_only() as used:
        block(1)
        block(8)
        block(32)
        block(64)
    for usage in used:
        print(json.dumps(asdict(usage)), flush=True)


if __name__ == "__main__":
    main()
