"""A hit never keeps a request from running that would run without it."""

from hybridrt.runtime.step.plan import int32s
from tests.engine.test_prefix_states import TEXT, rig_with_cache
from tests.support.engine_harness import VOCAB
from tests.support.mock_executor import tokens_alone


def test_a_hit_may_lie_on_a_node_whose_other_pages_are_needed() -> None:
    """Without recurrent layers a match may end within a node. While it is read, no page of the node is evicted."""
    rig = rig_with_cache(slots=0, pages=10)
    rig.finish(TEXT[:9], max_tokens=1, seed=1)
    prompt = [*TEXT[:2], 9, 9, 9, 9, 9]
    assert rig.finish(prompt, max_tokens=3, ignore_eos=True, seed=2).token_ids == tokens_alone(prompt, 2, 3, VOCAB)


def test_a_request_that_has_to_wait_evicts_nothing() -> None:
    rig = rig_with_cache(slots=4, pages=20, chunk=40)
    rig.finish(TEXT[:6], max_tokens=1, seed=1)
    rig.add([7] * 10, "runs", max_tokens=4, ignore_eos=True, seed=2)
    rig.step()
    rig.add([8] * 12, "waits", max_tokens=2, ignore_eos=True, seed=3)
    rig.step()
    assert rig.engine.counters().waiting == 1
    assert rig.pools.prefixes.tree.match(int32s(TEXT[:9])).length == 6
    rig.run()


def test_what_a_running_request_has_given_away_is_no_room() -> None:
    """Its prompt's pages are the cache's already, but it reads them: nothing is evicted in vain for a request that
    would need them."""
    rig = rig_with_cache(slots=4, pages=20, chunk=40)
    rig.finish(TEXT[:6], max_tokens=1, seed=1)
    rig.add([7] * 8, "runs", max_tokens=6, ignore_eos=True, seed=2)
    for _ in range(3):
        rig.step()
    assert rig.pools.pages.num_locked == 8
    rig.add([8] * 12, "waits", max_tokens=2, ignore_eos=True, seed=3)
    rig.step()
    assert rig.engine.counters().waiting == 1 and rig.pools.prefixes.tree.match(int32s(TEXT[:9])).length == 6
    rig.run()
