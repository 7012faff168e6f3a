"""An engine whose prompts are computed elsewhere, before its scheduler hears of them."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.base.errors import RequestError, TransferError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.request.sample_request import derive_seed
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from tests.support.engine_harness import VOCAB, Rig, expected
from tests.support.mock_executor import Windows, tokens_alone

FIVE = dict(max_tokens=5, ignore_eos=True, seed=1)


class Source:
    """Another rig computes the prompts, one after the other; `deliver` hands over what it has."""

    def __init__(self, rig: Rig, windows: Windows = (None,)) -> None:
        self.rig, self.elsewhere = rig, Rig(rows=1, pages=24, chunk=5, windows=windows)
        self.prompts: dict[str, list[int]] = {}
        self.advanced = 0
        rig.engine.prefill_source = self

    def request(self, request_id: str, tokens: Sequence[int], key: CacheKey) -> None:
        self.prompts[request_id] = list(tokens)

    def advance(self) -> None:
        self.advanced += 1

    def deliver(self, request_id: str, offset: int = 0) -> None:
        tokens = self.prompts.pop(request_id)
        engine = self.elsewhere.engine
        engine.submit(engine.prepare(tokens, SamplingParams(max_tokens=1)), export_to=range(offset, offset + 1))
        self.elsewhere.run()
        self.rig.executor.arena[offset] = self.elsewhere.executor.arena[offset]
        self.rig.engine.start(request_id, PrefixMatch(len(tokens), staged=offset))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_token_of_the_prompt_is_computed_here(overlap: bool) -> None:
    rig = Rig(overlap=overlap, chunk=4)
    source = Source(rig)
    request_id = rig.add([1, 2, 3, 4, 5, 6, 8], **FIVE)
    assert rig.step() == [] and source.advanced == 1 and not rig.executor.plans, "it waits outside the scheduler"
    assert rig.engine.has_unfinished() and rig.engine.gained(request_id) == 0
    source.deliver(request_id)
    rig.run()
    assert rig.outputs[request_id, 0].token_ids == tokens_alone([1, 2, 3, 4, 5, 6, 8], 1, 5, VOCAB)
    assert [list(row.tokens) for plan in rig.executor.plans for row in plan.extend] == [[8]]
    assert sum(len(row.tokens) for plan in source.elsewhere.executor.plans for row in plan.extend) == 6
    assert rig.engine.gained(request_id) is None


def test_tokens_that_are_resumed_are_not_gained_here() -> None:
    """They are there before the prompt's state is: who waits for the first step must not see them."""
    whole = tokens_alone([1, 2, 3], 1, 5, VOCAB)
    rig = Rig()
    source = Source(rig)
    request_id = rig.add([1, 2, 3], **FIVE, resume_token_ids=whole[:2])
    rig.step()
    assert rig.engine.gained(request_id) == 0
    source.deliver(request_id)
    while not rig.engine.gained(request_id):
        assert rig.engine.has_unfinished()
        rig.step()
    rig.run()
    assert rig.outputs[request_id, 0].token_ids == whole[2:]


def test_samples_of_one_prompt_share_what_arrived() -> None:
    rig = Rig(rows=2)
    source = Source(rig)
    request_id = rig.add([1, 2, 3], n=3, **FIVE)
    source.deliver(request_id, offset=7)
    rig.run()
    for index in range(3):
        seed = derive_seed(1, index) if index else 1
        assert rig.outputs[request_id, index].token_ids == tokens_alone([1, 2, 3], seed, 5, VOCAB)
    assert sum(len(plan.imports) for plan in rig.executor.plans) == 3
    assert sum(len(row.tokens) for plan in rig.executor.plans for row in plan.extend) == 3


def test_a_prompt_of_one_token_is_computed_here() -> None:
    rig = Rig()
    source = Source(rig)
    assert rig.finish([4], **FIVE).token_ids == tokens_alone([4], 1, 5, VOCAB) and not source.prompts


def test_without_what_was_to_arrive_the_prompt_is_computed_here() -> None:
    rig = Rig()
    Source(rig)
    request_id = rig.add([1, 2, 3], **FIVE)
    rig.engine.start(request_id)
    rig.run()
    assert rig.outputs[request_id, 0].token_ids == tokens_alone([1, 2, 3], 1, 5, VOCAB)


def test_waiting_requests_may_end() -> None:
    rig = Rig()
    source = Source(rig)
    aborted, failed, other = (rig.add([1, 2, 3], **FIVE) for _ in range(3))
    assert rig.engine.abort(aborted) and rig.engine.fail(failed, TransferError("no luck"))
    assert not rig.engine.fail("nobody", TransferError("no luck"))
    rig.step()
    assert rig.outputs[aborted, 0].finish_reason == rig.outputs[failed, 0].finish_reason == "abort"
    assert rig.outputs[aborted, 0].error is None
    assert isinstance(rig.outputs[failed, 0].error.__cause__, TransferError)  # type: ignore[union-attr]
    for request_id in (aborted, failed):
        with pytest.raises(RequestError, match="does not wait"):
            rig.engine.start(request_id)
    source.deliver(other)
    rig.run()
    assert rig.outputs[other, 0].finish_reason == "length"


def test_what_leaves_nothing_to_compute_is_refused() -> None:
    rig = Rig()
    Source(rig)
    request_id = rig.add([1, 2, 3], **FIVE)
    for length in (0, 3, 4):
        with pytest.raises(RequestError, match="pass 1 to 2"):
            rig.engine.start(request_id, PrefixMatch(length, staged=0))
    rig.engine.start(request_id, PrefixMatch(2, staged=0))
    with pytest.raises(RequestError, match="does not wait"):
        rig.engine.start(request_id)
    rig.engine.abort(request_id)
    rig.run()


def test_a_retracted_request_computes_what_had_arrived() -> None:
    rig = Rig(rows=2, pages=5, page_size=4, max_model_len=20)
    source = Source(rig)
    ids = [rig.add([i] * 7, max_tokens=10, ignore_eos=True, seed=i) for i in (1, 2)]
    for i, request_id in enumerate(ids):
        source.deliver(request_id, offset=i)
    rig.run()
    for i, request_id in enumerate(ids, 1):
        assert rig.outputs[request_id, 0].token_ids == tokens_alone([i] * 7, i, 10, VOCAB)
    assert rig.engine.counters().retractions and sum(len(plan.imports) for plan in rig.executor.plans) == 2


events = st.lists(st.tuples(st.sampled_from(["add", "deliver", "start", "fail", "abort", "step"]), st.integers(0, 5)))


@settings(max_examples=60, deadline=None)
@given(
    events=events, overlap=st.booleans(), late=st.integers(0, 2), drafts=st.sampled_from([0, 3]),
    windows=st.sampled_from([(None,), (1,), (3,), (None, 6), (None, 1, 4)]), pages=st.integers(7, 24),
)  # fmt: skip
def test_any_order_of_events(
    events: list[tuple[str, int]], overlap: bool, late: int, drafts: int, windows: Windows, pages: int
) -> None:
    rig = Rig(rows=2, pages=pages, chunk=5, overlap=overlap, late=late, drafts=drafts, windows=windows)
    source, prompts, ended = Source(rig, windows), dict[str, list[int]](), set[str]()
    for number, (event, which) in enumerate(events):
        waiting = list(source.prompts)
        request_id = waiting[which % len(waiting)] if waiting else None
        if event == "add":
            prompt = [1 + which] * (2 + 3 * which)
            prompts[rig.add(prompt, f"r{number}", max_tokens=6, seed=number)] = prompt
        elif event == "step" and rig.engine.has_unfinished():
            rig.step()
        elif event == "deliver" and request_id:
            source.deliver(request_id, offset=number)
        elif event in ("start", "fail", "abort") and request_id:
            del source.prompts[request_id]
            if event == "start":
                rig.engine.start(request_id)
                continue
            ended.add(request_id)
            rig.engine.abort(request_id) if event == "abort" else rig.engine.fail(request_id, TransferError("lost"))
    for number, request_id in enumerate(list(source.prompts)):
        source.deliver(request_id, offset=len(events) + number)
    rig.run()
    for request_id, prompt in prompts.items():
        output = rig.outputs[request_id, 0]
        if request_id in ended:
            assert output.finish_reason == "abort" and not output.token_ids
        else:
            params = SamplingParams(max_tokens=6)
            assert (output.token_ids, output.finish_reason) == expected(
                prompt, params, int(request_id[1:]), 64, VOCAB, windows
            )
