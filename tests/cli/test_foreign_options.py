"""Options and values of vLLM and SGLang on a command line: one error has all, with what to write instead."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hybridrt import LLM, EngineConfig
from hybridrt.base.errors import ConfigError, UnknownNameError
from hybridrt.base.errors_foreign import VALUES
from hybridrt.chat.registry import REASONING_PARSERS, TOOL_PARSERS
from hybridrt.cli.app import app
from hybridrt.cli.foreign_options import ROWS, SHORT, refusal
from hybridrt.images.reader import PromptLimits
from scripts.option_rows import DOCUMENT, document

PEERS = json.loads((Path(__file__).parents[1] / "vectors" / "peer_options.json").read_text())
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
SERVE = COMMANDS["serve"].params


def refused(line: str) -> str:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2, result.output
    return result.stderr


def test_one_error_has_all_options_that_are_not_there() -> None:
    said = refused(
        "serve embedded --tp 2 --port 1 --max-num-seqs=8 --nonsense 3 --dtype half --tp 2 -q fp8"
    ).splitlines()
    assert said == [
        "error: 5 options cannot be used:",
        "  --tp: write --tp-size instead",
        "  --max-num-seqs: write --max-running-requests instead",
        "  --nonsense: --help lists all",
        "  --dtype half: write float16 instead",
        "  -q: write --quantization",
    ]


@pytest.mark.parametrize("peer", PEERS)
def test_each_option_of_theirs_is_answered(peer: str) -> None:
    known = {name for param in SERVE for name in (*param.opts, *param.secondary_opts)}
    for option in (name for name in PEERS[peer]["options"] if name.startswith("--") and name not in known):
        said = refusal([option], SERVE)
        assert re.match(rf"no option {option}: (write --|see --|leave it out|there is no|the model is)", said), said
        assert "`" not in said and "](" not in said, said


def test_the_rows_are_those_of_the_page() -> None:
    assert ROWS.read_text() == document(), "run python -m scripts.option_rows"


def test_short_options_are_those_of_the_page() -> None:
    text = DOCUMENT.read_text().split("short options.**")[1].split("- **")[0]
    assert set(re.findall(r"`(-[a-zA-Z]+)`", text)) == SHORT.keys()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve --limit-mm-per-prompt {}", "leave it out: a prompt may have up to 128 images; --no-images takes none"),
        ("serve --tool-call-parser hermes", "write --tool-parser instead; not needed: the template chooses"),
        ("serve --tool-call-parser qwen25", "write --tool-parser hermes instead"),
        ("serve --speculative-algorithm NGRAM", "write --speculative ngram instead"),
        ("serve --enable-auto-tool-choice", "leave it out: tools need no switch"),
        ("serve --enable-log-requests", "write --access-log instead"),
        ("serve --disable-log-requests", "write --no-access-log instead"),
        ("serve --schedule-policy lpm", "leave it out: the order of prompts"),
        ("serve --enable-metrics", "leave it out: always on"),
        ("serve --cpu-offload-gb 4", "there is no such feature: weights stay on the device"),
        ("serve --ssl-keyfile x", "write --tls-key instead"),
        ("serve --compilation-config.mode 3", "leave it out, or see --attention-backend"),
        ("serve -tp 2", "no option -tp: write --tp-size instead"),
        ("serve -O3", "no option -O3: leave it out, or see"),
        ("serve --max_model_len 9", "write --max-model-len"),
        ("serve --prefx-cache", "did you mean --prefix-cache?"),
        ("inspect --tool-call-parser x", "leave it out here: `hybridrt serve` has --tool-parser"),
        ("serve --kv-cache-dtype fp8", "--kv-cache-dtype fp8: write fp8_e4m3 instead"),
        ("inspect --dtype=half", "--dtype half: write float16 instead"),
        ("serve --reasoning-parser qwen3", "--reasoning-parser qwen3: write think instead"),
        ("serve --quantization awq", "--quantization awq: leave it out: a quantised checkpoint is recognised"),
    ],
)
def test_the_answer_says_what_to_write(line: str, said: str) -> None:
    assert said in refused(line)


def test_values_and_what_follows_the_end_of_options_are_no_options() -> None:
    assert refusal(["m", "--served-model-name", "--tp", "--uds=--tp", "--", "--tp"], SERVE) == ""
    assert refusal(["-m", "--tp", "-mx", "-n2", "-7"], COMMANDS["generate"].params) == ""


def test_a_parser_of_an_entry_point_may_have_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(TOOL_PARSERS), "names", lambda self: ["openai"] if self is TOOL_PARSERS else [])
    assert refusal(["--tool-parser", "openai"], SERVE) == ""
    assert "write think" in refusal(["--reasoning-parser", "qwen3"], SERVE)


def test_translated_values_are_ours() -> None:
    registered = {"tool_parser": TOOL_PARSERS.names(), "reasoning_parser": REASONING_PARSERS.names()}
    for name, values in VALUES.items():
        for theirs, ours in values.items():
            if name in registered:
                assert ours in registered[name] and theirs not in registered[name]
            elif name != "speculative" and not ours.startswith("!"):
                EngineConfig("embedded", **{name: ours})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("dtype", "half", "write 'float16'"),
        ("kv_cache_dtype", "fp8", "write 'fp8_e4m3'"),
        ("quantization", "awq", ": leave it"),
    ],
)
def test_an_argument_of_python_is_translated_too(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig("embedded", **{name: value})


def test_a_limit_of_images_does_not_turn_them_off() -> None:
    with pytest.raises(UnknownNameError, match=f"up to {PromptLimits().images} images; images=False takes none"):
        LLM("embedded", limit_mm_per_prompt={"image": 4})
