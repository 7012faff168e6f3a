"""Which bytes travel between tensor-parallel sizes: against the vectors, and against tensors cut directly."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.base.errors import ConfigError, UnsupportedLayerError
from hybridrt.base.model_config import LinearConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.kinds.base import StateShape
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.kda import KDAConfig
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.kinds.registry import state_shape
from hybridrt.mem_cache.pools.state_slices import (
    MambaConvSplitInfo,
    MambaSpec,
    Section,
    compute_physical_blocks_per_logical,
    derive_mamba_conv_split,
    section_reads,
)

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "vectors" / "conv_transfer.json").read_text())[
    "cases"
]
BF16, F32 = torch.bfloat16, torch.float32


def spec_of(case: dict[str, Any], tp: int) -> MambaSpec:
    """What one of `tp` ranks of a vector's model keeps, cut plainly."""
    if case["kind"] == "mamba2":
        heads, width, state, conv = case["heads"], case["head_dim"], case["state"], case["groups"] * case["state"]
    else:
        heads, width, state, conv = (
            case["value_heads"],
            case["head_v"],
            case["head_k"],
            case["key_heads"] * case["head_k"],
        )
    temporal = BF16 if case.get("note") == "all bf16" else F32
    shapes = ((heads * width + 2 * conv) // tp, 3), (heads // tp, width, state)
    return MambaSpec(shapes, (BF16, temporal), case["kind"])


@pytest.mark.parametrize("case", CASES)
def test_vectors(case: dict[str, Any]) -> None:
    decode, prefill = case["decode_tp"], case["prefill_tp"]
    info = derive_mamba_conv_split(spec_of(case, decode), decode)
    ratio = decode // prefill if decode >= prefill else -(prefill // decode)
    rank = case["decode_rank"] % ratio if ratio > 0 else case["source_rank"] % -ratio
    assert info.remote_conv_offsets(rank, ratio) == [tuple(read) for read in case["reads"]]
    assert info.remote_temporal_offset(rank, ratio) == tuple(case["temporal"])
    if "writes_at" in case:
        assert info.write_offsets(rank, ratio) == case["writes_at"]
        assert info.temporal_write_offset(rank, ratio) == case["temporal_writes_at"]
    everything = [(read.source, read.nbytes) for read in info.reads(rank, ratio) if read.nbytes]
    assert everything == [tuple(read) for read in [*case["reads"], case["temporal"]]]


def test_parts_of_a_page() -> None:
    info = derive_mamba_conv_split(MambaSpec(((6144, 3), (64, 64, 128)), (BF16, F32), "mamba2", n_groups=8), 1)
    assert info == MambaConvSplitInfo(3, (4096, 1024, 1024), 2, (36864, 2097152), (None, 8, 8), 1)
    assert (info.local_conv_dim, info.proj_bytes) == (6144, (24576, 6144, 6144))
    assert info.local_conv_offsets == [(0, 24576), (24576, 6144), (30720, 6144)]
    assert info.remote_conv_offsets(0, 1) == info.local_conv_offsets == info.remote_conv_offsets(0, -1)


@pytest.mark.parametrize(
    "kind, conv_dim, temporal, dims",
    [
        ("mamba2", 10240, (128, 64, 128), (8192, 1024, 1024)),
        ("gdn", 10240, (48, 128, 128), (2048, 2048, 6144)),
        ("gdn_attention", 6144, (16, 128, 128), (2048, 2048, 2048)),
        ("mamba1", 8192, (8192, 16), (8192,)),
    ],
)
@pytest.mark.parametrize("tp", [1, 8])
def test_sub_projections(kind: str, conv_dim: int, temporal: tuple[int, ...], dims: tuple[int, ...], tp: int) -> None:
    spec = MambaSpec(((conv_dim // tp, 3), (temporal[0] // tp, *temporal[1:])), (BF16, BF16), kind)
    assert derive_mamba_conv_split(spec, tp).local_proj_dims == tuple(d // tp for d in dims)


def test_one_group_is_read_from_the_right_place_and_once() -> None:
    # 1 group of 4 states, 8 channels of x: a page of one rank has B at 8 * 6 bytes, whatever the ratio says.
    def info(tp: int) -> MambaConvSplitInfo:
        spec = MambaSpec(((8 // tp + 8, 3), (4 // tp, 2, 4)), (BF16, F32), "mamba2", n_groups=1)
        return derive_mamba_conv_split(spec, tp)

    assert info(2).remote_conv_offsets(1, 2) == [(24, 24), (48, 24), (72, 24)]
    assert info(4).remote_conv_offsets(1, 2) == [(12, 12), (24, 24), (48, 24)]
    # Both prefill ranks hold B and C, and the first one's are read.
    assert (info(1).remote_conv_offsets(0, -2), info(1).write_offsets(0, -2)) == (
        [(0, 24), (24, 24), (48, 24)],
        [0, 48, 72],
    )
    assert (info(1).remote_conv_offsets(1, -2), info(1).write_offsets(1, -2)) == ([(0, 24)], [24])
    assert [info(1).temporal_write_offset(rank, -2) for rank in (0, 1)] == [96, 160]
    assert info(1).remote_temporal_offset(1, -2) == (24 + 48, 64)


@pytest.mark.parametrize(
    "shapes, kind, groups",
    [
        (((12, 3, 1), (2, 4, 8)), "mamba2", None),  # conv not 2-D
        (((12,), (2, 4, 8)), "gdn", None),
        (((8, 3), (2, 4, 8)), "mamba2", None),  # nothing left
        (((6, 3), (2, 4, 8)), "gdn", None),  # less than nothing
        (((11, 3), (2, 4, 8)), "mamba2", None),  # odd
        (((24, 3), (2, 4)), "mamba2", None),
        (((24, 3), (2, 4, 8)), "mamba2", 3),  # B has 8 channels of 2 ranks, not 12 and not 24
        (((24, 3), (2, 4, 8)), "mamba1", None),
        (((24, -1), (2, 4, 8)), "gdn", None),
        (((24, 3), (2, 4, 8)), "mamba", None),
        (((24, 3), (2, 4, 8)), "attention", None),
    ],
)
def test_what_cannot_be_split_is_refused(shapes: Any, kind: str, groups: int | None) -> None:
    error = ConfigError if kind in ("mamba1", "mamba2", "gdn") else UnsupportedLayerError
    with pytest.raises(error):
        derive_mamba_conv_split(MambaSpec(shapes, (BF16, F32), kind, groups), 2)


def test_a_conv_of_one_tap_keeps_no_inputs() -> None:
    info = derive_mamba_conv_split(MambaSpec(((24, 0), (2, 4, 8)), (BF16, F32), "gdn"), 2)
    assert info.remote_conv_offsets(1, 2) == [] and info.remote_temporal_offset(1, 2) == (256, 256)


def test_ratios_that_cannot_be_are_refused() -> None:
    info = derive_mamba_conv_split(MambaSpec(((24, 3), (2, 4, 8)), (BF16, F32)), 1)
    with pytest.raises(ConfigError, match="tp_ratio is 0"):
        info.remote_conv_offsets(0, 0)
    with pytest.raises(ConfigError, match="equal parts"):
        info.remote_conv_offsets(0, -5)
    with pytest.raises(ConfigError, match="one must divide the other"):
        section_reads([Section(6, groups=3)], 6, 0, 3)
    with pytest.raises(ConfigError, match="local_tp is 0"):
        derive_mamba_conv_split(MambaSpec(((24, 3), (2, 4, 8)), (BF16, F32)), 0)


@pytest.mark.parametrize(
    "sizes, block_len, blocks",
    [((36864, 2097152), 8192, 261), ((18432, 1048576), 4096, 261), ((9216, 524288), 4096, 131), ((600, 1024), 1624, 1)],
)
def test_physical_blocks_per_logical(sizes: tuple[int, int], block_len: int, blocks: int) -> None:
    assert compute_physical_blocks_per_logical(sizes, block_len) == blocks
    with pytest.raises(ConfigError):
        compute_physical_blocks_per_logical(sizes, 0)


def shard(shape: StateShape, whole: torch.Tensor, wide: StateShape, rank: int, tp: int) -> torch.Tensor:
    """A rank's conv [conv_dim, rows], cut sub-projection by sub-projection as the layers cut their weights."""
    parts = whole.split([width for _, width in wide.segments])
    held = [full // width for (_, full), (_, width) in zip(wide.segments, shape.segments)]
    return torch.cat([TPGroup(rank, tp).shard(part, 0, n) for part, n in zip(parts, held)])


CONFIGS: list[LinearConfig] = [
    *(Mamba2Config(8, 2, 3, groups, 4, 256, (0.0, 1.0)) for groups in (1, 2, 4, 8)),
    GDNConfig(8, 8, 3, 2, 4),
    GDNConfig(8, 16, 2, 3, 3),
    KDAConfig(8, 3, 4),
]


def groups_of(config: LinearConfig) -> int:
    match config:
        case Mamba2Config():
            return config.n_groups
        case KDAConfig():
            return config.num_heads
    return config.num_k_heads


# Layers cut at least one group a rank, or share the only one.
SIZES = [
    (config, prefill, decode)
    for config, prefill, decode in product(CONFIGS, [1, 2, 4, 8], [1, 2, 4, 8])
    if groups_of(config) == 1 or groups_of(config) >= max(prefill, decode)
]


@pytest.mark.parametrize("config, prefill, decode", SIZES)
def test_transferred_pages_equal_pages_cut_directly(config: LinearConfig, prefill: int, decode: int) -> None:
    groups = groups_of(config)
    wide, sides = state_shape(config), (state_shape(config, prefill), state_shape(config, decode))
    rows = config.conv_kernel - 1
    conv = torch.arange(wide.conv_dim * rows, dtype=torch.int16).view(-1, rows)
    temporal = torch.arange(wide.temporal_numel, dtype=torch.int32).view(wide.temporal)

    def page(shape: StateShape, rank: int, tp: int) -> torch.Tensor:
        parts = shard(shape, conv, wide, rank, tp), TPGroup(rank, tp).shard(temporal, 0)
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])

    mine = sides[1]
    spec = MambaSpec(((mine.conv_dim, rows), mine.temporal), (torch.int16, torch.int32), mine.kind, groups)
    info = derive_mamba_conv_split(spec, decode)
    for rank in range(decode):
        expected, got, writes = page(mine, rank, decode), torch.zeros(sum(info.ssm_sizes), dtype=torch.uint8), 0
        ratio = decode // prefill if decode >= prefill else -(prefill // decode)
        sources = [rank // ratio] if ratio > 0 else range(-ratio * rank, -ratio * (rank + 1))
        for source in sources:
            remote = page(sides[0], source, prefill)
            for read in info.reads(rank if ratio > 0 else source, ratio):
                got[read.destination :][: read.nbytes] = remote[read.source :][: read.nbytes]
                writes += read.nbytes
        assert torch.equal(got, expected)
        assert writes == len(expected), "every byte once"


@settings(deadline=None)
@given(data=st.data())
def test_any_section_arrives_once(data: st.DataObject) -> None:
    """Also groups that several ranks share on both sides, which no layer has yet."""
    sizes = st.sampled_from([1, 2, 4, 8, 16])
    prefill, decode = data.draw(sizes), data.draw(sizes)
    groups = data.draw(st.none() | sizes)
    pieces = groups or 32
    content = torch.arange(pieces * 3, dtype=torch.uint8).view(pieces, 3)

    def held(rank: int, tp: int) -> torch.Tensor:
        return content[rank * pieces // tp :][: max(1, pieces // tp)].flatten()

    ratio = decode // prefill if decode >= prefill else -(prefill // decode)
    for rank in range(decode):
        expected = held(rank, decode)
        got, writes = torch.full_like(expected, 255), 0
        for source in [rank // ratio] if ratio > 0 else range(-ratio * rank, -ratio * (rank + 1)):
            section = Section(len(expected), groups)
            for read in section_reads([section], decode, rank if ratio > 0 else source, ratio):
                got[read.destination :][: read.nbytes] = held(source, prefill)[read.source :][: read.nbytes]
                writes += read.nbytes
        assert torch.equal(got, expected) and writes == len(expected)


@pytest.mark.parametrize("state", [0, 1024])
def test_every_part_of_the_conv_is_read_also_where_the_state_has_no_bytes(state: int) -> None:
    parts = (48, 8, 8)
    info = MambaConvSplitInfo(3, parts, 2, (384, state))
    assert info.remote_conv_offsets(1, 2) == [(288, 288), (624, 48), (720, 48)]
    assert info.remote_conv_offsets(1, -2) == [(0, 144), (144, 24), (168, 24)]
    assert info.write_offsets(1, -2) == [144, 312, 360]
    assert info.remote_temporal_offset(1, 2) == (768 + state, state)
    assert info.remote_temporal_offset(1, -2) == (192, state // 2)
    assert info.temporal_write_offset(1, -2) == 384 + state // 2
    assert [bool(read.nbytes) for read in info.reads(1, 2)] == [True, True, True, bool(state)]
