"""The recall study's task, its evaluation through the runtime, and the benchmark of the four modes, all tiny."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_history, common
from benchmarks.recall_study import Task, evaluate, model_config, train

TASK = Task()


def test_a_training_sequence_queries_every_fact_once_and_later() -> None:
    ids, targets = TASK.batch(5, 40, torch.Generator().manual_seed(0))
    for sequence, target in zip(ids.tolist(), targets.tolist(), strict=True):
        for key in range(TASK.keys):
            facts = {TASK.fact(key, value): value for value in range(TASK.values)}
            (told,) = (i for i, token in enumerate(sequence) if token in facts)
            asked = sequence.index(TASK.question(key))
            assert told < asked and target[asked] == sequence[asked + 1] == TASK.answer(facts[sequence[told]])
        assert sum(t >= 0 for t in target) == TASK.keys


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 40])
def test_a_prompts_fact_is_at_its_position(distance: int) -> None:
    prompts, answers = TASK.prompts(distance, 9, torch.Generator().manual_seed(0))
    for prompt, answer in zip(prompts, answers, strict=True):
        key = prompt[-1] - TASK.question(0)
        assert prompt[-1 - distance] == TASK.fact(key, answer - TASK.answer(0))


def test_a_trained_model_runs_in_the_runtime(tmp_path: Path) -> None:
    """A few steps make no memory, but what is trained is what is evaluated."""
    args = argparse.Namespace(seed=0, steps=3, batch=4, length=24, lr=1e-2)
    config = model_config(TASK, "enabled")
    model, curve = train(config, TASK, args, tmp_path)
    assert len(curve) == 3 and curve[-1]["loss"] > 0
    recall = evaluate(tmp_path, TASK, [3, 60], "cpu", 6)
    generator = torch.Generator().manual_seed(1234)
    for distance in (3, 60):
        prompts, answers = TASK.prompts(distance, 6, generator)
        with torch.no_grad():
            said = [int(model(torch.tensor([prompt]))[0, -1].argmax()) for prompt in prompts]
        assert recall[distance] == sum(a == b for a, b in zip(said, answers, strict=True)) / 6


@pytest.mark.slow
def test_all_four_modes_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "bench_history --device cpu --hidden 32 --layers 1 --window 8 --context 81 --batches 2 --prefill 1x9"
    monkeypatch.setattr("sys.argv", [*command.split(), "--repeats", "1", "--name", "tiny"])
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    bench_history.main()
    rows = json.loads((tmp_path / "tiny.json").read_text())["rows"]["measured"]
    assert [row["mode"] for row in rows] == [
        m for m in ("disabled", "prefix_sum", "enabled", "benchmark") for _ in "123"
    ]
    assert all(row.get("ms", 1) > 0 for row in rows)
