"""A quick run starts two engines, and still compares float32 with transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrt.engine.api.llm import LLM
from hybridrt.runtime.load.quantise import write_quantised
from hybridrt.verify import oracle, ours, outputs, run
from hybridrt.verify.run import verify
from hybridrt.verify.speed import check_speed
from hybridrt.verify.subject import Subject
from tests.support.checkpoints import CheckpointStore, write
from tests.support.newer_checkpoints import qwen35
from tests.verify.test_outputs import in_bfloat16

OUTPUTS = ("transformers", "speed", "ways to run")


@pytest.fixture
def halved(checkpoints: CheckpointStore, tmp_path: Path) -> Path:
    return in_bfloat16(checkpoints["qwen-plain"].path, tmp_path / "model")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each engine."""
    found: list[dict[str, Any]] = []

    class Counted(LLM):
        def __init__(self, model: str, **options: Any) -> None:
            assert all(before.get("closed") for before in found), "one engine at a time has the device's memory"
            found.append(options)
            super().__init__(model, **options)

        def close(self) -> None:
            next(each for each in found if not each.get("closed"))["closed"] = True
            super().close()

    monkeypatch.setattr(ours, "LLM", Counted)
    return found


def test_two_engines_do_all(halved: Path, started: list[dict[str, Any]]) -> None:
    report = verify(Subject(str(halved), "cpu", "bfloat16", quick=True))
    assert report.status != "failed", [result.findings for result in report.results]
    assert [(each["dtype"], each.get("speculative") is not None) for each in started] == [
        ("bfloat16", False), ("float32", True),
    ]  # fmt: skip
    assert all(each["closed"] for each in started)
    results = {result.name: result for result in report.results}
    assert results["transformers"].figures["largest_difference_bfloat16"] > 0
    assert results["ways to run"].figures["largest_difference_float32"] < 2e-3
    assert any("drafts (ngram) in float32" in note for note in results["ways to run"].notes)
    for name in OUTPUTS:
        parts = results[name].figures["seconds_of_parts"]
        assert sum(parts.values()) <= results[name].seconds + 0.01
    assert "loading transformers' model" in results["transformers"].figures["seconds_of_parts"]


def test_a_quantised_checkpoint_is_compared_in_float32_too(tmp_path: Path, started: list[dict[str, Any]]) -> None:
    """In bfloat16 alone a norm that is wrong by 2% passed."""
    make = qwen35(hidden_size=128, intermediate_size=128, num_hidden_layers=2, full_attention_interval=2)
    write(make, tmp_path / "plain")
    write_quantised(str(tmp_path / "plain"), tmp_path / "int4", "int4", ())
    report = verify(Subject(str(tmp_path / "int4"), "cpu", "bfloat16", quick=True))
    assert [each["dtype"] for each in started] == ["bfloat16", "float32"]
    results = {result.name: result for result in report.results}
    assert results["ways to run"].status == "passed", results["ways to run"].findings
    assert results["ways to run"].figures["largest_difference_float32"] < 2e-3


def test_transformers_own_rounding_limits_other_ways_to_run(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, own = list[Any](), (0.123, 0.123)
    monkeypatch.setattr(outputs, "within", lambda *_: own)
    monkeypatch.setattr(outputs, "_same", lambda what, first, other, limits, result: used.append(limits))
    verify(Subject(str(halved), "cpu", "bfloat16", quick=True))
    assert used and set(used) == {own}


@pytest.mark.parametrize("changed", ["bfloat16", "float32"])
def test_other_answers_are_seen(halved: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """Weights that one of the two engines alone reads otherwise."""
    load = LLM.__init__

    def damaged(self: LLM, model: str, **options: Any) -> None:
        load(self, model, **options)
        if options["dtype"] == changed:
            executor: Any = self.engine.executor
            with torch.no_grad():
                for name, parameter in executor.model.named_parameters():
                    if "norm" in name:
                        parameter.mul_(-3.0)

    monkeypatch.setattr(LLM, "__init__", damaged)
    report = verify(Subject(str(halved), "cpu", "bfloat16", quick=True))
    failed = {result.name for result in report.results if result.status == "failed"}
    assert failed == {"transformers" if changed == "bfloat16" else "ways to run"}


def test_an_engine_that_fails_is_not_kept(halved: Path, started: list[dict[str, Any]]) -> None:
    subject = Subject(str(halved), "cpu", "bfloat16", quick=True)
    subject.read_config()
    with pytest.raises(RuntimeError), ours.plain_engine(subject, "bfloat16"):
        raise RuntimeError
    assert started[0]["closed"] and subject.kept is None


def test_a_run_leaves_no_engine(halved: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last check may have kept one."""
    monkeypatch.setattr(run, "CHECKS", {name: run.CHECKS[name] for name in ("config", "speed")})
    assert verify(Subject(str(halved), "cpu", "bfloat16", quick=True)).status == "passed"
    assert [each["closed"] for each in started] == [True]


def test_what_fits_is_asked_without_a_kept_engine(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, done = Subject(str(halved), "cpu", "bfloat16", quick=True), list[str]()
    subject.read_config()
    kept: Any = SimpleNamespace(close=lambda: done.append("closed"))
    subject.kept = {}, kept
    monkeypatch.setattr(oracle, "fits", lambda *_: bool(done.append("asked")))
    assert not outputs.float32_fits(subject) and not outputs.float32_fits(subject)
    assert done == ["closed", "asked"]


def test_speed_is_of_prompts_that_are_computed(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept engine has a prefix cache."""
    subject, cached = Subject(str(halved), "cpu", "bfloat16", quick=True), list[int]()
    subject.read_config()
    generate = LLM.generate

    def watched(self: LLM, *args: Any, **kwargs: Any) -> Any:
        found = generate(self, *args, **kwargs)
        cached.extend(output.metrics.cached_tokens for output in found)
        return found

    monkeypatch.setattr(LLM, "generate", watched)
    check_speed(subject, outputs.Result("speed"))
    subject.close()
    assert cached and not any(cached)
