"""Bytes that a decode rank reads of a prefill rank's state block if their numbers of ranks differ.

A state block [conv | temporal] is one recurrent layer's state of one request on one rank: conv inputs
[conv_dim, K - 1], then the recurrent state. Conv inputs consist of sub-projections (x, B, C of Mamba-2;
q, k, v of Gated Delta Net), each cut over the ranks by itself. So a rank's share of a larger block is
a piece of each. Names and the signed ratio are those of vLLM's NIXL connector:

    tp_ratio >= 1    decode runs on tp_ratio times as many ranks as prefill: read a share of one block
    tp_ratio <= -1   prefill runs on -tp_ratio times as many: read that many smaller blocks, each whole
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kinds.base import LinearKind
from hybridrt.kinds.registry import linear_kind

Reads = list[tuple[int, int]]
_VLLM_NAMES = {"gdn_attention": "gdn"}


@dataclass(frozen=True)
class MambaSpec:
    """State of a recurrent layer for one request on one rank.

    Attributes:
        shapes: conv [conv_dim, K - 1] and recurrent state: [heads, head_dim, N] (Mamba-2), [value
            heads, V, K] (Gated Delta Net), [inner, N] (Mamba-1).
        dtypes: of the two.
        mamba_type: a kind of recurrent layer (`hybridrt.kinds`); "gdn_attention" means "gdn".
        n_groups: groups of B and C (key heads, of GDN) before sharding. Needed if they are fewer
            than the ranks: then neighbouring ranks hold the same one. None: each rank holds a
            different, equal part.
        state_nbytes: of the recurrent state, if it has scales next to its numbers.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[torch.dtype, torch.dtype]
    mamba_type: str = "mamba2"
    n_groups: int | None = None
    state_nbytes: int | None = None


@dataclass(frozen=True)
class Section:
    """A part of a state block that is cut over the ranks independently: `nbytes` on this rank.

    `groups`: number of pieces that cannot be cut. With fewer than ranks, neighbours hold the same
    piece. None: there are enough.
    """

    nbytes: int
    groups: int | None = None


@dataclass(frozen=True)
class RangeRead:
    """Copy of `nbytes` bytes from `source` of a prefill rank to `destination` of the decode rank.
    Both count from the start of a section or state block here, of a request's image in
    hybridrt.transfer.
    """

    source: int
    destination: int
    nbytes: int


def section_reads(sections: Sequence[Section], local_tp: int, rank: int, tp_ratio: int) -> list[RangeRead]:
    """What one of `local_tp` decode ranks reads of one prefill rank's state block: one read for
    each section, of 0 bytes if another rank's copy is read instead. `rank` and `tp_ratio` as in
    `MambaConvSplitInfo.remote_conv_offsets`.

    Raises:
        ConfigError: tp_ratio is 0, or a section cannot be cut that way.
    """
    if not tp_ratio:
        raise ConfigError("tp_ratio is 0; it is decode_tp // prefill_tp, or -(prefill_tp // decode_tp)")
    cut, ratio = _share if tp_ratio > 0 else _gather, abs(tp_ratio)
    found, source, destination = [], 0, 0
    for section in sections:
        remote_nbytes, read = cut(section, local_tp, rank % ratio, ratio)
        found.append(RangeRead(source + read.source, destination + read.destination, read.nbytes))
        source += remote_nbytes
        destination += section.nbytes
    return found


def _share(section: Section, local_tp: int, offset: int, ratio: int) -> tuple[int, RangeRead]:
    """The bytes of a prefill rank's section that `ratio` decode ranks read together, and the range
    that one of them reads. `same` of them read the same bytes.
    """
    same = 1 if section.groups is None else max(1, local_tp // section.groups)
    _check_ratio(ratio, same, "decode ranks that hold the same piece")
    parts = max(1, ratio // same)
    return parts * section.nbytes, RangeRead(offset // same * section.nbytes, 0, section.nbytes)


def _gather(section: Section, local_tp: int, offset: int, ratio: int) -> tuple[int, RangeRead]:
    """As `_share`, if one decode rank reads of `ratio` prefill ranks; `same` of them hold the same
    bytes.
    """
    pieces = ratio if section.groups is None else max(1, section.groups // local_tp)
    _check_ratio(ratio, pieces, "pieces on a decode rank")
    parts = min(ratio, pieces)
    same = ratio // parts
    if section.nbytes % parts:
        raise ConfigError(f"{section.nbytes} bytes of one rank cannot come from {parts} prefill ranks in equal parts")
    piece = section.nbytes // parts
    return piece, RangeRead(0, offset // same * piece, 0 if offset % same else piece)


def _check_ratio(ratio: int, count: int, what: str) -> None:
    if max(ratio, count) % min(ratio, count):
        raise ConfigError(f"a tp_ratio of {ratio} and {count} {what} do not fit: one must divide the other")


@dataclass(frozen=True)
class MambaConvSplitInfo:
    """A rank's state block by its parts.

    Attributes:
        conv_rows: K - 1.
        local_proj_dims: channels of each sub-projection on this rank, in order.
        conv_dtype_size: bytes of a conv element.
        ssm_sizes: bytes of conv and of recurrent state on this rank.
        proj_groups: for each sub-projection, the pieces that cannot be cut, over all ranks; None if
            there are enough for any number of ranks. None for the plain split of everything.
        state_groups: 1 if each rank keeps the whole recurrent state; None if they share it.
        local_tp: ranks of this side; used only with `proj_groups` or `state_groups`.
    """

    conv_rows: int
    local_proj_dims: tuple[int, ...]
    conv_dtype_size: int
    ssm_sizes: tuple[int, int]
    proj_groups: tuple[int | None, ...] | None = None
    local_tp: int = 1
    state_groups: int | None = None

    @property
    def local_conv_dim(self) -> int:
        return sum(self.local_proj_dims)

    @property
    def proj_bytes(self) -> tuple[int, ...]:
        return tuple(dim * self.conv_rows * self.conv_dtype_size for dim in self.local_proj_dims)

    @property
    def local_conv_offsets(self) -> Reads:
        ends = [sum(self.proj_bytes[:i]) for i in range(len(self.proj_bytes))]
        return list(zip(ends, self.proj_bytes))

    @property
    def sections(self) -> tuple[Section, ...]:
        groups = self.proj_groups or (None,) * len(self.local_proj_dims)
        parts = zip((*self.proj_bytes, self.ssm_sizes[1]), (*groups, self.state_groups), strict=True)
        return tuple(Section(*part) for part in parts)

    def reads(self, rank: int, tp_ratio: int) -> list[RangeRead]:
        return section_reads(self.sections, self.local_tp, rank, tp_ratio)

    def remote_conv_offsets(self, local_rank_offset: int, tp_ratio: int) -> Reads:
        """(offset, bytes) that this rank reads of the conv in one prefill rank's state block.

        If several prefill ranks hold the same copy of a sub-projection, it is read from the first.

        Args:
            local_rank_offset: with tp_ratio >= 1, which of the tp_ratio decode ranks that share the
                block this one is; else which of this rank's -tp_ratio sources the block belongs to.
                Taken modulo the ratio: the rank's number is valid.
            tp_ratio: signed, see the top of this file.

        Raises:
            ConfigError: tp_ratio is 0, or the block cannot be cut that way.
        """
        return [(read.source, read.nbytes) for read in self.reads(local_rank_offset, tp_ratio)[:-1] if read.nbytes]

    def write_offsets(self, local_rank_offset: int, tp_ratio: int) -> list[int]:
        return [read.destination for read in self.reads(local_rank_offset, tp_ratio)[:-1] if read.nbytes]

    def remote_temporal_offset(self, local_rank_offset: int, tp_ratio: int) -> tuple[int, int]:
        """(offset, bytes) that this rank reads of the recurrent state in one prefill rank's state
        block.
        """
        read = self.reads(local_rank_offset, tp_ratio)[-1]
        return read.source, read.nbytes

    def temporal_write_offset(self, local_rank_offset: int, tp_ratio: int) -> int:
        return self.reads(local_rank_offset, tp_ratio)[-1].destination


def derive_mamba_conv_split(spec: MambaSpec, local_tp: int) -> MambaConvSplitInfo:
    """The parts of a rank's state block. The width of x or v follows from the recurrent state. The
    rest of the conv is equal parts: B and C, or q and k.

    Args:
        local_tp: ranks of this side.

    Raises:
        UnsupportedLayerError: another kind of layer.
        ConfigError: shapes that do not fit together.
    """
    kind = linear_kind(_VLLM_NAMES.get(spec.mamba_type, spec.mamba_type))
    if local_tp < 1:
        raise ConfigError(f"local_tp is {local_tp}; a side has at least one rank")
    _check_shapes(kind, spec)
    dims, groups = _conv_parts(kind, spec, local_tp)
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    state = sizes[1] if spec.state_nbytes is None else spec.state_nbytes
    return MambaConvSplitInfo(
        spec.shapes[0][1], dims, spec.dtypes[0].itemsize, (sizes[0], state), groups if any(groups) else None,
        local_tp, None if kind.cut_state else 1,
    )  # fmt: skip


def _check_shapes(kind: LinearKind, spec: MambaSpec) -> None:
    conv, temporal = spec.shapes
    if len(conv) != 2:
        raise ConfigError(f"the conv state has the shape {conv}; it must be (conv_dim, K - 1)")
    if len(temporal) != max(len(kind.temporal_dims), 1):
        raise ConfigError(
            f"the {kind.title} state has the shape {temporal}; it must be ({', '.join(kind.temporal_dims)})"
        )
    present = (*conv[:1] * bool(kind.conv_parts), *temporal * bool(kind.temporal_dims))
    if min(present) < 1 or conv[1] < 0:
        raise ConfigError(f"shapes are {spec.shapes}; every dimension must be positive, K - 1 of one tap alone 0")


def _conv_parts(kind: LinearKind, spec: MambaSpec, local_tp: int) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    (conv_dim, _), temporal = spec.shapes
    shared = [name for name, grouped in kind.conv_parts.items() if grouped]
    wide = prod(temporal[:-1]) if kind.temporal_dims else conv_dim
    rest = conv_dim - wide * (len(kind.conv_parts) - len(shared))
    width, names = rest // max(len(shared), 1), " and ".join(shared)
    if rest != width * len(shared) or rest < len(shared):
        raise ConfigError(
            f"a {kind.title} conv of {conv_dim} channels beside a state of the shape {temporal} leaves {rest}, "
            f"which {names or 'no sub-projection'} must share equally"
        )
    groups = _groups(spec, local_tp, width, names) if shared else None
    parts = kind.conv_parts.values()
    return tuple(width if g else wide for g in parts), tuple(groups if g else None for g in parts)


def _groups(spec: MambaSpec, local_tp: int, width: int, names: str) -> int | None:
    """n_groups if ranks hold whole groups; None for the plain split, by default or by `width`."""
    groups, state_dim = spec.n_groups, spec.shapes[1][-1]
    if groups is None:
        return None
    whole = groups > 0 and max(groups, local_tp) % min(groups, local_tp) == 0
    if whole and width == max(1, groups // local_tp) * state_dim:
        return groups
    if width * local_tp == groups * state_dim:
        return None
    raise ConfigError(
        f"{names} have {width} channels on each of {local_tp} ranks; {groups} groups of {state_dim} make "
        f"{groups * state_dim} in all, or {state_dim} on each rank where ranks share a group"
    )


def compute_physical_blocks_per_logical(ssm_sizes: Sequence[int], block_len: int) -> int:
    """KV blocks of `block_len` bytes that a state block of `ssm_sizes` bytes needs, if both share
    one pool.
    """
    if block_len < 1:
        raise ConfigError(f"block_len is {block_len}; a KV block has at least one byte")
    return -(-sum(ssm_sizes) // block_len)
