"""`hybridrt generate` on a tiny model with random weights, against what LLM itself gives."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import hybridrt
from hybridrt import LLM, EngineConfig, SamplingParams
from hybridrt.base.errors import EngineError, RankError
from hybridrt.cli.app import app
from hybridrt.cli.generate import PromptSampling, _bar
from hybridrt.cli.options import EngineOptions
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.request.outputs import Delta, RequestOutput
from hybridrt.runtime.load import model_path
from hybridrt.runtime.run.model_runner import ModelRunner
from tests.support.tiny import CHAT_TEMPLATE, write_tiny

TINY_ENGINE = ("--load-format", "dummy", "--device", "cpu", "--max-running-requests", "4")
COMMAND = "from hybridrt.cli import main; main()"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    return write_tiny(path, chat_template=CHAT_TEMPLATE, generation={"do_sample": False})


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), load_format="dummy", device="cpu", max_running_requests=4)


def run(model: Path | str, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", "--model", str(model), *TINY_ENGINE, *arguments], input=stdin)


def greedy(llm: LLM, prompt: str | list[int], max_tokens: int) -> RequestOutput:
    return llm.generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=0.0))[0]


def test_text_is_what_llm_generates_and_nothing_else(tiny: Path, llm: LLM) -> None:
    result = run(tiny, "def f():", "--max-tokens", "12")
    assert result.exit_code == 0, result.output
    assert result.stdout == greedy(llm, "def f():", 12).text + "\n"


def test_echo_prints_the_prompt_first(tiny: Path, llm: LLM) -> None:
    result = run(tiny, "def f():", "--max-tokens", "5", "--echo")
    assert result.stdout == "def f():" + greedy(llm, "def f():", 5).text + "\n"


def test_several_prompts_come_in_order_under_their_labels(tiny: Path, llm: LLM) -> None:
    prompts = ["one", "a much longer second prompt", "3"]
    result = run(tiny, *prompts, "--max-tokens", "6")
    parts = [f"==> {p} <==\n{greedy(llm, p, 6).text}\n" for p in prompts]
    assert result.stdout == "\n".join(parts)


def test_samples_of_a_prompt_differ_and_a_seed_repeats_them(tiny: Path) -> None:
    def texts(seed: str) -> list[str]:
        result = run(tiny, "x", "-n", "3", "--temperature", "1", "--max-tokens", "8", "--seed", seed, "--json")
        return [json.loads(line)["text"] for line in result.stdout.splitlines()]

    first = texts("5")
    assert len(set(first)) == 3
    assert texts("5") == first


def test_standard_input_is_a_prompt_to_the_byte(tiny: Path, llm: LLM) -> None:
    result = run(tiny, "--max-tokens", "6", stdin="def f():\n    ")
    assert result.stdout == greedy(llm, "def f():\n    ", 6).text + "\n"


def test_json_lines_hold_the_sample(tiny: Path, llm: LLM) -> None:
    result = run(tiny, "ab", "c", "--max-tokens", "4", "--json", "--logprobs", "2")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["ab", "c"]
    assert [line["token_ids"] for line in lines] == [greedy(llm, p, 4).token_ids for p in ("ab", "c")]
    assert all(line["finish_reason"] == "length" and len(line["logprobs"]) == 4 for line in lines)
    metrics = lines[0]["metrics"]
    assert (metrics["prompt_tokens"], metrics["output_tokens"]) == (2, 4)
    assert 0 < metrics["time_to_first_token"] <= metrics["seconds"]
    assert metrics["tokens_per_second"] > 0


def test_token_ids_go_in_and_come_out(tiny: Path, llm: LLM) -> None:
    result = run(tiny, "--token-ids", "5, 6 7", "--max-tokens", "4")
    assert result.stdout == " ".join(map(str, greedy(llm, [5, 6, 7], 4).token_ids)) + "\n"


def test_a_model_without_tokenizer_takes_token_ids_alone(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, tokenizer=False)
    assert len(run(model, "--token-ids", "5 6", "--max-tokens", "3").stdout.split()) == 3
    refused = run(model, "text")
    assert refused.exit_code == 2
    assert "token ids" in refused.stderr


def test_chat_wraps_the_prompt_once(tiny: Path, llm: LLM) -> None:
    result = run(tiny, "--chat", "hi", "--max-tokens", "5")
    ids = llm.tokenizer.hf.encode("<bos>user: hi", add_special_tokens=False)
    assert ids.count(1) == 1
    assert result.stdout == greedy(llm, ids, 5).text + "\n"


def test_chat_needs_a_template(tmp_path: Path) -> None:
    result = run(write_tiny(tmp_path), "--chat", "hi")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


def test_verbose_shows_plan_and_timings_on_standard_error(tiny: Path, llm: LLM) -> None:
    result = run(tiny, "ab", "--max-tokens", "4", "--verbose")
    assert result.stdout == greedy(llm, "ab", 4).text + "\n"
    assert re.search(r"(?m)^model: .*\nmemory plan: .*KV pages.*\nprompt 1: 2 prompt tokens, 4 out", result.stderr)


def test_a_bar_shows_how_many_samples_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the texts go elsewhere than to the terminal."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("tqdm.auto.tqdm", lambda **options: made.append(options))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for total, hidden in ((3, False), (1, False), (3, True)):
        _bar(total, hidden)
    assert [bar["disable"] for bar in made] == [False, True, True]


def test_speculation_changes_the_speed_alone(tiny: Path) -> None:
    plain = run(tiny, "abcabcabc", "--max-tokens", "40")
    guessed = run(tiny, "abcabcabc", "--max-tokens", "40", "--speculative", "ngram", "--num-draft-tokens", "3", "-v")
    assert guessed.stdout == plain.stdout
    assert re.search(
        r"\d+ of \d+ drafts accepted, mean accepted length [1-4]\.\d\d, \d\.\d\d tokens per target step", guessed.stderr
    )


def test_the_default_model_brings_a_drafter() -> None:
    """Its drafts are often right; any other model needs one named."""
    common = ["for i in range(", "--device", "cpu", "--max-tokens", "32"]
    plain = CliRunner().invoke(app, ["generate", *common])
    drafted = CliRunner().invoke(app, ["generate", *common, "--speculative", "draft", "--json"])
    assert drafted.exit_code == 0, drafted.output
    line = json.loads(drafted.stdout)
    assert line["text"] + "\n" == plain.stdout
    metrics = line["metrics"]
    assert metrics["accepted"] > metrics["proposed"] / 3 and metrics["tokens_per_target_step"] > 1.5
    assert metrics["mean_accepted_length"] == 1 + metrics["accepted"] / metrics["verify_steps"]


def test_another_model_needs_its_drafter_named(tiny: Path) -> None:
    result = run(tiny, "x", "--speculative", "draft")
    assert result.exit_code == 2 and "needs --draft-model" in result.stderr


def test_drafts_need_a_method(tiny: Path) -> None:
    result = run(tiny, "x", "--num-draft-tokens", "3")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: --num-draft-tokens goes with --speculative ngram, draft or mtp\n",
    )


def test_the_default_model_needs_no_download() -> None:
    result = CliRunner().invoke(app, ["generate", "def read_lines(path):", "--device", "cpu", "--max-tokens", "24"])
    assert result.exit_code == 0, result.output
    assert len(result.stdout.strip()) > 10


def test_a_missing_default_model_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_path, "ASSETS", tmp_path)
    result = CliRunner().invoke(app, ["generate", "x"])
    assert result.exit_code == 2
    assert "lacks its embedded model" in result.stderr


def test_engine_options_reach_the_engine(tiny: Path) -> None:
    result = run(tiny, "ab", "--max-model-len", "33", "--page-size", "8", "--max-tokens", "2", "--verbose")
    assert "4 running requests" in result.stderr
    assert "32 KV pages (256 tokens)" in result.stderr, "pages of 8 tokens"
    assert "requests up to 33 tokens" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("x", "--dtype", "int7"), "dtype is 'int7'; it must be one of"),
        (("x", "--temperature", "nan"), "temperature is nan"),
        (("--token-ids", "5 x"), "no list of integers"),
        (("--token-ids", "5 9999"), "token id 9999 is outside the vocabulary"),
        (("x" * 500, "--max-model-len", "256"), "the prompt has 500 tokens"),
        (("x", "--attention-backend", "zzz"), "--attention-backend 'zzz' is not supported"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(tiny: Path, arguments: tuple[str, ...], text: str) -> None:
    result = run(tiny, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr
    assert result.stderr.count("\n") == 1


def test_empty_input_is_refused(tiny: Path) -> None:
    result = run(tiny, stdin="")
    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr


def test_unknown_names_are_answered_with_known_ones(tmp_path: Path) -> None:
    assert "no directory; pass a checkpoint directory, a hub name" in run(tmp_path / "none", "x").stderr
    unknown = run(tmp_path, "x", "--max-token", "3")
    assert unknown.exit_code == 2
    assert "--max-tokens" in unknown.stderr
    command = CliRunner().invoke(app, ["gnerate"])
    assert command.exit_code == 2
    assert "generate" in command.stderr


def test_a_failure_on_the_way_is_status_1(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine) -> list[Delta]:
        raise EngineError("the device\nis gone")

    monkeypatch.setattr(Engine, "step", broken)
    result = run(tiny, "x")
    assert result.exit_code == 1
    assert result.stderr == "error: the device is gone\n"


def test_a_step_that_fails_is_status_1(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ModelRunner, plan: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(ModelRunner, "launch", broken)
    result = run(tiny, "x", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "out of luck" in result.stderr


def test_a_lost_rank_is_named_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: ModelRunner, plan: object) -> None:
        raise RankError("tensor-parallel rank 1 was lost: no heartbeat; build a new LLM")

    monkeypatch.setattr(ModelRunner, "launch", lost)
    result = run(tiny, "x")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: tensor-parallel rank 1 was lost: no heartbeat; build a new LLM\n",
    )


def test_traceback_is_shown_on_request(tiny: Path) -> None:
    arguments = ["--traceback", "generate", "--model", str(tiny), "x", "--dtype", "int7"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "int7" in str(result.exception)


def test_an_interrupt_ends_with_status_130(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Engine) -> list[Delta]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    assert run(tiny, "x").exit_code == 130


def start(tiny: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-c",
        COMMAND,
        "generate",
        "--model",
        str(tiny),
        *TINY_ENGINE,
        "--ignore-eos",
        *arguments,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)


@pytest.mark.slow
def test_control_c_leaves_no_traceback(tiny: Path) -> None:
    process = start(tiny, "--token-ids", "5 6", "--max-tokens", "4000")
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate()[1]
    assert process.returncode == 130


def test_control_c_while_the_interpreter_ends_leaves_no_traceback() -> None:
    code = (
        "import atexit, os, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGINT); "
        "from hybridrt.cli import main; sys.argv[1:] = ['--help']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_text_has_the_form_that_options_ask_for(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [["a"]], "x-guidance": {"whitespace_flexible": false}}')
    no_type, number = tmp_path / "no_type.json", tmp_path / "number.json"
    no_type.write_text('{"type": "nope"}')
    number.write_text("5")
    assert run("embedded", "x", "--json-schema", str(schema), "--temperature", "0").stdout == '["a"]\n'
    assert run("embedded", "x", "--regex", "z{3}").stdout == "zzz\n"
    for options, text in (
        (("--json-schema", str(tmp_path)), "--json-schema"),
        (("--regex", "["), "error: --regex cannot be used: "),
        (("--regex", ""), "error: --regex is ''; "),
        (("--json-schema", str(no_type)), "error: --json-schema cannot be used: Invalid type"),
        (("--json-schema", str(number)), "error: --json-schema is '5'; "),
        (("--regex", "a", "--json-schema", str(schema)), "error: --json-schema and --regex both"),
    ):
        result = run("embedded", "x", *options)
        assert result.exit_code == 2 and text in result.stderr and "structured_outputs" not in result.stderr


@pytest.mark.slow
def test_a_closed_pipe_leaves_no_traceback(tiny: Path) -> None:
    process = start(tiny, "--token-ids", "5 6", "--max-tokens", "4000")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.wait()
    process.stderr.close()
    assert (process.returncode, errors) == (1, "")


def test_options_name_every_field_once_and_show_its_default() -> None:
    engine = {f.name: f.default for f in fields(EngineConfig)}
    shown = {f.name: f.metadata for f in fields(EngineOptions)}
    # A drafter is not an option of one line, and clients have keys of a server.
    assert set(engine) - set(shown) == {"model", "speculative", "client_weights"}
    sampling = {f.name: f.default for f in fields(SamplingParams)}
    # What a request among others needs, or its server.
    served = {"cache_salt", "priority", "truncate_prompt_tokens", "include_stop_str_in_output", "skip_special_tokens"}
    # Rules about token ids, and scores of a prompt, are for programs.
    programs = {
        "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs", "pooling", "logprob_token_ids",
        "resume_token_ids",
    }  # fmt: skip
    forms = {"structured_outputs"}  # which --json-schema and --regex set
    assert set(sampling) - {f.name for f in fields(PromptSampling)} == {"seed", *served, *programs, *forms}
    text = " ".join(CliRunner().invoke(app, ["generate", "--help"]).stdout.split())
    for name in shown:
        if engine[name] not in (None, True, MISSING):
            after = text.split(f"--{name.replace('_', '-')} ", 1)[1]
            default = "off" if engine[name] is False else engine[name]
            assert after.split("[", 1)[1].startswith(f"{default}]"), name


def test_help_and_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"hybridrt {hybridrt.__version__}\n"
    assert "inspect" in CliRunner().invoke(app, ["--help"]).stdout
