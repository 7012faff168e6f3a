"""Random histories through tiny pools: a request's tokens are those of the request alone, and the pools end empty."""

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrt.base.errors import MemoryBudgetError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.request.sample_request import derive_seed
from tests.support.engine_harness import VOCAB, Rig, expected
from tests.support.levels import examples

MAX_MODEL_LEN = 40


@dataclass(frozen=True)
class Add:
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Step:
    times: int


@dataclass(frozen=True)
class Abort:
    which: int


params = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 2, 9, 17, 30, None]),
    ignore_eos=st.sampled_from([True, True, False]),
    stop_token_ids=st.sampled_from([(), (), (3,), (3, 11)]),
    seed=st.integers(0, 2**63 - 1),
    n=st.sampled_from([1, 1, 1, 3]),
    logprobs=st.sampled_from([None, 1]),
)
adds = st.builds(Add, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14), params)
others = st.one_of(st.builds(Step, st.integers(1, 12)), st.builds(Abort, st.integers(0, 9)))
histories = st.lists(st.one_of(adds, adds, others), min_size=6, max_size=14)
rigs = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 6),
        "slots": st.sampled_from([0, 2, 6]),
        "pages": st.sampled_from([0, 10, 14, 20, 30]),
        "page_size": st.sampled_from([1, 2, 4]),
        "chunk": st.integers(1, 12),
        "late": st.integers(0, 3),
        "overlap": st.booleans(),
        "drafts": st.sampled_from([0, 0, 1, 4]),
    }
)
# Any request fits alone, no three of them together.
tight_rigs = st.fixed_dictionaries(
    {
        "rows": st.integers(3, 6),
        "pages": st.sampled_from([12, 14, 16]),
        "page_size": st.just(2),
        "chunk": st.integers(2, 12),
        "late": st.integers(0, 3),
        "overlap": st.booleans(),
        "drafts": st.sampled_from([0, 0, 2]),
    }
)
long_adds = st.builds(
    Add,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    st.builds(
        SamplingParams,
        max_tokens=st.integers(12, 18),
        ignore_eos=st.sampled_from([True, True, False]),
        seed=st.integers(0, 2**63 - 1),
    ),
)
# Requests of up to 40 tokens that hold few of them; some pools hold no request whole.
sliding_rigs = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 5),
        "pages": st.sampled_from([9, 12, 16, 30]),
        "page_size": st.sampled_from([1, 2, 4]),
        "chunk": st.integers(1, 12),
        "late": st.integers(0, 3),
        "overlap": st.booleans(),
        "drafts": st.sampled_from([0, 0, 1, 4]),
        "windows": st.sampled_from([(3,), (8,), (1, 6), (None, 2), (None, 5), (None, 1, 4)]),
        "cache": st.booleans(),
        "slots": st.sampled_from([0, None]),
    }
)
long_prompts = st.builds(
    Add,
    st.lists(st.integers(0, VOCAB - 1), min_size=10, max_size=36),
    st.builds(SamplingParams, max_tokens=st.sampled_from([1, 3, 12]), seed=st.integers(0, 2**63 - 1)),
)
schedules = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
by_level = examples(20, 200)


@by_level
def test_tokens_equal_the_request_alone(examples: int) -> None:
    draw(examples, rigs, histories)


@by_level
def test_tokens_survive_retraction(examples: int) -> None:
    draw(examples, tight_rigs, st.lists(st.one_of(long_adds, long_adds, others), min_size=6, max_size=12))


@by_level
def test_tokens_survive_a_sliding_window(examples: int) -> None:
    """Pages go back while requests run, to themselves and to others, also between the chunks of a prompt; some go to
    the prefix cache."""
    draw(examples, sliding_rigs, st.lists(st.one_of(long_prompts, long_adds, others), min_size=5, max_size=10))


def draw(examples: int, configs: st.SearchStrategy[dict], histories: st.SearchStrategy[list]) -> None:
    settings(schedules, max_examples=examples)(given(configs, histories)(play))()


def play(config: dict, history: list[Add | Step | Abort]) -> None:
    rig = Rig(max_model_len=MAX_MODEL_LEN, **config)
    run_history(rig, history)
    assert rig.executor.max_in_flight <= (2 if config["overlap"] else 1)


def run_history(rig: Rig, history: list[Add | Step | Abort]) -> dict[str, Add]:
    """Checks the tokens of all requests that were taken, and returns them by name."""
    added: dict[str, Add] = {}
    aborted: set[str] = set()
    for event in history:
        if isinstance(event, Add):
            add(rig, event, added)
        elif isinstance(event, Abort):
            name = f"r{event.which}"
            if rig.engine.abort(name):
                aborted.add(name)
            rig.check()
        else:
            for _ in range(event.times):
                rig.step()
    rig.run()
    for name, event in added.items():
        assert_tokens(rig, name, event, name in aborted)
    return added


def add(rig: Rig, event: Add, added: dict[str, Add]) -> None:
    name = f"r{len(added)}"
    before = rig.engine.counters()
    try:
        rig.engine.add_request(event.prompt, event.params, name)
    except MemoryBudgetError:
        assert rig.engine.counters() == before
    else:
        added[name] = event


def assert_tokens(rig: Rig, name: str, event: Add, was_aborted: bool) -> None:
    for i in range(event.params.n):
        output = rig.outputs[name, i]
        assert event.params.seed is not None
        seed = derive_seed(event.params.seed, i) if i else event.params.seed
        seen = rig.executor.windows, rig.executor.has_state
        tokens, reason = expected(event.prompt, event.params, seed, MAX_MODEL_LEN, VOCAB, *seen)
        if was_aborted and output.finish_reason == "abort":
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert (output.token_ids, output.finish_reason) == (tokens, reason)
        assert output.error is None
        assert output.metrics.output_tokens == len(output.token_ids)
        if event.params.logprobs is not None:
            assert [next(iter(lp)) for lp in output.logprobs or ()] == output.token_ids
