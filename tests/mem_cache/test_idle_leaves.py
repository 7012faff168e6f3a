"""Idle leaves: oldest first, whatever has happened since they were entered, in a list of bounded size."""

import numpy as np

from hybridrt.mem_cache.pools.page_groups import no_sets
from hybridrt.mem_cache.prefix_tree.radix_node import IdleLeaves, Node

ROOT = Node(np.empty(0, np.int32), 0, no_sets(1))


def leaf(used: int) -> Node:
    return Node(np.zeros(1, np.int32), 1, no_sets(1), ROOT, used=used)


def taken(leaves: IdleLeaves) -> list[Node]:
    """All leaves in order, each removed from the tree as it is taken."""
    found = []
    while (node := leaves.take_oldest()) is not None:
        node.parent = None
        found.append(node)
    return found


def test_oldest_first() -> None:
    leaves, nodes = IdleLeaves(), [leaf(used) for used in (3, 1, 2, 4)]
    for node in nodes:
        leaves.enlist(node, 4)
    nodes[1].used = 5  # used again
    nodes[2].readers = 1  # read now
    assert taken(leaves) == [nodes[0], nodes[3], nodes[1]]


def test_a_node_that_is_read_is_not_entered() -> None:
    leaves, node = IdleLeaves(), leaf(1)
    node.readers = 1
    leaves.enlist(node, 1)
    assert not leaves._heap


def test_entries_are_bounded_and_none_is_lost() -> None:
    leaves, nodes = IdleLeaves(), [leaf(used) for used in range(3)]
    for used in range(500):
        nodes[used % 3].used = used
        leaves.enlist(nodes[used % 3], 3)
        assert len(leaves._heap) <= 64 + 4 * 3
    assert taken(leaves) == [nodes[497 % 3], nodes[498 % 3], nodes[499 % 3]]
