"""Helpers of all Triton launchers: arrival counters, precision, cache keys."""

import sys
from collections.abc import MutableMapping
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hybridrt.base.device import is_capturing

_counters: MutableMapping[Tensor, dict[int, Tensor]] = WeakIdKeyDictionary()

_reserved: dict[torch.device, Tensor] = {}  # int32 zeros; captures take the first ones
_RESERVE, _LINE = 2**18, 32  # counters; two owners share no cache line

LARGE_SHARED_MEMORY = 227 << 10


def dot_precision(dtype: torch.dtype) -> str:
    """tl.dot's input_precision. float32 operands are split in three TF32 parts to keep their
    accuracy."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def cdiv(n: int, size: int) -> int:
    """How many blocks of `size` hold n things. triton.cdiv and triton.next_power_of_2 look for constexpr
    arguments, which takes the host 2 microseconds."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def dot_width(n: int) -> int:
    """The width of a tile of n numbers that `tl.dot` multiplies: a power of two, at least 16."""
    return max(16, next_power_of_2(n))


def zero_after(out: Tensor, tokens: int) -> None:
    """Fills the rows after so many tokens with zeros. Mostly there are none; to fill none takes the host as long."""
    if tokens < out.shape[0]:
        out[tokens:].zero_()


def arrival_counters(owner: Tensor, count: int) -> Tensor:
    """int32 zeros [count], in which programs that share work count their arrivals. They leave
    zeros.

    Counters are kept by `owner` and count, because graphs keep the address. Launches of one owner
    never overlap. A capture takes counters of `reserve_counters`. If none are left, each replay
    fills its own with zeros: kept ones would not be zero before the first replay.
    """
    kept = _counters.setdefault(owner, {})
    if count in kept:
        return kept[count]
    if not is_capturing():
        kept[count] = torch.zeros(count, dtype=torch.int32, device=owner.device)
        return kept[count]
    left = _reserved.get(owner.device)
    if left is None or len(left) < count:
        return torch.zeros(count, dtype=torch.int32, device=owner.device)
    kept[count], _reserved[owner.device] = left[:count], left[-(-count // _LINE) * _LINE :]
    return kept[count]


def reserve_counters(device: torch.device) -> None:
    """Makes zeros for the counters of the next capture, if few are left."""
    device = torch.empty(0, dtype=torch.float32, device=device).device  # with its index
    if device not in _reserved or len(_reserved[device]) < _RESERVE // 2:
        _reserved[device] = torch.zeros(_RESERVE, dtype=torch.int32, device=device)


def end_launches(device: torch.device) -> None:
    """Launches a small kernel that does not start early. After it, all kernels may read early what
    was written before it (`pdl_triton.py`)."""
    if device.type != "cpu":
        torch.zeros(1, dtype=torch.float32, device=device)


@cache
def compute_keys(module: ModuleType) -> None:
    """Computes Triton's cache keys in a fixed order: files that this one imports from first, then by
    definition.

    Triton adds a called function's global constants to a key only if that function's key was
    computed before. Otherwise processes that launch in another order would miss the cache.
    """
    for function in list(vars(module).values()):
        home = getattr(function, "__module__", None) or module.__name__
        has_key = hasattr(type(function), "cache_key")  # interpreted functions have none
        if home != module.__name__ and (has_key or home.endswith("_triton")):
            compute_keys(sys.modules[home])
        if has_key:
            _ = function.cache_key
