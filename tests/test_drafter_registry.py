"""Methods of drafting by name: those of this package and those of others, and what each declares."""

import ast
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.base import draft_methods as registry
from hybridrt.base import plugins
from hybridrt.base.draft_methods import BUILT_IN, DRAFTERS, load_method
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import BackendError, ConfigError
from hybridrt.base.plugins import load_object
from hybridrt.runtime.load.draft_needs import DraftRow
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.speculative.drafter import AdaptiveDrafter
from hybridrt.speculative.method import DraftMethod, draft_method
from tests.support.checkpoints import CheckpointStore
from tests.support.outside_drafter import OUTSIDE, FirstFollowers
from tests.test_structure import SOURCES, nodes


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package names its methods in entry points."""
    targets = {"first": "OUTSIDE", "wrong": "FirstFollowers", "absent": "Absent"}
    points = [SimpleNamespace(name=n, value=f"tests.support.outside_drafter:{t}") for n, t in targets.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == "hybridrt.drafters" else [])
    load_method.cache_clear()
    yield
    load_method.cache_clear()


def test_names_are_those_of_this_package_and_of_others() -> None:
    assert DRAFTERS.names() == sorted(["draft", "ngram", "mtp", "first", "wrong", "absent"])
    for name in BUILT_IN:
        assert isinstance(load_method(name), DraftMethod)
    assert load_method("first") is OUTSIDE


@pytest.mark.parametrize(("method", "error", "text"), [
    ("guess", ConfigError, r"'guess'.*absent, draft, first, mtp, ngram"),
    (["ngram"], ConfigError, r"method is \['ngram'\]"),
    ("wrong", BackendError, "'wrong' leads to .*must name a DraftMethod"),
    ("absent", BackendError, "tests.support.outside_drafter:Absent cannot be imported"),
])  # fmt: skip
def test_a_name_that_leads_to_no_method_is_refused_at_once(method: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SpeculativeConfig(method)


def test_a_record_that_is_no_whole_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    half = registry.DraftMethodBase()
    monkeypatch.setattr("hybridrt.speculative.method.load_method", lambda name: half)
    with pytest.raises(BackendError, match="must be a DraftMethod"):
        draft_method(SpeculativeConfig("first"))


def test_a_method_without_a_drafter_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(BackendError, match=r"no_drafter:METHOD cannot be imported: .* abstract method '?drafter"):
        load_object("tests.support.no_drafter:METHOD")


def test_a_drafter_of_another_package_drafts(checkpoints: CheckpointStore) -> None:
    """Its drafts are verified, the text is that of plain decoding, its bytes are charged, and nothing of a request is
    left with it."""
    path, prompts = str(checkpoints["falcon-plain"].path), [[5, 6, 7, 5, 6], [9], [40, 41, 40]]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    common = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_running_requests": 2}
    texts, plans = [], []
    for method in ("first", "ngram"):
        with LLM(path, **common, speculative=SpeculativeConfig(method, num_draft_tokens=3)) as llm:
            outputs = llm.generate(prompts, params)
            texts.append([output.token_ids for output in outputs])
            runner, drafter = llm.engine.executor, llm.engine._scheduler._drafter
            assert isinstance(runner, ModelRunner) and isinstance(drafter, AdaptiveDrafter)
            plans.append(runner.memory_plan)
            if method == "first":
                assert sum(output.metrics.proposed for output in outputs) > 0
                assert isinstance(drafter.inner, FirstFollowers)
                assert not drafter.inner.followers and not drafter.inner.known and not drafter._earned
    assert texts[0] == texts[1]
    assert plans[0].costs.row - plans[1].costs.row == 64
    assert plans[0].costs.fixed - plans[1].costs.fixed == 5000


def test_a_task_to_draft_needs_a_device_drafter(checkpoints: CheckpointStore) -> None:
    runner = ModelRunner(EngineConfig(str(checkpoints["falcon-plain"].path), device="cpu", max_model_len=64))
    with pytest.raises(ConfigError, match="has no device drafter"):
        runner.draft([DraftRow(1, 1, 1, 0, SamplingParams())], 1)


def test_no_file_but_a_methods_own_contains_its_name() -> None:
    """The runtime, the engine and the configuration ask the method; only help texts and errors name one."""
    compared = []
    for file in [file for name, file in SOURCES.items() if not name.startswith("hybridrt.mem_cache")]:
        for node in nodes(file):
            if isinstance(node, ast.Compare):
                names = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
                compared += [f"{file.name}:{node.lineno}"] * bool(names & set(BUILT_IN))
    assert compared == []
