"""Page groups that share memory: it goes to the requests that need it, whatever the mix of their lengths."""

import random
from collections.abc import Callable

import pytest

from hybridrt import LLM, SamplingParams
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import MemoryBudgetError
from hybridrt.collectives.groups import TPGroup
from hybridrt.engine.cache import host_fetches
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.mem_cache.pools.slab_plan import SlabPlan
from hybridrt.mem_cache.pools.slabs import SlabShare
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY
from hybridrt.runtime.load import fit
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.run import model_runner
from hybridrt.runtime.step.plan import PageWrite, StepPlan, int32s
from tests.engine.test_prefix_states import TEXT
from tests.engine.test_scheduler import request
from tests.support.checkpoints import CheckpointStore
from tests.support.engine_harness import VOCAB, Rig
from tests.support.levels import sweep
from tests.support.mock_executor import tokens_alone

WINDOW, PAGE = 7, 2
WINDOWS = None, WINDOW
DEMANDS = [PageDemand(PAGE, window, 8) for window in WINDOWS]
# A page of the window group has the bytes of four of the other one.
SHARES = SlabShare(4, 4), SlabShare(1, 4)
SLABS = 24
FIXED = [48, 12]  # pages of the same bytes, shared out once


def rig(slabs: int = SLABS, **config: object) -> Rig:
    settings = {"slots": 0, "page_size": PAGE, "max_model_len": 90, "chunk": 8, "rows": 12, "cache": True} | config
    return Rig(windows=WINDOWS, slabs=SlabPlan(1, slabs, SHARES), **settings)  # type: ignore[arg-type]


def admitted(pools: CacheCoordinator, lengths: list[int]) -> int:
    """How many requests of these lengths run at a time."""
    requests = [request(number, length) for number, length in enumerate(lengths)]
    running = [each for each in requests if pools.admit_request(each, 0, StepPlan())]
    for each in running:
        pools.release(each)
    pools.check()
    return len(running)


def test_memory_goes_to_many_short_requests_and_then_to_a_long_one() -> None:
    """Short ones need as many pages of each group; a long one hardly any of the window."""
    fixed = CacheCoordinator(30, 0, FIXED, DEMANDS)
    shared = CacheCoordinator(30, 0, [0, 0], DEMANDS, slabs=SlabPlan(1, SLABS, SHARES))
    short, long = [4] * 30, [130]
    assert admitted(fixed, short) == 6
    with pytest.raises(MemoryBudgetError, match="needs 65 KV pages and there are 48"):
        fixed.check_fits(131)
    for _ in range(2):
        assert admitted(shared, short) == 9, "18 slabs for windows, 5 for the others: one request more needs two"
        assert admitted(shared, long) == 1, "65 pages are 17 slabs, 7 are for the window"
    with pytest.raises(MemoryBudgetError, match=r"needs 81 KV pages and there are 80: cut .* to 161"):
        shared.check_fits(162)
    shared.check_fits(161)


def test_the_longest_request_runs_to_its_end_next_to_others() -> None:
    """It needs nearly everything at last: the others go back to the queue, their cached texts are given up."""
    pools = rig(slabs=SLABS - 8)
    prompts = [[number] * 9 for number in range(6)]
    for number, prompt in enumerate(prompts):
        pools.add(prompt, str(number), max_tokens=80 if not number else 50, ignore_eos=True, seed=number)
    pools.run()
    for number, prompt in enumerate(prompts):
        tokens = pools.outputs[str(number), 0].token_ids
        assert tokens == tokens_alone(prompt, number, 80 if not number else 50, VOCAB, WINDOWS)
    assert pools.engine.counters().retractions


def test_cached_texts_give_way_in_order_of_their_last_use_whichever_group_is_short() -> None:
    """A request that lacks pages of the window gets them from whole texts, the oldest first."""
    pools = rig()
    texts = [[*TEXT[:2], number, *TEXT[2:15]] for number in range(3)]
    for number, text in enumerate(texts):
        pools.finish(text, max_tokens=1, seed=number)
    held = [pools.pools.prefixes.tree.match(int32s([*text, 0])).length for text in texts]
    assert held == [16, 16, 16]
    free = pools.pools.prefixes.room()
    assert pools.pools.prefixes.make_room([0, 8], 0)
    held = [pools.pools.prefixes.tree.match(int32s([*text, 0])).length for text in texts]
    assert held[0] < 16 and held[2] == 16 and sorted(held) == held
    assert pools.pools.prefixes.room() == free, "what can be had at most is as before"
    assert pools.engine.reset_prefix_cache()
    assert pools.pools.pages.slabs is not None and pools.pools.pages.slabs.num_free == SLABS


def test_nothing_is_evicted_for_what_could_not_run_anyway() -> None:
    pools = rig()
    pools.finish(TEXT[:16], max_tokens=1, seed=1)
    cached = pools.pools.pages.num_cached
    pools.add([9] * 9, "runs", max_tokens=40, ignore_eos=True, seed=2)
    pools.step()
    plan = StepPlan()
    assert not pools.pools.admit_request(request(7, 84), 4, plan) and pools.pools.pages.num_cached >= cached
    pools.run()


def test_another_group_waits_for_the_copies_that_read_a_slab() -> None:
    """Its pages have other numbers. Pages of the same group do not wait: a copy reads others."""
    pools = rig(host=(40, 0), copy_delay=10**6)
    pools.finish(TEXT[:7], max_tokens=1, seed=1)
    tier = pools.pools.prefixes.tier
    assert tier is not None and tier.last_ticket and {*tier._read_pages} >= {(0, 4), (0, 5), (0, 6)}
    assert (0, 7) not in tier._read_pages, "the last page of slab 1"

    def awaited(pages: list[int]) -> int:
        plan = StepPlan(page_writes=[PageWrite(1, 0, int32s(pages)[None])])
        tier.seal(plan)
        tier.launched(plan)
        return plan.after_copies

    assert awaited([0, 4 * SLABS]) == awaited([4 * SLABS, 0]) == awaited([7, 0]) == awaited([0, 0]) == 0
    assert awaited([0, 4]) == tier.last_ticket, "the window's page in slab 1"
    assert awaited([0, 4]) == 0, "the steps after it need not wait"


@pytest.mark.parametrize("seed", sweep(range(8), 4))
def test_random_requests_in_little_memory_have_their_tokens(seed: int) -> None:
    """Of few slabs of odd sizes, as few as the longest request needs; without states, in main memory, too."""
    rng = random.Random(seed)
    shares = tuple(SlabShare(size := rng.randint(1, 5), size + rng.randint(0, 4)) for _ in WINDOWS)
    demands = [PageDemand(PAGE, window, 8, back=(PAGE - 1) * (window is not None)) for window in WINDOWS]
    least = next(n for n in range(1, 99) if SlabPlan(1, n, shares).fits(demands, 40))
    pools = Rig(
        windows=WINDOWS, slabs=SlabPlan(1, least + rng.choice((0, 1, 4)), shares), slots=0, page_size=PAGE,
        max_model_len=40, chunk=8, late=1, cache=True, drafts=seed % 2 * 3, host=(40, 0) if seed % 4 < 2 else None,
        copy_delay=seed % 3,
    )  # fmt: skip
    asked = {}
    for number in range(25):
        prompt = [*TEXT[: rng.randint(0, 12)], *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))]
        name = pools.add(prompt, str(number), max_tokens=rng.randint(1, 8), ignore_eos=True, seed=number)
        asked[name] = prompt
        for _ in range(rng.randint(0, 4)):
            pools.step()
    pools.run()
    for name, prompt in asked.items():
        tokens = pools.outputs[name, 0].token_ids
        assert tokens == tokens_alone(prompt, int(name), len(tokens), VOCAB, WINDOWS), name
    assert pools.engine.reset_prefix_cache()
    assert pools.pools.pages.slabs is not None and pools.pools.pages.slabs.num_free == pools.pools.pages.slabs.total


# -- states in the same memory

STATES = SlabShare(1, 1)


def with_states(slabs: int, **config: object) -> Rig:
    """Pages of one group, five a slab, or a state."""
    settings = {"page_size": PAGE, "max_model_len": 90, "chunk": 8, "rows": 12, "cache": True} | config
    plan = SlabPlan(1, slabs, (SlabShare(5, 6),), states=STATES)
    return Rig(slabs=plan, **settings)  # type: ignore[arg-type]


def test_a_budget_runs_many_short_requests_and_then_few_long_ones() -> None:
    """Of 22 slabs, twelve short requests need twelve states and 36 pages, eight slabs; a long one needs 58 pages."""
    short, long = [[number] * 3 for number in range(12)], [[number] * 107 for number in (1, 2)]
    for states in range(1, 22):
        fixed = CacheCoordinator(12, states, [5 * (22 - states)], DEMANDS[:1])
        longest = fixed.pages.bounds(115)[0] * PAGE
        assert admitted(fixed, [6] * 12) < 12 or longest < 115, "no fixed split has room for both"
    pools = with_states(22, max_model_len=120, chunk=64)
    for turn in range(2):
        asked = {pools.add(prompt, f"{turn} {prompt}", max_tokens=4, ignore_eos=True): prompt for prompt in short}
        most = 0
        while pools.engine.has_unfinished():
            pools.step()
            most = max(most, pools.pools.rows.num_used)
        assert most == 12, "all run at a time, with a state each"
        asked |= {pools.add(prompt, f"{turn} {prompt}", max_tokens=9, ignore_eos=True): prompt for prompt in long}
        pools.run()
        assert not pools.engine.counters().failed
        for name, prompt in asked.items():
            found = pools.outputs[name, 0].token_ids
            assert len(found) == (4 if prompt in short else 9)
    assert pools.engine.reset_prefix_cache()
    assert pools.pools.slabs is not None and pools.pools.slabs.num_free == 22


def test_one_request_leaves_room_for_its_own_state() -> None:
    pools = with_states(9).pools
    pools.check_fits(81)
    with pytest.raises(MemoryBudgetError, match=r"needs 41 KV pages and there are 40: cut .* to 81"):
        pools.check_fits(82)


def test_states_and_pages_wait_for_the_copies_that_read_a_slab() -> None:
    """A copy reads pages of slab 1, say. A step that leaves a state there, or clears it, waits; so does a page where a
    copy reads a state."""
    pools = with_states(12, host=(40, 6), copy_delay=10**6)
    pools.finish(TEXT[:12], max_tokens=1, seed=1)
    tier = pools.pools.prefixes.tier
    assert tier is not None

    def awaited(**plan: object) -> int:
        made = StepPlan(**plan)  # type: ignore[arg-type]
        tier.seal(made)
        tier.launched(made)
        return made.after_copies

    def leaves(slot: int) -> list[StateMove]:
        return [StateMove(1, 1, slot, When.BEFORE_ROWS)]

    slabs = {page // 6 for _, page in tier._read_pages}
    free = next(slab for slab in range(1, 13) if slab not in tier._read_slabs)
    assert len(slabs) > 1 and awaited(moves=leaves(free)) == awaited(cleared=[free]) == 0
    assert awaited(moves=leaves(slabs.pop())) == tier.last_ticket
    assert awaited(cleared=[slabs.pop()]) == tier.last_ticket
    (state,) = {*tier._read_slots} & {slab for slab, groups in tier._read_slabs.items() if 1 in groups}
    assert awaited(page_writes=[PageWrite(1, 0, int32s([6 * state])[None])]) == tier.last_ticket


def test_a_fetch_clears_the_slabs_that_it_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step waits for it. If the copy is cancelled before, the slabs are still to be cleared."""
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)
    pools = with_states(12, host=(40, 6))
    pools.finish(TEXT[:20], max_tokens=1, seed=1)
    coordinator, slabs = pools.pools, pools.pools.slabs
    assert slabs is not None and coordinator.fetches is not None and coordinator.prefixes.tier is not None
    coordinator.prefixes.evict([99], 99)
    coordinator.slots.free(coordinator.slots.alloc(12))
    waiting = request(0, 24)
    waiting.prompt_ids[:20] = TEXT[:20]
    for cancelled in (True, False):
        coordinator.advance_fetches([waiting], 0)
        copy = coordinator.prefixes.tier._pending[-1]
        assert copy.fetch and copy.cleared and not slabs.unclean
        if cancelled:
            coordinator.fetches.cancel_all()
            assert slabs.unclean == {*copy.cleared}
    plan = StepPlan()
    coordinator.seal(plan)
    assert plan.after_copies == copy.ticket and not plan.cleared


def test_pages_that_no_state_needs_go_first() -> None:
    """Those of the later text, whose state has saved less."""
    pools = with_states(12)
    texts = [TEXT[:18], [*reversed(TEXT[10:18])]]
    for text in texts:
        pools.finish(text, max_tokens=1)
    store, (earlier, later) = pools.pools.prefixes, [int32s([*text, 0]) for text in texts]
    while store.tree.match(later).length:
        store.free_evicted(store.tree.evict([0], 1))
    kept = store.tree.match(earlier).length
    store.free_evicted(gone := store.tree.evict_leaf(1, stateless=True))
    assert len(gone.pages[0]) == 1 and store.tree.match(earlier).length == kept >= 16
    for _ in range(9):
        store.free_evicted(store.tree.evict_leaf(1, stateless=True))
    assert not store.tree.cached_pages(later, DEFAULT_KEY)[0].length
    assert not store.tree.evict_leaf(1, stateless=True).pages[0], "the earlier text has its state"


@pytest.mark.parametrize("seed", sweep(range(12), 6, 6))
def test_states_and_pages_move_in_random_histories(seed: int) -> None:
    """Few slabs of odd sizes, windows or none, drafts, rings, and main memory: every request has its tokens, and the
    executor finds each state and page where it was left."""
    rng = random.Random(seed)
    windows = rng.choice(((None,), WINDOWS, (WINDOW,), (None, None, 1, 8)))
    shares = tuple(SlabShare(size := rng.randint(1, 5), size + rng.randint(0, 4)) for _ in windows)
    size = rng.choice((1, 1, 2, 3))
    demands = [PageDemand(PAGE, window, 8) for window in windows]
    least = next(n for n in range(1, 99) if SlabPlan(1, n, shares, states=SlabShare(size, size)).fits(demands, 40))
    plan = SlabPlan(1, least + rng.choice((1, 4, 12)), shares, states=SlabShare(size, size))
    pools = Rig(
        windows=windows, slabs=plan, page_size=PAGE, max_model_len=40, chunk=8, late=seed % 3, cache=True, rows=6,
        drafts=seed % 2 * 3, replay=seed % 3 == 1, host=(40, 6) if seed % 4 > 1 else None, copy_delay=seed % 5, grid=4,
    )  # fmt: skip
    asked, had_states, had_pages = {}, set[int](), set[int]()
    for number in range(40):
        short = rng.random() < 0.6
        prompt = [
            *TEXT[: rng.randint(0, 12)],
            *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 4 if short else 20))),
        ]
        asked[pools.add(prompt, str(number), max_tokens=rng.randint(1, 8), ignore_eos=True, seed=number)] = prompt
        for _ in range(rng.randint(0, 4)):
            pools.step()
            *groups, states = pools.pools.slabs.allocators if pools.pools.slabs is not None else []
            had_states.update(states.owned())
            had_pages.update(*[group.owned() for group in groups])
    pools.run()
    for name, prompt in asked.items():
        tokens = pools.outputs[name, 0].token_ids
        assert tokens == tokens_alone(prompt, int(name), len(tokens), VOCAB, windows), name
    assert had_states & had_pages, "no slab has had both"
    assert pools.engine.reset_prefix_cache()
    assert pools.pools.slabs is not None and pools.pools.slabs.num_free == plan.num_slabs


def test_a_model_runs_in_a_budget_without_a_fixed_split(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight short requests with a state each, then one of 250 tokens; both orders give the tokens of ample memory."""
    path, rng = str(checkpoints["falcon-plain"].path), random.Random(0)
    short = [[rng.randrange(3, 90) for _ in range(5)] for _ in range(8)]
    long = [rng.randrange(3, 90) for _ in range(240)]
    settings = {"max_running_requests": 8, "max_model_len": 250, "page_size": 4, "device": "cpu", "dtype": "float32"}
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(path, **settings) as ample:
        wanted = [out.token_ids for out in ample.generate([*short, long], greedy)]
    config = EngineConfig(path, **settings)
    _, target = load_target(config, TPGroup())

    def plan(budget: int, share: bool) -> MemoryPlan:
        return make_plan(config, target, budget_bytes=budget, share=share)

    budget = least_budget(lambda budget: plan(budget, True))
    with pytest.raises(MemoryBudgetError, match="max_running_requests from 8"):
        plan(budget, False)
    for module in (fit, model_runner):
        monkeypatch.setattr(module, "pool_budget", lambda *_: budget)
    with LLM(path, **settings) as llm:
        for texts in ([*short, long], [long, *short], short, [long]):
            outs = llm.generate(texts, greedy)
            assert [out.token_ids for out in outs] == [wanted[[*short, long].index(text)] for text in texts]
        assert llm.plan.num_rows == 8 and llm.plan.slabs is not None


def least_budget(plan: Callable[[int], MemoryPlan]) -> int:
    low, high = 0, 10**8
    while high - low > 1000:
        middle = (low + high) // 2
        try:
            plan(middle)
            high = middle
        except MemoryBudgetError:
            low = middle
    return high


@pytest.mark.parametrize(("size", "slabs"), [(2, 16), (3, 16), (4, 8)])
def test_a_state_that_is_superseded_is_nobody_elses_before_it_is_read(size: int, slabs: int) -> None:
    """Turns of conversations come at once. The free slot that is lent next may be in another slab."""
    plan = SlabPlan(1, slabs, (SlabShare(8, 8),), states=SlabShare(size, size))
    for seed in range(3):
        pools = Rig(slabs=plan, slots=0, page_size=4, max_model_len=90, chunk=400, rows=6, cache=True, grid=4)
        rng = random.Random(seed)
        texts = [random_tokens(rng, rng.randint(6, 12)) for _ in range(6)]
        for turn in range(4):
            for number, text in enumerate(texts):
                pools.add(text, f"{turn} {number}", max_tokens=3, ignore_eos=True, seed=number)
            pools.run()
            for number, text in enumerate(texts):
                tokens = pools.outputs[f"{turn} {number}", 0].token_ids
                assert tokens == tokens_alone(text, number, 3, VOCAB)
                text += [tokens[0], *random_tokens(rng, rng.randint(5, 9))]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]
