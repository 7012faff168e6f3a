"""Quantised matrices of random codes as files hold them, with their meaning from the formulas."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrt.base.quantization import Scheme, StoredModule

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NIBBLE_OF_OUTPUT = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # AWQ
SIZE = 0.02  # of the weights, roughly


@dataclass
class Written:
    """Tensors of a module by their last names, and the float32 matrix [out, in] that they mean."""

    scheme: Scheme
    tensors: dict[str, Tensor]
    dense: Tensor

    def module(self, name: str) -> StoredModule:
        return StoredModule(name, self.scheme, {last: (t.dtype, tuple(t.shape)) for last, t in self.tensors.items()})


def random(*shape: int, low: int = 0, high: int = 16) -> Tensor:
    return torch.randint(low, high, shape)


def scales(*shape: int, size: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different from each other, so that a wrong one shows."""
    return (size * (0.5 + torch.rand(*shape))).to(dtype)


def grid(scheme: Scheme, out: int, width: int) -> tuple[int, int]:
    return tuple(-(-side // block) if block else 1 for side, block in zip((out, width), scheme.block))  # type: ignore[return-value]


def meaning(codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, index: Tensor | None = None) -> Tensor:
    """w[r, c] = (codes[r, c] - zero[R, C]) * scale[R, C]. index: C of each input, if it is not c // block."""
    high, wide = (block or side for block, side in zip(scheme.block, codes.shape))
    rows = (torch.arange(codes.shape[0]) // high).unsqueeze(1)
    columns = torch.arange(codes.shape[1]) // wide if index is None else index
    less = 0.0 if zero is None else zero[rows, columns]
    return (codes - less) * scale.float()[rows, columns]


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] of codes [rows, n]: code j at bits j * bits."""
    per_word = 32 // bits
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // per_word), dtype=torch.int64)
    for j in range(codes.shape[1]):
        words[:, j // per_word] |= codes[:, j].long() << (bits * (j % per_word))
    return (words - ((words >> 31) << 32)).to(torch.int32)


def awq_words(codes: Tensor) -> Tensor:
    """int32 [rows, out / 8] of codes [rows, out]."""
    places = [8 * (j // 8) + NIBBLE_OF_OUTPUT[j % 8] for j in range(codes.shape[1])]
    ordered = torch.empty_like(codes)
    ordered[:, places] = codes
    return packed_words(ordered, 4)


def e4m3(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def of_fp8(
    scheme: Scheme, scale: str, dtype: torch.dtype = torch.float32, flat: bool = False
) -> Callable[..., Written]:
    def write(out: int, width: int) -> Written:
        codes, found = e4m3(out, width), scales(*grid(scheme, out, width), size=SIZE, dtype=dtype)
        stored = found
        if dtype == torch.float8_e8m0fnu:
            found = torch.exp2(random(*found.shape, low=-7, high=-4).float())
            stored = (torch.log2(found) + 127).to(torch.uint8)
        dense = meaning(codes.float(), found, None, scheme)
        stored = stored.reshape(()) if flat and stored.numel() == 1 else stored
        return Written(scheme, {"weight": codes, scale: stored}, dense)

    return write


def of_fp4(scheme: Scheme, names: tuple[str, str], divides: bool) -> Callable[..., Written]:
    """names: of the codes and the common scale; "" for exponents without one."""

    def write(out: int, width: int) -> Written:
        codes = random(out, width)
        values = torch.tensor([*E2M1, *(-v for v in E2M1)])[codes]
        tensors = {names[0]: (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)}
        if not names[1]:
            power = random(*grid(scheme, out, width), low=-9, high=-6)
            tensors["weight_scale"] = (power + 127).to(torch.uint8)
            return Written(scheme, tensors, meaning(values, torch.exp2(power.float()), None, scheme))
        scale = scales(*grid(scheme, out, width), size=3.0).to(torch.float8_e4m3fn)
        common = float(scales(1, size=SIZE / 8))
        tensors |= {"weight_scale": scale, names[1]: torch.tensor(1 / common if divides else common)}
        return Written(scheme, tensors, meaning(values, scale.float() * common, None, scheme))

    return write


def of_integers(scheme: Scheme) -> Callable[..., Written]:
    """compressed-tensors."""
    bits = int(scheme.method[3:])
    centre, top = 1 << (bits - 1), 1 << bits

    def write(out: int, width: int) -> Written:
        codes, scale = random(out, width, high=top), scales(*grid(scheme, out, width), size=SIZE / centre * 2)
        zero = random(*scale.shape, high=top) if scheme.zeros else torch.full(scale.shape, centre)
        dense = meaning(codes, scale, zero, scheme)
        if scheme.layout == "compressed":
            tensors = {"weight": (codes - centre).to(torch.int8), "weight_zero_point": (zero - centre).to(torch.int8)}
        else:
            tensors = {"weight_packed": packed_words(codes, bits), "weight_shape": torch.tensor([out, width])}
            tensors["weight_zero_point"] = packed_words(zero.t(), bits).t().contiguous()
        tensors["weight_scale"] = scale
        if not scheme.zeros:
            del tensors["weight_zero_point"]
        return Written(scheme, tensors, dense)

    return write


def awq(scheme: Scheme) -> Callable[..., Written]:
    def write(out: int, width: int) -> Written:
        codes, scale = random(out, width), scales(*grid(scheme, out, width), size=SIZE / 4, dtype=torch.float16)
        zero = random(*scale.shape)
        tensors = {"qweight": awq_words(codes.t()), "qzeros": awq_words(zero.t()), "scales": scale.t().contiguous()}
        return Written(scheme, tensors, meaning(codes, scale, zero, scheme))

    return write


def gptq(scheme: Scheme, shuffled: bool = False) -> Callable[..., Written]:
    bits = int(scheme.method[3:])

    def write(out: int, width: int) -> Written:
        codes = random(out, width, high=1 << bits)
        scale = scales(*grid(scheme, out, width), size=SIZE / (1 << (bits - 2)), dtype=torch.float16)
        zero = random(*scale.shape, low=1, high=1 << bits)
        index = torch.arange(width) // (scheme.block[1] or width)
        index = index[torch.randperm(width)] if shuffled else index
        less = 1 if scheme.layout == "gptq" else 0
        stored = packed_words(zero.t() - less, bits)
        tensors = {"qweight": packed_words(codes, bits).t().contiguous(), "qzeros": stored}
        tensors |= {"scales": scale.t().contiguous(), "g_idx": index.to(torch.int32)}
        return Written(scheme, tensors, meaning(codes, scale, zero, scheme, index))

    return write


F16, E8M0, E4M3 = torch.float16, torch.float8_e8m0fnu, torch.float8_e4m3fn
KINDS: dict[str, Callable[..., Written]] = {
    "fp8-blocks": of_fp8(Scheme("fp8", "fp8", (4, 8)), "weight_scale_inv"),
    "fp8-exponents": of_fp8(Scheme("fp8", "fp8", (4, 8), scale_dtype=E8M0), "weight_scale_inv", E8M0),
    "fp8-rows": of_fp8(Scheme("fp8", "compressed", (1, 0)), "weight_scale"),
    "fp8-tensor": of_fp8(Scheme("fp8", "modelopt"), "weight_scale", flat=True),
    "mxfp8": of_fp8(Scheme("fp8", "compressed", (1, 32), scale_dtype=E8M0), "weight_scale", E8M0),
    "int8-rows": of_integers(Scheme("int8", "compressed", (1, 0))),
    "int8-zeros": of_integers(Scheme("int8", "compressed", (1, 0), zeros=True)),
    "int8-packed": of_integers(Scheme("int8", "compressed-packed", (1, 8))),
    "int4-rows": of_integers(Scheme("int4", "compressed-packed", (1, 0))),
    "int4-groups": of_integers(Scheme("int4", "compressed-packed", (1, 8))),
    "int4-zeros": of_integers(Scheme("int4", "compressed-packed", (1, 8), zeros=True)),
    "awq": awq(Scheme("int4", "awq", (1, 8), scale_dtype=F16, zeros=True)),
    "gptq": gptq(Scheme("int4", "gptq", (1, 8), scale_dtype=F16, zeros=True, indexed=True)),
    "gptq-index": gptq(Scheme("int4", "gptq_v2", (1, 8), scale_dtype=F16, zeros=True, indexed=True), shuffled=True),
    "gptq8": gptq(Scheme("int8", "gptq", (1, 8), scale_dtype=F16, zeros=True, indexed=True)),
    "nvfp4": of_fp4(
        Scheme("fp4", "modelopt-nvfp4", (1, 16), scale_dtype=E4M3), ("weight", "weight_scale_2"), divides=False
    ),
    "nvfp4-ct": of_fp4(
        Scheme("fp4", "compressed-nvfp4", (1, 16), scale_dtype=E4M3), ("weight_packed", "weight_global_scale"),
        divides=True,
    ),
    "mxfp4": of_fp4(Scheme("fp4", "compressed-mxfp4", (1, 32), scale_dtype=E8M0), ("weight_packed", ""), False),
}  # fmt: skip
