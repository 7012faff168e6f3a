"""Mistakes of an engine that drives the backends itself: each raises at once and names the wrong value."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridrt.attention import checks
from hybridrt.base.errors import BackendError, PoolError
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.base.sampling_params import SamplingParams
from tests.support.by_hand import ByHand, Row
from tests.support.checkpoints import CheckpointStore
from tests.support.speculation import Ask, Rig

Make = Callable[..., ByHand]


@pytest.fixture
def make(checkpoints: CheckpointStore) -> Make:
    return lambda name="falcon-plain", **options: ByHand(checkpoints[name].path, rows=3, **options)


def decoding(hand: ByHand) -> ForwardBatch:
    """A decode step of two rows after their prompts."""
    hand.admit(1, 2)
    hand.extend(Row(1, 0, [5, 6, 7]), Row(2, 0, [8, 9]))
    return hand.batch([Row(1, 3, [4]), Row(2, 2, [3])])


def mixed(hand: ByHand) -> ForwardBatch:
    decoding(hand)
    hand.admit(3)
    return hand.batch([Row(1, 3, [4]), Row(2, 2, [3])], [Row(3, 0, [7, 7, 7])])


@pytest.mark.parametrize("name", ["falcon-plain", "qwen-plain"])
def test_a_forgotten_commit_is_an_error(name: str, make: Make) -> None:
    hand = make(name, mode="replay")
    first = decoding(hand)
    hand.forward(first)
    following = hand.batch([Row(1, 4, [4]), Row(2, 3, [3])])
    with pytest.raises(BackendError, match="call commit"):
        hand.forward(following)
    hand.backend.commit(first)
    hand.decode(Row(1, 4, [4]), Row(2, 3, [3]))


def test_a_forgotten_commit_of_a_verify_step_is_an_error(make: Make) -> None:
    hand = make(tokens=3, mode="intermediate")
    decoding(hand)
    hand.admit(3)
    rows = [Row(1, 3, [4, 5, 6]), Row(2, 2, [3, 4, 5])]
    step = hand.batch(rows)
    hand.forward(step)
    with pytest.raises(BackendError, match="call commit"):
        hand.forward(hand.batch((), [Row(3, 0, [1])]))
    hand.backend.commit(step, torch.ones(2, dtype=torch.int32))
    hand.verify([Row(1, 4, [4, 5, 6]), Row(2, 3, [3, 4, 5])], [1, 1])


def test_a_dropped_step_needs_no_commit(make: Make) -> None:
    hand = make(mode="replay")
    batch = decoding(hand)
    hand.backend.prepare(batch)
    hand.backend.drop_step()
    hand.decode(Row(1, 3, [4]), Row(2, 2, [3]))


def test_a_step_that_fails_leaves_the_next_one_alone(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its plan and its commit: the engine continues with other requests."""
    rig = Rig(checkpoints["falcon-plain"].path, mode="replay")
    model: Any = rig.runner.model
    asks = [Ask([5, 6, 7], SamplingParams(max_tokens=6, temperature=0.0, seed=1))]
    want = rig.run(asks)
    forward, calls = model.forward, iter(range(100))

    def fails_once(batch: ForwardBatch) -> torch.Tensor:
        if next(calls) == 2:
            raise RuntimeError("once")
        out: torch.Tensor = forward(batch)
        return out

    monkeypatch.setattr(model, "forward", fails_once)
    engine = rig.engine()
    engine.add_request(asks[0].prompt, asks[0].params, "fails")
    outputs = [output for _ in range(3) for output in engine.step()]
    assert "once" in str(outputs[-1].error)
    assert [o.token_ids for o in rig.run(asks).values()] == [o.token_ids for o in want.values()]


def test_graph_replays_check_commits_and_modes(make: Make) -> None:
    hand = make(tokens=3, mode="replay")
    decoding(hand)
    backend, rows, lens = hand.backend, torch.tensor([1, 2]).int(), torch.tensor([6, 5]).int()
    backend.init_cuda_graph_state(2, 6)
    backend.init_cuda_graph_state(2, 2)
    verify = (rows, lens, ForwardMode.TARGET_VERIFY, SpecInfo(3), None)
    with pytest.raises(BackendError, match="spec_info"):
        backend.init_forward_metadata_replay_cuda_graph(2, 2, rows, lens, ForwardMode.DECODE, SpecInfo(3), None)
    with pytest.raises(BackendError, match="num_real is 3"):
        backend.init_forward_metadata_replay_cuda_graph(2, 3, *verify)
    with pytest.raises(BackendError, match="EXTEND"):
        backend.init_forward_metadata_replay_cuda_graph(2, 2, rows, lens, ForwardMode.EXTEND, None, None)
    backend.init_forward_metadata_replay_cuda_graph(2, 2, *verify)
    with pytest.raises(BackendError, match="call commit"):
        backend.init_forward_metadata_replay_cuda_graph(2, 2, *verify)
    backend.update_mamba_state_after_mtp_verify(torch.ones(2, dtype=torch.int32))
    plain = (rows, lens - 2, ForwardMode.DECODE, None, None)
    for _ in range(2):  # the commit is part of a plain step's graph
        backend.init_forward_metadata_replay_cuda_graph(2, 2, *plain)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "prefill as decode": ({"forward_mode": ForwardMode.DECODE}, "forward_mode is DECODE"),
    "mixed as prefill": ({"forward_mode": ForwardMode.EXTEND}, "forward_mode is EXTEND"),
    "verify without drafts": ({"forward_mode": ForwardMode.TARGET_VERIFY}, "forward_mode is TARGET_VERIFY"),
    "idle with rows": ({"forward_mode": ForwardMode.IDLE}, "forward_mode is IDLE"),
    "seq_lens of other rows": ({"seq_lens": torch.ones(2, dtype=torch.int32)}, r"seq_lens has shape \(2,\)"),
    "offsets without an end": ({"query_start_loc": torch.zeros(3, dtype=torch.int32)}, "query_start_loc has shape"),
    "positions missing": ({"positions": torch.zeros(4, dtype=torch.int32)}, "positions has shape"),
    "slots in two dimensions": ({"out_cache_loc": torch.zeros(5, 1, dtype=torch.int32)}, "out_cache_loc has shape"),
    "more real rows than rows": ({"num_real": 4}, "num_real is 4"),
    "more decode rows than rows": ({"num_decode_rows": 9}, "num_decode_rows 9"),
    "no host lengths": ({"seq_lens_cpu": None}, "seq_lens_cpu"),
    "host lengths of two rows": ({"seq_lens_cpu": [4, 3]}, "seq_lens_cpu has 2"),
    "two tokens in a decode row": ({"query_lens_cpu": [2, 1, 2]}, "each has 1 tokens"),
    "more tokens than there are": ({"query_lens_cpu": [1, 1, 4]}, "counts 6 tokens"),
    "a length without the new tokens": ({"seq_lens_cpu": [4, 3, 2]}, "row 2 has 3 new tokens and a length of 2"),
    "a slot outside the pool": ({"out_cache_loc": torch.full((5,), 10**6, dtype=torch.int32)}, "holds 1000000"),
    "a negative slot": ({"out_cache_loc": torch.full((5,), -1, dtype=torch.int32)}, "holds -1"),
    "a slot to read for each row, decode rows too": (
        {"read_state_slots": torch.zeros(3, dtype=torch.int32)},
        "1 extend rows need one entry each",
    ),
    "a slot to read outside the pool": ({"read_state_slots": torch.tensor([99], dtype=torch.int32)}, "holds 99"),
    "a row outside the pool": ({"req_pool_indices": torch.tensor([1, 2, 77], dtype=torch.int32)}, "holds 77"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_batch_that_contradicts_itself_is_refused(what: str, make: Make) -> None:
    hand = make()
    batch = mixed(hand)
    changes, message = WRONG[what]
    with pytest.raises(BackendError, match=message):
        hand.forward(replace(batch, **changes))
    assert hand.forward(batch).isfinite().all()


def test_a_state_slot_outside_the_pool_is_refused(make: Make) -> None:
    hand = make()
    batch = decoding(hand)
    hand.pools.req_to_token.req_to_state_slot[2] = 99
    with pytest.raises(BackendError, match="holds 99"):
        hand.forward(batch)


@pytest.mark.parametrize("page", [10**4, -1])
def test_a_page_outside_the_pool_that_is_only_read_is_refused(page: int, make: Make) -> None:
    """No new token is written there. A negative number would count from the pool's end."""
    hand = make()
    hand.admit(1)
    hand.extend(Row(1, 0, [5, 6, 7, 8, 9]))
    batch = hand.batch([Row(1, 5, [4])])
    hand.pools.req_to_token.write_pages(torch.tensor([1]), torch.tensor([0]), torch.tensor([page]))
    with pytest.raises(BackendError, match=f"req_to_token holds {page * 4}"):
        hand.forward(batch)


@pytest.mark.parametrize("mode", ["decode", 1, None])
def test_a_mode_that_is_none_is_refused(mode: Any, make: Make) -> None:
    hand = make()
    with pytest.raises(BackendError, match=f"forward_mode is {mode!r}"):
        hand.forward(replace(decoding(hand), forward_mode=mode))


@pytest.mark.parametrize(
    ("slots", "message"),
    [([0, 0], "req_to_state_slot of row 0 is 0, which is scratch"),
     ([2, 2], "req_to_state_slot of row 1 is 2, which belongs to another row")],
)  # fmt: skip
def test_debugging_finds_state_slots_that_are_shared_or_missing(
    slots: list[int], message: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a row was not admitted: requests would read each other's state."""
    monkeypatch.setattr(checks, "DEBUG", True)
    hand = make()
    batch = decoding(hand)
    hand.pools.req_to_token.req_to_state_slot[1:3] = torch.tensor(slots).int()
    with pytest.raises(BackendError, match=message):
        hand.forward(batch)


def test_debugging_finds_a_row_that_is_there_twice(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEBUG", True)
    hand = make()
    with pytest.raises(BackendError, match="req_pool_indices of row 1 is 1, which belongs to another row"):
        hand.forward(replace(decoding(hand), req_pool_indices=torch.tensor([1, 1], dtype=torch.int32)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": torch.tensor([1, 2, 3, 6], dtype=torch.int32)}, "query_start_loc begins with 1"),
        ({"seq_lens": torch.tensor([5, 3, 3], dtype=torch.int32)}, "seq_lens of row 0 is 5"),
        ({"seq_lens": torch.tensor([4, 3, 2], dtype=torch.int32)}, "seq_lens gives 2 for row 2"),
        ({"query_start_loc": torch.tensor([0, 1, 2, 4], dtype=torch.int32)}, "query_start_loc gives 2 for row 2"),
        ({"positions": torch.tensor([4, 2, 0, 1, 2], dtype=torch.int32)}, "positions gives 5 for row 0"),
    ],
)
def test_debugging_compares_the_device_with_the_host(
    changes: dict[str, Any], message: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "DEBUG", True)
    hand = make()
    batch = mixed(hand)
    with pytest.raises(BackendError, match=message):
        hand.forward(replace(batch, **changes))
    assert hand.forward(batch).isfinite().all()


@pytest.mark.parametrize(("token", "message"), [(0, "position 3 of row 0"), (3, "position 1 of row 2")])
def test_debugging_finds_a_place_that_is_another_tokens(
    token: int, message: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is inside the pool, but the page table names another for this token."""
    monkeypatch.setattr(checks, "DEBUG", False)
    hand = make()
    batch = mixed(hand)
    places = batch.out_cache_loc.clone()
    places[token] = places[2]
    assert hand.forward(replace(batch, out_cache_loc=places)).isfinite().all()
    monkeypatch.setattr(checks, "DEBUG", True)
    with pytest.raises(BackendError, match=f"out_cache_loc is {int(places[2])} for {message}, .* names"):
        hand.forward(replace(batch, out_cache_loc=places))
    assert hand.forward(batch).isfinite().all()


def test_debugging_lets_padding_drafts_go_nowhere(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEBUG", True)
    hand = make(tokens=3, mode="replay")
    decoding(hand)
    batch = hand.batch([Row(1, 3, [4, 5, 6]), Row(2, 2, [3, 4, 5])])
    batch.spec_info = SpecInfo(3, num_drafts=torch.tensor([2, 0], dtype=torch.int32))
    batch.out_cache_loc[4:] = 0
    hand.forward(batch)
    hand.commit([1, 1])
    batch.out_cache_loc[3] = 0
    with pytest.raises(BackendError, match="out_cache_loc is 0 for position 2 of row 1"):
        hand.forward(batch)


@pytest.mark.parametrize("name", ["falcon-plain", "falcon_mamba-plain"])
def test_debugging_finds_a_real_row_that_counts_as_padding(
    name: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = make(name)
    batch = decoding(hand)
    monkeypatch.setattr(checks, "DEBUG", True)
    with pytest.raises(BackendError, match="num_real is 1, but row 1 is request row 2"):
        hand.forward(replace(batch, num_real=1))
    hand.forward(batch)


def test_debugging_finds_it_in_a_graph_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = make(mode="replay")
    decoding(hand)
    monkeypatch.setattr(checks, "DEBUG", True)
    hand.backend.init_cuda_graph_state(2, 2)
    rows, lens = torch.tensor([1, 2]).int(), torch.tensor([4, 3]).int()
    step = (rows, lens, ForwardMode.DECODE, None, None)
    with pytest.raises(BackendError, match="num_real is 1, but row 1 is request row 2"):
        hand.backend.init_forward_metadata_replay_cuda_graph(2, 1, *step)
    hand.backend.init_forward_metadata_replay_cuda_graph(2, 2, *step)
    rows[1] = 0
    hand.backend.init_forward_metadata_replay_cuda_graph(2, 1, *step)


@pytest.mark.parametrize(
    ("what", "numbers", "message"),
    [
        ("admit_rows", ([1, 5], [1, 2]), "rows holds 5; valid are 0 to 4"),
        ("admit_rows", ([1, 2], [1, 9]), "slots holds 9; valid are 0 to 8"),
        ("admit_rows", ([-1, 2], [1, 2]), "rows holds -1"),
        ("write_pages", ([5], [0], [1]), "rows holds 5; valid are 0 to 4"),
        ("write_pages", ([1], [24], [1]), "page_indices holds 24; valid are 0 to 23"),
    ],
)
def test_rows_and_slots_outside_their_tables_are_refused(
    what: str, numbers: tuple[list[int], ...], message: str, make: Make
) -> None:
    """And nothing is written."""
    hand = make()
    decoding(hand)
    before, table = hand.snapshot(), hand.pools.req_to_token.req_to_token.clone()
    with pytest.raises(PoolError, match=message):
        getattr(hand.pools.req_to_token, what)(*map(torch.tensor, numbers))
    assert not any(hand.touched(before).values()) and torch.equal(table, hand.pools.req_to_token.req_to_token)
