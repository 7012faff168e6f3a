"""New keys and values enter a paged KV cache. Shapes and token slots: `paged_attention.py`."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrt.kernels.attention.kv_codes import as_bytes, encode
from hybridrt.kernels.core.operation import By, operation


@operation(By("triton"))
def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor, k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:  # fmt: skip
    """Stores k, v `[T, Hkv, D]` at token slots out_cache_loc `[T]` of the caches `[pages, page,
    Hkv, D]`, in place; in float8_e4m3fn caches as codes (`kv_codes.py`). Page 0 is padding and not
    written."""
    store(((k_cache, k, k_scale), (v_cache, v, v_scale)), out_cache_loc)


NewCells = Iterable[tuple[Tensor, Tensor, float]]  # a cache, what enters it, and the scale of codes


def store(caches: NewCells, out_cache_loc: Tensor) -> None:
    """`write_kv` in plain torch."""
    caches = tuple(caches)
    store_at(caches, cell_places(out_cache_loc, caches[0][0].shape[1]))


class CellPlaces(NamedTuple):
    """Places of tokens in the cells [pages * page, ...] of a cache, equal in all layers of a step.

    Attributes:
        cells: [T] int64; 0 for padding.
        padding: [T] bool; None if it is known that there is none.
    """

    cells: Tensor
    padding: Tensor | None


def cell_places(out_cache_loc: Tensor, page: int) -> CellPlaces:
    """The places of token slots [T] in pages of `page` tokens."""
    slots = out_cache_loc.long()
    if slots.device.type == "cpu" and (slots.numpy() >= page).all():
        return CellPlaces(slots, None)
    padding = slots < page
    return CellPlaces(slots.masked_fill(padding, 0), padding)


def store_at(caches: NewCells, places: CellPlaces) -> None:
    for cache, new, scale in caches:
        cells = cache.view(-1, *cache.shape[2:])
        if cells.dtype == torch.float8_e4m3fn:
            cells, values = as_bytes(cells), as_bytes(encode(new, scale))
        else:
            values = new.to(cells.dtype)
        if places.padding is not None:
            values = torch.where(places.padding[:, None, None], cells[:1], values)
        cells.index_copy_(0, places.cells, values)
