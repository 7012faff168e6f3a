"""Pools of layers with several windows: a page group for each."""

import pytest
import torch

from hybridrt.base.config import AttentionSpec
from hybridrt.mem_cache.pools.kv_pool import KVPool, page_bytes, page_windows
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool


def spec(kv_heads: int, dim: int, window: int | None, **more: str) -> AttentionSpec:
    return AttentionSpec(4, kv_heads, dim, dim, window, 1.0, torch.float16, **more)


# Two specs of one window, and a latent cache; not in the order of the windows.
LAYERS = {
    spec(2, 8, 9): [0, 3], spec(2, 8, None): [1], spec(1, 4, 9): [4], spec(2, 8, 5): [2],
    spec(1, 6, None, variant="mla"): [5],
}  # fmt: skip
GROUPS = {1: 0, 5: 0, 2: 1, 0: 2, 3: 2, 4: 2}
PAGES, SIZE = (6, 4, 3), 2


def test_layers_of_a_window_share_pages() -> None:
    """A group has as many pages as were asked for, and layers of a window that differ in shape are one group."""
    pool = KVPool(LAYERS, num_pages=PAGES, page_size=SIZE, device="cpu")
    assert pool.windows == page_windows(LAYERS) == (None, 5, 9) and pool.num_pages == PAGES
    assert {layer: pool.group_of(layer) for layer in GROUPS} == GROUPS
    assert pool.tensor_groups == [2, 2, 0, 0, 2, 2, 1, 1, 0]
    shapes = [(2, 4, 2, 2, 8)] * 2 + [(1, 7, 2, 2, 8)] * 2 + [(1, 4, 2, 1, 4)] * 2 + [(1, 5, 2, 2, 8)] * 2
    assert [tuple(tensor.shape) for tensor in pool.tensors] == [*shapes, (1, 7, 2, 1, 6)]
    for layer, group in GROUPS.items():
        assert all(len(tensor) == PAGES[group] + 1 for tensor in pool.held(layer))
    for group, nbytes in enumerate(page_bytes(LAYERS, SIZE)):
        own = [tensor.nbytes for tensor, its in zip(pool.tensors, pool.tensor_groups) if its == group]
        assert nbytes * (PAGES[group] + 1) == sum(own) > 0


def test_one_number_of_pages_is_that_of_every_group() -> None:
    assert KVPool(LAYERS, num_pages=2, page_size=SIZE, device="cpu").num_pages == (2, 2, 2)
    assert KVPool({}, num_pages=2, page_size=SIZE, device="cpu").num_pages == page_bytes({}, SIZE) == ()


def test_pages_are_copied_in_each_group() -> None:
    """Sources and targets of the groups differ; page 0 on both sides is a group without a copy."""
    pool = KVPool(LAYERS, num_pages=PAGES, page_size=SIZE, device="cpu")
    for tensor in pool.tensors:
        tensor[:, 1:].copy_(torch.randn(tensor[:, 1:].shape))
    before = [tensor.clone() for tensor in pool.tensors]
    copies = {0: {2: 6, 5: 1}, 1: {4: 1}, 2: {3: 2}}  # by group: targets of sources
    sources, targets = torch.tensor([[2, 4, 0], [5, 0, 3]]), torch.tensor([[6, 1, 0], [1, 0, 2]])
    pool.copy_pages(sources, targets)
    for tensor, old, group in zip(pool.tensors, before, pool.tensor_groups):
        wanted = {target: source for source, target in copies[group].items()}
        for page in range(PAGES[group] + 1):
            assert torch.equal(tensor[:, page], old[:, wanted.get(page, page)]), (group, page)


@pytest.mark.parametrize("groups", [2, 3])
def test_a_table_has_token_slots_of_each_group(groups: int) -> None:
    table = HybridReqToTokenPool(
        num_rows=2, max_context=11, page_size=4, mamba_pool=None, device="cpu", num_groups=groups
    )
    assert table.tables.shape == (3, groups, 12)
    pages = torch.tensor([5, 3, 9])[:, None] + 10 * torch.arange(groups)
    table.write_pages(torch.tensor([2, 2, 1]), torch.tensor([0, 2, 1]), pages)
    found = table.token_slots(torch.tensor([2, 1, 2]), torch.tensor([9, 6, 0]))
    assert found.is_contiguous(), "kernels read the slots of a group as one run"
    assert found.tolist() == [[13 + 40 * g, 38 + 40 * g, 20 + 40 * g] for g in range(groups)]
    assert table.req_to_token[2].tolist() == [20, 21, 22, 23, 0, 0, 0, 0, 12, 13, 14, 15]
    table.req_to_token[2, 0] = 7
    assert table.tables[2, 0, 0] == 7, "a view"
    row = HybridReqToTokenPool.row_bytes(11, 4, groups)
    assert row == table.tables[0].nbytes + table.req_to_state_slot[:1].nbytes
