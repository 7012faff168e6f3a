"""State slots and KV pages over one buffer of slabs: each has bytes of its own."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hybridrt.base.model_config import AttentionSpec
from hybridrt.kernels.state.state_commit import move_kv
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.kinds.registry import state_shape
from hybridrt.mem_cache.pools.kv_pool import KVPool, cell_bytes, page_bytes
from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.mem_cache.pools.mamba_pool_spec import MambaPoolSpec
from hybridrt.mem_cache.pools.slab_memory import SlabMemory
from hybridrt.mem_cache.pools.slab_plan import SlabPlan, plan_slabs
from hybridrt.mem_cache.pools.state_moves import StateMove, When

SIZE = 4
MAMBA = state_shape(Mamba2Config(4, 3, 5, n_groups=2, conv_kernel=4, chunk_size=8, dt_limit=(0.0, 1.0)))
GDN = state_shape(GDNConfig(num_k_heads=1, num_v_heads=2, head_k_dim=6, head_v_dim=7, conv_kernel=3))
STATES = MambaPoolSpec({MAMBA: (0, 2), GDN: (1,)}, torch.bfloat16, torch.float32)
LAYERS = {
    AttentionSpec(4, heads, 8, 8, window, 1.0, torch.bfloat16): ids
    for heads, window, ids in ((2, None, [3, 5]), (1, 9, [4]))
}


def plan_of(budget: int = 200_000, own_pages: int = 3, slot_bytes: int = STATES.packed_slot_bytes()) -> SlabPlan:
    plan = plan_slabs(
        budget, page_bytes(LAYERS, SIZE), cell_bytes(LAYERS, SIZE), own_pages=own_pages, page_size=SIZE,
        slot_bytes=slot_bytes,
    )  # fmt: skip
    assert plan is not None and plan.nbytes <= budget and plan.states is not None
    return plan


def pools(plan: SlabPlan, own_pages: int = 3) -> tuple[MambaPool, KVPool]:
    memory = SlabMemory(plan, "cpu")
    states = MambaPool(STATES, num_slots=0, num_rows=2, device="cpu", memory=memory)
    kv = KVPool(LAYERS, num_pages=0, page_size=SIZE, device="cpu", own_pages=own_pages, memory=memory)
    return states, kv


def state_tensors(pool: MambaPool) -> list[torch.Tensor]:
    return [tensor for _, cache in pool.stacks for tensor in (cache.conv, cache.temporal)]


def numbers(plan: SlabPlan, slab: int, owner: int) -> list[int]:
    """Entries of a slab that belongs to page group `owner`, or to states."""
    share = [*plan.groups, plan.states][owner]
    assert share is not None
    return [slab * share.apart + i for i in range(share.per_slab)]


def test_no_byte_is_in_two_entries() -> None:
    """Slabs go to states and groups in turn; all keep what was written to them alone."""
    plan = plan_of()
    states, kv = pools(plan)
    owned: list[list[int]] = [*[kv.own[g].tolist() for g in range(2)], []]
    for slab in range(1, 1 + plan.num_slabs):
        owned[slab % 3] += numbers(plan, slab, slab % 3)
    tensors = [(tensor, group) for tensor, group in zip(kv.tensors, kv.tensor_groups)]
    tensors += [(tensor, 2) for tensor in state_tensors(states)]
    torch.manual_seed(0)
    written = []
    for tensor, owner in tensors:
        for number in owned[owner]:
            written.append((tensor, number, torch.randn(tensor[:, number].shape).to(tensor.dtype)))
            tensor[:, number] = written[-1][2]
    for tensor, number, wanted in written:
        assert torch.equal(tensor[:, number], wanted)
    assert not any(tensor[:, 0].any() for tensor, _ in tensors), "scratch"


def test_states_in_8_bits_have_a_length_for_each_number() -> None:
    """`num_slots` counts slots that may be lent; numbers begin after the scratch slab's."""
    spec = MambaPoolSpec({GDN: (1,)}, torch.bfloat16, torch.int8, mode="replay")
    plan = plan_of(slot_bytes=spec.packed_slot_bytes())
    slots = plan.num_slots
    pool = MambaPool(spec, num_slots=slots, num_rows=2, device="cpu", memory=SlabMemory(plan, "cpu"))
    last = numbers(plan, plan.num_slabs, 2)[-1]
    assert last > slots and pool.state_lengths is not None and len(pool.state_lengths) == last + 1
    pool.admit_rows(torch.tensor([1]), torch.tensor([last]))


def test_moves_of_states_in_slabs_leave_pages_alone() -> None:
    plan = plan_of()
    states, kv = pools(plan)
    first, second = numbers(plan, 1, 2)[0], numbers(plan, 3, 2)[0]
    for tensor in kv.tensors:
        tensor.fill_(5)  # all slabs have been pages
    states.admit_rows(torch.tensor([1]), torch.tensor([first]))
    assert not any(tensor[:, first].any() for tensor in state_tensors(states)), "a new tenant has zeros"
    for tensor in state_tensors(states):
        tensor[:, first] = torch.randn(tensor[:, first].shape).to(tensor.dtype)
    pages = [tensor[:, numbers(plan, 2, g)].clone() for tensor, g in zip(kv.tensors, kv.tensor_groups)]
    states.move([StateMove(1, first, second, When.BEFORE_ROWS)], lambda arrays: [*map(torch.from_numpy, arrays)])
    for tensor in state_tensors(states):
        assert tensor[:, first].any() and torch.equal(tensor[:, first], tensor[:, second])
    image = [part.clone() for part in states.read_slot(first, 9)]
    states.admit_rows(torch.tensor([2]), torch.tensor([second]))
    states.write_slot(second, 9, iter(image))
    assert all(map(torch.equal, states.read_slot(second, 9), image))
    for tensor, group, before in zip(kv.tensors, kv.tensor_groups, pages):
        assert torch.equal(tensor[:, numbers(plan, 2, group)], before)


@pytest.mark.parametrize("slot_bytes", [16, 100, 5_000, 70_000, 1_000_003])
def test_a_slab_is_whole_slots_and_the_padding_is_small(slot_bytes: int) -> None:
    plan = plan_slabs(10**9, (8192, 4096), (1024, 2048), own_pages=0, page_size=16, slot_bytes=slot_bytes)
    assert plan is not None and plan.states is not None
    assert plan.slab_bytes == plan.slot_stride * plan.states.apart and plan.states.apart == plan.states.per_slab
    assert slot_bytes <= plan.slot_stride < 1.1 * slot_bytes + 32 and plan.slot_stride % 16 == 0
    assert plan.num_slots == plan.num_slabs * plan.states.per_slab and plan.slab_bytes >= 8192
    assert [plan.slab_bytes % (share.apart * cell) for share, cell in zip(plan.groups, (1024, 2048))] == [0, 0]


def test_one_group_shares_memory_with_states() -> None:
    sizes = {"own_pages": 0, "page_size": 16}
    assert plan_slabs(10**9, (8192,), (1024,), **sizes) is None
    plan = plan_slabs(10**9, (8192,), (1024,), **sizes, slot_bytes=10**6)
    assert plan is not None and len(plan.groups) == 1
    assert plan.fits([], 1) and plan_slabs(10**6, (), (), **sizes, slot_bytes=10**4) is None


def allocated(work: Callable[[], object]) -> int:
    """Most bytes that one operator of `work` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    return max(event.cpu_memory_usage for event in seen.events())


def test_copies_of_few_entries_copy_these_alone() -> None:
    """Views of slabs are not contiguous, and torch's index_select first copies all of such a tensor."""
    plan = plan_of()
    states, kv = pools(plan)
    first, second = numbers(plan, 1, 2)[0], numbers(plan, 3, 2)[0]
    states.admit_rows(torch.tensor([1]), torch.tensor([first]))
    few, row, slot = torch.tensor([[1, 1]]), torch.tensor([1]), torch.tensor([second], dtype=torch.int32)
    cells = torch.tensor([1], dtype=torch.int32)
    most = max(tensor[:, :2].nbytes for tensor in (*kv.tensors, *state_tensors(states)))
    for work in (
        lambda: kv.copy_pages(few, few + 1),
        lambda: states.snapshot(row, slot),
        lambda: states.restore(slot, row),
        lambda: [move_kv(tensor, cells, cells + 1) for tensor in kv.tensors],
    ):
        assert allocated(work) <= most
