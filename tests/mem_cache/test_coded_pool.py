"""A pool of states in 8 bits: its sizes, and moves that keep codes, scales and lengths together."""

from typing import Any

import numpy as np
import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.records import StateSlots
from hybridrt.kernels.state.state_codes import element_keys, load_states, store_states
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.registry import state_shape
from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.mem_cache.pools.mamba_pool_spec import MambaPoolSpec
from hybridrt.mem_cache.pools.state_moves import StateMove, When

SHAPE = state_shape(GDNConfig(num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=16, conv_kernel=4))


def spec(dtype: torch.dtype = torch.int8, **changed: Any) -> MambaPoolSpec:
    return MambaPoolSpec({SHAPE: [0, 3]}, torch.float32, dtype, mode="replay", **changed)


def pool(dtype: torch.dtype = torch.int8, **changed: Any) -> MambaPool:
    made = MambaPool(spec(dtype, **changed), num_slots=6, num_rows=3, device="cpu")
    made.set_decays(dict.fromkeys((0, 3), lambda: None))
    return made


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def state_of(made: MambaPool, slot: int, layer_id: int = 3) -> StateSlots:
    cache = made.layer_cache(layer_id)
    return StateSlots(cache.state, int32(slot), int32(slot), codes=cache.codes)


def read(made: MambaPool, slot: int, layer_id: int = 3) -> torch.Tensor:
    return load_states(state_of(made, slot, layer_id), torch.tensor([True]))[1]


def filled(slot: int, length: int, **changed: Any) -> tuple[MambaPool, torch.Tensor]:
    """A pool whose row 2 has the slot, with a state after `length` tokens in layer 3."""
    made, new = pool(**changed), torch.randn(1, *SHAPE.temporal)
    made.admit_rows(int32(2), int32(slot))
    store_states(state_of(made, slot), new, int32(length))
    return made, new[0]


def test_a_state_takes_half_of_its_bytes_in_bfloat16_and_its_scales() -> None:
    numbers = 4 * 16 * 32
    conv = spec().slot_bytes() - 2 * (numbers + 2 * numbers // 32)
    assert spec(torch.bfloat16).slot_bytes() - conv == 2 * 2 * numbers
    assert spec().image_bytes() < spec(torch.bfloat16).image_bytes()
    made = pool()
    assert sum(t.nbytes for _, stack in made.stacks for t in (stack.conv, stack.temporal)) == 7 * spec().slot_bytes()


def test_an_admitted_slot_is_zero_and_no_other() -> None:
    made, new = filled(4, 77)
    store_states(state_of(made, 5), new[None], int32(9))
    made.admit_rows(int32(1), int32(4))
    assert not read(made, 4).any() and made.state_lengths is not None
    assert made.state_lengths.tolist() == [0, 0, 0, 0, 0, 9, 0]
    assert (read(made, 5) - new).abs().max() < 0.1


def test_images_carry_codes_scales_and_lengths() -> None:
    made, new = filled(4, 77)
    parts = [part.clone() for part in made.export(2, 77)]
    assert [(tuple(part.shape), part.dtype) for part in parts] == [
        (part.shape, part.dtype) for part in made.slot_parts()
    ]
    other = pool()
    other.admit_rows(int32(1), int32(6))
    other.import_(1, 77, iter(parts))
    assert torch.equal(read(other, 6), read(made, 4))
    assert (read(other, 6) - new).abs().max() < 0.1
    assert other.state_lengths is not None and int(other.state_lengths[6]) == 77


def test_snapshots_moves_and_restored_states_round_at_their_position() -> None:
    made, _ = filled(4, 77)
    cache = made.layer_cache(3)
    for ring in cache.ring:
        ring[2] = -torch.rand_like(ring[2]) * 0.1
    made.ring_length[2] = 5
    made.snapshot(int32(2), int32(1))
    upload = lambda arrays: [torch.from_numpy(np.asarray(array)) for array in arrays]  # noqa: E731
    made.move([StateMove(2, 4, 3, When.BEFORE_ROWS)], upload)
    assert made.state_lengths is not None
    assert made.state_lengths.tolist() == [0, 82, 0, 82, 77, 0, 0]
    assert torch.equal(read(made, 1), read(made, 3))
    made.fold(int32(2))
    assert torch.equal(read(made, 4), read(made, 1)), "the same numbers in the same position are rounded alike"
    made.admit_rows(int32(1), int32(5))
    made.restore(int32(3), int32(1))
    assert torch.equal(read(made, 5), read(made, 3))
    assert int(made.state_lengths[5]) == 82


def test_ranks_have_the_keys_of_their_own_heads() -> None:
    for rank in range(2):
        codes = pool(rank=rank).layer_cache(3).codes
        assert codes is not None and torch.equal(codes.element_keys, element_keys(3, 4 * rank, 4))


def test_states_that_have_no_codes_are_refused() -> None:
    mamba1 = state_shape(Mamba1Config(intermediate_size=8, state_size=4, conv_kernel=4, dt_rank=2))
    with pytest.raises(ConfigError, match='mamba_ssm_dtype="int8" does not exist for Mamba-1'):
        MambaPoolSpec({mamba1: [0]}, torch.float32, torch.int8)
    with pytest.raises(ConfigError, match='needs state mode "replay"'):
        MambaPoolSpec({SHAPE: [0]}, torch.float32, torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match='mamba_ssm_rounding="stochastic" needs state mode "replay"'):
        MambaPoolSpec({SHAPE: [0]}, torch.float32, torch.bfloat16, stochastic=True)
