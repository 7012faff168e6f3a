"""Cached prefixes of models with sliding windows: a prefix needs the pages that the next token sees in each group."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt import LLM
from hybridrt.base.errors import SessionError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.cache import answer_states, host_fetches
from tests.engine.test_prefix_states import TEXT, computed, others, rig_with_cache
from tests.engine.test_schedules import Abort, Add, Step, run_history, schedules
from tests.support.checkpoints import CheckpointStore
from tests.support.engine_harness import VOCAB, Rig
from tests.support.levels import examples, sweep
from tests.support.mock_executor import Windows, tokens_alone
from tests.support.random_windows import random_windows

WINDOW = 5
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)


def windowed(**config: Any) -> Rig:
    return rig_with_cache(**{"windows": (WINDOW,), "grid": 4, "slots": 8, "chunk": 40, **config})


def alone(prompt: list[int], seed: int, count: int, rig: Rig) -> list[int]:
    return tokens_alone(prompt, seed, count, VOCAB, rig.executor.windows, rig.executor.has_state)


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("replay", [False, True])
def test_a_second_turn_starts_where_the_first_ended(page_size: int, replay: bool) -> None:
    rig = windowed(page_size=page_size, replay=replay)
    answer = rig.finish(TEXT[:9], max_tokens=6, ignore_eos=True, seed=1).token_ids
    assert rig.pools.pages.num_cached
    second = [*TEXT[:9], *answer, 9, 8]
    assert rig.finish(second, max_tokens=6, ignore_eos=True, seed=2).token_ids == alone(second, 2, 6, rig)
    assert computed(rig)[-1] in (14, 15)


def test_a_prompt_that_is_still_decoded_serves_others() -> None:
    rig = windowed(page_size=2, rows=3)
    rig.add(TEXT[:11], "long", max_tokens=20, ignore_eos=True, seed=1)
    for _ in range(4):
        rig.step()
    late = [*TEXT[:9], 7, 7]
    rig.add(late, "late", max_tokens=5, ignore_eos=True, seed=2)
    rig.run()
    assert computed(rig) == [0, 8]
    assert rig.outputs["late", 0].token_ids == alone(late, 2, 5, rig)
    assert rig.outputs["long", 0].token_ids == alone(TEXT[:11], 1, 20, rig)


@pytest.mark.parametrize("windows", [(7,), (None, WINDOW, 7)])
def test_states_within_an_answer_outlive_their_window(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    """States in the middle of a page too, whose other tokens come later."""
    monkeypatch.setattr(answer_states, "APART", 3)
    rig = windowed(windows=windows, page_size=4, slots=12, pages=60)
    answer = rig.finish(TEXT[:9], max_tokens=20, ignore_eos=True, seed=1).token_ids
    rig.assert_empty()
    for kept in (17, 12, 6):
        history = [*TEXT[:9], *answer[:kept], 3]
        assert rig.finish(history, max_tokens=4, ignore_eos=True, seed=2).token_ids == alone(history, 2, 4, rig)
        assert 9 + kept - computed(rig)[-1] < 2 * 3


def test_samples_of_a_prompt_start_from_its_state() -> None:
    rig = windowed(rows=4)
    rig.add(TEXT[:11], n=3, max_tokens=4, ignore_eos=True, seed=1)
    rig.run()
    assert computed(rig) == [0, 8, 8]


def test_a_state_goes_with_the_pages_that_its_next_token_sees() -> None:
    """Pages that no next token sees go first, then those of the state that was used first."""
    rig = windowed()
    rig.finish(TEXT[:11], max_tokens=3, ignore_eos=True, seed=1)
    pages, states = rig.pools.pages.num_cached, rig.pools.slots.num_cached
    assert (pages, states) == (13, 2), "of the prompt, of which the state after 8 tokens sees 4 pages, and of the end"
    rig.pools.prefixes.evict([pages - 2 * (WINDOW - 1)], 0)
    assert (rig.pools.pages.num_cached, rig.pools.slots.num_cached) == (2 * (WINDOW - 1), 2)
    rig.pools.prefixes.evict([1], 0)
    assert rig.pools.slots.num_cached == 1
    assert rig.engine.reset_prefix_cache()


@pytest.mark.parametrize("windows", [(None, WINDOW), (WINDOW,)])
def test_without_recurrent_layers_a_prompt_is_left_at_any_whole_page(windows: Windows) -> None:
    """Also far before its end: pages that have left the window are kept, as far as room allows."""
    rig = windowed(windows=windows, slots=0, page_size=2, chunk=6, pages=40, max_model_len=60)
    rig.finish(TEXT[:40], max_tokens=2, ignore_eos=True, seed=1)
    for length in (36, 21, 8):
        prompt = [*TEXT[:length], 0]
        assert rig.finish(prompt, max_tokens=3, ignore_eos=True, seed=2).token_ids == alone(prompt, 2, 3, rig)
        assert computed(rig)[-1] == length // 2 * 2


def test_a_full_group_keeps_what_a_window_group_cannot() -> None:
    """Few pages in the window group: prompts that share a prefix take each other's pages, and stay right."""
    rig = windowed(windows=(None, 3), slots=0, page_size=1, chunk=4, pages=30, rows=3)
    for number, length in enumerate((20, 24, 9, 26, 24, 14)):
        prompt = [*TEXT[:length], number]
        assert rig.finish(prompt, max_tokens=2, ignore_eos=True, seed=number).token_ids == alone(prompt, number, 2, rig)
    assert rig.engine.counters().cache_hit > 20


turns = st.builds(
    Add,
    st.builds(lambda n, extra: TEXT[:n] + extra, st.integers(1, 24), st.lists(st.integers(0, VOCAB - 1), max_size=2)),
    st.builds(
        SamplingParams,
        max_tokens=st.sampled_from([1, 2, 5, 12]),
        ignore_eos=st.sampled_from([True, False]),
        seed=st.sampled_from([77, 78]),
        n=st.sampled_from([1, 1, 2]),
    ),
)
window_rigs = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 4),
        "slots": st.sampled_from([0, 4, 5, 9]),
        "host": st.sampled_from([None, (44, 6)]),
        "copy_delay": st.sampled_from([0, 3]),
        "pages": st.sampled_from([44, 60]),
        "page_size": st.sampled_from([1, 2, 4]),
        "grid": st.sampled_from([4, 8]),
        "chunk": st.integers(1, 12),
        "late": st.integers(0, 3),
        "overlap": st.booleans(),
        "drafts": st.sampled_from([0, 0, 4]),
        "replay": st.booleans(),
        "windows": random_windows(1, 3) | st.just((None, None, 2, 5, 5)),
    }
)


@examples(20, 150)
def test_cached_tokens_equal_uncached_ones(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledgers are compared after every step."""

    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)

    @settings(schedules, max_examples=examples)
    @given(window_rigs, st.lists(st.one_of(turns, turns, others), min_size=6, max_size=14))
    def schedule(config: dict, history: list[Add | Step | Abort]) -> None:
        rig = rig_with_cache(max_model_len=40, **config)
        added = run_history(rig, history)
        assert len(added) == sum(isinstance(event, Add) for event in history), "none is refused"

    schedule()


@pytest.mark.parametrize("page_size", sweep([8, 1, 16, 64], 4))
def test_a_real_model_says_the_same_with_the_cache(
    page_size: int, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """A turn, a second one, and one that leaves the first one's prompt at its last place on the grid. Then from a file,
    and from main memory."""
    path = str(checkpoints["swa_ssm-plain"].path)
    first = torch.arange(5, 5 + 70).tolist()
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_size": page_size, "max_model_len": 128}
    with LLM(path, max_running_requests=2, prefix_cache=False, **common) as plain:
        answer = plain.generate([first], GREEDY)[0].token_ids
        prompts = [first, [*first, *answer, 9, 8], [*first[:66], 3, 4]]
        wanted = [out.token_ids for out in plain.generate(prompts, GREEDY)]
    with LLM(path, max_running_requests=2, host_cache_bytes=1 << 20, **common) as llm:
        outs = llm.generate([prompts[0]], GREEDY)
        llm.save_session(tmp_path / "turn", [*first, *answer])
        outs += [llm.generate([prompt], GREEDY)[0] for prompt in prompts[1:]]
        assert [out.token_ids for out in outs] == wanted
        assert [out.metrics.cached_tokens for out in outs] == [0, 78, 64]
        store = llm.engine.prefixes
        store.evict([group.total for group in llm.engine._coordinator.pages.groups], 99)
        again = llm.generate([prompts[1]], GREEDY)[0]
        assert again.token_ids == wanted[1] and again.metrics.cached_tokens >= 78
        assert llm.engine.counters().cache_fetched >= 78
    with LLM(path, max_running_requests=2, **common) as llm:
        llm.load_session(tmp_path / "turn")
        out = llm.generate([prompts[1]], GREEDY)[0]
        assert (out.token_ids, out.metrics.cached_tokens) == (wanted[1], 78)
    other = common | {"page_size": 2 * page_size}
    with LLM(path, max_running_requests=2, **other) as llm, pytest.raises(SessionError, match="page_size"):
        llm.load_session(tmp_path / "turn")


def test_a_window_of_one_token_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after a whole page sees no page: a copy of none would be begun for ever."""
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)
    rig = windowed(windows=(1,), slots=0, page_size=2, host=(40, 0))
    rig.finish(TEXT[:12], max_tokens=2, seed=1)
    rig.pools.prefixes.evict([99], 0)
    assert rig.finish(TEXT[:12], max_tokens=2, seed=1).token_ids == alone(TEXT[:12], 1, 2, rig)
    assert not rig.engine.counters().cache_fetched


def test_prompts_that_share_their_pages_do_not_starve_each_other() -> None:
    """Pages that the cache has taken from a running prompt are replaced when they leave its window."""
    rig = windowed(rows=6, slots=12, pages=109, page_size=1, chunk=3, windows=(8,), grid=16, max_model_len=400)
    prompts = [[n % VOCAB, *TEXT[:7], *(TEXT[n % 40] for n in range(n))] for n in (1, 8, 55, 140, 290, 140, 141)]
    for _ in range(2):
        for seed, prompt in enumerate(prompts):
            rig.add(prompt, max_tokens=24, ignore_eos=True, seed=seed)
        rig.run()
