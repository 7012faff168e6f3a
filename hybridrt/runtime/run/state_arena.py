"""The buffer through which images of states leave for other workers and arrive from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch

from hybridrt.base.errors import PoolError
from hybridrt.kinds.registry import state_dtype, state_shape
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.mem_cache.pools.state_slices import MambaSpec, Section, derive_mamba_conv_split
from hybridrt.mem_cache.pools.stored_states import stored_state
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.step.plan import StateCopy

Part = tuple[tuple[int, ...], torch.dtype]  # shape and dtype in an image


@dataclass(frozen=True)
class ImageLayout:
    """What one rank keeps of a request after `length` tokens, as one run of bytes without gaps:

        for each recurrent layer   conv inputs [conv_dim, K - 1] | recurrent state [*temporal]
        for each attention layer   keys [kv_heads, tokens, head_dim] | values [kv_heads, tokens, v_head_dim]
                                   or latent vectors [1, tokens, head_dim], the same on all ranks

    Tokens are all `length` of them without the first `start`, whose KV the receiver has; in a layer
    with a sliding window, those that the next token sees. The dimension that is cut over ranks is
    outermost, so that a share of it is one run too.

    Attributes:
        states: the parts of all recurrent layers' states, in order.
        tokens: one token's part of each tensor with keys, values or latent vectors, in order.
        windows: of the layers of these tensors, in tokens.
    """

    states: tuple[Section, ...]
    tokens: tuple[Section, ...]
    windows: tuple[int | None, ...]
    tp_size: int

    @classmethod
    def from_target(cls, target: RunTarget, kv: KVPool) -> "ImageLayout":
        mc, tp = target.model_config, target.tp.size
        configs = {layer_id: config for kind, config in mc.linear.items() for layer_id in mc.linear_layer_ids(kind)}
        states, tokens, windows = list[Section](), list[Section](), list[int | None]()
        for layer_id in sorted(configs):
            shape, groups = state_shape(configs[layer_id], tp), state_shape(configs[layer_id]).groups
            shapes = (shape.conv_dim, shape.conv_kernel - 1), shape.temporal
            stored, dtype = stored_state(shape, target.state_dtype)
            nbytes = prod(stored) * dtype.itemsize
            dtypes = target.dtype, state_dtype(shape, target.state_dtype)
            mamba = MambaSpec(shapes, dtypes, shape.kind, groups, nbytes)
            states += derive_mamba_conv_split(mamba, tp).sections
        for layer_id in mc.full_attention_layer_ids:
            spec, heads = kv.specs[layer_id], mc.attention_of(layer_id).num_kv_heads
            tokens += [Section(spec.num_kv_heads * dim * spec.dtype.itemsize, heads) for dim in spec.cache_dims]
            windows += [spec.sliding_window] * len(spec.cache_dims)
        return cls(tuple(states), tuple(tokens), tuple(windows), tp)

    def sections(self, length: int, start: int = 0) -> list[Section]:
        """The image's parts, in order, as conv_transfer cuts them over ranks."""
        kv = (
            Section(kv_tokens(window, length, start) * token.nbytes, token.groups)
            for token, window in zip(self.tokens, self.windows)
        )
        return [*self.states, *kv]

    def image_bytes(self, length: int, start: int = 0) -> int:
        return sum(section.nbytes for section in self.sections(length, start))


def kv_tokens(window: int | None, length: int, start: int) -> int:
    """How many of the last tokens' keys and values an image of `length` tokens holds in a layer with
    this window."""
    return length - start if window is None else min(length, window - 1)


class StateArena:
    """Copies states between the pools and images in `buffer` [transfer_bytes] uint8, on the pools'
    device.

    Pools have layouts of their own: a ring of conv inputs, KV in pages, in replay mode a checkpoint
    and a ring of inputs since. An image has none of these, so the two workers' layouts may differ.
    """

    def __init__(self, target: RunTarget, pools: Pools, transfer_bytes: int) -> None:
        self.layout = ImageLayout.from_target(target, pools.kv)
        self.buffer = torch.zeros(transfer_bytes, dtype=torch.uint8, device=target.device)
        self._table, self._windows = pools.req_to_token, pools.kv.windows
        layers = target.model_config.full_attention_layer_ids
        self._kv = [(pools.kv.group_of(i), t) for i in layers for t in pools.kv.layer_tensors(i)]

    def export_state(self, copy: StateCopy) -> None:
        """Pools to image. May fold the state: a ring of inputs becomes part of its checkpoint.

        Raises:
            PoolError: the image is larger than its room. Nothing has changed.
        """
        self._check_room(copy)
        places, pool, offset = self._places(copy), self._table.mamba_pool, copy.offset
        states = () if pool is None else pool.export(copy.row, copy.length)
        kv = (tensor.flatten(0, 1).index_select(0, places[group]).transpose(0, 1) for group, tensor in self._kv)
        for tensor in chain(states, kv):
            data = tensor.contiguous().view(-1).view(torch.uint8)
            self.buffer[offset : offset + len(data)] = data
            offset += len(data)

    def import_state(self, copy: StateCopy) -> None:
        """Image to pools, into the slot and pages of a row that has just been admitted.

        Raises:
            PoolError: the image would end outside the arena. Nothing has changed.
        """
        self._check_room(copy)
        places, pool = self._places(copy), self._table.mamba_pool
        states = [] if pool is None else [(part.shape, part.dtype) for part in pool.slot_parts()]
        kv = [((t.shape[2], len(places[group]), t.shape[3]), t.dtype) for group, t in self._kv]
        parts = self._read(copy.offset, [*states, *kv])
        if pool is not None:
            pool.import_(copy.row, copy.length, parts)
        for (group, tensor), heads in zip(self._kv, parts, strict=True):
            tensor.flatten(0, 1).index_copy_(0, places[group], heads.transpose(0, 1))

    def _check_room(self, copy: StateCopy) -> None:
        """PoolError if it does not fit: another worker may be reading the bytes next to it."""
        needed, end = self.layout.image_bytes(copy.length, copy.start), self.buffer.numel()
        room = end - copy.offset if copy.room is None else copy.room
        if copy.offset < 0 or needed > room or copy.offset + needed > end:
            raise PoolError(
                f"the image of {copy.length} tokens has {needed} bytes; it has room for {room} at byte {copy.offset} "
                f"of an arena of {end}"
            )

    def _places(self, copy: StateCopy) -> list[torch.Tensor]:
        """The token slots of an image, by page group."""
        counts = [kv_tokens(window, copy.length, copy.start) for window in self._windows]
        tables = self._table.tables[copy.row]
        return [table[copy.length - count : copy.length].long() for table, count in zip(tables, counts)]

    def _read(self, start: int, parts: Sequence[Part]) -> Iterator[torch.Tensor]:
        """Copies, because an image has no alignment."""
        for shape, dtype in parts:
            end = start + prod(shape) * dtype.itemsize
            yield self.buffer[start:end].clone().view(dtype).view(shape)
            start = end
