"""Tails of states in the radix tree: pages that several states may share."""

import pytest

from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from tests.mem_cache.test_radix_cache import Ledger, Text, array


@pytest.mark.parametrize(
    "ends", [((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 9, 9)), ((1, 2, 3, 4, 5, 9, 9), (1, 2, 3, 4, 5, 6))]
)
def test_a_tail_that_is_read_stays_when_its_owners_state_goes(ends: tuple[Text, Text]) -> None:
    """The state of five tokens has no tail of its own. Two states below have one each, and both go."""
    ledger = Ledger(4, True)
    for text in ends:
        ledger.offer(text, (5, len(text)))
    match = ledger.tree.match(array((1, 2, 3, 4, 5, 8)))
    ledger.tree.lock(match)
    ledger.lock(match)
    assert match.tail is not None and match.length == 5 and match.tail_node is not match.node
    for left in (2, 1):
        ledger.evict(0, 1)
        ledger.check()
        assert len(ledger.states) == left and match.tail[0, 0] in ledger.pages[0]
    ledger.has_read(match)
    ledger.lock(PrefixMatch(pages=match.pages), -1)
    ledger.check()
    ledger.tree.unlock(match)
    ledger.check()
    ledger.evict(9, 9)
    assert not any(ledger.pages.values()) and not ledger.states
