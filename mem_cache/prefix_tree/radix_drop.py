"""Removes a bad part of the radix tree from matching while some requests still read it.

The part stays in place, so locks and eviction go on as before. Its parent stores it under a
negative number, which is no token, so no match finds it. This code uses private members of the
tree.
"""

import numpy as np

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import CacheEntries
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_node import Node, is_idle_leaf


def drop(tree: RadixCache, tokens: np.ndarray, key: CacheKey, *, whole: bool) -> CacheEntries:
    """Hides the deepest entry on the path of a text [n] int32, and all below, because it was
    computed from the entry. `whole`: also hides the entries above.

    Returns:
        The entries that no request reads; the tree has given them up. The others are evicted first,
            once they are unlocked.
    """
    found, _ = tree._descend(key, tokens)
    path = [node for node in reversed(list(found.path)) if node.start < len(tokens)]
    kept = [node for node in path if len(node.pages) or node.state is not None or node.tail is not None]
    gone = tree.collect()
    if not kept:
        return gone.entries()
    below = [top := _with_tail(tree, path, kept[0] if whole else path[-1])]
    for node in below:
        below += node.children.values()
        if gone.log is not None:
            tree.note_entries(node, "lost", gone.log)
    _hide(tree, top)
    for node in reversed(below):
        node.used = 0
        if node.state is not None and not node.state_readers:
            tree._drop_state(node, gone)
    for node in reversed(below):
        if is_idle_leaf(node):
            tree.shorten(node, None, gone)
    return tree.given_up(gone, "dropped")


def _hide(tree: RadixCache, node: Node) -> None:
    assert node.parent is not None
    del node.parent.children[node.first]
    node.first = -next(tree._hidden)
    node.parent.children[node.first] = node


def _with_tail(tree: RadixCache, path: list[Node], top: Node) -> Node:
    for node in path:
        owner = tree.paths.tail(node)[0] if node.state is not None else None
        if node is top or (owner is not None and top in owner.path):
            return node
    return top
