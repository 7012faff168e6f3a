"""Copies a cached prefix between the pools of all ranks and tensors in main memory."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch

from hybridrt.collectives.groups import TPGroup
from hybridrt.mem_cache.pools.mamba_pool_spec import Shapes
from hybridrt.mem_cache.pools.page_groups import first_page
from hybridrt.mem_cache.pools.pools import Pools

Tensors = Mapping[str, torch.Tensor]


def prefix_shapes(pools: Pools, tp_size: int, length: int, num_states: int) -> Shapes:
    """Shape and dtype of every copied tensor by name, in order. Dimension 0 is the rank; dimension
    1 of keys and values is the token: all `length` tokens or, in a layer with a window, those from
    the first page on that the next token sees."""
    counts = [length - first for first in _first_tokens(pools, length)]
    kv = {name: ((tp_size, counts[group], *t.shape[2:]), t.dtype) for name, group, t in _kv_tensors(pools)}
    parts = {name: ((tp_size, *shape[1:]), dtype) for name, shape, dtype in _state_parts(pools, num_states)}
    return kv | parts


class PrefixPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Where the pools hold a prefix.

    Attributes:
        length: tokens with copied keys and values.
        pages: of each page group, the KV pages of the copied tokens, in order; none for a model
            without attention layers.
        states: (number of tokens, slot) of each recurrent state.
    """

    length: int
    pages: Sequence[Sequence[int]]
    states: Sequence[tuple[int, int]]


@torch.inference_mode()
def read_prefix(pools: Pools, tp: TPGroup, prefix: PrefixPlaces) -> dict[str, torch.Tensor]:
    """This rank's part of copying a prefix out of the pools, after the launched steps. The result
    is `prefix_shapes`, in main memory; only rank 0 reads it."""
    places = _token_places(pools, prefix)
    found = {name: _gather(tp, t.flatten(0, 1).index_select(0, places[group])) for name, group, t in _kv_tensors(pools)}
    names = iter(_state_parts(pools, len(prefix.states)))
    for length, slot in prefix.states:
        assert pools.req_to_token.mamba_pool is not None
        for part in pools.req_to_token.mamba_pool.read_slot(slot, length):
            found[next(names)[0]] = _gather(tp, part[0])
    return found


@torch.inference_mode()
def write_prefix(pools: Pools, tp: TPGroup, prefix: PrefixPlaces, data: Tensors | None) -> None:
    """This rank's part of copying a prefix into the pools, after the launched steps.

    Args:
        data: on rank 0 `prefix_shapes`; None on other ranks.
    """
    places = _token_places(pools, prefix)
    for name, group, tensor in _kv_tensors(pools):
        shape = len(places[group]), *tensor.shape[2:]
        part = _scatter(tp, None if data is None else data[name], shape, tensor.dtype, tensor.device)
        tensor.flatten(0, 1).index_copy_(0, places[group], part)
    device = pools.req_to_token.tables.device
    parts = (
        _scatter(tp, None if data is None else data[name], shape, dtype, device)
        for name, shape, dtype in _state_parts(pools, len(prefix.states))
    )
    for length, slot in prefix.states:
        assert pools.req_to_token.mamba_pool is not None
        pools.req_to_token.mamba_pool.write_slot(slot, length, parts)


def _first_tokens(pools: Pools, length: int) -> list[int]:
    """By page group: the first token of a prefix that is copied."""
    size = pools.kv.page_size
    return [0 if window is None else first_page(length, window, size) * size for window in pools.kv.windows]


def _token_places(pools: Pools, prefix: PrefixPlaces) -> list[torch.Tensor]:
    """By page group: slots of the copied tokens, [n] int64."""
    size, device, found = pools.kv.page_size, pools.req_to_token.tables.device, list[torch.Tensor]()
    for numbers, first in zip(prefix.pages, _first_tokens(pools, prefix.length)):
        pages = torch.tensor(numbers, dtype=torch.int64, device=device)
        found.append((pages[:, None] * size + torch.arange(size, device=device)).view(-1)[: prefix.length - first])
    return found


def _kv_tensors(pools: Pools) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(name, page group, [pages, page_size, ...]) of all KV layers, prediction heads included."""
    for layer_id in pools.kv.specs:
        for what, tensor in zip(("keys", "values"), pools.kv.layer_tensors(layer_id)):
            yield f"layers.{layer_id}.{what}", pools.kv.group_of(layer_id), tensor


def _state_parts(pools: Pools, num_states: int) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) in the order of the state pool."""
    if pools.req_to_token.mamba_pool is None:
        return
    parts = list(pools.req_to_token.mamba_pool.slot_parts())
    for number in range(num_states):
        for i, part in enumerate(parts):
            yield f"states.{number}.layers.{part.layer_id}.{'state' if i % 2 else 'conv'}", part.shape, part.dtype


def _gather(tp: TPGroup, part: torch.Tensor) -> torch.Tensor:
    """[...] of each rank to [ranks, ...] in main memory."""
    if tp.size == 1 or not part.numel():
        return part.cpu().expand(tp.size, *part.shape)
    data = part.contiguous().view(-1).view(torch.uint8)
    return tp.all_gather_last(data).cpu().view(part.dtype).view(tp.size, *part.shape)


def _scatter(
    tp: TPGroup, data: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """This rank's part, `shape`, of rank 0's [ranks, ...]."""
    part = torch.empty(shape, dtype=dtype, device=device)
    if tp.size == 1 or not part.numel():
        return part if data is None else part.copy_(data.view(shape))
    size = part.numel() * dtype.itemsize
    whole = torch.zeros(tp.size * size, dtype=torch.uint8, device=device)
    if data is not None:
        whole.copy_(data.contiguous().view(-1).view(torch.uint8))
    return tp.all_reduce(whole)[tp.rank * size :][:size].clone().view(dtype).view(shape)
