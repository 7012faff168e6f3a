"""Requests with spans through the engine: intake, the prefix cache, retraction, batches, sessions."""

import asyncio
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import RequestError
from hybridrt.base.spans import EncoderInput, Span
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.request.spans import KEY_BIT, cache_ids, span_limits
from hybridrt.models.config.read_config import read_model_config
from hybridrt.runtime.run import span_encoder
from hybridrt.runtime.run.step_runner import StepRunner
from hybridrt.runtime.step.plan import DecodeRow, DecodeRows, EmbeddingFetch, EncoderTask, StepPlan, int32s
from hybridrt.server.warm_up import see_images
from hybridrt.speculative.ngram import NgramDrafter
from tests.models.test_vision import QWEN, seeing
from tests.support.checkpoints import CheckpointStore
from tests.support.prompt_steps import capture_prompts
from tests.support.sizes import VOCAB

IMAGE, VIDEO, STEPS = VOCAB - 1, VOCAB - 2, 6
GREEDY = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
TEXT = [4 + 7 * i % 60 for i in range(60)]
Made = dict[str, Any]


@pytest.fixture(scope="module")
def path(checkpoints: CheckpointStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing(checkpoints[QWEN].path, tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with engine(path) as made:
        yield made


def engine(path: Path, **options: Any) -> LLM:
    return LLM(str(path), device="cpu", max_model_len=160, page_size=4, **{"max_running_requests": 4, **options})


def prompt(path: Path, before: int, *images: tuple[int, int, int], after: int = 5) -> Made:
    """Text, images (seed, rows and columns of tokens) each after two tokens of text, and text."""
    spec = read_model_config(path).vision
    assert spec is not None
    tokens, spans = TEXT[:before], list[Span]()
    for seed, rows, columns in images:
        grid, numbers = (spec.merge * rows, spec.merge * columns), spec.patch_numbers
        patches = np.random.default_rng(seed).integers(0, 256, (grid[0] * grid[1], numbers), np.uint8)
        digest = sha256(patches.tobytes()).digest()
        spans.append(Span(len(tokens), rows * columns, digest, (rows, columns), EncoderInput(patches, grid)))
        tokens = [*tokens, *[IMAGE] * (rows * columns), 5, 6]
    return {"prompt_token_ids": [*tokens, *TEXT[:after]], "spans": spans}


def tokens_of(llm: LLM, *prompts: Made, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(list(prompts), params)]


def cached(llm: LLM, given: Made, salt: str | None = None) -> int:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, cache_salt=salt)
    (out,) = llm.generate([given], params)
    return out.metrics.cached_tokens


# -- intake


def altered(given: Made, place: int = 0, **fields: Any) -> Made:
    spans = list(given["spans"])
    spans[place] = replace(spans[place], **fields)
    return given | {"spans": spans}


def bad(path: Path) -> dict[str, tuple[Made, str]]:
    fine = prompt(path, 3, (1, 2, 2), (2, 1, 3))
    ids, (first, second) = fine["prompt_token_ids"], fine["spans"]
    return {
        "none": ({"prompt_token_ids": ids}, "pass images with the prompt"),
        "one of two": (fine | {"spans": [first]}, "is in no span, but it is the placeholder"),
        "on text": (altered(fine, start=2), "is in a span, but it is not the placeholder"),
        "order": (fine | {"spans": [second, first]}, "must begin at"),
        "twice": (fine | {"spans": [first, first, second]}, "must begin at 7 or later"),
        "past the end": (altered(fine, 1, start=10**6), "within the prompt of"),
        "negative": (altered(fine, start=-1), "pass integers from 0 on"),
        "empty": (altered(fine, length=0, grid=(0, 2)), "and a length"),
        "grid": (altered(fine, grid=(1, 2)), "pass its product"),
        "patches": (altered(fine, input=second.input), "has no input of 4 x 4 patches"),
        "numbers": (
            altered(fine, input=EncoderInput(first.input.patches[:, 1:], first.input.grid)), "no uint8 array of 16 x"
        ),
        "dtype": (
            altered(fine, input=EncoderInput(first.input.patches.astype(float), first.input.grid)), "no uint8 array"
        ),
        "digest": (altered(fine, digest=b"short"), "pass 32 bytes"),
        "no spans": (fine | {"spans": [5]}, "pass a list of"),
        "video": (fine | {"prompt_token_ids": [VIDEO, *ids[1:]]}, "video_token_id"),
        "other names": (fine | {"images": []}, "images go with prompt"),
    }  # fmt: skip


def test_bad_spans_are_refused_by_name(llm: LLM, path: Path) -> None:
    for name, (given, text) in bad(path).items():
        with pytest.raises(RequestError, match=text):
            llm.generate([given], GREEDY)
        assert not llm.engine.has_unfinished(), name


def test_a_span_may_not_be_cut_off(llm: LLM, path: Path) -> None:
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        llm.generate([prompt(path, 3, (1, 2, 2))], SamplingParams(max_tokens=1, truncate_prompt_tokens=6))


def test_limits_name_what_to_change(path: Path) -> None:
    given = prompt(path, 3, (1, 2, 2))
    with engine(path, encoder_cache_tokens=3) as small, pytest.raises(RequestError, match="raise encoder_cache_tokens"):
        small.generate([given], GREEDY)
    with engine(path, images=False) as blind, pytest.raises(RequestError, match="text part of this model alone"):
        blind.generate([{"prompt_token_ids": given["prompt_token_ids"]}], GREEDY)
    drafts = EngineConfig("m", speculative=SpeculativeConfig("draft", draft_model="other"))
    limits = span_limits(drafts, read_model_config(path))
    assert limits is not None and 'method "draft" drafts with a smaller model' in limits.refusal


# -- the prefix cache


def test_ids_of_the_cache_tell_images_apart(path: Path) -> None:
    one, other = (prompt(path, 3, (seed, 2, 2)) for seed in (1, 2))
    first, again, second = (cache_ids(each["prompt_token_ids"], each["spans"]) for each in (one, one, other))
    assert np.array_equal(first, again) and len(set(first[3:7].tolist())) == 4
    assert not set(first[3:7].tolist()) & set(second[3:7].tolist()) and (first[3:7] >= KEY_BIT).all()
    assert first.dtype == np.int64 and first[:3].tolist() == TEXT[:3]
    wide = cache_ids(one["prompt_token_ids"], [replace(one["spans"][0], grid=(1, 4))])
    assert not set(first[3:7].tolist()) & set(wide[3:7].tolist()), "positions differ"
    assert cache_ids([5, 6], []).dtype == np.int32


def test_only_the_same_image_is_the_same_prefix(llm: LLM, path: Path) -> None:
    """Hits end before, within and after an image, with the state there."""
    llm.engine.reset_prefix_cache()
    image = prompt(path, 14, (1, 4, 6), after=20)
    alone = tokens_of(llm, image)
    with_image, without = cached(llm, image), cached(llm, prompt(path, 14, (9, 4, 6), after=20))
    assert with_image > 14 + 24 and without <= 14
    assert tokens_of(llm, image) == alone
    assert cached(llm, image, salt="mine") == 0


def test_a_hit_may_end_within_an_image(path: Path) -> None:
    """A prompt of 30 tokens leaves a state after 16, in the middle of its image."""
    with engine(path, chunked_prefill_size=16) as llm, engine(path, prefix_cache=False) as plain:
        given = prompt(path, 10, (1, 4, 4), after=2)
        tokens_of(llm, given)
        other = {**given, "prompt_token_ids": [*given["prompt_token_ids"][:-2], 50, 51, 52]}
        (out,) = llm.generate([other], GREEDY)
        assert 10 < out.metrics.cached_tokens < 26
        assert out.token_ids == tokens_of(plain, other)[0]
        assert llm.engine.counters().encoded_spans == 1


@pytest.mark.parametrize("chunk", [64, 24])
def test_another_text_after_an_image_computes_only_text(chunk: int, path: Path) -> None:
    """The first prompt leaves a state after its image. Graphs run text after it, at its positions."""
    given = prompt(path, 0, (1, 4, 8), after=24)
    others = [{**given, "prompt_token_ids": [*given["prompt_token_ids"][:32], *TEXT[n:]]} for n in (35, 50)]
    with engine(path, chunked_prefill_size=chunk) as llm, engine(path, prefix_cache=False) as plain:
        wanted, runner = tokens_of(plain, *others), llm.engine.executor
        assert isinstance(runner, StepRunner)
        tokens_of(llm, given)
        replay, replayed = capture_prompts(runner, ((0,), (16, 48)), saves=True).replay, list[StepPlan]()
        runner.prompt_graphs.replay = lambda *of: replayed.append(of[0]) or replay(*of)  # type: ignore
        found = [llm.generate([other], GREEDY)[0] for other in others]
        assert [out.metrics.cached_tokens for out in found] == [32, 32] and [out.token_ids for out in found] == wanted
        assert all(row.mrope is not None for plan in replayed for row in plan.extend)
        assert sum(len(row.tokens) for plan in replayed for row in plan.extend) == 25 + 10
        assert llm.engine.counters().encoded_spans == 1


def test_the_state_after_an_image_takes_no_step_of_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(path, target_itl_ms=50.0) as llm:
        runner, plans = llm.engine.executor, list[StepPlan]()
        launch = runner.launch
        monkeypatch.setattr(runner, "launch", lambda plan: plans.append(plan) or launch(plan))
        tokens_of(llm, prompt(path, 0, (1, 4, 8), after=24))
        assert [[end for end, _ in row.saves] for plan in plans for row in plan.extend] == [[32, 48]]


def test_sessions_keep_images(path: Path, tmp_path: Path) -> None:
    given = prompt(path, 14, (1, 3, 4), after=12)
    with engine(path) as llm:
        expected = tokens_of(llm, given)
        saved = llm.save_session(tmp_path / "session", given)
        assert saved.token_ids == given["prompt_token_ids"][: len(saved.token_ids)]
    with engine(path) as llm:
        assert llm.load_session(tmp_path / "session").token_ids == saved.token_ids
        assert cached(llm, prompt(path, 14, (2, 3, 4), after=12)) <= 14
        assert cached(llm, given) > 26 and tokens_of(llm, given) == expected


def test_a_dump_has_no_ids_that_are_no_tokens(llm: LLM, path: Path) -> None:
    tokens_of(llm, prompt(path, 3, (1, 2, 2)))
    tree = llm.engine.prefixes.tree
    assert max(int(node.tokens.max()) for node in tree.nodes()) >= KEY_BIT
    seen = list[int]()

    def decode(ids: Any) -> str:
        seen.extend(ids)
        return ""

    from hybridrt.engine.cache.cache_dump import cache_dump

    cache_dump(llm.engine._coordinator, decode)
    assert seen and max(seen) < VOCAB


# -- batches, chunks, retraction


def requests(path: Path) -> list[Made]:
    return [
        prompt(path, 3, (1, 2, 3)),
        prompt(path, 1, (2, 1, 4), (1, 2, 3), after=2),
        {"prompt_token_ids": TEXT[:9]},
        prompt(path, 0, (3, 3, 2)),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 5, "prefix_cache": False},
        {"encoder_cache_tokens": 7, "chunked_prefill_size": 11},
        {"speculative": SpeculativeConfig("ngram", num_draft_tokens=3), "chunked_prefill_size": 6},
        pytest.param({"tp_size": 2, "chunked_prefill_size": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_alone_is_batched(options: dict[str, Any], llm: LLM, path: Path) -> None:
    given = requests(path)
    alone = [tokens_of(llm, each)[0] for each in given]
    with engine(path, **options) as other:
        assert tokens_of(other, *given) == alone
        assert tokens_of(other, *given[::-1]) == alone[::-1]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_images_come_back_from_main_memory(tp: int, llm: LLM, path: Path) -> None:
    given = [prompt(path, 3, (seed, 2, 3), after=seed) for seed in (1, 2, 3, 1, 2, 3)]
    alone = tokens_of(llm, *given)
    options = {"encoder_cache_tokens": 8, "encoder_host_tokens": 13, "prefix_cache": False, "tp_size": tp}
    with engine(path, **options) as other:
        assert [tokens_of(other, each)[0] for each in given] == alone
        first = other.engine.counters()
        assert [tokens_of(other, each)[0] for each in given[2:0:-1]] == alone[2:0:-1]
        counts = other.engine.counters()
    assert (first.encoded_spans, first.encoder_host_hits) == (6, 0), "three do not fit"
    assert counts.encoded_spans == 6 and (counts.encoder_hits, counts.encoder_host_hits) == (1, 1)


def test_a_task_does_not_overwrite_what_was_fetched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up before it ended, and has lost some of its rows."""
    monkeypatch.setitem(span_encoder.SLICE_PATCHES, "cpu", 1)
    spans = prompt(path, 0, (1, 2, 3), (2, 1, 2))["spans"]
    with engine(path, encoder_host_tokens=8) as llm:
        encoder = llm.engine.executor.encoder
        encoder.advance(StepPlan(encode=[EncoderTask(1, spans[1].input, int32s([0, 1]), int32s([5, 6]))]))
        decoding = DecodeRows.from_rows([DecodeRow(1, 2, 3)])
        encoder.advance(StepPlan(decode=decoding, encode=[EncoderTask(2, spans[0].input, int32s(range(2, 8)))]))
        assert not encoder.encoded(2)
        encoder.advance(StepPlan(decode=decoding, fetch=[EmbeddingFetch(int32s([5, 6]), int32s([4, 7]))]))
        encoder.advance(StepPlan())
        assert encoder.encoded(2) and encoder._kept[0].any() and not encoder._kept[2].any()
        assert torch.equal(encoder._kept[[0, 1]], encoder._kept[[4, 7]])


@pytest.mark.parametrize("target", [None, 50.0])
def test_a_step_with_decode_rows_admits_few_images(
    target: float | None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose first tokens need the encoder. Text that comes after them does not wait for it."""
    monkeypatch.setitem(span_encoder.SLICE_PATCHES, "cpu", 64)
    with engine(path, max_running_requests=9, target_itl_ms=target, encoder_cache_tokens=64) as llm:
        running, runner, plans = llm.engine, llm.engine.executor, list[StepPlan]()
        long = SamplingParams(max_tokens=99, temperature=0.0, ignore_eos=True)
        running.add_request(TEXT[:9], long, "text")
        while not running.gained("text"):
            running.step()
        launch = runner.launch
        monkeypatch.setattr(runner, "launch", lambda plan: plans.append(plan) or launch(plan))
        for seed in range(6):
            running.add_request(prompt(path, 0, (seed, 4, 4), after=seed), GREEDY, f"image {seed}")
        running.add_request(TEXT[:7], GREEDY, "later")
        deltas = list[Any]()
        while (running.gained("text") or 99) < 90:
            deltas += running.step()
        running.abort("text")
        images = [len(plan.encode) for plan in plans if plan.decode]
        assert sum(images) == 6 and max(images) <= 2 and images[0] == 2
        assert sum(len(plan.admissions) for plan in plans) == 7
        ended = [delta.request_id for delta in deltas if delta.finish_reason]
        assert len(ended) == 7 and {"later"} & set(ended[:3])


def test_a_retracted_request_sees_its_images_again(llm: LLM, path: Path) -> None:
    given = prompt(path, 3, (1, 2, 3), (2, 4, 1))
    expected = tokens_of(llm, given)[0]
    with engine(path, prefix_cache=False, encoder_cache_tokens=6, chunked_prefill_size=7) as other:
        running = other.engine
        running.add_request(given, GREEDY, stream=False)
        (request,) = running._samples.all()
        left, deltas = [(7, 0), (22, 1), (25, 3)], list[Any]()  # tokens that are computed, and of the answer
        while running.has_unfinished():
            deltas += running.step()
            if left and request.row is not None and (request.computed, len(request.output)) >= left[0]:
                left.pop(0)
                with running._change:
                    running._scheduler._retract_latest(StepPlan())
                running._scheduler.encoder.cache.check()  # type: ignore[union-attr]
        assert request.metrics.retractions == 3 and running.counters().encoded_spans > 5
        assert [delta.token_ids for delta in deltas] == [expected]
        assert not running._scheduler.encoder.cache._pinned  # type: ignore[union-attr]


def test_a_sampled_placeholder_is_text(llm: LLM, path: Path) -> None:
    """Its embedding is the table's, in the step after it and after a retraction."""
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, allowed_token_ids=[IMAGE])
    given = prompt(path, 3, (1, 2, 3))
    assert tokens_of(llm, given, params=params) == [[IMAGE] * 3]
    plain = {"prompt_token_ids": TEXT[:9]}
    assert tokens_of(llm, plain, params=params) == [[IMAGE] * 3]


def test_a_failed_step_leaves_no_embeddings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompt(path, 3, (1, 2, 3))
    with engine(path) as llm:
        expected = tokens_of(llm, given)
        runner = llm.engine.executor
        monkeypatch.setattr(runner, "encoder", None)  # launch raises
        with pytest.raises(Exception, match="runner without an encoder"):
            tokens_of(llm, prompt(path, 3, (2, 2, 3)))
        monkeypatch.undo()
        assert tokens_of(llm, given) == expected
        assert tokens_of(llm, prompt(path, 3, (2, 2, 3))) == tokens_of(llm, prompt(path, 3, (2, 2, 3)))


class Text(msgspec.Struct):
    """A request of a drafter."""

    prompt: list[int]
    arrival: int = 1
    output: list[int] = []


def test_prompt_lookup_neither_finds_nor_proposes_placeholders() -> None:
    drafter = NgramDrafter(excluded=[IMAGE])

    def proposed(*tokens: int) -> list[int]:
        text: Any = Text(list(tokens))
        drafter.begin_request(text)
        return list(drafter.propose([text], [4])[0].tokens)

    assert proposed(5, 6, 7, IMAGE, IMAGE, 8, 5, 6) == [7]
    assert proposed(IMAGE, 6, 7, 8, IMAGE, 6) == []
    assert proposed(5, 6, 7, 8, 5, 6) == [7, 8, 5, 6]


def test_a_warm_up_sees_images(path: Path) -> None:
    with engine(path) as llm:
        asyncio.run(see_images(AsyncLLM(llm)))
        counts = llm.engine.counters()
        assert (counts.encoded_spans, counts.encoded_tokens) == (2, 2 * 12**2) and counts.failed == 0


def test_the_memory_plan_counts_the_encoder(path: Path) -> None:
    with engine(path) as seeing_model, engine(path, images=False) as blind, engine(path, encoder_cache_tokens=1) as few:
        names = [{name for name, _, _ in llm.plan.table()} for llm in (seeing_model, blind)]
        assert names[0] - names[1] == {"image encoder: workspace, embeddings"}
        assert seeing_model.plan.weight_bytes > blind.plan.weight_bytes
        assert seeing_model.plan.costs.encoder == 16384 * few.plan.costs.encoder > 0
        kept = seeing_model.engine.executor.encoder._kept  # type: ignore[attr-defined]
        assert seeing_model.plan.costs.encoder > kept.nbytes
