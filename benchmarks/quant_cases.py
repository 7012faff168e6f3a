"""Products with weights of 8 and 4 bits for bench_kernels, next to bfloat16 ones, torch._scaled_mm and DeepGEMM.

Libraries multiply activations that are quantised before they are timed.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases import Case, Load, decode_op, int32, linears, normal
from benchmarks.library_cases import Args, Call, Peers, beside
from hybridrt.base.model_config import ModelConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.dense.moe import ExpertStack, fused_experts
from hybridrt.kernels.dense.norm_activation import add_rms_norm
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, InputNorm, is_skinny, skinny_linear
from hybridrt.kernels.quant.quant_linear import MAX_TOKENS
from hybridrt.kernels.quant.quant_weight import QuantWeight, dequantize, expert_of
from hybridrt.layers.moe import MoE
from hybridrt.layers.weights import Build
from hybridrt.models.registry import model_class
from tests.support.quant_weights import empty_weight, quant_weight

MEASURED = ("fp8 blocks", "fp8 rows", "int4", "nvfp4", "mxfp4")
E4M3_MAX = 448.0


def weight_bytes(weight: QuantWeight) -> int:
    return sum(t.numel() * t.element_size() for t in weight if isinstance(t, Tensor))


def _bfloat16(args: Args) -> Call:
    """What a dense layer does with the same weight in bfloat16."""
    x, act, weight = args["x"], args["activation"], dequantize(args["weight"]).bfloat16()
    norm = None if args["norm_weight"] is None else InputNorm(args["norm_weight"], args["eps"], args["residual"])
    if is_skinny(x, weight, act):
        return lambda: skinny_linear(x, weight, norm=norm, activation=act)

    def separate() -> Tensor:
        h = x if norm is None else add_rms_norm(x, args["residual"], norm.norm_weight, norm.eps)[0]
        y = F.linear(h, weight)
        return y if act is None else ACTIVATIONS[act](y)

    return separate


def _scaled_mm(args: Args) -> Call:
    """Scales of rows on both sides."""
    weight, x = args["weight"], args["x"]
    if weight.scale is not None or weight.factor is None:
        raise ValueError("it scales whole rows")
    x_scale = x.float().abs().amax(1, keepdim=True) / E4M3_MAX
    low, columns = (x / x_scale).to(torch.float8_e4m3fn), weight.data.t()
    scale = weight.factor[None]
    return lambda: torch._scaled_mm(low, columns, x_scale, scale, out_dtype=torch.bfloat16)


def _deep_gemm(args: Args) -> Call:
    """Scales of 128 x 128 weights, and of 128 inputs of a token."""
    import deep_gemm

    weight, x = args["weight"], args["x"]
    if weight.code != "e4m3" or weight.block != (128, 128):
        raise ValueError("it scales blocks of 128 x 128")
    groups = x.float().unflatten(1, (-1, 128))
    x_scale = groups.abs().amax(2) / E4M3_MAX
    low = (groups / x_scale[..., None]).flatten(1).to(torch.float8_e4m3fn)
    out = torch.empty(len(x), weight.rows, dtype=torch.bfloat16, device=x.device)
    return lambda: deep_gemm.fp8_gemm_nt((low, x_scale), (weight.data, weight.scale), out)


LINEAR: Peers = {
    "bfloat16": (("torch",), _bfloat16),
    "torch._scaled_mm": (("torch",), _scaled_mm),
    "DeepGEMM": (("deep_gemm",), _deep_gemm),
}


@decode_op("quant_linear")
def quant_linear(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    if load.rows > MAX_TOKENS:
        return
    for (rows, columns, normed, activation), name in linears(config).items():
        for kind in MEASURED if columns % 4 == 0 else ():  # 8-bit weights have whole words of four

            def make(
                kind: str = kind, shape: Any = (rows, columns), normed: bool = normed, act: Any = activation
            ) -> Args:
                x, residual = normal(device, 2, load.rows, shape[1])
                before = {"norm_weight": torch.ones(shape[1], device=device), "residual": residual}
                args = {"x": x, "weight": quant_weight(kind, *shape, device=device), "eps": 1e-5, "activation": act}
                return args | (before if normed else dict.fromkeys(before))

            moved = weight_bytes(empty_weight(kind, rows, columns))
            moved += 2 * load.rows * (rows + columns * (3 if normed else 1))
            made, peers = beside(make, device, LINEAR)
            yield Case("quant_linear", f"{name} {rows}x{columns} {kind}", made, moved, baselines=peers)


def _bfloat16_experts(args: Args) -> Call:
    stacks = (torch.stack([dequantize(expert_of(w, e)).bfloat16() for e in range(len(w.data))])
              for w in (args["up"], args["down"]))  # fmt: skip
    experts = ExpertStack(*stacks, args["activation"])
    return lambda: fused_experts(args["x"], experts, args["weights"], args["ids"])


EXPERTS: Peers = {"bfloat16": (("torch",), _bfloat16_experts)}


@decode_op("quant_experts")
def quant_experts(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """Tokens that choose experts at random. Bytes are those of the experts that one draw touched."""
    model = model_class(config.architecture)(config, Build(TPGroup(), torch.bfloat16, torch.device("meta")), max_len=1)
    layer = next((module for module in model.modules() if isinstance(module, MoE)), None)
    if layer is None:
        return
    stack, top_k = layer.experts.method.parameters(), layer.router.choice.top_k
    (count, rows, width), inner = stack["up"].shape, stack["down"].shape[2]
    activation = "silu" if rows == 2 * inner else "relu2"
    ids = torch.rand(load.rows, count, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :top_k]
    for kind in MEASURED:

        def make(kind: str = kind) -> Args:
            picks = {"weights": torch.rand(load.rows, top_k, device=device), "ids": int32(device, ids.tolist())}
            up = quant_weight(kind, rows, width, count, device=device)
            down = quant_weight(kind, width, inner, count, device=device)
            return {"x": normal(device, load.rows, width), "up": up, "down": down, "activation": activation} | picks

        whole = sum(weight_bytes(empty_weight(kind, *shape, count)) for shape in ((rows, width), (width, inner)))
        moved = whole * len(ids.unique()) / count + 4 * load.rows * width
        made, peers = beside(make, device, EXPERTS)
        yield Case("quant_experts", f"{count} of {width}x{inner} {kind}", made, moved, baselines=peers)
