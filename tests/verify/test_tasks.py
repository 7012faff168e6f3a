"""Tasks of lm-eval: what it is asked, and what a report tells of its answer."""

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hybridrt import LLM, SamplingParams
from hybridrt.base.errors import ProviderNotInstalledError
from hybridrt.verify import served
from hybridrt.verify.page import page
from hybridrt.verify.results import Report, Result
from hybridrt.verify.subject import Subject
from hybridrt.verify.tasks import check_tasks

TEXTS = ("def add(a, b):\n    return a +", "import os\nimport ")
SCORES = {
    "name": "few", "alias": "few", "sample_len": 4, "acc,none": 0.75, "acc_stderr,none": 0.25,
    "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A",
}  # fmt: skip


@pytest.fixture
def subject() -> Subject:
    found = Subject("embedded", device="cpu", quick=True)
    found.read_config()
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that a stand-in of lm-eval got. An "error" among them is raised."""
    given: dict[str, Any] = {}

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        given.update(arguments)
        if "error" in given:
            raise given["error"]
        return {"results": {"few": SCORES}, "n-samples": {"few": {"original": 9, "effective": 4}}}

    @contextmanager
    def no_server(subject: Subject) -> Iterator[str]:
        assert subject.kept is None, "an engine has the memory that the server needs"
        yield "http://127.0.0.1:1"

    module = ModuleType("lm_eval")
    module.__spec__ = ModuleSpec("lm_eval", None)
    module.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", module)
    monkeypatch.setattr(served, "served", no_server)
    return given


def test_scores_are_told_and_no_folders(subject: Subject, asked: dict[str, Any]) -> None:
    kept: Any = SimpleNamespace(close=lambda: None)
    result, subject.kept = Result("tasks"), ({}, kept)
    check_tasks(subject, result, ["/home/me/few.yaml"], 4)
    subject.parts.end()
    assert asked["tasks"] == ["/home/me/few.yaml"] and asked["limit"] == 4 and not asked["confirm_run_unsafe_code"]
    assert asked["model_args"]["base_url"] == "http://127.0.0.1:1/v1/completions"
    assert subject.config is not None and asked["model_args"]["max_length"] <= subject.config.max_position_embeddings
    assert result.notes == ["few: acc 0.7500 ± 0.2500; exact_match (strict) 0.5000, 4 questions"]
    result.figures["seconds_of_parts"] = subject.parts.seconds
    text = page(Report("m", True, {}, {}, [result], {"files": {}}).as_json())
    assert "acc 0.7500" in text and "tasks few.yaml" in text and "/home/me" not in text


def test_what_lm_eval_raises_is_a_failure(subject: Subject, asked: dict[str, Any]) -> None:
    asked["error"], result = KeyError("nosuch"), Result("tasks")
    check_tasks(subject, result, ["nosuch"], None)
    assert result.status == "failed" and "KeyError" in result.findings[0] and "nosuch" in result.findings[0]


def test_a_broken_checkpoint_is_left_out(subject: Subject, asked: dict[str, Any]) -> None:
    subject.broken, result = "not run: the check 'keys' has failed", Result("tasks")
    check_tasks(subject, result, ["few"], None)
    assert result.status == "left out" and not asked


def test_without_lm_eval_it_is_said(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProviderNotInstalledError, match="pip install"):
        check_tasks(subject, Result("tasks"), ["few"], None)


@pytest.mark.slow
def test_a_local_task_gives_the_perplexity_of_the_engine(subject: Subject, tmp_path: Path) -> None:
    """With lm-eval itself. It puts the end of texts before each text."""
    pytest.importorskip("lm_eval")
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    task = {
        "task": "texts", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
        ],
    }  # fmt: skip
    (tmp_path / "texts.yaml").write_text(json.dumps(task))
    result = Result("tasks")
    check_tasks(subject, result, [str(tmp_path / "texts.yaml")], None)
    assert result.status == "passed", result.findings
    total = 0.0
    with LLM("embedded", device="cpu") as llm:
        for text in TEXTS:
            assert llm.tokenizer is not None
            ids = [llm.tokenizer.hf.eos_token_id, *llm.tokenizer.encode_bare(text)]
            scores = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
            total += sum(float(next(iter(each.values()))) for each in (scores or [])[1:] if each)
    own = math.exp(-total / sum(len(text.encode()) for text in TEXTS))
    assert result.figures["tasks"]["texts"]["byte_perplexity,none"] == pytest.approx(own, rel=1e-5)
    assert f"byte_perplexity {own:.4f}" in result.notes[0] and "2 questions" in result.notes[0]
