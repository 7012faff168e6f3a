"""Lines of quantised models next to bfloat16."""

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from benchmarks import quant_ratios
from benchmarks.quant_ratios import LINES, checkpoint, main, measured, ratios
from hybridrt.models.config.read_config import read_model_config

OUTPUT = """start to first token 9.1 s; {}
decode batch 1               4.000 ms        250 tok/s  floor   3.600 ms (90.0%)  spread 0.000  slowest 1.010
prefill 1x8192                           40000 tok/s     600 TFLOP/s (85.7% of 700)
"""


def test_figures_are_read_from_the_benchmark_and_divided_by_those_of_bfloat16() -> None:
    found = measured(OUTPUT)
    assert found == {"1": 4.0, "1x8192": 40000.0}
    assert ratios({"1": 2.5, "1x8192": 56000.0, "32": 3.0}, found, {"1": 0.61}) == [
        "1: 2.5 = 0.625 (aim 0.61)",
        "1x8192: 56000 = 1.400",
        "32: 3",
    ]


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.model} {line.name}")
def test_a_line_is_a_config_that_is_read(line: quant_ratios.Line, tmp_path: Path) -> None:
    config = read_model_config(checkpoint(line, tmp_path / "model"))
    assert (config.quant is None) == (line.quant is None)


def test_lines_that_would_begin_too_late_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = list[list[str]]()

    def run(command: list[str], **_: Any) -> CompletedProcess[str]:
        commands.append(command)
        return CompletedProcess(command, 0, OUTPUT)

    monkeypatch.setattr(quant_ratios.subprocess, "run", run)
    monkeypatch.setattr(quant_ratios, "environment", dict)
    main(["--only", "e4m3 KV"])
    assert len(commands) == 2 and "int8" in commands[1] and "1: 4 = 1.000 (aim 0.61)" in capsys.readouterr().out
    main(["--seconds", "-1"])
    assert len(commands) == 2 and capsys.readouterr().out.count("left out after -1 s") == len(LINES)
