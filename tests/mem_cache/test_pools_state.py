"""Pools: shapes, what a new tenant gets, page tables, and many slots."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.base.model_config import AttentionSpec
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.kinds.registry import state_shape
from hybridrt.mem_cache.pools.kv_pool import KVPool, page_bytes
from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.mem_cache.pools.mamba_pool_spec import MambaPoolSpec, ring_width
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from tests.support.by_hand import ByHand, Row
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import sweep

MAMBA = state_shape(Mamba2Config(4, 3, 5, n_groups=2, conv_kernel=4, chunk_size=8, dt_limit=(0.0, 1.0)))
MAMBA1 = state_shape(Mamba1Config(intermediate_size=9, state_size=4, conv_kernel=4, dt_rank=2))
GDN = state_shape(GDNConfig(num_k_heads=1, num_v_heads=2, head_k_dim=6, head_v_dim=7, conv_kernel=3))
SPEC = MambaPoolSpec({MAMBA: (0, 2), GDN: (1,)}, torch.float16, torch.float32)


def make(spec: MambaPoolSpec, slots: int = 5, rows: int = 3) -> MambaPool:
    return MambaPool(spec, num_slots=slots, num_rows=rows, device="cpu")


def test_layers_of_several_kinds_share_slot_ids() -> None:
    pool = make(SPEC)
    assert pool.layer_ids == [0, 1, 2]
    mamba, gdn = pool.layer_cache(2), pool.layer_cache(1)
    assert mamba.conv.shape == (6, 12 + 10 + 10, 4) and mamba.temporal.shape == (6, 4, 3, 5)
    assert gdn.conv.shape == (6, 6 + 6 + 14, 4) and gdn.temporal.shape == (6, 2, 7, 6)
    assert (mamba.conv.dtype, mamba.temporal.dtype) == (torch.float16, torch.float32)
    assert mamba.intermediate_ssm is None and mamba.ring_values is None


def test_speculative_caches_are_sized_by_running_rows() -> None:
    pool = make(replace(SPEC, tokens_per_step=5, mode="intermediate", forks=True), slots=9, rows=3)
    mamba = pool.layer_cache(0)
    assert mamba.conv.shape[0] == mamba.temporal.shape[0] == 10
    assert mamba.intermediate_ssm is not None and mamba.intermediate_ssm.shape == (4, 5, 4, 3, 5)
    window = mamba.intermediate_conv_window
    assert window is not None and window.shape == (4, 5, 32, 3)
    assert mamba.conv.shape[2] == 8, "a power of two >= K - 1 + T"


def test_state_rings_are_sized_by_running_rows() -> None:
    pool = make(replace(SPEC, mode="replay", tokens_per_step=4), slots=9, rows=3)
    values, keys, gates = pool.layer_cache(0).ring
    assert (values.shape, keys.shape, gates.shape) == ((4, 4, 32, 3), (4, 2, 32, 5), (4, 4, 32))
    assert (values.dtype, keys.dtype, gates.dtype) == (torch.float16, torch.float16, torch.float32)
    values, keys, gates = pool.layer_cache(1).ring
    assert (values.shape, keys.shape, gates.shape) == ((4, 2, 32, 7), (4, 1, 32, 6), (4, 2, 32))


@pytest.mark.parametrize("tokens", range(1, 17))
def test_a_state_ring_holds_two_steps(tokens: int) -> None:
    assert ring_width(tokens) == (16 if tokens == 1 else 32 if tokens <= 8 else 64)
    assert ring_width(tokens) >= 2 * tokens


def test_bytes_of_a_spec_are_those_of_a_pool() -> None:
    for spec in (SPEC, replace(SPEC, mode="replay"), replace(SPEC, mode="intermediate", tokens_per_step=3, forks=True)):
        pool = make(spec)
        tensors = [t for i in pool.layer_ids for t in vars(pool.layer_cache(i)).values() if t is not None]
        tensors += [pool.ring_start, pool.ring_length]  # the page tables are charged with req_to_state_slot
        total = sum(t.numel() * t.element_size() for t in tensors)
        assert total == 6 * spec.slot_bytes() + 4 * spec.row_bytes()


def test_three_kinds_of_state_in_one_pool() -> None:
    """A slot is the same request's in all of them, and a layer's bytes are its own."""
    spec = replace(SPEC, groups={**SPEC.groups, MAMBA1: (3, 4)}, mode="intermediate", tokens_per_step=2)
    pool = make(spec)
    cache = pool.layer_cache(4)
    assert cache.conv.shape == (6, 9, 8) and cache.temporal.shape == (6, 9, 4)
    assert cache.intermediate_ssm is not None and cache.intermediate_ssm.shape == (4, 2, 9, 4)
    for layer_id in pool.layer_ids:
        pool.layer_cache(layer_id).temporal[1:] = layer_id
    pool.admit_rows(torch.tensor([1]), torch.tensor([2]))
    for layer_id in pool.layer_ids:
        found = [t.unique().tolist() for t in pool.layer_cache(layer_id).temporal]
        assert found == [[0], [layer_id], [0], *[[layer_id]] * 3]
    with pytest.raises(ConfigError, match="does not exist for Mamba-1"):
        replace(spec, mode="replay")


def test_modes_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="classic"):
        replace(SPEC, mode="ring")
    with pytest.raises(ConfigError, match="intermediate"):
        replace(SPEC, mode="replay", forks=True)


def test_a_new_tenant_gets_zeros_and_no_other_row_does() -> None:
    pool = make(replace(SPEC, mode="replay"))
    for layer_id in pool.layer_ids:
        pool.layer_cache(layer_id).conv.fill_(torch.nan)
        pool.layer_cache(layer_id).temporal.fill_(torch.nan)
    pool.ring_start.fill_(7)
    pool.ring_length.fill_(9)
    table = HybridReqToTokenPool(num_rows=3, max_context=8, page_size=4, mamba_pool=pool, device="cpu")
    table.admit_rows(torch.tensor([3, 1]), torch.tensor([2, 5]))
    for layer_id in pool.layer_ids:
        for tensor in (pool.layer_cache(layer_id).conv, pool.layer_cache(layer_id).temporal):
            zeroed = [i for i in range(6) if not tensor[i].any()]
            untouched = [i for i in range(6) if tensor[i].isnan().all()]
            assert (zeroed, untouched) == ([2, 5], [0, 1, 3, 4])
    assert pool.ring_start.tolist() == [7, 0, 7, 0] and pool.ring_length.tolist() == [9, 0, 9, 0]
    rows = torch.tensor([1, 3, 0], dtype=torch.int32)
    for slots in (table.state_slots(rows), table.get_mamba_indices(rows)):
        assert slots.tolist() == [5, 2, 0] and slots.dtype == torch.int32
    assert table.mamba2_layer_cache(1) is pool.layer_cache(1)
    table.admit_rows(torch.tensor([3, 1]), torch.tensor([2, 5]), torch.tensor([19, 31]))
    assert pool.spec.phases_apart == 16 - 1 + 1 and pool.ring_start.tolist() == [7, 15, 7, 3]


def test_page_tables_are_contiguous_within_pages() -> None:
    table = HybridReqToTokenPool(num_rows=2, max_context=10, page_size=4, mamba_pool=None, device="cpu")
    assert table.req_to_token.shape == (3, 12) and table.req_to_token.dtype == torch.int32
    table.write_pages(torch.tensor([2, 2, 1]), torch.tensor([0, 2, 1]), torch.tensor([5, 3, 9]))
    assert table.req_to_token[2].tolist() == [20, 21, 22, 23, 0, 0, 0, 0, 12, 13, 14, 15]
    assert table.req_to_token[1].tolist() == [0, 0, 0, 0, 36, 37, 38, 39, 0, 0, 0, 0]
    rows, positions = torch.tensor([2, 1, 2], dtype=torch.int32), torch.tensor([9, 6, 0], dtype=torch.int32)
    assert table.token_slots(rows, positions).tolist() == [13, 38, 20]


def test_kv_pools_start_finite_and_know_their_bytes() -> None:
    """Groups of equal specs; of "mla" one latent vector a token."""
    half = {"dtype": torch.float16, "sliding_window": None, "scale": 1.0}
    gqa, wide = AttentionSpec(6, 3, 5, 5, **half), AttentionSpec(6, 3, 5, 8, **half)
    groups = {gqa: [3, 7], wide: [4], AttentionSpec(6, 1, 9, 6, variant="mla", **half): [5]}
    pool = KVPool(groups, num_pages=4, page_size=2, device="cpu")
    shapes = [(2, 5, 2, 3, 5)] * 2 + [(1, 5, 2, 3, 5), (1, 5, 2, 3, 8), (1, 5, 2, 1, 9)]
    assert [tuple(tensor.shape) for tensor in pool.tensors] == shapes
    assert not any(tensor.any() for tensor in pool.tensors), "what a mask hides must be finite"
    for layer_id, (group, index) in {3: (0, 0), 7: (0, 1), 4: (1, 0)}.items():
        places = [tensor.data_ptr() for tensor in pool.layer(layer_id)]
        assert places == [tensor[index].data_ptr() for tensor in pool.tensors[2 * group : 2 * group + 2]]
    (vectors,), (keys, values) = pool.layer_tensors(5), pool.layer(5)
    assert keys is vectors and values.shape == (5, 2, 1, 6) and values.data_ptr() == vectors.data_ptr()
    assert pool.specs == {3: gqa, 7: gqa, 4: wide, 5: list(groups)[2]}
    assert (5 * sum(page_bytes(groups, 2)),) == (sum(tensor.nbytes for tensor in pool.tensors),)
    with pytest.raises(ConfigError, match="variant is 'mqa'; it must be one of gqa, mla"):
        AttentionSpec(6, 3, 5, 5, variant="mqa", **half)


@pytest.mark.parametrize(
    ("name", "mode"), sweep(product(["falcon-plain", "qwen-dense_by_number"], ["classic", "replay"]), 3)
)
def test_slots_and_rows_past_4096(name: str, mode: str, checkpoints: CheckpointStore) -> None:
    """The last of 5000 slots and rows gives what the first gives."""
    hand = ByHand(checkpoints[name].path, mode=mode, rows=5000, max_len=8)

    def run(*rows: int) -> Tensor:
        hand.admit(*rows)
        logits = [hand.extend(*(Row(row, 0, [5, 6, 7]) for row in rows))[-1]]
        for i in range(3, 6):
            logits.append(hand.decode(*(Row(row, i, [8 + i]) for row in rows))[-1])
        return torch.stack(logits)

    first = run(1)
    far = max(range(1, 5001), key=hand.slot)
    torch.testing.assert_close(run(2, 5000), first)
    torch.testing.assert_close(run(3, far), first)


def test_addresses_of_far_slots_exceed_32_bits() -> None:
    """A pool whose last slot begins 2**31 elements after its first, as 32 heads of 128 x 128 do past slot 4096: memory
    that is never touched costs nothing, so the pool is made without being written."""
    from hybridrt.kernels.mamba.selective_state_update import selective_state_update
    from tests.support.flat import flat
    from tests.support.mamba2_oracle import close, int32, scan_inputs

    torch.use_deterministic_algorithms(False)
    state = 32 * 128 * 128
    slots = 2**31 // state + 2
    base = torch.empty(slots * state, dtype=torch.float16)
    inputs = scan_inputs(1, 1)
    heads, dim, n = inputs.x.shape[2], inputs.x.shape[3], inputs.B.shape[3]
    far = base.as_strided((slots, heads, dim, n), (state, dim * n, n, 1))
    near = torch.zeros(2, heads, dim, n, dtype=torch.float16)
    last = slots - 1
    far[last] = near[1] = torch.randn(heads, dim, n)
    far[0] = 0.0
    outs = [
        flat(
            selective_state_update, **inputs.terms(), states=pool, read_state_slots=int32(slot),
            write_state_slots=int32(slot),
        )
        for pool, slot in ((far, last), (near, 1))
    ]  # fmt: skip
    close(outs[0], outs[1], 0.0)
    assert torch.equal(far[last], near[1])


def test_pages_of_a_model_without_kv_are_nothing() -> None:
    """A foreign engine hands out pages whatever the model."""
    table = HybridReqToTokenPool(num_rows=2, max_context=0, page_size=4, mamba_pool=None, device="cpu")
    table.write_pages(torch.tensor([1, 2]), torch.tensor([0, 3]), torch.tensor([5, 6]))
    assert table.req_to_token.numel() == 0
    assert table.token_slots(torch.tensor([1]), torch.tensor([7])).tolist() == [0]
