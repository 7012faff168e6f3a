"""hybridrt.embedding: every wrong call raises a typed error, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import BackendError, ConfigError, HybridrtError, MemoryBudgetError, PoolError
from hybridrt.embedding import EmbeddedRuntime, Scratch, SpecInfo, plan_memory
from tests.support.embedded import LENGTH, ROWS, Models, decode, make, run, start

GOOD: dict[str, Any] = {"input_ids": [1, 2, 3, 4], "rows": [0, 1], "seq_lens": [6, 3], "query_lens": [1, 3],
                        "num_decode_rows": 1}  # fmt: skip
WRONG: dict[str, tuple[dict[str, Any], type[HybridrtError], str]] = {
    "a token too few": ({"input_ids": [1, 2, 3]}, BackendError, "input_ids has 3 tokens; the rows have 4"),
    "rows in bfloat16": ({"rows": torch.tensor([0, 1], dtype=torch.bfloat16)}, BackendError, "dtype torch.bfloat16"),
    "sparse rows": ({"rows": torch.tensor([0, 1]).to_sparse()}, BackendError, "layout torch.sparse_coo"),
    "rows with a gradient": ({"rows": torch.tensor([0.0, 1.0], requires_grad=True)}, BackendError, "torch.float32"),
    "tokens on the device, one too few": (
        {"input_ids": torch.zeros(3, dtype=torch.int32)}, BackendError, r"input_ids has shape \(3,\)"),
    "a token outside the vocabulary": ({"input_ids": [1, 2, 3, 10**6]}, BackendError, r"input_ids\[3\] is 1000000"),
    "tokens that are no integers": ({"input_ids": [1.0, 2.0, 3.0, 4.0]}, BackendError, "dtype float64"),
    "tokens that are text": ({"input_ids": "abcd"}, BackendError, "input_ids has 0 dimensions"),
    "booleans": ({"rows": [True, False]}, BackendError, "dtype bool"),
    "two dimensions": ({"seq_lens": [[6, 3]]}, BackendError, "2 dimensions"),
    "ragged lists": ({"input_ids": [[1], [2, 3, 4]]}, BackendError, "no array of integers"),
    "a number beyond int32": ({"seq_lens": [2**31, 3]}, BackendError, "int32"),
    "lengths of one row": ({"seq_lens": [6]}, BackendError, "rows has 2 entries and seq_lens 1"),
    "new tokens of three rows": ({"query_lens": [1, 2, 1]}, BackendError, "rows has 2 entries and query_lens 3"),
    "a length without its tokens": ({"seq_lens": [6, 2]}, BackendError, r"seq_lens\[1\] is 2 with 3 new tokens"),
    "negative new tokens": ({"query_lens": [1, -1]}, BackendError, r"with -1 new tokens"),
    "a length beyond the plan": ({"seq_lens": [LENGTH + 1, 3]}, BackendError, f"at most {LENGTH}"),
    "two tokens in a decode row": ({"query_lens": [2, 2]}, BackendError, "each has 1 tokens"),
    "more decode rows than rows": ({"num_decode_rows": 3}, BackendError, "num_decode_rows is 3"),
    "no rows": ({"rows": [], "seq_lens": [], "query_lens": [], "input_ids": []}, BackendError, "a batch of 0 rows"),
    "padding in front": ({"rows": [ROWS, 0]}, BackendError, "comes before a real one"),
    "a row outside the table": ({"rows": [0, ROWS + 1]}, PoolError, f"rows holds {ROWS + 1}"),
    "a negative row": ({"rows": [0, -1]}, PoolError, "rows holds -1"),
    "a row twice": ({"rows": [1, 1]}, PoolError, "rows holds 1 twice"),
    "a row that was not admitted": ({"rows": [0, 2]}, PoolError, "row 2 was not admitted"),
    "a token without a page": ({"seq_lens": [6, 9]}, PoolError, "row 1 has no page for position 8"),
    "a slot to read outside the pool": ({"read_state_slots": [9]}, PoolError, "read_state_slots holds 9"),
    "slots to read of all rows": ({"read_state_slots": [0, 0]}, BackendError, "1 extend rows need one entry each"),
}  # fmt: skip


def everything(runtime: EmbeddedRuntime) -> dict[str, torch.Tensor]:
    pool, table = runtime.pools.req_to_token.mamba_pool, runtime.pools.req_to_token
    assert pool is not None
    found = {"table": table.req_to_token, "slots": pool.req_to_state_slot, "length": pool.ring_length}
    found |= {f"kv {i}": tensor for i, tensor in enumerate(runtime.pools.kv.tensors)}
    for i in pool.layer_ids:
        found |= {f"conv {i}": pool.layer_cache(i).conv, f"state {i}": pool.layer_cache(i).temporal}
    return {name: tensor.clone() for name, tensor in found.items()}


def running(models: Models, **options: Any) -> EmbeddedRuntime:
    """Row 0 has its prompt, row 1 is admitted, row 2 is free."""
    runtime = make(models(**options))
    start(runtime)
    runtime.admit([1], [1])
    runtime.write_pages([1, 1], [0, 1], [8, 9])
    return runtime


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_batch_is_refused_and_changes_nothing(what: str, models: Models) -> None:
    runtime = running(models)
    changes, error, message = WRONG[what]
    before = everything(runtime)
    with pytest.raises(error, match=message):
        run(runtime, runtime.batch(**GOOD | changes))
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(runtime).items())
    assert run(runtime, runtime.batch(**GOOD)).isfinite().all()


CALLS: dict[str, tuple[Callable[[EmbeddedRuntime], object], type[HybridrtError], str]] = {
    "a scratch row": (lambda r: r.admit([ROWS], [2]), PoolError, f"rows holds {ROWS}, which is scratch"),
    "a scratch slot": (lambda r: r.admit([2], [5]), PoolError, "state_slots holds 5, which is scratch"),
    "a slot outside": (lambda r: r.admit([2], [6]), PoolError, "holds 6; valid are 0 to 5, and 5 is scratch"),
    "a slot for two rows": (lambda r: r.admit([1, 2], [3, 3]), PoolError, "state_slots holds 3 twice"),
    "slots missing": (lambda r: r.admit([2]), PoolError, "admit needs a state slot"),
    "a slot too many": (lambda r: r.admit([2], [3, 4]), BackendError, "rows has 1 entries and state_slots 2"),
    "a scratch page": (lambda r: r.write_pages([2], [0], [r.plan.num_pages]), PoolError, "which is scratch"),
    "a page index beyond": (lambda r: r.write_pages([2], [8], [0]), BackendError, r"page_indices\[0\] is 8"),
    "pages missing": (lambda r: r.write_pages([2, 2], [0, 1], [0]), BackendError, "rows has 2 entries and pages 1"),
    "indices missing": (lambda r: r.write_pages([2, 2], [0], [0, 1]), BackendError, "page_indices 1"),
    "a KV place outside": (
        lambda r: r.write_tokens(*torch.tensor([[0], [0], [10**6]])), PoolError, "places holds 1000000"),
    "a position outside": (
        lambda r: r.write_tokens(*torch.tensor([[0], [99], [0]])), PoolError, "positions holds 99"),
    "lists for a device table": (lambda r: r.write_tokens([0], [0], [0]), BackendError, "rows must be a tensor"),  # type: ignore[arg-type]
    "places that are no integers": (
        lambda r: r.write_tokens(*torch.tensor([[0.0], [0.0], [0.0]])), BackendError, "dtype torch.float32"),
    "places that are sparse": (
        lambda r: r.write_tokens(*[torch.tensor([1]).to_sparse()] * 3), BackendError, "layout torch.sparse_coo"),
    "places of two shapes": (
        lambda r: r.write_tokens(torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([0])), BackendError, "shape"),
    "a snapshot of a row not admitted": (lambda r: r.snapshot([2], [4]), PoolError, "row 2 was not admitted"),
    "a snapshot into its own slot": (lambda r: r.snapshot([0], [0]), PoolError, "slot 0 is the row's own"),
    "a snapshot into scratch": (lambda r: r.snapshot([0], [5]), PoolError, "which is scratch"),
    "one slot for two snapshots": (lambda r: r.snapshot([0, 1], [4, 4]), PoolError, "state_slots holds 4 twice"),
    "restored from nowhere": (lambda r: r.restore([17], [0]), PoolError, "state_slots holds 17"),
    "restored into two rows": (lambda r: r.restore([4], [0, 1]), BackendError, "rows has 2 entries and state_slots 1"),
    "graphs without rows": (lambda r: r.capture(max_rows=0), ConfigError, "max_bs is 0"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_a_wrong_call_is_refused_and_changes_nothing(what: str, models: Models) -> None:
    runtime = running(models)
    call, error, message = CALLS[what]
    before = everything(runtime)
    with pytest.raises(error, match=message):
        call(runtime)
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(runtime).items())
    assert run(runtime, runtime.batch(**GOOD)).isfinite().all()


def test_a_row_loses_its_pages_when_it_is_admitted_again(models: Models) -> None:
    runtime = running(models)
    runtime.admit([0], [2])
    with pytest.raises(PoolError, match="row 0 has no page for position 5"):
        runtime.batch(**GOOD)


def test_two_rows_with_one_slot_are_refused(models: Models) -> None:
    """As where a slot was lent again while the request that had it still runs."""
    runtime = running(models)
    runtime.admit([1], [0])
    with pytest.raises(PoolError, match="state slots of rows holds 0 twice"):
        runtime.batch(**GOOD)


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_a_step_that_was_not_committed_stops_what_depends_on_it(mode: str, models: Models) -> None:
    runtime = running(models, state_mode=mode)
    graphs = runtime.capture(max_rows=1)
    batch = runtime.batch(**GOOD)
    for other in (batch, None):
        with pytest.raises(BackendError, match="commit is for the batch that forward ran last"):
            runtime.commit(other)  # type: ignore[arg-type]
    runtime.prepare(batch)
    runtime.forward(batch)
    following = runtime.batch(**GOOD | {"seq_lens": [7, 6]})
    runtime.prepare(following)
    for early in (
        lambda: runtime.forward(following), lambda: runtime.snapshot([0], [4]), lambda: runtime.restore([4], [0]),
        lambda: runtime.admit([2], [2]), lambda: graphs.replay(input_ids=[1], rows=[0], seq_lens=[7]), runtime.capture,
    ):  # fmt: skip
        with pytest.raises((BackendError, PoolError), match="waits for its commit"):
            early()
    with pytest.raises(BackendError, match="accepted is for verify steps"):
        runtime.commit(batch, [1])
    runtime.commit(batch)
    with pytest.raises(BackendError, match="commit is for"):
        runtime.commit(batch)
    runtime.forward(following)


@pytest.mark.parametrize("mode", ["intermediate", "replay"])
def test_a_step_continues_where_the_state_stands(mode: str, models: Models) -> None:
    """Lengths that are off by one and agree with each other: after a prompt, in a graph, after a snapshot, at the
    first token, and after drafts."""
    runtime = running(models, speculative=SpeculativeConfig(num_draft_tokens=2, state_mode=mode))
    graphs = runtime.capture(max_rows=1)
    runtime.snapshot([0], [4])
    before = everything(runtime)
    wrong: list[dict[str, Any]] = [
        {"input_ids": [1], "rows": [0], "seq_lens": [5]}, {"input_ids": [1], "rows": [0], "seq_lens": [7]},
        {"input_ids": [1, 2], "rows": [0], "seq_lens": [6], "query_lens": [2]},
        {"input_ids": [1, 2], "rows": [1], "seq_lens": [3], "query_lens": [2]},
        {"input_ids": [1, 2], "rows": [1], "seq_lens": [6], "query_lens": [2], "read_state_slots": [4]},
        {"input_ids": [1, 2, 3], "rows": [0, 1], "seq_lens": [6, 3], "query_lens": [1, 2], "num_decode_rows": 1},
    ]  # fmt: skip
    for step in wrong:
        with pytest.raises(BackendError, match=r"row \d would continue at position \d, but its state includes \d"):
            run(runtime, runtime.batch(**step))
    with pytest.raises(BackendError, match="row 0 would continue at position 4, but its state includes 5 tokens"):
        graphs.replay(input_ids=[1], rows=[0], seq_lens=[5])
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(runtime).items())
    graphs.replay(input_ids=[1], rows=[0], seq_lens=[6])
    run(runtime, runtime.batch(input_ids=[1, 2, 3], rows=[0], seq_lens=[9], spec_info=SpecInfo(3)), [2])
    with pytest.raises(BackendError, match="row 0 would continue at position 9, but its state includes 8 tokens"):
        decode(runtime, 3, 10)
    runtime.restore([4], [1])
    with pytest.raises(BackendError, match="row 1 would continue at position 4, but its state includes 5 tokens"):
        decode(runtime, 3, 5, row=1)
    decode(runtime, 3, 9)
    decode(runtime, 3, 6, row=1)


def test_where_a_state_stands_may_be_unknown(models: Models) -> None:
    """In a slot that the host engine has filled by other means, in one that was copied while a step was prepared ahead,
    and after a step that was dropped. A step may be prepared again."""
    runtime = running(models)
    tail: dict[str, Any] = {"input_ids": [1, 2], "rows": [1], "seq_lens": [6], "query_lens": [2]}
    run(runtime, runtime.batch(**tail, read_state_slots=[3]))
    runtime.restore([3], [1])
    run(runtime, runtime.batch(**tail))
    runtime.snapshot([0], [4])
    decode(runtime, 1, 6)
    ahead = runtime.batch(input_ids=[1], rows=[0], seq_lens=[7])
    runtime.prepare(ahead)
    runtime.snapshot([0], [4])
    run(runtime, ahead)
    runtime.admit([1], [1])
    runtime.write_pages([1, 1], [0, 1], [8, 9])
    run(runtime, runtime.batch(**tail | {"seq_lens": [8]}, read_state_slots=[4]))
    runtime.prepare(runtime.batch(input_ids=[1], rows=[0], seq_lens=[8]))
    runtime.drop()
    decode(runtime, 1, 8)


def test_a_step_that_was_not_prepared_is_refused(models: Models) -> None:
    runtime = running(models)
    with pytest.raises(BackendError, match="prepare"):
        runtime.forward(runtime.batch(**GOOD))


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_a_step_runs_after_the_commit_of_the_one_before(mode: str, models: Models) -> None:
    runtime = running(models, state_mode=mode)
    first, second = (runtime.batch(**GOOD | {"seq_lens": [6 + i, 3 + 3 * i]}) for i in range(2))
    runtime.prepare(first)
    runtime.prepare(second)
    runtime.forward(first)
    with pytest.raises(BackendError, match="forward while a step waits for its commit"):
        runtime.forward(second)
    runtime.commit(first)
    assert runtime.forward(second).isfinite().all()


def test_a_dropped_step_needs_no_commit(models: Models) -> None:
    runtime = running(models, state_mode="replay")
    batch = runtime.batch(**GOOD)
    runtime.prepare(batch)
    runtime.forward(batch)
    runtime.drop()
    fresh = make(models(state_mode="replay"))
    assert torch.allclose(start(runtime), start(fresh), atol=1e-5)
    assert torch.allclose(decode(runtime, 3, 6), decode(fresh, 3, 6), atol=1e-5)


@pytest.mark.parametrize(
    ("accepted", "message"),
    [(None, "verify steps, which need it"), ([4], "accepted holds 4"), ([0], "accepted is 0 for a real row"),
     ([1, 1], r"shape \(2,\)"), ([], r"shape \(0,\)"), ([1.5], "float64"), (torch.ones(1), "float32")],
)  # fmt: skip
def test_what_a_verify_step_accepts_is_checked(accepted: Any, message: str, models: Models) -> None:
    runtime = make(models(speculative=SpeculativeConfig(num_draft_tokens=2, state_mode="replay")))
    start(runtime)
    batch = runtime.batch(input_ids=[3, 4, 5], rows=[0], seq_lens=[8], spec_info=SpecInfo(3))
    runtime.prepare(batch)
    runtime.forward(batch)
    with pytest.raises(BackendError, match=message):
        runtime.commit(batch, accepted)
    runtime.commit(batch, [2])


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"input_ids": [1], "rows": [0], "seq_lens": [LENGTH + 1]}, "at most"),
        ({"input_ids": [1]}, "input_ids has 1"),
        ({"rows": [0, ROWS]}, "which is scratch"),
        ({"rows": [0, 2]}, "not admitted"),
        ({"rows": [0, 0]}, "twice"),
        ({"seq_lens": [6, 9]}, "row 1 has no page for position 8"),
        ({"input_ids": [1, 2, 3], "rows": [0, 1, 2], "seq_lens": [6, 6, 6]}, "no graph holds 3 rows"),
    ],
)
def test_a_wrong_replay_is_refused(step: dict[str, Any], message: str, models: Models) -> None:
    runtime = running(models)
    graphs = runtime.capture(max_rows=2)
    before = everything(runtime)
    with pytest.raises(HybridrtError, match=message):
        graphs.replay(**{"input_ids": [1, 2], "rows": [0, 1], "seq_lens": [6, 3]} | step)
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(runtime).items())


@pytest.mark.parametrize("name", ["row", "state slot", "page"])
@pytest.mark.parametrize("place", [10**6, -(10**6)])
def test_scratch_outside_its_table_is_refused(name: str, place: int, models: Models) -> None:
    with pytest.raises(PoolError, match=f"the scratch {name} is {place}"):
        make(models(), Scratch(**{name.replace(" ", "_"): place}))


def test_a_budget_is_needed_and_kept(models: Models) -> None:
    with pytest.raises(MemoryBudgetError, match="raise the budget"):
        plan_memory(models(), budget_bytes=2**10)
    plan = plan_memory(models(), budget_bytes=2**20)
    assert plan.pool_bytes <= 2**20
    with pytest.raises(TypeError):
        plan_memory(models())  # type: ignore[call-arg]
