"""The examples run, and give what the engine gives."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples import composite_by_hand, embed_backends, foreign_engine
from hybridrt import LLM, EngineConfig, SamplingParams
from hybridrt.embedding import DecodeGraphs, EmbeddedRuntime, LoadedModel, load
from tests.support.checkpoints import Make, falcon, falcon_mamba, jamba, nemotron, qwen
from tests.support.levels import sweep
from tests.support.tiny import write_tiny

SHARED = list(range(40, 56))
PROMPTS = [[*SHARED, 5, 6, 7, 8, 9], [11], [*SHARED, *range(20, 60)], [*SHARED, 3], [60, 61, 62], [*SHARED, 70, 71]]
MODELS: dict[str, tuple[Make, str]] = {
    **{
        f"{make.__name__} {mode}": (make(), mode) for make in (falcon, nemotron, qwen) for mode in ("classic", "replay")
    },
    "jamba": (jamba(), "auto"),
    "falcon mamba": (falcon_mamba(), "auto"),
    "attention alone": (nemotron("*-*-"), "auto"),
}
TOKENS = 28
BUDGET = 2**26
Expected = Callable[[str], tuple[EngineConfig, list[list[int]]]]


def settings(state_mode: str) -> dict[str, Any]:
    """Three requests at a time, chunks shorter than the prompts, pages shorter than the chunks."""
    sizes = {"max_running_requests": 3, "max_model_len": 128, "chunked_prefill_size": 20, "page_size": 8}
    return {"load_format": "dummy", "device": "cpu", "state_mode": state_mode, **sizes}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """A model's configuration, and what `LLM` answers; made once."""
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)

    @cache
    def answers(name: str) -> tuple[EngineConfig, list[list[int]]]:
        make, mode = MODELS[name]
        model = str(write_tiny(tmp_path_factory.mktemp("model"), make, tokenizer=False))
        with LLM(model, **settings(mode)) as llm:
            outputs = llm.generate(PROMPTS, greedy)
        return EngineConfig(model, **settings(mode)), [output.token_ids for output in outputs]

    return answers


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each method of the surface is called, and which rows and pages are lent."""
    found: Counter[str] = Counter()

    def counted(cls: type, name: str) -> None:
        method: Callable[..., Any] = getattr(cls, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            if name == "admit":
                found.update(f"row {row}" for row in args[0])
            if name == "write_pages":
                found.update(f"page {page}" for page in args[2])
            return method(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, call)

    for name in ("admit", "write_pages", "snapshot", "restore", "commit"):
        counted(EmbeddedRuntime, name)
    counted(DecodeGraphs, "replay")
    return found


@pytest.mark.parametrize("name", sweep(MODELS, 7, thin=3))
def test_embedded_loop_gives_the_engines_tokens(name: str, expected: Expected, calls: Counter[str]) -> None:
    """Admission while others run, chunks, mixed steps, graphs, a shared prefix; row 0 and page 0 in use."""
    config, tokens = expected(name)
    loop = embed_backends.Loop(config, BUDGET, TOKENS, shared=len(SHARED))
    assert loop.generate(PROMPTS) == tokens
    assert calls["admit"] == len(PROMPTS) and calls["row 0"] and calls["commit"] and calls["replay"] > 10
    recurrent, paged = loop.plan.num_slots > 0, loop.plan.num_pages > 0
    assert (calls["snapshot"], calls["restore"]) == ((1, 3) if recurrent else (0, 0))
    assert not paged or calls["page 0"]
    assert sorted(loop.rows) == list(range(loop.plan.num_rows))
    assert len({*loop.pages, *loop.prefix_pages}) == loop.plan.num_pages


@pytest.mark.parametrize(
    ("name", "num_blocks"), sweep([("falcon replay", None), *((name, 16) for name in MODELS)], 5, thin=3)
)
def test_a_foreign_engine_gives_the_engines_tokens(name: str, num_blocks: int | None, expected: Expected) -> None:
    """With blocks for all, and with so few that requests are preempted."""
    config, tokens = expected(name)
    engine = foreign_engine.ForeignEngine(config, BUDGET, num_blocks)
    blocks = set(engine.free_blocks)
    assert engine.generate(PROMPTS, TOKENS) == tokens
    assert (engine.preempted > 0) == (num_blocks is not None and engine.has_kv)
    assert sorted(engine.free_rows) == list(range(engine.dummy)) and set(engine.free_blocks) == blocks
    assert 0 in blocks and engine.runtime.numbers.rows.scratch == engine.dummy


def test_the_foreign_engine_plans_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is prepared before the one in front of it runs."""
    order: list[str] = []
    for name in ("prepare", "forward"):
        method: Callable[..., Any] = getattr(EmbeddedRuntime, name)
        monkeypatch.setattr(
            EmbeddedRuntime, name, lambda self, batch, n=name, m=method: order.append(n) or m(self, batch)
        )
    model = str(write_tiny(tmp_path, tokenizer=False))
    foreign_engine.ForeignEngine(EngineConfig(model, **settings("replay")), BUDGET).generate(PROMPTS[:2], 8)
    assert order[:5] == ["prepare", "prepare", "forward", "prepare", "forward"]


def test_a_request_that_no_block_count_fits_is_an_error(tmp_path: Path) -> None:
    engine = foreign_engine.ForeignEngine(
        EngineConfig(str(write_tiny(tmp_path, tokenizer=False)), **settings("classic")), BUDGET, num_blocks=5
    )
    with pytest.raises(MemoryError, match="does not fit into the blocks"):
        engine.generate(PROMPTS, TOKENS)


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_the_composite_by_hand_gives_the_engines_tokens(
    mode: str, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token but the first comes from a replay of the one recorded step."""
    launches: list[int] = []
    replay = composite_by_hand.DecodeGraph.replay
    monkeypatch.setattr(
        composite_by_hand.DecodeGraph,
        "replay",
        lambda graph, tokens, lens: launches.append(len(lens)) or replay(graph, tokens, lens),  # type: ignore[func-returns-value]
    )
    config, tokens = expected(f"falcon {mode}")
    assert composite_by_hand.generate(load(config), PROMPTS, TOKENS) == tokens
    assert launches == [len(PROMPTS)] * (TOKENS - 1)


def test_the_composite_by_hand_prints_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(write_tiny(tmp_path))
    monkeypatch.setattr(composite_by_hand, "load", lambda config: load(EngineConfig(model, load_format="dummy")))
    composite_by_hand.main()
    printed = capsys.readouterr().out
    assert printed.startswith("def read_lines(path):") and "\n\nclass Stack:" in printed


@pytest.mark.parametrize("example", [embed_backends, foreign_engine])
def test_main_prints_text(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dummy(config: EngineConfig) -> LoadedModel:
        return load(replace(config, load_format="dummy", device="cpu"))

    monkeypatch.setattr(example, "load", dummy)
    example.main(str(write_tiny(tmp_path)))
    printed = capsys.readouterr().out
    assert printed.startswith("def read_lines(path):")
    assert "\n\nimport " in printed and "\n\nclass Stack:" in printed
