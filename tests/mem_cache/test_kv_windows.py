"""Pools of layers with several windows: a page group for each."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrt.base.model_config import AttentionSpec
from hybridrt.mem_cache.pools.kv_pool import KVPool, cell_bytes, layer_groups, page_bytes
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.mem_cache.pools.slab_memory import SlabMemory
from hybridrt.mem_cache.pools.slab_plan import SlabPlan, plan_slabs


def spec(kv_heads: int, dim: int, window: int | None, **more: str) -> AttentionSpec:
    return AttentionSpec(4, kv_heads, dim, dim, window, 1.0, torch.float16, **more)


# Layers of one window with tokens of two sizes, and a latent cache; not in the order of the windows. Layer 6 is of
# another shape and of the same size as layers 0 and 3.
LAYERS = {
    spec(2, 8, 9): [0, 3], spec(2, 8, None): [1], spec(1, 4, 9): [4], spec(2, 8, 5): [2],
    spec(1, 6, None, variant="mla"): [5], spec(1, 16, 9): [6],
}  # fmt: skip
WINDOWS = (None, None, 5, 9, 9)
GROUPS = {1: 0, 5: 1, 2: 2, 0: 3, 3: 3, 6: 3, 4: 4}
PAGES, SIZE = (6, 4, 3, 5, 2), 2


def test_layers_of_a_window_and_of_a_size_share_pages() -> None:
    """A group has as many pages as were asked for."""
    pool = KVPool(LAYERS, num_pages=PAGES, page_size=SIZE, device="cpu")
    assert pool.windows == tuple(group.window for group in layer_groups(LAYERS)) == WINDOWS
    assert pool.num_pages == PAGES
    assert {layer: pool.group_of(layer) for layer in GROUPS} == GROUPS
    assert pool.tensor_groups == [3, 3, 0, 0, 4, 4, 2, 2, 1, 3, 3]
    shapes = [(2, 6, 2, 2, 8)] * 2 + [(1, 7, 2, 2, 8)] * 2 + [(1, 3, 2, 1, 4)] * 2 + [(1, 4, 2, 2, 8)] * 2
    assert [tuple(tensor.shape) for tensor in pool.tensors] == [*shapes, (1, 5, 2, 1, 6), *[(1, 6, 2, 1, 16)] * 2]
    for layer, group in GROUPS.items():
        assert all(len(tensor) == PAGES[group] + 1 for tensor in pool.layer_tensors(layer))
    for group, nbytes in enumerate(page_bytes(LAYERS, SIZE)):
        own = [tensor.nbytes for tensor, its in zip(pool.tensors, pool.tensor_groups) if its == group]
        assert nbytes * (PAGES[group] + 1) == sum(own) > 0


def test_one_number_of_pages_is_that_of_every_group() -> None:
    assert KVPool(LAYERS, num_pages=2, page_size=SIZE, device="cpu").num_pages == (2,) * 5
    assert KVPool({}, num_pages=2, page_size=SIZE, device="cpu").num_pages == page_bytes({}, SIZE) == ()


def test_pages_are_copied_in_each_group() -> None:
    """Sources and targets of the groups differ; page 0 on both sides is a group without a copy."""
    pool = KVPool(LAYERS, num_pages=PAGES, page_size=SIZE, device="cpu")
    for tensor in pool.tensors:
        tensor[:, 1:].copy_(torch.randn(tensor[:, 1:].shape))
    before = [tensor.clone() for tensor in pool.tensors]
    copies = {0: {2: 6, 5: 1}, 1: {4: 1}, 2: {3: 2}, 3: {5: 3, 1: 4}, 4: {}}  # by group: targets of sources
    sources = torch.tensor([[2, 4, 0, 5, 0], [5, 0, 3, 1, 0]])
    targets = torch.tensor([[6, 1, 0, 3, 0], [1, 0, 2, 4, 0]])
    pool.copy_pages(sources, targets)
    for tensor, old, group in zip(pool.tensors, before, pool.tensor_groups):
        wanted = {target: source for source, target in copies[group].items()}
        for page in range(PAGES[group] + 1):
            assert torch.equal(tensor[:, page], old[:, wanted.get(page, page)]), (group, page)


class Operations(TorchDispatchMode):
    """Notes the operations of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("groups", [2, 3])
def test_a_table_has_token_slots_of_each_group(groups: int) -> None:
    table = HybridReqToTokenPool(
        num_rows=2, max_context=11, page_size=4, mamba_pool=None, device="cpu", num_groups=groups
    )
    assert table.tables.shape == (3, groups, 12)
    pages = torch.tensor([5, 3, 9])[:, None] + 10 * torch.arange(groups)
    table.write_pages(torch.tensor([2, 2, 1]), torch.tensor([0, 2, 1]), pages)
    rows, positions = torch.tensor([2, 1, 2]), torch.tensor([9, 6, 0])
    with Operations() as operations:
        found = table.token_slots(rows, positions)
    assert [name for name in operations.names if name != "aten::transpose"] == ["aten::index"], "one launch"
    assert found.is_contiguous(), "kernels read the slots of a group as one run"
    assert found.tolist() == [[13 + 40 * g, 38 + 40 * g, 20 + 40 * g] for g in range(groups)]
    assert table.req_to_token[2].tolist() == [20, 21, 22, 23, 0, 0, 0, 0, 12, 13, 14, 15]
    table.req_to_token[2, 0] = 7
    assert table.tables[2, 0, 0] == 7, "a view"
    row = HybridReqToTokenPool.row_bytes(11, 4, groups)
    assert row == table.tables[0].nbytes + table.req_to_state_slot[:1].nbytes


def in_slabs(own_pages: int = 0, budget: int = 80_000) -> tuple[KVPool, SlabPlan]:
    plan = plan_slabs(budget, page_bytes(LAYERS, SIZE), cell_bytes(LAYERS, SIZE), own_pages=own_pages, page_size=SIZE)
    assert plan is not None and plan.nbytes <= budget
    memory = SlabMemory(plan, "cpu")
    return KVPool(LAYERS, num_pages=0, page_size=SIZE, device="cpu", own_pages=own_pages, memory=memory), plan


def pages_of_slab(plan: SlabPlan, group: int, slab: int) -> list[int]:
    share = plan.groups[group]
    return [slab * share.apart + i for i in range(share.per_slab)]


def test_groups_share_memory_and_no_byte_is_in_two_pages() -> None:
    """Slabs go to the groups in turn. Each page of each tensor keeps what was written to it alone, and page 0 is
    zero. Kernels need tokens of a layer without gaps."""
    pool, plan = in_slabs(own_pages=7)
    pages: dict[int, list[int]] = {group: pool.own[group].tolist() for group in range(5)}
    assert all(len({*numbers}) == 7 for numbers in pages.values())
    for slab in range(1, 1 + plan.num_slabs):
        pages[slab % 5] += pages_of_slab(plan, slab % 5, slab)
    torch.manual_seed(0)
    written = {}
    for layer in GROUPS:
        for i, tensor in enumerate(pool.layer_tensors(layer)):
            assert tensor.is_contiguous() and len(tensor) == pool.num_pages[pool.group_of(layer)] + 1
            for page in pages[pool.group_of(layer)]:
                written[layer, i, page] = torch.randn(tensor[page].shape).to(tensor.dtype)
                tensor[page] = written[layer, i, page]
    for (layer, i, page), wanted in written.items():
        assert torch.equal(pool.layer_tensors(layer)[i][page], wanted), (layer, i, page)
    assert not any(tensor[:, 0].any() for tensor in pool.tensors)


def test_pages_in_slabs_are_copied_in_each_group() -> None:
    pool, plan = in_slabs()
    sources = torch.tensor([[pages_of_slab(plan, g, 1 + g)[0] for g in range(5)]])
    targets = torch.tensor([[pages_of_slab(plan, g, 5 + g)[0] for g in range(5)]])
    for tensor, group in zip(pool.tensors, pool.tensor_groups):
        tensor[:, sources[0, group]] = torch.randn(tensor[:, 0].shape).to(tensor.dtype)
    pool.copy_pages(sources, targets)
    for tensor, group in zip(pool.tensors, pool.tensor_groups):
        assert tensor[:, sources[0, group]].any()
        assert torch.equal(tensor[:, targets[0, group]], tensor[:, sources[0, group]])


def test_keys_and_values_of_two_sizes_share_nothing() -> None:
    """A page would have one number in the keys and another one in the values. No backend takes such layers."""
    sizes = {"own_pages": 0, "page_size": SIZE}
    assert cell_bytes(LAYERS, SIZE) == (64, 24, 64, 64, 16)
    narrow = {replace(spec(2, 8, 9), v_head_dim=4): [7], **LAYERS}
    assert cell_bytes(narrow, SIZE) == (64, 24, 64, None, 64, 16)
    assert plan_slabs(80_000, page_bytes(narrow, SIZE), cell_bytes(narrow, SIZE), **sizes) is None
    assert plan_slabs(40_000, (64,), (64,), **sizes) is None, "one group alone"


def test_slabs_are_as_small_as_their_number_allows_and_waste_little() -> None:
    plan = plan_slabs(10**9, (2 * 96, 10 * 64), (96, 64), own_pages=0, page_size=2)
    assert plan is not None and plan.num_slabs <= 4096 and plan.slab_bytes % (10 * 192) == 0, "both fill a slab"
    small = plan_slabs(10_000, (2 * 96, 10 * 64), (96, 64), own_pages=0, page_size=2)
    assert small is not None and small.slab_bytes == 768, "of 640 bytes at least, and of whole pages of 96 and 64"
    vast = plan_slabs(2**37, (2 * 96, 10 * 64), (96, 64), own_pages=0, page_size=16)
    assert vast is None, "a token's slot has 31 bits"
