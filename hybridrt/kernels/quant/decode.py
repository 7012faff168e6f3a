"""Codes of quantised matrices to float32.

Milliseconds for 2048 x 4096 codes on one core: 8.6 for pairs, which a table of 256 entries gives
(37 with float32 entries); 15 for e4m3 (120 by torch's conversion); 1.8 for int8.
"""

from functools import cache

import torch
from torch import Tensor

from hybridrt.kernels.quant.formats import decode_e2m1, pack_pairs, unpack_pairs

CENTRE_OF_INT4 = 8  # the code of zero without zero points


def decode_fp8(codes: Tensor, width: int) -> Tensor:
    """e4m3 [n, width] to float32, except NaN."""
    if codes.device.type != "cpu":
        return codes.float()
    # As float16: the sign, a zero, four bits of the exponent, three of the mantissa; 8 lower exponents.
    bits = (codes.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)
    return bits.view(torch.float16).float().mul_(256)


def decode_int8(codes: Tensor, width: int) -> Tensor:
    """int8 [n, width] to float32."""
    return codes.float()


def decode_int4(codes: Tensor, width: int) -> Tensor:
    """Pairs [n, width / 2] of codes 0 to 15 to float32 [n, width], less the centre."""
    if codes.device.type != "cpu":
        return unpack_pairs(codes)[:, :width].float() - CENTRE_OF_INT4
    return _looked_up(codes, _pairs("int4"))[:, :width]


def decode_fp4(codes: Tensor, width: int) -> Tensor:
    """Pairs [n, width / 2] of e2m1 codes to float32 [n, width]."""
    if codes.device.type != "cpu":
        return decode_e2m1(unpack_pairs(codes))[:, :width]
    return _looked_up(codes, _pairs("fp4"))[:, :width]


def take_pairs(codes: Tensor, columns: Tensor) -> Tensor:
    """Inputs `columns` of pairs [n, P], as pairs. An odd number is filled up with code 0."""
    taken = unpack_pairs(codes)[:, columns]
    return pack_pairs(torch.nn.functional.pad(taken, (0, len(columns) % 2)))


def _looked_up(codes: Tensor, table: Tensor) -> Tensor:
    """Each code's two float32 values, which a float64 of `table` carries."""
    found = torch.index_select(table, 0, codes.flatten().to(torch.int32))
    return found.view(torch.float32).view(codes.shape[0], -1)


@cache
def _pairs(method: str) -> Tensor:
    """[256]: the values of a byte's two codes."""
    codes = unpack_pairs(torch.arange(256, dtype=torch.uint8).unsqueeze(1))
    values = decode_e2m1(codes) if method == "fp4" else codes.float() - CENTRE_OF_INT4
    return values.contiguous().view(torch.float64).flatten()
