"""hybridrt.embedding: its numbers, its steps against the same steps run otherwise, and what a wrong call does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt.config import SpeculativeConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.embedding import (
    EmbeddedRuntime,
    EngineConfig,
    ForwardBatch,
    LoadedModel,
    Scratch,
    SpecInfo,
    build,
    load,
    plan_memory,
)
from hybridrt.errors import BackendError, ConfigError, HybridrtError, MemoryBudgetError, PoolError
from tests.support.checkpoints import Make, falcon, falcon_mamba, nemotron
from tests.support.tiny import write_tiny

ROWS, PAGE, LENGTH = 3, 4, 32
PROMPT = [5, 6, 7, 8, 9]
Models = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny models with random weights, by what they are made of."""
    found: dict[Any, LoadedModel] = {}

    def model(make: Callable[[], Make] = falcon, **options: Any) -> LoadedModel:
        key = (make, str(options))
        if key not in found:
            path = write_tiny(tmp_path_factory.mktemp("model"), make(), tokenizer=False)
            sizes: dict[str, Any] = {"max_running_requests": ROWS, "max_model_len": LENGTH, "page_size": PAGE}
            found[key] = load(EngineConfig(str(path), load_format="dummy", device="cpu", **sizes, **options))
        return found[key]

    return model


def make(loaded: LoadedModel, scratch: Scratch | None = None) -> EmbeddedRuntime:
    return build(loaded, plan_memory(loaded, budget_bytes=2**24, cache_slots=2), scratch)


def start(runtime: EmbeddedRuntime, row: int = 0, slot: int = 0, first_page: int = 0) -> torch.Tensor:
    """Prefills PROMPT; logits of its last token."""
    runtime.admit([row], [slot])
    runtime.write_pages([row] * 8, range(8), range(first_page, first_page + 8))
    batch = runtime.batch(input_ids=PROMPT, rows=[row], seq_lens=[5], query_lens=[5])
    return run(runtime, batch)[-1]


def run(runtime: EmbeddedRuntime, batch: ForwardBatch, accepted: Any = None) -> torch.Tensor:
    runtime.prepare(batch)
    logits = runtime.logits(runtime.forward(batch))
    if batch.num_decode_rows:
        runtime.commit(batch, accepted)
    return logits


def decode(runtime: EmbeddedRuntime, token: int, length: int, row: int = 0) -> torch.Tensor:
    return run(runtime, runtime.batch(input_ids=[token], rows=[row], seq_lens=[length]))[0]


def continuation(runtime: EmbeddedRuntime, first: torch.Tensor, length: int, count: int, row: int = 0) -> torch.Tensor:
    """Logits of `count` greedy tokens, the first among them: [count, vocab]."""
    logits = [first]
    for i in range(count - 1):
        logits.append(decode(runtime, int(logits[-1].argmax()), length + i + 1, row))
    return torch.stack(logits)


# -- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scratch", [Scratch(0, 0, 0), Scratch(1, 2, 3), Scratch(-1, 0, -2)])
def test_scratch_lies_where_the_host_engine_wants_it(scratch: Scratch, models: Models) -> None:
    """The same request on each row, slot and page that is not scratch; all give what the default numbering gives."""
    loaded = models(state_mode="replay")
    want = continuation(reference := make(loaded), start(reference), 5, 20)
    runtime = make(loaded, scratch)
    numbers, plan = runtime.numbers, runtime.plan
    rows = [r for r in range(plan.num_rows + 1) if r != numbers.rows.scratch]
    slots = [s for s in range(plan.num_slots + 1) if s != numbers.slots.scratch]
    pages = [p for p in range(plan.num_pages + 1) if p != numbers.pages.scratch]
    for i, row in enumerate(rows):
        runtime.admit([row], [slots[i]])
        runtime.write_pages([row] * 8, range(8), pages[8 * i : 8 * i + 8])
        first = run(runtime, runtime.batch(input_ids=PROMPT, rows=[row], seq_lens=[5], query_lens=[5]))[-1]
        assert torch.equal(continuation(runtime, first, 5, 20, row), want)
    padded = runtime.batch(
        input_ids=[3, 0], rows=[rows[0], numbers.rows.scratch], seq_lens=[25, 1], query_lens=[1, 1], num_decode_rows=2
    )
    assert padded.num_real == 1


def test_padding_touches_no_entry_of_a_request(models: Models) -> None:
    """By default row 0, slot 0 and page 0 are a request's."""
    runtime = make(models(state_mode="replay"))
    first = start(runtime)
    batch = runtime.batch(input_ids=[1, 1, 1], rows=[0, ROWS, ROWS], seq_lens=[6, 1, 1])
    padded = run(runtime, batch)[0]
    other = make(models(state_mode="replay"))
    assert torch.equal(first, start(other))
    assert torch.allclose(padded, decode(other, 1, 6), atol=1e-5)
    assert torch.allclose(decode(runtime, 2, 7), decode(other, 2, 7), atol=1e-5)


def test_numbers_are_a_rotation(models: Models) -> None:
    numbers = make(models(), Scratch(row=1, page=2)).numbers
    assert numbers.rows.scratch == 1 and numbers.rows.inside(1) == 0 and numbers.rows.inside(0) == ROWS
    assert numbers.tokens.inside(2 * PAGE + 3) == 3
    every = torch.arange(numbers.tokens.count)
    assert torch.equal(numbers.tokens.outside(numbers.tokens.inside(every)), every)
    assert numbers.tokens.inside(every).unique().numel() == numbers.tokens.count


def test_a_table_that_the_engine_computes_on_the_device(models: Models) -> None:
    loaded = models()
    want = continuation(reference := make(loaded), start(reference), 5, 10)
    runtime = make(loaded, Scratch(page=1))
    runtime.admit([0], [0])
    pages = torch.tensor([7, 0, 5, 3])
    places = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    with pytest.raises(PoolError, match="row 0 has no page for position 0"):
        runtime.batch(input_ids=PROMPT, rows=[0], seq_lens=[5], query_lens=[5])
    runtime.write_tokens(torch.zeros(16, dtype=torch.int64), torch.arange(16), places)
    first = run(runtime, runtime.batch(input_ids=PROMPT, rows=[0], seq_lens=[5], query_lens=[5]))[-1]
    assert torch.equal(continuation(runtime, first, 5, 10), want)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda x: np.array(x, np.uint8)])
def test_arrays_may_be_lists_numpy_or_torch(kind: Any, models: Models) -> None:
    runtime = make(models())
    runtime.admit(kind([0]), kind([0]))
    runtime.write_pages(kind([0, 0]), kind([0, 1]), kind([0, 1]))
    batch = runtime.batch(input_ids=kind(PROMPT), rows=kind([0]), seq_lens=kind([5]), query_lens=kind([5]))
    assert torch.equal(run(runtime, batch)[-1], start(make(models())))


# -- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_a_snapshot_restored_goes_on_as_the_request_would(mode: str, models: Models) -> None:
    """Behind a prefill, and in the middle of decoding, where a replay ring holds tokens."""
    runtime = make(models(state_mode=mode))
    first = start(runtime)
    half = continuation(runtime, first, 5, 8)
    runtime.snapshot([0], [4])
    token = int(half[-1].argmax())
    want = continuation(runtime, decode(runtime, token, 13), 13, 6)
    runtime.admit([2], [1])
    runtime.restore([4], [2])
    runtime.write_pages([2] * 8, range(8), range(8))  # reads the KV of row 0, and writes the same again
    got = continuation(runtime, decode(runtime, token, 13, row=2), 13, 6, row=2)
    assert torch.allclose(got, want, atol=1e-5)


def test_a_prompt_starts_from_the_state_in_another_slot(models: Models) -> None:
    runtime = make(models())
    start(runtime)
    runtime.snapshot([0], [4])
    runtime.admit([1], [1])
    runtime.write_pages([1, 1], [0, 1], [0, 1])
    ids, scratch = [3, 4], runtime.numbers.slots.scratch
    batch = runtime.batch(input_ids=ids, rows=[1], seq_lens=[7], query_lens=[2], read_slots=[4])
    want = run(runtime, runtime.batch(input_ids=ids, rows=[0], seq_lens=[7], query_lens=[2], read_slots=[scratch]))
    assert torch.allclose(run(runtime, batch), want, atol=1e-5)


@pytest.mark.parametrize("mode", ["intermediate", "replay"])
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_a_verify_step_keeps_what_was_accepted(mode: str, accepted: int, models: Models) -> None:
    loaded = models(speculative=SpeculativeConfig(num_draft_tokens=2, state_mode=mode))
    runtime, plain = make(loaded), make(loaded)
    start(runtime), start(plain)
    tokens = [3, 11, 4]
    batch = runtime.batch(input_ids=tokens, rows=[0], seq_lens=[8], spec_info=SpecInfo(3))
    verified = run(runtime, batch, [accepted])
    one_by_one = torch.stack([decode(plain, token, 6 + i) for i, token in enumerate(tokens[:accepted])])
    assert torch.allclose(verified[:accepted], one_by_one, atol=1e-5)
    following = 6 + accepted
    assert torch.allclose(decode(runtime, 2, following), decode(plain, 2, following), atol=1e-5)


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_graphs_give_what_eager_steps_give(mode: str, models: Models) -> None:
    runtime, eager = make(models(state_mode=mode)), make(models(state_mode=mode))
    graphs = runtime.capture(max_rows=2)
    assert graphs.fits(1) and graphs.fits(2) and not graphs.fits(3) and not graphs.fits(0)
    for each in (runtime, eager):
        start(each)
        start(each, row=2, slot=1, first_page=8)
    for i in range(20):  # longer than a ring
        step: dict[str, Any] = {"input_ids": [i, i + 1], "rows": [2, 0], "seq_lens": [6 + i % 10, 6 + i % 10]}
        if i % 10 == 0:
            for each in (runtime, eager):
                start(each)
                start(each, row=2, slot=1, first_page=8)
        assert torch.allclose(graphs.replay(**step), run(eager, eager.batch(**step)), atol=1e-5)


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_a_step_is_prepared_before_the_one_before_has_run(mode: str, models: Models) -> None:
    """Long enough that rings are folded, and with tokens that are filled in between."""
    runtime, plain = make(models(state_mode=mode)), make(models(state_mode=mode))
    want = continuation(plain, start(plain), 5, 11)
    token = start(runtime).argmax()[None].int()
    got, ahead = [], []
    for length in range(6, 16):
        ids = torch.zeros(1, dtype=torch.int32)
        ahead.append((ids, runtime.batch(input_ids=ids, rows=[0], seq_lens=[length])))
        runtime.prepare(ahead[-1][1])
        if len(ahead) == 3:
            got.append(fill_and_run(runtime, *ahead.pop(0), got[-1] if got else None, token))
    while ahead:
        got.append(fill_and_run(runtime, *ahead.pop(0), got[-1], token))
    assert torch.allclose(torch.stack(got), want[1:], atol=1e-5)


def fill_and_run(
    runtime: EmbeddedRuntime, ids: torch.Tensor, batch: ForwardBatch, last: torch.Tensor | None, first: torch.Tensor
) -> torch.Tensor:
    ids.copy_(first if last is None else last.argmax()[None])
    logits = runtime.logits(runtime.forward(batch))[0]
    runtime.commit(batch)
    return logits


# -- what a wrong call does -----------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"input_ids": [1, 2, 3, 4], "rows": [0, 1], "seq_lens": [6, 3], "query_lens": [1, 3],
                        "num_decode_rows": 1}  # fmt: skip
WRONG: dict[str, tuple[dict[str, Any], type[HybridrtError], str]] = {
    "a token too few": ({"input_ids": [1, 2, 3]}, BackendError, "input_ids has 3 tokens; the rows have 4"),
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
    "padding in front": ({"rows": [ROWS, 0]}, BackendError, "stands before a real one"),
    "a row outside the table": ({"rows": [0, ROWS + 1]}, PoolError, f"rows holds {ROWS + 1}"),
    "a negative row": ({"rows": [0, -1]}, PoolError, "rows holds -1"),
    "a row twice": ({"rows": [1, 1]}, PoolError, "rows holds 1 twice"),
    "a row that was not admitted": ({"rows": [0, 2]}, PoolError, "row 2 was not admitted"),
    "a token without a page": ({"seq_lens": [6, 9]}, PoolError, "row 1 has no page for position 8"),
    "a slot to read outside the pool": ({"read_slots": [9]}, PoolError, "read_slots holds 9"),
    "slots to read of all rows": ({"read_slots": [0, 0]}, BackendError, "1 extend rows need one entry each"),
}  # fmt: skip


def everything(runtime: EmbeddedRuntime) -> dict[str, torch.Tensor]:
    pool, table = runtime.pools.req_to_token.mamba_pool, runtime.pools.req_to_token
    assert pool is not None
    found = {"k": runtime.pools.kv.k, "table": table.req_to_token, "slots": pool.row_slots, "length": pool.ring_length}
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
    "a scratch slot": (lambda r: r.admit([2], [5]), PoolError, "slots holds 5, which is scratch"),
    "a slot outside": (lambda r: r.admit([2], [6]), PoolError, "slots holds 6; valid are 0 to 5, and 5 is scratch"),
    "a slot for two rows": (lambda r: r.admit([1, 2], [3, 3]), PoolError, "slots holds 3 twice"),
    "slots missing": (lambda r: r.admit([2]), PoolError, "admit needs a state slot"),
    "a slot too many": (lambda r: r.admit([2], [3, 4]), BackendError, "rows has 1 entries and slots 2"),
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
    "places of two shapes": (
        lambda r: r.write_tokens(torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([0])), BackendError, "shape"),
    "a snapshot of a row not admitted": (lambda r: r.snapshot([2], [4]), PoolError, "row 2 was not admitted"),
    "a snapshot into its own slot": (lambda r: r.snapshot([0], [0]), PoolError, "slot 0 is the row's own"),
    "a snapshot into scratch": (lambda r: r.snapshot([0], [5]), PoolError, "which is scratch"),
    "one slot for two snapshots": (lambda r: r.snapshot([0, 1], [4, 4]), PoolError, "slots holds 4 twice"),
    "restored from nowhere": (lambda r: r.restore([17], [0]), PoolError, "slots holds 17"),
    "restored into two rows": (lambda r: r.restore([4], [0, 1]), BackendError, "rows has 2 entries and slots 1"),
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
    """As where a slot was lent again, and the request that had it goes on."""
    runtime = running(models)
    runtime.admit([1], [0])
    with pytest.raises(PoolError, match="state slots of rows holds 0 twice"):
        runtime.batch(**GOOD)


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_a_step_that_was_not_committed_stops_what_depends_on_it(mode: str, models: Models) -> None:
    runtime = running(models, state_mode=mode)
    graphs = runtime.capture(max_rows=1)
    batch = runtime.batch(**GOOD)
    with pytest.raises(BackendError, match="commit is for the batch that forward ran last"):
        runtime.commit(batch)
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


@pytest.mark.parametrize("name", ["row", "slot", "page"])
@pytest.mark.parametrize("place", [10**6, -(10**6)])
def test_scratch_outside_its_table_is_refused(name: str, place: int, models: Models) -> None:
    with pytest.raises(PoolError, match=f"the scratch {name} is {place}"):
        make(models(), Scratch(**{name: place}))


def test_a_budget_is_needed_and_kept(models: Models) -> None:
    with pytest.raises(MemoryBudgetError, match="raise the budget"):
        plan_memory(models(), budget_bytes=2**10)
    plan = plan_memory(models(), budget_bytes=2**20)
    assert plan.pool_bytes <= 2**20
    with pytest.raises(TypeError):
        plan_memory(models())  # type: ignore[call-arg]


def test_a_group_of_other_size_is_refused(models: Models) -> None:
    with pytest.raises(ConfigError, match="tp_size is 2"):
        load(EngineConfig("embedded", tp_size=2), tp=TPGroup())


def test_a_model_without_attention_or_state_has_nothing_to_write(models: Models) -> None:
    runtime = make(models(falcon_mamba))
    assert runtime.plan.num_pages == 0
    runtime.write_pages([0], [0], [0])
    runtime.write_tokens(*torch.zeros(3, 1, dtype=torch.int64))
    assert start(runtime).isfinite().all()


def test_a_model_without_recurrent_layers_needs_no_slots(models: Models) -> None:
    runtime = make(models(attention_alone))
    assert runtime.plan.num_slots == 0
    runtime.admit([0])
    runtime.write_pages([0, 0], [0, 1], [0, 1])
    batch = runtime.batch(input_ids=PROMPT, rows=[0], seq_lens=[5], query_lens=[5])
    assert continuation(runtime, run(runtime, batch)[-1], 5, 3).isfinite().all()
    with pytest.raises(PoolError, match="no state to snapshot"):
        runtime.snapshot([0], [0])


def attention_alone() -> Make:
    return nemotron("*-*-")
