"""The examples run, and give what the engine gives."""

from pathlib import Path
from typing import Any

import pytest

from examples import embed_backends
from hybridrt import LLM, EngineConfig, SamplingParams
from tests.support.checkpoints import Make, falcon, jamba, nemotron, qwen
from tests.support.tiny import write_tiny

PROMPTS = [[5, 6, 7, 8, 9], [11], list(range(20, 60))]


@pytest.mark.parametrize(
    ("make", "state_mode"),
    [*[(make, mode) for make in (falcon(), nemotron(), qwen()) for mode in ("classic", "replay")], (jamba(), "auto")],
)
def test_embedded_loop_gives_the_engines_tokens(make: Make, state_mode: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "max_running_requests": 3}
    settings |= {"max_model_len": 96, "state_mode": state_mode}
    model = str(write_tiny(tmp_path, make, tokenizer=False))
    expected = LLM(model, **settings).generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    outputs = embed_backends.generate(EngineConfig(model, **settings), PROMPTS, 40)
    assert outputs == [output.token_ids for output in expected]


def test_main_prints_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_backends, "build_model", _dummy(embed_backends.build_model))
    embed_backends.main(str(write_tiny(tmp_path)))
    printed = capsys.readouterr().out
    assert printed.startswith("def read_lines(path):")
    assert "\n\nimport " in printed


def _dummy(build: Any) -> Any:
    """build_model with random weights: the tiny checkpoint has none."""
    from dataclasses import replace

    return lambda config, *rest, **options: build(replace(config, load_format="dummy"), *rest, **options)
