"""Decode and verify graphs side by side in one runner, as closures over the buffers that CUDA graphs would read."""

import logging
from pathlib import Path
from typing import Any

import pytest

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.forward_batch import ForwardMode, SpecInfo
from hybridrt.runtime.replay import graph_runner, prompt_graphs
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import DecodeRow, DecodeRows, ExtendRow, StepPlan
from tests.support.prefilled import PROMPTS, prefilled
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
