"""What the counters say of each request: tokens asked are hit, lost once, or new."""

from tests.engine.test_prefix_states import rig_with_cache
from tests.support.engine_harness import VOCAB, Rig
from tests.support.mock_executor import tokens_alone

TEXT = tokens_alone([4, 2], 5, 200, VOCAB)
ROOM = {"pages": 200, "slots": 9, "page_size": 4, "max_model_len": 256, "chunk": 256}


def lost(rig: Rig) -> tuple[int, int, int]:
    """Tokens without a state, without KV and of changed histories, of all requests so far."""
    counts = rig.pools.prefixes.counts
    return counts.without_state, counts.without_kv, counts.retokenised


def test_the_last_token_of_a_prompt_is_never_lost() -> None:
    """Whatever is cached, it is computed."""
    rig = rig_with_cache(grid=4, **ROOM)
    for _ in range(2):
        rig.finish(TEXT[:13], max_tokens=1, seed=1)
    assert rig.pools.prefixes.counts.hit == 12 and lost(rig) == (0, 0, 0)


def test_a_request_that_skips_the_match_loses_nothing() -> None:
    rig = rig_with_cache(**ROOM)
    for scores in (None, 0):
        rig.finish(TEXT[:150], max_tokens=1, seed=1, prompt_logprobs=scores)
    assert rig.pools.prefixes.counts.asked == 300 and lost(rig) == (0, 0, 0)


def test_no_token_is_lost_twice() -> None:
    """The prompt leaves a cached answer after 100 tokens. Of its own text 128 tokens in whole blocks have been evicted.
    The answer has 129 with KV."""
    rig = rig_with_cache(**ROOM)
    prompt = TEXT[:90]
    answer = rig.finish(prompt, max_tokens=40, ignore_eos=True, seed=1).token_ids
    text = [*prompt, *answer[:10], (answer[10] + 1) % VOCAB, *TEXT[90:140]]
    rig.finish(text, max_tokens=1, seed=2)
    rig.pools.prefixes.evict([200], 9)
    rig.finish(prompt, max_tokens=40, ignore_eos=True, seed=1)
    before = lost(rig)
    rig.finish([*text, 1], max_tokens=1, seed=3)
    found = [now - then for now, then in zip(lost(rig), before, strict=True)]
    assert rig.pools.prefixes.counts.asked == 90 + 151 + 90 + 152
    assert found == [20, 28, 1]
