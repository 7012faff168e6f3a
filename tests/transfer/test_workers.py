"""Prefill on one worker, decode on another: same tokens, whatever happens to the prefill side."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt import LLM, SpeculativeConfig
from hybridrt.base.errors import ConfigError, HandshakeError, TransferError
from hybridrt.runtime.step.plan import StateCopy, StepPlan
from tests.support.checkpoints import Make, falcon, falcon_mamba, jamba, lfm2, mamba, mamba2, nemotron, qwen
from tests.support.in_process import QueueChannel, decode_hello
from tests.support.levels import sweep
from tests.support.ling25 import ling25
from tests.support.newer_checkpoints import bamba, granite, kimi, lfm3, ling, minimax, olmo, qwen35_moe, zamba2
from tests.support.tiny import write_tiny
from tests.support.transfer_pair import Decoder, Prefiller, alone, build, greedy, run
from tests.support.windowed_checkpoints import gpt_oss, lara

MODELS: dict[str, Make] = {
    "falcon": falcon(), "nemotron": nemotron("M*-ME"), "qwen": qwen(), "attention": nemotron("*-*-"),
    "mamba": nemotron("MM-"), "falcon_mamba": falcon_mamba(), "jamba": jamba(), "lfm2": lfm2(), "mamba-1": mamba(),
    "lfm3": lfm3(),
    "mamba-2": mamba2(),
    "qwen35": qwen35_moe(), "granite": granite(), "olmo": olmo(), "bamba": bamba(),
    "zamba2": zamba2(), "minimax": minimax(), "kimi": kimi(), "ling": ling(num_hidden_layers=2),
    "ling25": ling25(num_hidden_layers=2), "one tap": falcon(mamba_d_conv=1, num_hidden_layers=1),
    "gpt_oss": gpt_oss(num_hidden_layers=2), "lara": lara(),
}  # fmt: skip
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(3, 131) for _ in range(n)] for n in (1, 2, 5, 17, 40, 70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("falcon"), falcon(), tokenizer=False)


@pytest.mark.parametrize("name", sweep(MODELS, 9, thin=4))
def test_same_tokens_as_one_process(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, MODELS[name], tokenizer=False)
    hub: dict[str, torch.Tensor] = {}
    prefill, decode = Prefiller(build(path), hub), Decoder(build(path), hub, compute_here=False)
    prefill.connect(decode)
    ids = [decode.engine.add_request(prompt, greedy()) for prompt in PROMPTS]
    run(decode, prefill)
    assert [decode.tokens(i) for i in ids] == alone(path, PROMPTS, greedy())
    assert decode.worker.counters().fetched == len(PROMPTS) - 1, "one token needs no prefill"
    assert prefill.worker.counters().computed == len(PROMPTS) - 1
    decode.assert_empty()
    prefill.assert_empty()


@pytest.mark.parametrize("ours, theirs", [("classic", "replay"), ("replay", "classic")])
def test_each_side_keeps_its_state_its_own_way(ours: str, theirs: str, model: Path) -> None:
    hub: dict[str, torch.Tensor] = {}
    prefill, decode = Prefiller(build(model, state_mode=ours), hub), Decoder(build(model, state_mode=theirs), hub)
    prefill.connect(decode)
    ids = [decode.engine.add_request(prompt, greedy(24)) for prompt in PROMPTS]
    run(decode, prefill)
    assert [decode.tokens(i) for i in ids] == alone(model, PROMPTS, greedy(24))


@pytest.fixture
def pair(model: Path) -> tuple[Prefiller, Decoder]:
    hub: dict[str, torch.Tensor] = {}
    return Prefiller(build(model), hub), Decoder(build(model), hub)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return alone(model, PROMPTS, greedy())


def test_tokens_of_the_model_differ_from_prompt_to_prompt(expected: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)


def test_text_and_samples_and_ids(pair: tuple[Prefiller, Decoder], model: Path) -> None:
    prefill, decode = pair
    prefill.connect(decode)
    request_id = decode.engine.add_request(PROMPTS[3], greedy(4), "mine", stream=False)
    run(decode, prefill)
    assert request_id == "mine" and len(decode.tokens("mine")) == 4
    again = decode.engine.add_request(PROMPTS[3], greedy(4), "mine")
    run(decode, prefill)
    assert again == "mine" and decode.worker.counters().fetched == 2
    decode.assert_empty()


def test_an_answer_that_was_cut_goes_on(pair: tuple[Prefiller, Decoder], expected: list[list[int]]) -> None:
    """Its first tokens are there while its prompt waits for a prefill worker."""
    prefill, decode = pair
    prefill.connect(decode)
    params = [greedy(resume_token_ids=tokens[:3]) for tokens in expected]
    ids = [decode.engine.add_request(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    run(decode, prefill)
    assert [tokens[:3] + decode.tokens(i) for tokens, i in zip(expected, ids, strict=True)] == expected
    assert decode.worker.counters().fetched == len(PROMPTS) - 1
    decode.assert_empty()
    prefill.assert_empty()


@pytest.mark.parametrize("seed", sweep(range(24), 12, 13, thin=3))
def test_a_prefill_worker_dies_at_any_moment(
    seed: int, pair: tuple[Prefiller, Decoder], expected: list[list[int]]
) -> None:
    rng = random.Random(seed)
    prefill, decode = pair
    prefill.connect(decode)
    running = decode.engine.add_request([7], greedy(60))  # decodes all the while
    ids = [decode.engine.add_request(prompt, greedy()) for prompt in PROMPTS]
    for _ in range(rng.randrange(40)):
        decode.step()
        if rng.random() < 0.7:
            prefill.step()
    prefill.die()
    run(decode)
    assert [decode.tokens(i) for i in ids] == expected
    assert len(decode.tokens(running)) == 60
    assert all(output.error is None for output in decode.outputs.values())
    counters = decode.worker.counters()
    assert counters.workers == 0 and counters.fetched + counters.computed_here == len(PROMPTS) - 1
    decode.assert_empty()


def test_who_sees_that_a_worker_is_gone_knows_why(pair: tuple[Prefiller, Decoder]) -> None:
    """Other threads ask whether it is connected."""
    prefill, decode = pair
    worker, connected = decode.worker, list[bool]()
    name = prefill.connect(decode)
    worker.on_lost = lambda lost, error, fetched: connected.append(worker.is_connected(lost))
    worker.disconnect(name, "it answers wrongly")
    assert connected == [True] and not worker.is_connected(name)


def test_deaths_hit_every_phase(pair: tuple[Prefiller, Decoder]) -> None:
    """The test above would prove little if nothing was ever being read when the worker died."""
    prefill, decode = pair
    prefill.connect(decode)
    decode.engine.add_request(PROMPTS[5], greedy())
    phases = set()
    for _ in range(40):
        decode.step()
        prefill.step()
        phases |= {bool(attempt.reading) for attempt in decode.worker._attempts.values()}
    assert phases == {False, True}


@pytest.mark.parametrize("seed", sweep(range(12), 6, 7))
def test_another_worker_takes_over(seed: int, model: Path, expected: list[list[int]]) -> None:
    rng, hub = random.Random(seed), dict[str, torch.Tensor]()
    first, second = (Prefiller(build(model), hub, name) for name in ("first", "second"))
    decode = Decoder(build(model), hub, compute_here=False)
    for worker in (first, second):
        worker.connect(decode)
    ids = [decode.engine.add_request(prompt, greedy()) for prompt in PROMPTS]
    for _ in range(rng.randrange(25)):
        for side in (decode, first, second):
            side.step()
    first.die()
    run(decode, second)
    assert [decode.tokens(i) for i in ids] == expected
    decode.assert_empty()
    second.assert_empty()


def test_without_a_worker_a_request_fails_alone(model: Path) -> None:
    hub: dict[str, torch.Tensor] = {}
    prefill, decode = Prefiller(build(model), hub), Decoder(build(model), hub, compute_here=False)
    prefill.connect(decode)
    running = decode.engine.add_request([7], greedy(30))
    lost = decode.engine.add_request(PROMPTS[5], greedy())
    decode.step()
    prefill.die()
    run(decode)
    output = decode.outputs[lost, 0]
    assert output.finish_reason == "abort" and isinstance(output.error.__cause__, TransferError)  # type: ignore[union-attr]
    assert len(decode.tokens(running)) == 30
    never = decode.engine.add_request(PROMPTS[4], greedy())
    run(decode)
    assert "no prefill worker is connected" in str(decode.outputs[never, 0].error)
    decode.assert_empty()


@pytest.mark.parametrize("seed", sweep(range(16), 8, 9))
def test_requests_are_cancelled_at_any_moment(
    seed: int, pair: tuple[Prefiller, Decoder], expected: list[list[int]]
) -> None:
    rng = random.Random(seed)
    prefill, decode = pair
    prefill.connect(decode)
    ids = [decode.engine.add_request(prompt, greedy()) for prompt in PROMPTS]
    doomed = set(rng.sample(ids, 3))
    for request_id in doomed:
        for _ in range(rng.randrange(12)):
            decode.step()
            prefill.step()
        decode.engine.abort(request_id)
        if rng.random() < 0.5:  # the id may come again at once
            decode.engine.add_request(PROMPTS[3], greedy(), request_id + "'")
    run(decode, prefill)
    for request_id, tokens in zip(ids, expected, strict=True):
        finished = decode.outputs[request_id, 0]
        assert finished.token_ids == tokens[: len(finished.token_ids)]
        assert request_id in doomed or finished.finish_reason == "length"
    decode.assert_empty()
    prefill.assert_empty()


def test_an_id_that_comes_again_gets_its_own_state(pair: tuple[Prefiller, Decoder], expected: list[list[int]]) -> None:
    prefill, decode = pair
    prefill.connect(decode)
    for steps in range(14):
        decode.engine.add_request(PROMPTS[5], greedy(), "x")
        for _ in range(steps):
            decode.step()
            prefill.step()
        decode.engine.abort("x")
        decode.engine.add_request(PROMPTS[4], greedy(), "x")
        run(decode, prefill)
        assert decode.tokens("x") == expected[4]
    decode.assert_empty()
    prefill.assert_empty()


def test_a_decode_worker_that_leaves_frees_its_images(pair: tuple[Prefiller, Decoder]) -> None:
    prefill, decode = pair
    prefill.connect(decode)
    for prompt in PROMPTS:
        decode.engine.add_request(prompt, greedy())
    for _ in range(3):
        decode.step()
        prefill.step()
    assert prefill.worker.counters().jobs
    decode.worker.close()
    while prefill.worker.step():
        pass
    prefill.assert_empty()
    while decode.engine.has_unfinished():
        decode.step()
    assert all(output.finish_reason == "length" for output in decode.outputs.values())
    assert decode.engine.prefill_source is None


def test_small_arenas_make_prompts_wait_and_large_prompts_stay_here(model: Path, expected: list[list[int]]) -> None:
    hub: dict[str, torch.Tensor] = {}
    one = Prefiller(build(model), {}).side.layout.image_bytes(50)
    prefill = Prefiller(build(model, transfer_bytes=one), hub)
    decode = Decoder(build(model, transfer_bytes=one), hub)
    prefill.connect(decode)
    ids = [decode.engine.add_request(prompt, greedy()) for prompt in PROMPTS]
    run(decode, prefill)
    assert [decode.tokens(i) for i in ids] == expected
    counters = decode.worker.counters()
    assert (counters.fetched, counters.computed_here) == (4, 1), "69 tokens never fit"
    larger = Decoder(build(model), hub)
    prefill.connect(larger)
    large = larger.engine.add_request(PROMPTS[5], greedy())
    run(larger, prefill)
    assert larger.tokens(large) == expected[5]
    counters = larger.worker.counters()
    assert (counters.fetched, counters.retried, counters.computed_here) == (0, 2, 1)
    assert prefill.worker.counters().failed == 3
    prefill.assert_empty()


def test_a_prompt_that_fails_there_is_tried_again(pair: tuple[Prefiller, Decoder], expected: list[list[int]]) -> None:
    prefill, decode = pair
    prefill.connect(decode)
    launch, broken = prefill.side.engine.executor.launch, [True]

    def fail_once(plan: Any) -> Any:
        if broken.pop() if broken else False:
            raise RuntimeError("a kernel failed")
        return launch(plan)

    prefill.side.engine.executor.launch = fail_once  # type: ignore[method-assign]
    request_id = decode.engine.add_request(PROMPTS[4], greedy())
    run(decode, prefill)
    assert decode.tokens(request_id) == expected[4]
    assert (decode.worker.counters().retried, prefill.worker.counters().failed) == (1, 1)
    decode.assert_empty()
    prefill.assert_empty()


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("state_dtype", {"mamba_ssm_dtype": "bfloat16"}),
    ("conv_dtype", {"dtype": "bfloat16"}),
    ("page_size", {"page_size": 8}),
    ("model", {"seed": 1}),
    ("kv_codes", {"kv_cache_dtype": "fp8_e4m3"}),
]


@pytest.mark.parametrize("field, change", CHANGES)
def test_workers_that_differ_refuse_each_other(field: str, change: dict[str, Any], model: Path) -> None:
    hub: dict[str, torch.Tensor] = {}
    prefill, decode = Prefiller(build(model, **change), hub), Decoder(build(model), hub)
    with pytest.raises(HandshakeError, match=f"{field} is .* here and .* there") as caught:
        prefill.connect(decode)
    assert caught.value.field == field
    prefill.step()
    assert not prefill.worker._peers, "the decode side has hung up"
    request_id = decode.engine.add_request(PROMPTS[2], greedy())
    run(decode, prefill)
    assert prefill.worker.counters().computed == 0 and len(decode.tokens(request_id)) == 6


def test_codes_of_keys_and_values_move_between_workers_with_equal_scales(model: Path) -> None:
    hub: dict[str, torch.Tensor] = {}
    coded: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
    prefill, decode = Prefiller(build(model, **coded), hub), Decoder(build(model, **coded), hub)
    prefill.connect(decode)
    ids = [decode.engine.add_request(prompt, greedy()) for prompt in PROMPTS]
    run(decode, prefill)
    assert [decode.tokens(i) for i in ids] == alone(model, PROMPTS, greedy(), **coded)
    other = Decoder(build(model, kv_scales="one", **coded), hub)
    with pytest.raises(HandshakeError, match=r"kv_scales is .* here and .* there"):
        prefill.connect(other)


def test_a_prefill_worker_refuses_orders_before_the_handshake(pair: tuple[Prefiller, Decoder]) -> None:
    prefill, decode = pair
    hello = decode_hello(decode.side.handshake | {"page_size": 64})
    for messages in (
        [{"type": "prefill", "key": "x", "tokens": [1, 2]}],
        [hello, {"type": "prefill", "key": "x", "tokens": [1, 2]}],
    ):
        ours, theirs = QueueChannel.pair()
        prefill.worker.attach(ours)
        for message in messages:
            theirs.send(message)
        while prefill.worker.step():
            pass
        prefill.assert_empty()
    assert prefill.worker.counters().refused == 2 and prefill.worker.counters().computed == 0


def test_an_llm_without_an_arena_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="transfer_bytes"):
        Prefiller(build(model, transfer_bytes=0), {})


def test_generate_goes_through_the_worker(pair: tuple[Prefiller, Decoder], model: Path, expected: Any) -> None:
    """Whoever drives the engine, an LLM for example, need not know."""
    prefill, _ = pair
    llm = build(model)
    decode = Decoder(llm, prefill.transport._hub)
    prefill.connect(decode)
    advance = decode.worker.advance
    decode.worker.advance = lambda: (advance(), prefill.step())  # type: ignore[method-assign,assignment,func-returns-value]
    assert [o.token_ids for o in llm.generate(PROMPTS, greedy())] == expected
    assert decode.worker.counters().fetched == len(PROMPTS) - 1
    assert isinstance(llm, LLM)


def test_what_a_worker_leaves_behind_is_not_trusted(pair: tuple[Prefiller, Decoder], expected: list[list[int]]) -> None:
    """A worker that has hung up may write over an image while it is being read."""
    prefill, decode = pair
    prefill.connect(decode)
    request_id = decode.engine.add_request(PROMPTS[5], greedy())
    while not any(attempt.reading for attempt in decode.worker._attempts.values()):
        decode.step()
        prefill.step()
    prefill.channel.close()
    prefill.side.arena.fill_(255)
    run(decode)
    assert decode.tokens(request_id) == expected[5] and decode.worker.counters().computed_here == 1


def test_only_the_worker_that_was_asked_is_listened_to(model: Path, expected: list[list[int]]) -> None:
    hub: dict[str, torch.Tensor] = {}
    first, second = (Prefiller(build(model), hub, name) for name in ("first", "second"))
    decode = Decoder(build(model), hub)
    for worker in (first, second):
        worker.connect(decode)
    request_id = decode.engine.add_request(PROMPTS[4], greedy())
    decode.step()
    (attempt,) = decode.worker._attempts.values()
    assert attempt.worker == "worker-0"
    second.channel.send({"type": "ready", "key": attempt.key, "offset": 0})
    decode.step()
    assert not attempt.reading
    run(decode, first, second)
    assert decode.tokens(request_id) == expected[4] and second.worker.counters().computed == 0


def test_a_cancelled_prompt_is_not_computed_any_further(pair: tuple[Prefiller, Decoder]) -> None:
    prefill, decode = pair
    prefill.connect(decode)
    request_id = decode.engine.add_request(PROMPTS[5], greedy())
    decode.step()
    prefill.step()
    assert prefill.side.engine.counters().running == 1
    decode.engine.abort(request_id)
    decode.step()
    prefill.step()
    assert (prefill.side.engine.counters().running, prefill.side.engine.counters().prompt_tokens) == (0, 16)
    prefill.assert_empty()


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_the_decode_side_may_speculate(method: str, model: Path) -> None:
    drafts = SpeculativeConfig(method=method, num_draft_tokens=3, draft_model=str(model) if method == "draft" else None)
    hub: dict[str, torch.Tensor] = {}
    prefill, decode = Prefiller(build(model, speculative=drafts), hub), Decoder(build(model, speculative=drafts), hub)
    prefill.connect(decode)
    ids = [decode.engine.add_request(prompt, greedy(20)) for prompt in PROMPTS]
    run(decode, prefill)
    assert [decode.tokens(i) for i in ids] == alone(model, PROMPTS, greedy(20))
    if method == "draft":
        assert decode.engine.counters().accepted > 20
        drafter: Any = decode.engine._scheduler._drafter
        assert drafter.inner.runner.arena is None, "drafts do not travel"


def test_states_arrive_beside_a_graph_of_the_decode_rows(model: Path, expected: list[list[int]]) -> None:
    hub: dict[str, torch.Tensor] = {}
    prefill, decode = Prefiller(build(model), hub), Decoder(build(model, cuda_graph_prompts=False), hub)
    runner: Any = decode.engine.executor
    runner.capture()
    prefill.connect(decode)
    running = decode.engine.add_request([7], greedy(40))
    ids = [decode.engine.add_request(prompt, greedy()) for prompt in PROMPTS]
    run(decode, prefill)
    assert [decode.tokens(i) for i in ids] == expected
    assert decode.tokens(running) == alone(model, [[7]], greedy(40))[0]


def test_a_runner_without_an_arena_takes_no_states(model: Path) -> None:
    executor = build(model).engine.executor
    assert executor.launch(StepPlan()).result().tokens == []
    bare = build(model, transfer_bytes=0).engine.executor
    for plan in (StepPlan(imports=[StateCopy(1, 2, 0)]), StepPlan(exports=[StateCopy(1, 2, 0)])):
        with pytest.raises(ConfigError, match="transfer_bytes"):
            bare.launch(plan)
