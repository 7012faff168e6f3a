"""What a decode worker has cached of a prompt does not travel; prefill workers have caches of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from tests.support.checkpoints import CASES, Make, falcon, falcon_mamba, nemotron, qwen
from tests.support.in_process import QueueChannel, decode_hello
from tests.support.levels import sweep
from tests.support.tiny import write_tiny
from tests.support.transfer_pair import Decoder, Prefiller, alone, build, greedy, run

FIRST = [5 + i * 7 % 120 for i in range(40)]
OTHERS: dict[str, Make] = {
    "qwen": qwen(), "attention": nemotron("*-*-"), "falcon_mamba": falcon_mamba(), "swa_ssm": CASES["swa_ssm-plain"],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("falcon"), falcon(), tokenizer=False)


def connected(path: Path, **changes: Any) -> tuple[Prefiller, Decoder]:
    hub: dict[str, torch.Tensor] = {}
    prefill, decode = Prefiller(build(path), hub), Decoder(build(path, **changes), hub)
    prefill.connect(decode)
    return prefill, decode


def finish(prefill: Prefiller, decode: Decoder, prompt: list[int], **params: Any) -> list[int]:
    request_id = decode.engine.add_request(prompt, greedy(**params))
    run(decode, prefill)
    return decode.tokens(request_id)


def bytes_of(decode: Decoder) -> int:
    return decode.worker.counters().bytes_fetched


def turns(path: Path, prefill: Prefiller, decode: Decoder) -> tuple[list[int], int, int]:
    """A turn and the next one. Returns the second prompt, and the bytes that travelled for each."""
    answer = finish(prefill, decode, FIRST)
    first, second = bytes_of(decode), [*FIRST, *answer, 9, 8, 7]
    assert finish(prefill, decode, second) == alone(path, [second], greedy())[0]
    return second, first, bytes_of(decode) - first


def test_of_a_second_turn_only_the_tail_and_the_state_travel(model: Path) -> None:
    prefill, decode = connected(model)
    second, _, travelled = turns(model, prefill, decode)
    layout, kept = decode.side.layout, (len(FIRST) + 5) // 4 * 4  # whole pages of what the first turn computed
    assert travelled == layout.image_bytes(len(second) - 1, kept) < layout.image_bytes(len(second) - 1)
    counters = decode.engine.counters()
    assert counters.cache_hit == kept and decode.outputs["request-1", 0].metrics.cached_tokens == kept
    # The prefill worker has computed FIRST but for its last token; it goes on from the last place on the grid.
    assert prefill.side.engine.counters().prompt_tokens == len(FIRST) - 1 + len(second) - 1 - (len(FIRST) - 1)
    decode.assert_empty()
    prefill.assert_empty()


@pytest.mark.parametrize("name", sweep(OTHERS, 4))
def test_other_models(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, OTHERS[name], tokenizer=False)
    _, first, travelled = turns(path, *connected(path))
    no_kv = name in ("falcon_mamba", "swa_ssm")  # or of a window alone
    assert travelled == first if no_kv else travelled < first


def test_a_prompt_that_is_cached_whole_is_not_asked_for(model: Path) -> None:
    prefill, decode = connected(model)
    answer = finish(prefill, decode, FIRST)
    again = [*FIRST, *answer]
    assert finish(prefill, decode, again) == alone(model, [again], greedy())[0]
    counters = decode.worker.counters()
    assert (counters.fetched, counters.cached) == (1, 1) and prefill.worker.counters().computed == 1


def test_a_prompt_that_no_message_can_hold_is_computed_here(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the connections to one worker after the other."""
    prefill, decode = connected(model)
    monkeypatch.setattr("hybridrt.transfer.decode.MAX_TOKENS", 30)
    tokens = [7] * 32
    assert finish(prefill, decode, tokens) == alone(model, [tokens], greedy())[0]
    counters = decode.worker.counters()
    assert (counters.workers, counters.fetched, counters.computed_here) == (1, 0, 1)
    assert finish(prefill, decode, FIRST[:20]) and decode.worker.counters().fetched == 1


def test_a_prompt_that_is_cached_while_it_waits_is_not_asked_for(tmp_path: Path) -> None:
    """The model has attention alone: nothing is left to ask for, and a worker ends the connection if it is."""
    path, prompt = write_tiny(tmp_path, OTHERS["attention"], tokenizer=False), [*FIRST, 9]
    room = Decoder(build(path), {}).side.layout.image_bytes(len(FIRST))
    prefill, decode = connected(path, transfer_bytes=room)
    ids = [decode.engine.add_request(prompt, greedy()) for _ in range(2)]
    run(decode, prefill)
    assert [decode.tokens(request_id) for request_id in ids] == alone(path, [prompt], greedy()) * 2
    counters = decode.worker.counters()
    assert (counters.fetched, counters.cached, counters.computed_here) == (1, 1, 0)
    assert prefill.worker.counters().refused == 0


@pytest.mark.parametrize("steps", sweep([None, 1, 3, 8], 4))
def test_what_was_cached_may_be_evicted_in_the_meantime(steps: int | None, model: Path) -> None:
    """At any moment: before the image has come it is asked for once more, after that the prompt is computed here."""
    prefill, decode = connected(model)
    answer = finish(prefill, decode, FIRST)
    second = [*FIRST, *answer, 9, 8, 7]
    request_id = decode.engine.add_request(second, greedy())
    if steps is None:
        start = decode.engine.start
        decode.engine.start = lambda *args: (start(*args), decode.engine.reset_prefix_cache())  # type: ignore[method-assign,assignment,func-returns-value]
    else:
        for _ in range(steps):
            decode.step()
            prefill.step()
        decode.engine.reset_prefix_cache()
    run(decode, prefill)
    assert decode.tokens(request_id) == alone(model, [second], greedy())[0]
    computed = decode.engine.counters().prompt_tokens - 1  # without the first turn's
    assert computed == (1 if steps else len(second))
    decode.assert_empty()
    prefill.assert_empty()


def test_an_evicted_part_is_asked_for_again(model: Path) -> None:
    prefill, decode = connected(model)
    second = [*FIRST, *finish(prefill, decode, FIRST), 9, 8, 7]
    decode.engine.add_request(second, greedy(), "x")
    decode.step()
    assert [attempt.start for attempt in decode.worker._attempts.values()] == [44]
    decode.engine.reset_prefix_cache()
    run(decode, prefill)
    assert decode.tokens("x") == alone(model, [second], greedy())[0]
    counters = decode.worker.counters()
    assert (counters.fetched, counters.retried, counters.computed_here) == (2, 1, 0)


def test_pages_that_a_request_counts_on_stay_while_it_runs(model: Path) -> None:
    prefill, decode = connected(model)
    second = [*FIRST, *finish(prefill, decode, FIRST), 9, 8, 7]
    decode.engine.add_request(second, greedy(30), "x")
    while not decode.engine.counters().running:
        decode.step()
        prefill.step()
    assert not decode.engine.reset_prefix_cache() and decode.side.engine._coordinator.pages.num_locked >= 11
    run(decode, prefill)
    assert decode.tokens("x") == alone(model, [second], greedy(30))[0]
    decode.assert_empty()


def test_samples_of_one_prompt(model: Path) -> None:
    prefill, decode = connected(model)
    second = [*FIRST, *finish(prefill, decode, FIRST), 9, 8, 7]
    request_id = decode.engine.add_request(second, greedy(n=2))
    run(decode, prefill)
    wanted = alone(model, [second], greedy())[0]
    assert [decode.outputs[request_id, i].token_ids for i in range(2)] == [wanted] * 2
    decode.assert_empty()


def test_salts_hide_prompts_on_both_sides(model: Path) -> None:
    prefill, decode = connected(model)
    for salt in ("a", "b", None):
        finish(prefill, decode, FIRST, cache_salt=salt)
    assert decode.engine.counters().cache_hit == prefill.side.engine.counters().cache_hit == 0
    again = [*FIRST, 3]
    finish(prefill, decode, again, cache_salt="b")
    assert decode.engine.counters().cache_hit == 40 and prefill.side.engine.counters().cache_hit == 39


@pytest.mark.parametrize("field", ["weights", "adapter"])
def test_a_worker_computes_no_prompt_of_other_weights_or_another_adapter(
    model: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker computes it then."""
    prefill, decode = connected(model)
    key = CacheKey("a", **{field: "other"})
    monkeypatch.setattr(decode.engine, "cache_key", lambda params: key)
    answer = finish(prefill, decode, FIRST, cache_salt="a")
    assert answer == alone(model, [FIRST], greedy())[0]
    counters = decode.worker.counters()
    assert (counters.fetched, counters.computed_here) == (0, 1)
    assert not prefill.side.engine.counters().prompt_tokens
    decode.assert_empty()
    prefill.assert_empty()


def test_a_start_behind_the_prompt_ends_the_connection(model: Path) -> None:
    prefill, decode = connected(model)
    for start in (3, 2**61, -1):
        ours, theirs = QueueChannel.pair()
        prefill.worker.attach(ours)
        theirs.send(decode_hello(decode.side.handshake))
        theirs.send({"type": "prefill", "key": "x", "tokens": [1, 2], "start": start})
        while prefill.worker.step():
            pass
        prefill.assert_empty()
    assert prefill.worker.counters().refused == 3


def test_an_order_of_nothing_ends_the_connection(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, OTHERS["attention"], tokenizer=False)
    prefill, decode = connected(path)
    ours, theirs = QueueChannel.pair()
    prefill.worker.attach(ours)
    theirs.send(decode_hello(decode.side.handshake))
    theirs.send({"type": "prefill", "key": "x", "tokens": [1, 2], "start": 2})
    while prefill.worker.step():
        pass
    assert prefill.worker.counters().refused == 1
    prefill.assert_empty()
