"""Where the model is named on a command line, and errors that speak of options."""

from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hybridrt.cli.app import app
from hybridrt.cli.option_names import in_options


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.mark.parametrize(
    "first", ["./checkpoint", "checkpoint", "{}/checkpoint", "org/name", "model.GGUF", "./a/b.gguf"]
)
def test_a_model_as_first_prompt_is_refused(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a model need not exist for its name to be no prompt."""
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    first = first.format(tmp_path)
    said = refused("generate", first, "hello")
    assert f"--model {first}" in said and "looks like a model" in said


@pytest.mark.parametrize("first", ["def f(a/b):", "and/or what", "x" * 5000, "a\0b", "1/2/3", "checkpoint", "org/name"])
def test_other_prompts_are_prompts_and_so_is_any_if_the_model_is_named(first: str) -> None:
    arguments = ["--model", "embedded"] if first == "org/name" else []
    # The next check after that of the first prompt.
    assert "--top-k" in refused("generate", *arguments, "--top-k", "-7", first)


@pytest.mark.parametrize("first", ["./nosuch", "../no/such", "/no/such-7b", "~/nosuch"])
def test_a_path_that_leads_nowhere_is_no_first_prompt_of_several(first: str) -> None:
    said = refused("generate", first, "x")
    assert f"--model {first}" in said and "looks like a model" in said
    for prompts in ([first], ["x", first], ["// a comment", "x"], ["/* a */", "x"]):
        assert "--top-k" in refused("generate", "--top-k", "-7", *prompts)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve --tensor-parallel-size 2", "no option --tensor-parallel-size: write --tp-size instead"),
        ("serve --tensor-parallel-size=2", "no option --tensor-parallel-size: write --tp-size instead"),
        ("serve x --gpu-memory-utilization 0.9", "write --memory-fraction instead"),
        ("serve --mem-fraction-static 0.9", "write --memory-fraction instead"),
        ("serve --max-num-seqs 8", "write --max-running-requests instead"),
        ("serve --context-length 8", "write --max-model-len instead"),
        ("serve --model-path x", "the model is an argument here"),
        ("generate --model-path x", "write --model instead"),
        ("serve --enforce-eager", "write --no-cuda-graph instead"),
        ("serve --disable-radix-cache", "write --no-prefix-cache instead"),
        ("serve --num-speculative-tokens 3", "write --speculative instead"),
        ("serve --trust-remote-code", "leave it out: code of a checkpoint is never run"),
        ("serve --enable-chunked-prefill", "(--chunked-prefill-size)"),
        ("generate --max-new-tokens 3 x", "write --max-tokens instead"),
        ("generate --guided-regex a x", "write --regex instead"),
    ],
)
def test_options_of_other_runtimes_are_named_as_here(line: str, said: str) -> None:
    assert said in refused(*line.split())


def test_a_word_behind_the_end_of_options_is_a_prompt() -> None:
    assert "--top-k is -7" in refused("generate", "--top-k", "-7", "--", "--tensor-parallel-size")


def test_an_error_of_several_lines_keeps_them() -> None:
    said = refused("generate", "--regex", "ab[c", "x").splitlines()
    assert said[0].startswith("error: --regex") and len(said) > 2
    assert said[1].strip() == "ab[c" and said[2].index("^") == said[1].index("[")


@pytest.mark.parametrize("command", ["serve", "chat", "inspect", "compile"])
@pytest.mark.parametrize("option", [("--model", "x"), ("-m", "x"), ("--model=x",)])
def test_an_option_is_refused_where_the_model_is_an_argument(command: str, option: tuple[str, ...]) -> None:
    assert f"hybridrt {command} ./checkpoint" in refused(command, *option).replace("root", "hybridrt")


def test_an_argument_is_refused_where_the_model_is_an_option() -> None:
    assert "--model ./checkpoint" in refused("bench", "offline", "./checkpoint")


def test_every_command_of_a_model_takes_it_in_one_way() -> None:
    commands = dict(get_command(app).commands)  # type: ignore[attr-defined]
    commands["offline"] = commands.pop("bench").commands["offline"]
    kinds = {name: {p.name: p for p in command.params}.get("model") for name, command in commands.items()}
    found = {name: param and (param.param_type_name, param.metavar) for name, param in kinds.items()}
    argument, option = ("argument", "MODEL"), ("option", "MODEL")
    assert found == {
        "generate": option, "offline": option, "serve": argument, "chat": argument, "inspect": argument,
        "compile": argument, "tune": argument, "quantize": argument, "verify": argument,
        "doctor": None, "explain": None, "compare": None,
        "router": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("generate --max-tokens 0 x", "--max-tokens is 0;"),
        ("generate --top-k -7 x", "--top-k is -7;"),
        ("generate --temperature -1 x", "--temperature is -1.0;"),
        ("generate -n 0 x", "-n is 0;"),
        ("generate --logprobs 99 --json x", "--logprobs is 99;"),
        ("chat --max-tokens 0", "--max-tokens is 0;"),
        ("serve --port 99999", "--port is 99999;"),
        ("serve --max-waiting 0", "--max-waiting is 0;"),
        ("serve --request-timeout 0", "--request-timeout is 0.0;"),
        ("inspect --dtype int7", "--dtype is 'int7';"),
        ("inspect --max-model-len 0", "--max-model-len is 0;"),
        ("inspect --device xpu", "--device is 'xpu';"),
        ("inspect --attention-backend x", "--attention-backend 'x'"),
        ("inspect --speculative ngram --draft-model x", '--speculative "ngram" takes no --draft-model;'),
        ("inspect --host-cache-bytes 9 --no-prefix-cache", "--host-cache-bytes extends the prefix cache"),
        ("bench offline --rate 0", "--rate is 0.0;"),
        ("bench offline --prompt-tokens 0", "--prompt-tokens is 0;"),
        ("bench serve --slo-ttft 0", "--slo-ttft is 0.0;"),
        ("compile --device cpu --gpu h100", "--device is 'cpu';"),
        ("generate x --speculative nope", "--speculative 'nope' is not supported;"),
    ],
)
def test_an_error_names_the_option(line: str, start: str) -> None:
    if line.startswith("compile"):
        pytest.importorskip("triton")
    said = refused(*line.split())
    assert said.startswith(f"error: {start}") and "=True" not in said and "None" not in said, said


def test_names_of_files_and_of_their_fields_are_no_options() -> None:
    params = get_command(app).commands["generate"].params  # type: ignore[attr-defined]
    for text in (
        "/x/generation_config.json cannot be used: top_k is -7; correct it",
        "./max_tokens is no directory",
        "dir/max_tokens/x and 'max_tokens' and max_tokens_of",
        "the seed is lost, and no device was found",
    ):
        assert in_options(text, params) == text
    said = 'raise max_model_len, or set prefix_cache=False and cuda_graph=True, dtype="float16" or (tp_size)'
    assert in_options(said, params) == (
        "raise --max-model-len, or set --no-prefix-cache and --cuda-graph, --dtype float16 or (--tp-size)"
    )
