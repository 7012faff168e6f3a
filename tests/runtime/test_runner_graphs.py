"""Decode and verify graphs side by side in one runner, as closures over the buffers that CUDA graphs would read."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import ConfigError
from hybridrt.base.forward_batch import ForwardMode, SpecInfo
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.runtime.replay import graph_runner, prompt_graphs
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import Admission, DecodeRow, DecodeRows, ExtendRow, PageWrite, StepPlan, StepResult
from hybridrt.runtime.step.sampling_table import make_rules
from tests.support.page_sets import page_sets
from tests.support.prefilled import GREEDY, PROMPTS, prefilled
from tests.support.tiny import write_tiny


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(write_tiny(tmp_path, tokenizer=False))


def runner(path: str, mode: str, graphs: bool) -> ModelRunner:
    """A runner of four rows, three of them prefilled, that has graphs although its device is a CPU."""
    config = EngineConfig(
        path, device="cpu", load_format="dummy", max_model_len=32, max_running_requests=4,
        speculative=SpeculativeConfig(num_draft_tokens=3, state_mode=mode),
    )  # fmt: skip
    return prefilled(config, graphs)


@pytest.mark.parametrize("mode", ["intermediate", "replay"])
def test_verify_and_plain_steps_in_turn(path: str, mode: str) -> None:
    """Three rows in a bucket of four, whatever is accepted."""
    with_graphs, eager = runner(path, mode, True), runner(path, mode, False)
    computed = [len(prompt) for prompt in PROMPTS]
    for drafts in ([(7, 8, 9), (4,), ()], [(), (), ()], [(), (3, 3, 3), (5, 6)], [(), (), ()]):
        decode = DecodeRows.from_rows(DecodeRow(i + 1, computed[i], 0, drafts[i]) for i in range(3))
        tokens = with_graphs.launch(StepPlan(decode=decode)).result().tokens
        assert tokens == eager.launch(StepPlan(decode=decode)).result().tokens
        computed = [done + len(gained) for done, gained in zip(computed, tokens, strict=True)]


PLAIN = EngineConfig("tiny", device="cpu", load_format="dummy", max_model_len=32, max_running_requests=4)
DRAWN = [(GREEDY, True), (SamplingParams(temperature=0.0, logprobs=2), True)]
SAMPLED = [
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
    SamplingParams(temperature=0.0, bad_words=["x"]),
    SamplingParams(temperature=0.0, logit_bias={9: 50.0}),
]


@pytest.mark.parametrize(("params", "drawn"), [*DRAWN, *((params, False) for params in SAMPLED)])
def test_a_second_graph_draws_where_all_rows_take_the_likeliest_token(
    path: str, params: SamplingParams, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are those of the sampler, also if they are read after the next step."""
    found, draws, draw = list[list[StepResult]](), list[int](), GraphRunner.draw
    monkeypatch.setattr(GraphRunner, "draw", lambda *args: draws.append(args[1]) or draw(*args))
    for graphs in (True, False):
        made = prefilled(replace(PLAIN, model=path), graphs)
        rules = make_rules(params, (), [(9, 9)] if params.bad_words else (), made.model_config.vocab_size)
        admission = Admission.from_prompt(4, 4, [3], params, 1, rules)
        pages = [PageWrite(4, 0, page_sets([7]))]
        made.launch(StepPlan([admission], pages, extend=[ExtendRow(4, 0, [3], 0, True)])).result()
        computed, steps = [*map(len, PROMPTS), 1], []
        for i in range(3):
            rows = [DecodeRow(row, n + i, i) for row, n in enumerate(computed, 1)]
            steps.append(made.launch(StepPlan(decode=DecodeRows.from_rows(rows))))
        found.append([step.result() for step in steps])
    assert [result.tokens for result in found[0]] == [result.tokens for result in found[1]]
    assert [each for each in found[0][0].logprobs if each] == [each for each in found[1][0].logprobs if each]
    assert draws == ([4] * 3 if drawn else [])


def test_masks_go_to_the_sampler(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prefilled(replace(PLAIN, model=path), True)
    monkeypatch.setattr(GraphRunner, "draw", lambda *_: pytest.fail("no mask is read"))
    rows = [DecodeRow(row, len(prompt), 0) for row, prompt in enumerate(PROMPTS, 1)]
    step = made.launch(StepPlan(decode=DecodeRows.from_rows(rows), constrained=[1]))
    masks = np.zeros((1, -(-made.model_config.vocab_size // 32)), np.int32)
    masks[0, 0] = 1 << 7
    step.sample(masks)
    assert step.result().tokens[1] == [7]


def test_verified_tokens_are_not_drawn(path: str) -> None:
    made = prefilled(replace(PLAIN, model=path))
    with pytest.raises(ConfigError, match="steps of 3 tokens a row: leave draw out"):
        GraphRunner(
            model=made.model, backend=made.backend, req_to_token_pool=made.pools.req_to_token,
            last_tokens=made.last_tokens, max_bs=1, tokens_per_row=3, draw=lambda *_: None,
        )  # fmt: skip


def test_a_step_without_decode_rows_replays_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(path, "replay", True)
    monkeypatch.setattr(GraphRunner, "replay", lambda *_: pytest.fail("a graph of padding rows"))
    made.launch(StepPlan(extend=[ExtendRow(1, 3, [4, 5], 0, True)])).result()


def test_what_graphs_take_and_where_they_end_is_said(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = iter(range(10 << 30, 0, -(1 << 29)))
    for module in (graph_runner, prompt_graphs):
        monkeypatch.setattr(module, "free_device_bytes", lambda device: next(free))
    config = EngineConfig(
        path,
        device="cpu",
        load_format="dummy",
        max_running_requests=2,
        cuda_graph_max_bs=9,
        max_model_len=128,
        chunked_prefill_size=128,
    )
    made = ModelRunner(config)
    with caplog.at_level(logging.INFO):
        made.capture()
    assert made.prompt_graphs is not None and made.prompt_graphs.captured_bytes == 1 << 29
    assert made.graphs[1].captured_bytes == 1 << 30  # buckets of 2 and 1
    ends, take = (record.getMessage() for record in caplog.records if record.name == "hybridrt.runtime.run.capture")
    assert "graphs end at batch 2, not at cuda_graph_max_bs=9" in ends and "up to 2 rows take 1.50 GiB" in take


def test_each_width_of_a_step_has_its_own_buffers(path: str) -> None:
    """A captured graph still reads what it was captured with when another is captured."""
    backend: Any = runner(path, "intermediate", True).backend
    linear = backend.linear_attn_backend
    for tokens in (4, 1):
        backend.init_cuda_graph_state(4, 4 * tokens)
    rows, found = linear.pools.req_to_state_slot[:4], []
    for tokens in (4, 1, 4):
        spec = SpecInfo(tokens) if tokens > 1 else None
        mode = ForwardMode.TARGET_VERIFY if spec else ForwardMode.DECODE
        backend.init_forward_metadata_replay_cuda_graph(4, 3, rows, rows, mode, spec, None)
        backend.drop_step()
        found.append(backend._last_batch.metadata[linear].decode.buffers.state_slots.data_ptr())
    assert found[0] == found[2] != found[1]
