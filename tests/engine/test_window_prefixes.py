"""Cached prefixes of models whose attention layers all have a sliding window: states with their windows' pages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt import LLM
from hybridrt.base.errors import ConfigError, SessionError
from hybridrt.base.sampling_params import SamplingParams
from tests.engine.test_prefix_states import TEXT, computed, others, rig_with_cache
from tests.engine.test_schedules import Abort, Add, Step, run_history, schedules
from tests.support.checkpoints import CheckpointStore
from tests.support.engine_harness import VOCAB, Rig
from tests.support.levels import sweep
from tests.support.mock_executor import tokens_alone

WINDOW = 5
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)


def windowed(**config: Any) -> Rig:
    return rig_with_cache(**{"sliding_window": WINDOW, "grid": 4, "slots": 8, "chunk": 40, **config})


def alone(prompt: list[int], seed: int, count: int, window: int = WINDOW) -> list[int]:
    return tokens_alone(prompt, seed, count, VOCAB, window)


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("replay", [False, True])
def test_a_second_turn_starts_where_the_first_ended(page_size: int, replay: bool) -> None:
    rig = windowed(page_size=page_size, replay=replay)
    answer = rig.finish(TEXT[:9], max_tokens=6, ignore_eos=True, seed=1).token_ids
    held = rig.pools.pages.num_cached
    assert 0 < held <= rig.pools.slots.num_cached * rig.pools._demand.kept
    second = [*TEXT[:9], *answer, 9, 8]
    assert rig.finish(second, max_tokens=6, ignore_eos=True, seed=2).token_ids == alone(second, 2, 6)
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
    assert rig.outputs["late", 0].token_ids == alone(late, 2, 5)
    assert rig.outputs["long", 0].token_ids == alone(TEXT[:11], 1, 20)


def test_samples_of_a_prompt_start_from_its_state() -> None:
    rig = windowed(rows=4)
    rig.add(TEXT[:11], n=3, max_tokens=4, ignore_eos=True, seed=1)
    rig.run()
    assert computed(rig) == [0, 8, 8]


def test_pages_go_with_their_states() -> None:
    rig = windowed()
    rig.finish(TEXT[:11], max_tokens=3, ignore_eos=True, seed=1)
    pages, states = rig.pools.pages.num_cached, rig.pools.slots.num_cached
    assert (pages, states) == (2 * (WINDOW - 1), 2)
    rig.pools.prefixes.evict(1, 0)
    assert (rig.pools.pages.num_cached, rig.pools.slots.num_cached) == (WINDOW - 1, 1)
    assert rig.engine.reset_prefix_cache()


def test_no_copy_fills_pages_of_a_state_that_was_evicted() -> None:
    rig = windowed(overlap=False)
    rig.add(TEXT[:11], max_tokens=5, ignore_eos=True, seed=1)
    rig.step()
    assert rig.pools.prefixes.windows is not None and len(rig.pools.prefixes.windows.copies) == WINDOW - 1
    rig.pools.prefixes.evict(99, 99)
    assert not rig.pools.prefixes.windows.copies
    rig.run()


def test_a_copy_that_a_failed_launch_names_is_not_trusted() -> None:
    rig = windowed(rows=3)
    rig.add(TEXT[:11], "long", max_tokens=12, ignore_eos=True, seed=1)
    rig.step()
    rig.executor.fail_launch[len(rig.executor.plans) + 1] = RuntimeError("no")
    rig.run()
    prompt = [*TEXT[:9], 7, 7]
    assert rig.finish(prompt, max_tokens=5, ignore_eos=True, seed=2).token_ids == alone(prompt, 2, 5)


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
        "slots": st.sampled_from([4, 5, 9]),
        "pages": st.sampled_from([44, 60]),
        "page_size": st.sampled_from([1, 2, 4]),
        "grid": st.sampled_from([4, 8]),
        "chunk": st.integers(1, 12),
        "late": st.integers(0, 3),
        "overlap": st.booleans(),
        "drafts": st.sampled_from([0, 0, 4]),
        "replay": st.booleans(),
        "sliding_window": st.integers(1, 9),
    }
)


@pytest.mark.parametrize("examples", [20, pytest.param(150, marks=pytest.mark.slow)])
def test_cached_tokens_equal_uncached_ones(examples: int) -> None:
    """The ledgers are compared after every step."""

    @settings(schedules, max_examples=examples)
    @given(window_rigs, st.lists(st.one_of(turns, turns, others), min_size=6, max_size=14))
    def schedule(config: dict, history: list[Add | Step | Abort]) -> None:
        rig = rig_with_cache(max_model_len=40, **config)
        added = run_history(rig, history, config["sliding_window"])
        assert len(added) == sum(isinstance(event, Add) for event in history), "none is refused"

    schedule()


@pytest.mark.parametrize("page_size", sweep([1, 8, 16, 64], 2))
def test_a_real_model_says_the_same_with_the_cache(page_size: int, checkpoints: CheckpointStore) -> None:
    """A turn, a second one, and one that leaves the first one's prompt at its last place on the grid."""
    path = str(checkpoints["swa_ssm-plain"].path)
    first = torch.arange(5, 5 + 70).tolist()
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_size": page_size, "max_model_len": 128}
    with LLM(path, max_running_requests=2, prefix_cache=False, **common) as plain:
        answer = plain.generate([first], GREEDY)[0].token_ids
        prompts = [first, [*first, *answer, 9, 8], [*first[:66], 3, 4]]
        wanted = [out.token_ids for out in plain.generate(prompts, GREEDY)]
    with LLM(path, max_running_requests=2, **common) as llm:
        outs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert [out.token_ids for out in outs] == wanted
        assert [out.metrics.cached_tokens for out in outs] == [0, 78, 64]
        with pytest.raises(SessionError, match="sliding window"):
            llm.save_session(Path("never"), prompts[1])


def test_main_memory_is_refused(checkpoints: CheckpointStore) -> None:
    with pytest.raises(ConfigError, match="host_cache_bytes has no use"):
        LLM(str(checkpoints["swa_ssm-plain"].path), device="cpu", host_cache_bytes=1 << 20)
