"""The memory plan: it spends a budget and no more, counts what is allocated, and its errors say what works."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume
from hypothesis import strategies as st
from torch import Tensor

from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import MemoryBudgetError
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan, PageGroup, UnitCosts, plan_memory, share_memory
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.runtime.load.build_model import weight_bytes
from hybridrt.runtime.sampling.sampler import prompt_logprob_bytes
from hybridrt.speculative.draft_model import DraftModelDrafter
from hybridrt.speculative.head import HeadRunner
from tests.support.checkpoints import VOCAB, CheckpointStore
from tests.support.levels import draw, examples
from tests.support.mtp_oracle import HEADS, write_with_head
from tests.support.session import Session, budget

FILTERED = [HealthCheck.filter_too_much]  # a drawn budget gives either a plan or an error


@st.composite
def demands(draw: st.DrawFn) -> list[PageDemand]:
    """Of page groups of one page size, with different windows."""
    size, steps = draw(st.sampled_from([1, 4, 16])), (draw(st.integers(1, 90)), draw(st.integers(1, 5)))
    windows = draw(st.lists(st.none() | st.integers(1, 100), max_size=3, unique=True))
    return [PageDemand(size, window, *steps) for window in windows]


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of plan_memory, budgets from hopeless to ample."""
    groups = draw(demands())
    pages = draw(st.lists(st.integers(1, 800), min_size=len(groups), max_size=len(groups)))
    costs = UnitCosts(
        slot=draw(st.just(0) | st.integers(1, 5000)), row=draw(st.integers(1, 2000)), pages=pages,
        fixed=draw(st.sampled_from([0, 77])), transfer=draw(st.sampled_from([0, 33])),
    )  # fmt: skip
    limit = draw(st.integers(1, 400))
    return {
        "budget_bytes": draw(st.integers(0, 200_000)),
        "costs": costs,
        "demands": groups,
        "page_size": groups[0].page_size if groups else 16,
        "keeps_prefixes": draw(st.booleans()),
        "max_running_requests": draw(st.none() | st.integers(1, 40)),
        "default_rows": draw(st.integers(1, 40)),
        "max_model_len": draw(st.none() | st.integers(1, limit)),
        "model_limit": limit,
        "cache_slots": draw(st.sampled_from([0, 0, 1, 7])),
    }


def attempt(arguments: dict[str, Any]) -> MemoryPlan | str:
    try:
        return plan_memory(**arguments)
    except MemoryBudgetError as error:
        return str(error)


@examples(30, 400)
def test_a_plan_keeps_its_promises(examples: int) -> None:
    draw(examples, check_promises, plans(), derandomize=True, suppress_health_check=FILTERED)


def check_promises(arguments: dict[str, Any]) -> None:
    plan = attempt(arguments)
    assume(isinstance(plan, MemoryPlan))
    assert isinstance(plan, MemoryPlan)
    assert plan.pool_bytes <= plan.budget_bytes == arguments["budget_bytes"]
    assert plan.num_rows == (arguments["max_running_requests"] or plan.num_rows) >= 1
    assert plan.cache_slots == (arguments["cache_slots"] if arguments["costs"].slot else 0)
    assert plan.num_slots == (plan.num_rows + plan.cache_slots if arguments["costs"].slot else 0)
    assert 1 <= plan.max_model_len <= arguments["model_limit"]
    assert plan.max_model_len == (arguments["max_model_len"] or plan.max_model_len)
    assert sum(size for _, _, size in plan.table()) == plan.pool_bytes
    if not plan.groups:
        assert plan.max_model_len == (arguments["max_model_len"] or arguments["model_limit"])
        return
    for group in plan.groups:
        assert group.num_pages >= group.demand.least(plan.max_model_len), "one request of max_model_len fits"
        assert group.num_pages <= plan.num_rows * group.demand.whole(arguments["max_model_len"] or plan.max_model_len)
    ample = all(group.num_pages >= group.demand.pool(plan.num_rows, plan.max_model_len) for group in plan.groups)
    # The next page index takes a page of each group, and maybe one for cached prefixes.
    assert ample or plan.pool_bytes + 2 * sum(plan.costs.pages) > plan.budget_bytes, "no page is wasted"


@examples(30, 400)
def test_an_error_names_numbers_that_work(examples: int) -> None:
    draw(examples, check_advice, plans(), derandomize=True, suppress_health_check=FILTERED)


def check_advice(arguments: dict[str, Any]) -> None:
    text = attempt(arguments)
    assume(isinstance(text, str))
    assert isinstance(text, str)
    changes: list[dict[str, Any]] = []
    if found := re.search(r"max_model_len to (\d+)", text):
        changes.append({"max_model_len": int(found[1])})
    if found := re.search(r"max_running_requests from \d+ to (\d+)", text):
        changes.append({"max_running_requests": int(found[1])})
    if found := re.search(r"cache_slots from \d+ to (\d+)", text):
        changes.append({"cache_slots": int(found[1])})
    if found := re.search(r"transfer_bytes from \d+ to (\d+)", text):
        changes.append({"costs": replace(arguments["costs"], transfer=int(found[1]))})
    needed = re.search(r"budget to (\d+) bytes", text)
    assert needed, text
    changes.append({"budget_bytes": int(needed[1])})
    for change in changes:
        assert isinstance(attempt({**arguments, **change}), MemoryPlan), f"{change} was advised: {text}"
    assert isinstance(attempt({**arguments, "budget_bytes": int(needed[1]) - 1}), str), "it is the least that works"


@examples(15, 150)
def test_rows_beyond_the_request_never_make_a_plan_fail(examples: int) -> None:
    """Where one request fits, the plan chooses a number of rows that fits, too."""
    draw(examples, check_rows, plans(), derandomize=True)


def check_rows(arguments: dict[str, Any]) -> None:
    one = attempt({**arguments, "max_running_requests": 1})
    assume(isinstance(one, MemoryPlan))
    assert isinstance(attempt({**arguments, "max_running_requests": None}), MemoryPlan)


def test_no_request_can_be_longer_than_the_model_was_made_for() -> None:
    arguments = {
        "budget_bytes": 10**6, "costs": UnitCosts(1, 1, [1]), "demands": [PageDemand(4)], "page_size": 4,
        "max_running_requests": 2,
        "default_rows": 4, "max_model_len": 65, "model_limit": 64,
    }  # fmt: skip
    with pytest.raises(MemoryBudgetError, match=r"65.*64"):
        plan_memory(**arguments)  # type: ignore[arg-type]


def test_an_arena_that_takes_all_is_named() -> None:
    def plan(transfer: int) -> MemoryPlan | str:
        return attempt({
            "budget_bytes": 1000, "costs": UnitCosts(10, 10, [10], transfer=transfer), "demands": [PageDemand(4)],
            "page_size": 4, "max_running_requests": 2, "default_rows": 4, "max_model_len": 8, "model_limit": 64,
        })  # fmt: skip

    text = plan(990)
    assert isinstance(text, str)
    advised = re.search(r"lower transfer_bytes from 990 to (\d+)", text)
    assert advised, text
    assert isinstance(plan(int(advised[1])), MemoryPlan)
    assert isinstance(plan(int(advised[1]) + 1), str), "it is the most that fits"


def allocated(session: Session | DraftModelDrafter) -> int:
    """Bytes of everything that the runner allocated for requests, and of what prompts' log-probabilities may take."""
    runner = session.runner
    table = runner.pools.req_to_token
    shared = runner.pools.shared
    tensors = [*([] if shared else runner.pools.kv.tensors), table.tables, table.req_to_state_slot, runner.last_tokens]
    sampling = [*vars(runner.sampling_table).values(), *runner.sampling_table.rules]
    tensors += [part for part in sampling if isinstance(part, Tensor) and part._base is None]
    if isinstance(head := runner.drafter, HeadRunner):
        tensors += [head.hidden, head.ahead.hidden, head.tokens]
    if (mamba := table.mamba_pool) is not None:
        tensors += [mamba.ring_start, mamba.ring_length]
        for layer_id in mamba.layer_ids:
            cache = vars(mamba.layer_cache(layer_id))
            tensors += [
                t for name, t in cache.items() if t is not None and not (shared and name in ("conv", "temporal"))
            ]
    scores = prompt_logprob_bytes(runner.model_config.vocab_size, runner.target.dtype.itemsize)
    held = sum(t.numel() * t.element_size() for t in tensors) + (scores if isinstance(session, Session) else 0)
    return held + (shared.plan.nbytes if shared else 0)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"state_mode": "replay", "mamba_ssm_dtype": "bfloat16"},
    {"dtype": "bfloat16", "page_size": 4, "max_running_requests": 3},
    {"max_model_len": None},
    {"speculative": SpeculativeConfig(num_draft_tokens=3, state_mode="intermediate")},
    {"speculative": SpeculativeConfig(num_draft_tokens=3, state_mode="replay")},
    {"speculative": SpeculativeConfig(num_draft_tokens=3, state_mode="intermediate", topk=2)},
]


@pytest.mark.parametrize("name", ["falcon-plain", "qwen-plain", "nemotron-experts", "nemotron-attention_alone"])
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_what_is_planned_is_what_is_allocated(name: str, changes: dict[str, Any], checkpoints: CheckpointStore) -> None:
    """To the byte: states, rings, intermediate caches, page tables, sampling tables, cursors, KV."""
    session = Session(checkpoints[name].path, budget_bytes=3_000_000, **changes)
    assert allocated(session) == session.plan.pool_bytes <= 3_000_000


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("name", ["qwen", "nemotron"])
def test_a_prediction_head_is_charged(name: str, drafts: int, tmp_path: Path) -> None:
    """Its layer of KV in every page, hidden states, and pages for drafts ahead of what is lent; its weights too."""
    write_with_head(HEADS[name], tmp_path)
    speculative = [SpeculativeConfig(method, num_draft_tokens=drafts) for method in ("mtp", "ngram")]
    with_head, without = (Session(tmp_path, budget_bytes=3_000_000, speculative=s, page_size=4) for s in speculative)
    assert allocated(with_head) == with_head.plan.pool_bytes <= 3_000_000
    assert sum(with_head.plan.costs.pages) == 2 * sum(without.plan.costs.pages)
    assert with_head.plan.weight_bytes > without.plan.weight_bytes


def test_a_draft_model_is_charged(checkpoints: CheckpointStore) -> None:
    """Its weights, and for each row two states, a page table and KV of the longest request."""
    target, draft = checkpoints["falcon-plain"].path, str(checkpoints["nemotron-plain"].path)
    found = []
    for spec in (SpeculativeConfig("draft", draft_model=draft), SpeculativeConfig("ngram")):
        found.append(Session(target, budget_bytes=10**7, speculative=spec, max_model_len=100))
    with_draft, without = (session.plan for session in found)
    assert (with_draft.num_rows, with_draft.num_pages) == (without.num_rows, without.num_pages)
    drafter = DraftModelDrafter(found[0].config, with_draft, VOCAB)
    pools = drafter.runner.pools
    assert pools.req_to_token.mamba_pool is not None
    slot = pools.req_to_token.mamba_pool.spec.slot_bytes()
    page, pages = sum(tensor[:, 0].nbytes for tensor in pools.kv.tensors), -(-(100 + 4) // 16)
    unused = slot + (pages - 1) * page  # row 0 needs one slot and one page alone
    held = allocated(drafter) + weight_bytes(drafter.runner.model)
    assert with_draft.pool_bytes - without.pool_bytes == held + unused


def test_a_short_plan_is_charged_for_short_tables(checkpoints: CheckpointStore) -> None:
    """max_model_len is cut to what fits, and page tables with it."""
    session = Session(checkpoints["falcon-plain"].path, budget_bytes=665_000, max_model_len=None)
    assert session.plan.max_model_len < session.runner.model_config.max_position_embeddings
    assert allocated(session) == session.plan.pool_bytes <= 665_000


def test_speculative_caches_are_charged_by_running_rows(checkpoints: CheckpointStore) -> None:
    path = checkpoints["falcon-plain"].path
    plain, wide = (
        Session(path, speculative=SpeculativeConfig(num_draft_tokens=n, state_mode="intermediate")).plan.costs
        for n in (1, 7)
    )
    layers, state = 2, 6 * 8 * 8 * 4
    assert wide.row - plain.row == (8 - 2) * layers * state
    conv = layers * 64 * 4
    assert wide.slot - plain.slot == (16 - 8) * conv


def test_too_small_a_budget_of_a_real_model(checkpoints: CheckpointStore) -> None:
    path = checkpoints["qwen-plain"].path
    exact = budget(path, rows=2, pages=10, max_model_len=160)
    plan = Session(path, budget_bytes=exact, max_running_requests=2).plan
    assert (plan.num_rows, plan.num_pages, plan.pool_bytes) == (2, 10, exact)
    with pytest.raises(MemoryBudgetError, match="max_model_len to 144"):
        Session(path, budget_bytes=exact - 1, max_running_requests=2)


def test_fewer_state_slots_than_running_requests_are_refused() -> None:
    plan = MemoryPlan(4, 6, (PageGroup(PageDemand(16), 8, 1),), 16, 64, UnitCosts(1, 1, [1]), 0)
    assert plan.cache_slots == 2 and "6 slots, 2 of them for cached prefixes" in str(plan.table())
    with pytest.raises(MemoryBudgetError, match="3 state slots for 4 running requests"):
        replace(plan, num_slots=3)
    assert replace(plan, num_slots=0).cache_slots == 0, "a model without recurrent layers"


def test_slots_for_cached_prefixes_are_never_negative() -> None:
    with pytest.raises(MemoryBudgetError, match="cache_slots is -1"):
        plan_memory(
            budget_bytes=10**6, costs=UnitCosts(1, 1, [1]), demands=[PageDemand(4)], page_size=4,
            max_running_requests=2, default_rows=4,
            max_model_len=64, model_limit=64, cache_slots=-1,
        )  # fmt: skip


def test_the_plan_prints_itself(checkpoints: CheckpointStore) -> None:
    plan = Session(checkpoints["falcon-plain"].path).plan
    assert "4 running requests" in plan.summary() and "160 tokens" in plan.summary()
    assert {what for what, _, _ in plan.table()} >= {
        "KV cache and recurrent state, shared",
        "weights",
        "running requests",
    }
    assert sum(size for _, _, size in plan.table()) == plan.pool_bytes + plan.weight_bytes
    assert plan.slabs is not None and f"or {plan.num_slots} slots" in str(plan.table())
    apart = replace(plan, slabs=None).table()
    assert {what for what, _, _ in apart} >= {"recurrent state", "KV cache"}
    assert "0 slots" in str(replace(plan, num_slots=0, slabs=None).table())


@examples(20, 300)
def test_rows_and_the_longest_request_need_not_fit_at_the_same_time(examples: int) -> None:
    """In one memory. Each of them fits alone, and with memory for both the plan is the usual one."""
    draw(examples, check_one_memory, plans())


def check_one_memory(arguments: dict[str, Any]) -> None:
    apart, together = attempt(arguments), attempt({**arguments, "one_memory": True})
    if not isinstance(apart, str) or isinstance(together, str):
        assert together == apart
        return
    costs, rows, longest = arguments["costs"], together.num_rows, together.max_model_len
    assert rows == (arguments["max_running_requests"] or 1) and longest == (arguments["max_model_len"] or longest)
    assert together.pool_bytes <= arguments["budget_bytes"] and costs.slot and together.num_slots == rows
    need = sum(demand.least(longest) * nbytes for demand, nbytes in zip(arguments["demands"], costs.pages))
    pages = sum(group.num_pages * group.page_bytes for group in together.groups)
    assert need > pages or arguments["cache_slots"], "the pages alone are too few, or slots of prefixes were in the way"
    assert arguments["budget_bytes"] >= (rows + 1) * costs.row + costs.slot + need


@examples(20, 300)
def test_shared_memory_is_no_larger_and_holds_the_longest_request(examples: int) -> None:
    """Groups whose pages have up to 6 tensors each."""
    draw(examples, check_shared, plans(), st.integers(0, 9), st.data())


def check_shared(arguments: dict[str, Any], own: int, data: st.DataObject) -> None:
    tensors = [data.draw(st.integers(1, 6)) for _ in arguments["demands"]]
    costs = arguments["costs"]
    sizes = [16 * size * count for size, count in zip(costs.pages, tensors)]
    plan = attempt(arguments | {"costs": replace(costs, pages=sizes), "budget_bytes": 16 * arguments["budget_bytes"]})
    assume(not isinstance(plan, str))
    assert isinstance(plan, MemoryPlan)
    cells = [16 * size for size in costs.pages]
    shared = share_memory(plan, cells, own, costs.slot)
    if shared is None:
        return
    slabs = shared.slabs
    assert slabs is not None and len(plan.groups) + bool(costs.slot) > 1 and shared.pool_bytes <= plan.pool_bytes
    assert shared.max_model_len == plan.max_model_len and shared.num_rows == plan.num_rows
    need = [
        -(-group.demand.least(plan.max_model_len) // share.per_slab) for group, share in zip(plan.groups, slabs.groups)
    ]
    assert sum(need) + bool(costs.slot) <= slabs.num_slabs
    assert slabs.num_slots == shared.num_slots and (not costs.slot or shared.num_slots >= shared.num_rows)
    for group, share, size, cell in zip(shared.groups, slabs.groups, sizes, cells):
        assert share.per_slab * size <= slabs.slab_bytes == share.apart * cell
        assert group.num_pages == slabs.num_slabs * share.per_slab
    assert any(name.endswith(", shared") for name, _, _ in shared.table()) and " or " in shared.summary()
