"""The matrices of a plain checkpoint that are quantised by us."""

import re
from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.base.quantization import Scheme
from hybridrt.layers.weights import WEIGHT_DTYPES, Transform
from hybridrt.models.base import CausalLM
from hybridrt.models.config.quant_online import SMALLEST, OnlineRules

_EXPERT = re.compile(r"(.*\.experts\.\d+)\.(gate|up|down)")


def online_table(
    model: CausalLM, targets: Mapping[str, Any], rules: OnlineRules, linear: Container[str]
) -> dict[str, Scheme]:
    """Schemes of a plain model's parts, "layer.segment". Matrices of linear layers and experts have
    one; embeddings, heads, routers and convolutions do not. Ranks and sizes of shards change nothing.

    Raises:
        ConfigError: no matrix can be quantised.
    """
    tables = {f"{model.embed_key}.weight", "lm_head.weight"}
    found: dict[str, Scheme] = {}
    for key, pieces in targets.items():
        parts = [piece.name.removesuffix(".weight") for piece in pieces]
        if key in tables or not all(_is_linear(part, linear) for part in parts):
            continue
        rows, columns = sum(piece.dest.shape[-2] for piece in pieces), pieces[0].dest.shape[-1]
        scheme = rules.scheme_of(parts[0], rows, columns)
        if scheme is not None:
            found |= dict.fromkeys(parts, scheme)
    _keep_experts_alike(found, targets)
    if not found:
        raise ConfigError(
            f"{model.config.architecture} has no matrix of at least {SMALLEST} x {SMALLEST} numbers to quantise: leave "
            "quantization out"
        )
    return found


def _is_linear(part: str, linear: Container[str]) -> bool:
    expert = _EXPERT.fullmatch(part)
    return part in linear if expert is None else re.sub(r"\d+$", "0", expert[1]) + ".down" in linear


def _keep_experts_alike(found: dict[str, Scheme], targets: Mapping[str, Any]) -> None:
    """Kernels take both matrices of experts in codes, or both plain."""
    plain = set[str]()
    for pieces in targets.values():
        expert = _EXPERT.fullmatch(pieces[0].name.removesuffix(".weight"))
        if expert is not None and expert[0] not in found:
            plain.add(expert[1])
    for part in [part for part in found if (expert := _EXPERT.fullmatch(part)) and expert[1] in plain]:
        del found[part]


def matrix_of(key: str, tensor: Tensor, part: Transform) -> Tensor:
    """A part of a checkpoint's tensor, as [out, in]. CheckpointError: it is none."""
    if tensor.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(f"{key} holds {tensor.dtype}; bfloat16, float16 and float32 are quantised")
    try:
        matrix = part(tensor)
    except (RuntimeError, IndexError) as e:
        raise CheckpointError(f"{key}: shape {tuple(tensor.shape)} does not suit config.json: {e}") from e
    if matrix.dim() != 2:
        raise CheckpointError(f"{key} has shape {list(tensor.shape)}, which gives no matrix")
    return matrix
