"""One request at a time or a few: how they stop, abort, fail, draw and are refused."""

import time
from collections.abc import Sequence

import msgspec
import pytest

from hybridrt.base.errors import EngineError, MemoryBudgetError, RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.request.outputs import Delta, DeltaQueue
from hybridrt.engine.request.sample_request import derive_seed
from tests.support.engine_harness import EOS, VOCAB, ByteTokenizer, Rig
from tests.support.mock_executor import MockHandle, tokens_alone
from tests.support.samples import Samples

ENDLESS = dict(max_tokens=30, ignore_eos=True, seed=1)


def stopping_seed(prompt: list[int], low: int, high: int) -> tuple[int, int]:
    """A seed with which the prompt's first end-of-sequence token comes at an index in [low, high), and the index."""
    for seed in range(1000):
        tokens = tokens_alone(prompt, seed, high, VOCAB)
        if EOS in tokens and low <= tokens.index(EOS):
            return seed, tokens.index(EOS)
    raise AssertionError("no such seed")


@pytest.mark.parametrize("overlap", [False, True])
def test_eos_ends_a_request_and_is_its_last_token(overlap: bool) -> None:
    seed, at = stopping_seed([1, 2], 4, 12)
    output = Rig(overlap=overlap).finish([1, 2], max_tokens=30, seed=seed)
    assert output.finish_reason == "stop" and output.token_ids[-1] == EOS and len(output.token_ids) == at + 1
    longer = Rig(overlap=overlap).finish([1, 2], max_tokens=30, seed=seed, ignore_eos=True)
    assert longer.finish_reason == "length" and len(longer.token_ids) == 30
    assert longer.token_ids[: at + 1] == output.token_ids


def test_stop_token_ids_hold_even_without_eos() -> None:
    tokens = tokens_alone([3], 5, 30, VOCAB)
    output = Rig().finish([3], max_tokens=30, ignore_eos=True, seed=5, stop_token_ids=[tokens[6]])
    assert output.finish_reason == "stop"
    assert output.token_ids == tokens[: tokens.index(tokens[6]) + 1]


def test_surplus_of_the_step_launched_ahead_is_dropped() -> None:
    seed, at = stopping_seed([1, 2], 4, 12)
    rig = Rig(overlap=True, late=2)
    output = rig.finish([1, 2], max_tokens=30, seed=seed)
    assert len(output.token_ids) == at + 1 == output.metrics.output_tokens
    assert rig.engine.counters().output_tokens == at + 1
    assert len(rig.executor.plans) == at + 2, "one step was launched ahead of the stop"


@pytest.mark.parametrize("drafts", [0, 3])
def test_never_runs_beyond_max_tokens_or_max_model_len(drafts: int) -> None:
    rig = Rig(max_model_len=16, drafts=drafts)
    cut = rig.finish([1] * 10, max_tokens=None, ignore_eos=True, seed=1)
    assert (len(cut.token_ids), cut.finish_reason) == (6, "length")
    asked = rig.finish([1] * 10, max_tokens=4, ignore_eos=True, seed=1)
    assert (len(asked.token_ids), asked.finish_reason) == (4, "length")
    decoded = [plan.decode for plan in rig.executor.plans]
    positions = [last for rows in decoded for last in (rows.computed + rows.num_drafts).tolist()]
    assert max(positions) <= 14, "the last token's KV is never written"
    assert len(rig.finish([1] * 15, max_tokens=9, seed=1).token_ids) == 1


def test_prompt_lengths_from_one_to_the_limit() -> None:
    rig = Rig(max_model_len=20, chunk=7)
    for length in range(1, 20):
        prompt = [length] * length
        output = rig.finish(prompt, max_tokens=3, ignore_eos=True, seed=length)
        assert output.token_ids == tokens_alone(prompt, length, min(3, 20 - length), VOCAB)


def test_bad_requests_are_refused_with_numbers_and_change_nothing() -> None:
    rig = Rig(max_model_len=20, pages=3, page_size=4)
    before = rig.engine.counters()
    for prompt, error, text in [
        ([], RequestError, "empty"),
        ([1, VOCAB], RequestError, f"token id {VOCAB} .* 0 to {VOCAB - 1}"),
        ([-1], RequestError, "token id -1"),
        ([1] * 20, RequestError, "20 tokens.*at most 19"),
        ([1] * 12, MemoryBudgetError, "needs 5 KV pages and there are 3: cut prompt . max_tokens to 13"),
        ("text", RequestError, "no tokenizer"),
        ([1.5], RequestError, "token ids"),
        (None, RequestError, "token ids"),
    ]:
        with pytest.raises(error, match=text):
            rig.engine.add_request(prompt, SamplingParams(max_tokens=100))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tokenizer"):
        rig.add([1], stop="x")
    with pytest.raises(RequestError, match="SamplingParams"):
        rig.engine.add_request([1], {"max_tokens": 3})  # type: ignore[arg-type]
    assert rig.engine.counters() == before and not rig.engine.has_unfinished()
    assert rig.finish([1], max_tokens=2, seed=0).token_ids == tokens_alone([1], 0, 2, VOCAB)
    assert rig.add([1], max_tokens=1) == "request-1", "refused requests take no number, so no seed"


def test_a_request_that_just_fits_the_pool_runs() -> None:
    rig = Rig(pages=3, page_size=4)
    assert len(rig.finish([1] * 5, max_tokens=8, ignore_eos=True, seed=0).token_ids) == 8
    with pytest.raises(MemoryBudgetError):
        rig.add([1] * 5, max_tokens=9)


def test_request_ids() -> None:
    rig = Rig()
    rig.add([1], "request-1", **ENDLESS)
    assert rig.add([2], **ENDLESS) == "request-2", "a given id is not given again"
    with pytest.raises(RequestError, match="in use"):
        rig.add([3], "request-2", **ENDLESS)
    rig.run()
    assert rig.add([3], "request-2", **ENDLESS) == "request-2", "a finished request's id is free again"


def test_abort_in_every_stage() -> None:
    rig = Rig(rows=1, chunk=4, overlap=True, late=2)
    assert not rig.engine.abort("nobody")
    running, waiting = rig.add([1] * 10, **ENDLESS), rig.add([2], **ENDLESS)
    assert rig.engine.abort(waiting) and not rig.engine.abort(waiting)
    rig.step()
    assert rig.engine.abort(running), "in the middle of its prefill, a step in flight"
    assert rig.pools.rows.num_used == 1, "held until the step in flight is consumed"
    rig.run()
    assert {o.finish_reason for o in rig.outputs.values()} == {"abort"}
    decoding = rig.add([3], **ENDLESS)
    for _ in range(5):
        rig.step()
    assert rig.engine.abort(decoding)
    rig.run()
    output = rig.outputs[decoding, 0]
    assert output.finish_reason == "abort" and output.error is None
    assert output.token_ids == tokens_alone([3], 1, len(output.token_ids), VOCAB) != []
    assert not rig.engine.abort(decoding), "already finished"
    assert rig.engine.counters().aborted == 3


def test_abort_when_nothing_is_in_flight_frees_at_once() -> None:
    rig = Rig(overlap=False)
    name = rig.add([1] * 5, **ENDLESS)
    rig.step()
    assert rig.pools.rows.num_used == 1
    rig.engine.abort(name)
    rig.assert_empty()
    assert rig.engine.has_unfinished(), "its output has not been handed out"
    assert [o.finish_reason for o in rig.step()] == ["abort"]


def test_n_samples_have_seeds_of_their_own_and_share_an_id() -> None:
    rig = Rig(rows=2)
    name = rig.add([1, 2], n=3, max_tokens=6, ignore_eos=True, seed=9)
    rig.run()
    for i, seed in enumerate([9, derive_seed(9, 1), derive_seed(9, 2)]):
        assert rig.outputs[name, i].token_ids == tokens_alone([1, 2], seed, 6, VOCAB)
        assert rig.outputs[name, i].index == i
    assert len({tuple(o.token_ids) for o in rig.outputs.values()}) == 3
    many = rig.add([1], n=3, **ENDLESS)
    rig.step()
    assert rig.engine.abort(many)
    rig.run()
    assert [rig.outputs[many, i].finish_reason for i in range(3)] == ["abort"] * 3


def test_seeds_come_from_the_engines_seed_and_the_order_of_arrival() -> None:
    def run(seed: int) -> list[list[int]]:
        rig = Rig(seed=seed)
        names = [rig.add([4], max_tokens=8, ignore_eos=True) for _ in range(3)]
        rig.run()
        return [rig.outputs[name, 0].token_ids for name in names]

    assert run(3) == run(3) == [tokens_alone([4], derive_seed(3, i), 8, VOCAB) for i in range(3)]
    assert run(3) != run(4)
    assert len({tuple(tokens) for tokens in run(3)}) == 3


def test_derive_seed_is_splitmix64() -> None:
    # First outputs of the published generator with state 1234567, less their lowest bit.
    assert [derive_seed(1234567, i) for i in range(3)] == [
        6457827717110365317 >> 1,
        3203168211198807973 >> 1,
        9817491932198370423 >> 1,
    ]
    assert all(0 <= derive_seed(s, 0) < 2**63 for s in (-1, 0, 2**63 - 1, 2**200))


def test_logprobs_are_one_dict_a_token() -> None:
    output = Rig().finish([1], max_tokens=3, ignore_eos=True, seed=2, logprobs=1)
    assert output.logprobs is not None and len(output.logprobs) == 3
    assert all(lp[token] == -0.5 and len(lp) == 2 for lp, token in zip(output.logprobs, output.token_ids, strict=True))
    assert Rig().finish([1], max_tokens=3, seed=2).logprobs is None


def test_metrics_and_counters() -> None:
    rig = Rig(drafts=3)
    metrics = rig.finish([1] * 20, max_tokens=20, ignore_eos=True, seed=2).metrics
    assert metrics.first_token_time is not None and metrics.finish_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finish_time
    assert (metrics.prompt_tokens, metrics.output_tokens) == (20, 20)
    counters = rig.engine.counters()
    assert (counters.prompt_tokens, counters.output_tokens, counters.finished) == (20, 20, 1)
    assert counters.proposed == metrics.proposed > counters.accepted == metrics.accepted > 0
    assert counters.steps == len(rig.executor.plans) and counters.free_rows == 4


def test_the_first_tokens_time_is_the_firsts() -> None:
    rig = Rig(overlap=False)
    rig.add([1], **ENDLESS)
    rig.step()
    seen = time.monotonic()
    rig.run()
    (metrics,) = (sample.metrics for sample in rig.outputs.values())
    assert metrics is not None and metrics.first_token_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= seen


def test_a_delta_holds_what_was_gained_alone() -> None:
    rig = Rig()
    rig.add([1], max_tokens=5, ignore_eos=True, seed=0, logprobs=1)
    deltas = []
    while rig.engine.has_unfinished():
        deltas += rig.step()
    assert [len(d.token_ids) for d in deltas] == [1] * 5
    assert [d.finish_reason for d in deltas] == [None] * 4 + ["length"]
    assert [d.metrics is None for d in deltas] == [True] * 4 + [False]


def test_a_reader_that_lags_gets_the_gains_of_several_steps_in_one_delta() -> None:
    rig = Rig(tokenizer=ByteTokenizer(), vocab=128)
    queue = DeltaQueue()
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=0, logprobs=1, n=2)
    name = rig.engine.submit(rig.engine.prepare([1], params), queue=queue)
    taken = []
    while rig.engine.has_unfinished():
        rig.engine.run_step()
        if len(rig.executor.plans) % 4 == 0:
            taken.append(queue.take_deltas())
    taken.append(queue.take_deltas())
    assert max(len(delta.token_ids) for deltas in taken for delta in deltas) > 1
    assert all(len({delta.index for delta in deltas}) == len(deltas) for deltas in taken), "one a sample"
    samples = Samples()
    for deltas in taken:
        samples.add(deltas)
    for index in range(2):
        tokens = tokens_alone([1], derive_seed(0, 1) if index else 0, 9, 128)
        sample = samples[name, index]
        assert (sample.token_ids, sample.text) == (tokens, ByteTokenizer().decode(tokens))
        assert sample.logprobs is not None and len(sample.logprobs) == 9
    assert queue.take_deltas() == [] and not queue.moved


def test_deltas_are_plain_data() -> None:
    rig = Rig(overlap=False)
    rig.add([1], max_tokens=2, ignore_eos=True, seed=0, logprobs=1)
    failing = rig.add([2], **ENDLESS)
    deltas = rig.step()
    rig.engine.fail(failing, ValueError("why"))
    while rig.engine.has_unfinished():
        deltas += rig.step()
    sent = msgspec.msgpack.encode(deltas, enc_hook=str)
    came = msgspec.msgpack.decode(sent, type=list[Delta], dec_hook=lambda kind, text: kind(text))
    assert any(delta.error is not None for delta in came)
    for ours, theirs in zip(deltas, came, strict=True):
        assert str(ours.error) == str(theirs.error)
        ours.error = theirs.error = None
    assert came == deltas


def test_text_is_made_once_where_it_is_read_at_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ByteTokenizer()
    rig = Rig(tokenizer=tokenizer, vocab=128)
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: (decoded.append(len(ids)), decode(ids))[1])
    rig.engine.add_request([1], SamplingParams(max_tokens=20, ignore_eos=True, seed=0), stream=False)
    before = len(decoded)
    rig.run()
    assert len(decoded) == before + 1 and decoded[-1] == 21


def test_without_streaming_only_the_last_output_comes() -> None:
    rig = Rig()
    rig.engine.add_request([1], SamplingParams(max_tokens=5, ignore_eos=True, seed=0), stream=False)
    outputs = []
    while rig.engine.has_unfinished():
        outputs += rig.step()
    assert [len(o.token_ids) for o in outputs] == [5]


@pytest.mark.parametrize("stream", [False, True])
def test_text_leaves_out_the_stopping_token_and_the_stop_string(stream: bool) -> None:
    rig = Rig(tokenizer=ByteTokenizer(), vocab=256, max_model_len=200, pages=200, page_size=1)
    tokens = tokens_alone(list(b"go"), 3, 60, 256)
    text = ByteTokenizer().decode(tokens[:40])
    spot = next(i for i in range(5, 38) if "\N{REPLACEMENT CHARACTER}" not in text[i : i + 2])
    stop, params = text[spot : spot + 2], dict(max_tokens=60, ignore_eos=True, seed=3)
    name = rig.engine.add_request("go", SamplingParams(stop=["never seen", stop], **params), stream=stream)
    rig.run()
    output = rig.outputs[name, 0]
    assert output.finish_reason == "stop" and output.text == text[: text.index(stop)]
    assert output.token_ids == tokens[: len(output.token_ids)]
    assert ByteTokenizer().decode(output.token_ids).startswith(output.text + stop)
    name = rig.engine.add_request("go", SamplingParams(stop_token_ids=[tokens[9]], **params), stream=stream)
    rig.run()
    end = tokens.index(tokens[9])
    assert rig.outputs[name, 0].token_ids == tokens[: end + 1]
    assert rig.outputs[name, 0].text == ByteTokenizer().decode(tokens[:end]).rstrip("\N{REPLACEMENT CHARACTER}")


def test_a_stop_string_before_an_unfinished_character_is_a_stop_even_at_the_limit() -> None:
    class Endings(ByteTokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return b"".join(b"END\xe2" for t in token_ids if t < 256).decode(errors="replace")

    output = Rig(tokenizer=Endings()).finish([1], max_tokens=1, ignore_eos=True, seed=0, stop="D")
    assert (output.finish_reason, output.text) == ("stop", "EN")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["fail_launch", "fail_result"])
def test_a_failed_step_ends_its_requests_alone(where: str, overlap: bool) -> None:
    rig = Rig(rows=2, chunk=32, overlap=overlap, late=1)
    names = [rig.add([i], max_tokens=12, ignore_eos=True, seed=i) for i in (1, 2, 3)]
    getattr(rig.executor, where)[4] = ValueError("device lost")
    rig.run()
    for name in names[:2]:
        output = rig.outputs[name, 0]
        assert output.finish_reason == "abort" and isinstance(output.error, EngineError)
        assert "device lost" in str(output.error) and isinstance(output.error.__cause__, ValueError)
    assert rig.outputs[names[2], 0].token_ids == tokens_alone([3], 3, 12, VOCAB), "it was waiting, and runs"
    assert rig.engine.counters().failed == 2
    assert rig.finish([5], max_tokens=4, ignore_eos=True, seed=0).token_ids == tokens_alone([5], 0, 4, VOCAB)


def test_a_device_that_is_lost_before_a_step_is_read_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a step has ended is asked first, and on a lost device this raises as reading the step does."""
    rig = Rig(overlap=True, late=2)
    name = rig.add([1], **ENDLESS)
    rig.executor.fail_result[2] = ValueError("device lost")
    monkeypatch.setattr(MockHandle, "ready", lambda handle: handle.error is not None and handle.result() is None)
    rig.run()
    output = rig.outputs[name, 0]
    assert output.finish_reason == "abort" and isinstance(output.error, EngineError)
    assert isinstance(output.error.__cause__, ValueError)


def test_a_failed_step_does_not_end_what_has_ended_before() -> None:
    rig = Rig(overlap=True, late=2)
    gone, other = rig.add([1], **ENDLESS), rig.add([2], **ENDLESS)
    rig.executor.fail_result[2] = ValueError("device lost")
    for _ in range(3):
        rig.step()
    rig.engine.abort(gone)
    rig.run()
    assert rig.outputs[gone, 0].error is None and rig.outputs[other, 0].error is not None
    assert rig.engine.counters().aborted == rig.engine.counters().failed == 1


def test_an_interrupted_launch_ends_its_requests_and_is_raised() -> None:
    rig = Rig()
    rig.add([1], **ENDLESS)
    rig.executor.fail_launch[2] = KeyboardInterrupt()
    rig.step(), rig.step()
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    rig.run()
    assert rig.outputs["request-0", 0].finish_reason == "abort"


def test_an_interrupt_while_waiting_loses_nothing() -> None:
    rig = Rig()
    rig.add([1], **ENDLESS)
    rig.step(), rig.step()
    rig.executor.interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    rig.run()
    assert rig.outputs["request-0", 0].token_ids == tokens_alone([1], 1, 30, VOCAB)


def test_a_result_of_the_wrong_shape_fails_its_step() -> None:
    rig = Rig(overlap=False)
    rig.add([1], **ENDLESS)
    rig.step()
    rig.executor.decode = lambda row, tenant: []  # type: ignore[method-assign]
    rig.run()
    assert "gained 0 tokens" in str(rig.outputs["request-0", 0].error)
    rig = Rig(overlap=False)
    rig.add([1], **ENDLESS)
    rig.executor.extend = lambda row, tenant: []  # type: ignore[method-assign]
    rig.run()
    assert "1 rows sampled; the result has 0 lists" in str(rig.outputs["request-0", 0].error)


def test_a_request_whose_text_cannot_be_made_fails_alone() -> None:
    class Choking(ByteTokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            if 42 in token_ids:
                raise UnicodeError("42 is no text")
            return super().decode(token_ids)

    rig = Rig(tokenizer=Choking(), vocab=256)
    seed = next(s for s in range(999) if 42 in tokens_alone([1], s, 20, 256))
    bad = rig.add([1], max_tokens=20, ignore_eos=True, seed=seed)
    good_seed = next(s for s in range(999) if 42 not in tokens_alone([1], s, 20, 256))
    good = rig.add([1], max_tokens=20, ignore_eos=True, seed=good_seed)
    rig.run()
    assert "42 is no text" in str(rig.outputs[bad, 0].error)
    assert rig.outputs[good, 0].token_ids == tokens_alone([1], good_seed, 20, 256)


def test_a_request_whose_text_cannot_be_made_can_be_aborted() -> None:
    tokenizer = ByteTokenizer()
    rig = Rig(tokenizer=tokenizer)
    name = rig.engine.add_request([1], SamplingParams(max_tokens=20, ignore_eos=True), stream=False)
    for _ in range(4):
        rig.step()
    tokenizer.decode = lambda token_ids, **_: "".join(map(chr, [-1]))  # type: ignore[method-assign]
    assert rig.engine.abort(name)
    rig.run()
    assert isinstance(rig.outputs[name, 0].error, EngineError)


def test_lost_pool_entries_are_an_error_not_an_endless_loop() -> None:
    rig = Rig(rows=1)
    (row,) = rig.pools.rows.alloc(1)
    name = rig.add([1], **ENDLESS)
    with pytest.raises(EngineError, match=r"nothing can be scheduled.*waiting=1"):
        rig.step()
    rig.engine.abort(name)
    rig.pools.rows.free([row])
    rig.run()
