"""Requests of a million tokens: the memory plan, the chunks of the prompt, and short requests next to it."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_policy import PAGE_SIZE, VOCAB, SimulatedExecutor
from hybridrt import LLM, SamplingParams
from hybridrt.base.errors import MemoryBudgetError
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.request.intake import EngineLimits
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.runtime.step.plan import StepHandle, StepPlan
from tests.support.checkpoints import falcon, mamba2, write
from tests.support.tiny import write_tiny

MILLION = 1 << 20
CHUNK = 8192


def small(**more: Any) -> dict[str, Any]:
    return {"hidden_size": 16, "num_hidden_layers": 1, "max_position_embeddings": MILLION, **more}


def test_the_plan_has_room_for_one(tmp_path: Path) -> None:
    """KV of a token takes 64 bytes here, and a page table's row 4 MiB."""
    config = small(num_attention_heads=1, num_key_value_heads=1, head_dim=8, intermediate_size=16)
    path = str(write_tiny(tmp_path, falcon(**config), tokenizer=False))
    with LLM(path, device="cpu", load_format="dummy", max_running_requests=2, max_model_len=MILLION) as llm:
        plan = llm.plan
        assert plan.max_model_len == MILLION and plan.num_pages * plan.page_size >= MILLION
        assert plan.budget_bytes < 1 << 40, "it is what the machine has"


def test_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """KV of a token takes 64 KiB: 64 GiB."""
    config = small(num_attention_heads=2, num_key_value_heads=2, head_dim=4096)
    path = str(write_tiny(tmp_path, falcon(**config), tokenizer=False))
    with pytest.raises(MemoryBudgetError, match="max_model_len"):
        LLM(
            path, device="cpu", load_format="dummy", max_running_requests=1, max_model_len=MILLION, memory_fraction=0.01
        )


class Chunks(SimulatedExecutor):
    """Notes the chunks of prompts, by request row."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[int, int]] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        self.steps.append({row.row: len(row.tokens) for row in plan.extend})
        return super().launch(plan)


@pytest.mark.parametrize("target", [None, 20.0], ids=["chunks of one size", "chunks by a target"])
def test_short_requests_go_on_beside_it(target: float | None) -> None:
    """Its prompt is computed to its end although others always decode, and they get a token in every step."""
    device = Chunks()
    itl = None if target is None else TrafficPolicy(target, clock=device.monotonic)
    pools = CacheCoordinator(4, 4, [2 * MILLION // PAGE_SIZE], [PageDemand(PAGE_SIZE)])
    engine = Engine(device, pools, EngineLimits(VOCAB, MILLION, CHUNK), policy=itl)
    draw, length = random.Random(0), MILLION - 64
    short = SamplingParams(max_tokens=MILLION // 2, ignore_eos=True)
    engine.add_request([5] * 100, short, "short")
    for _ in range(12):
        engine.step()
    engine.add_request(draw.choices(range(3, VOCAB), k=length), SamplingParams(max_tokens=4), "long")
    before, steps = engine.gained("short") or 0, 0
    while not engine.gained("long"):
        engine.step()
        steps += 1
        assert steps < 4 * MILLION // CHUNK, "its prompt starves"
    assert (engine.gained("short") or 0) - before >= steps - 2, "a step without a token"
    chunks = [n for step in device.steps for row, n in step.items() if n != 100]
    assert sum(chunks) == length and max(chunks) <= CHUNK
    if target is None:
        assert set(chunks[:-1]) == {CHUNK - 1}, "the other token of a step is the short request's"
    for request in ("short", "long"):
        engine.abort(request)
    engine.drain()
    for pool in (pools.rows, pools.slots, pools.pages):
        assert not pool.num_used, f"leaked: {pool}"


@pytest.mark.parametrize(
    "length", [pytest.param(MILLION // 4, marks=pytest.mark.slow), pytest.param(MILLION, marks=pytest.mark.soak)]
)
def test_its_state_is_the_same_in_small_and_in_large_chunks(length: int, tmp_path: Path) -> None:
    make = mamba2(**small(num_heads=2, head_dim=16, n_groups=1, chunk_size=256))
    write(make, tmp_path, seed=0)
    draw, tokens = random.Random(1), []
    prompt = draw.choices(range(3, 64), k=length - 64)
    for chunk in (CHUNK, 8 * CHUNK):
        with LLM(
            str(tmp_path), device="cpu", max_running_requests=1, max_model_len=length, chunked_prefill_size=chunk
        ) as llm:
            tokens.append(
                llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0].token_ids
            )
    assert tokens[0] == tokens[1]
