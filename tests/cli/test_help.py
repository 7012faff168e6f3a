"""The help groups options by what they set, and shells complete them."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import shellingham
import typer
from typer.testing import CliRunner

from hybridrt.cli.app import app
from hybridrt.cli.bench import LoadOptions
from hybridrt.cli.options import EngineOptions, SamplingOptions, SpeculativeOptions
from hybridrt.cli.router import RouterOptions
from hybridrt.cli.serve import FrontOptions, ServerOptions

COMMAND = [sys.executable, "-c", "from hybridrt.cli import main; main()"]


def panels(*command: str) -> dict[str, set[str]]:
    """The long options of a command's help by the heading above them."""
    found: dict[str, set[str]] = {}
    for line in CliRunner().invoke(app, [*command, "--help"]).stdout.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            found[line[:-1]] = set()
        elif line.startswith("  -"):
            found[list(found)[-1]] |= {word.strip(",/") for word in line.split() if word.startswith("--")}
    return found


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        (["serve"], {"Server": ServerOptions, "Engine": EngineOptions, "Speculation": SpeculativeOptions}),
        (["router"], {"Router": RouterOptions, "Server": FrontOptions}),
        (["generate"], {"Sampling": SamplingOptions, "Engine": EngineOptions, "Speculation": SpeculativeOptions}),
        (["bench", "offline"], {"Load": LoadOptions, "Engine": EngineOptions}),
        (["bench", "serve"], {"Load": LoadOptions}),
    ],
)
def test_options_stand_under_what_they_set(command: list[str], groups: dict[str, Any]) -> None:
    shown = panels(*command)
    assert "--help" in shown["Options"] and [title for title in shown if title in groups] == list(groups)
    for title, group in groups.items():
        plural = {field.name.replace("_", "-").rstrip("s") for field in fields(group)}
        assert {option[2:].removeprefix("no-").rstrip("s") for option in shown[title]} >= plural, title


@pytest.mark.parametrize("command", ["generate", "serve", "quantize", "explain", "compare"])
def test_arguments_are_shown_without_types_of_python(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"]).stdout
    lines = text.partition("Arguments:\n")[2].partition("\n\n")[0].splitlines()
    assert lines and not [line for line in lines if "str" in line.split("  ")[1]], lines
    assert ("[embedded]" in lines[0]) == (command == "serve")


def test_lists_of_commands_and_defaults_are_shown_in_one_form() -> None:
    """A summary that is too long for 80 columns would end in "..."."""
    commands = {*typer.main.get_command(app).commands} - {"bench"}  # type: ignore[attr-defined]
    for words in ([], ["bench"], *([name] for name in sorted(commands)), ["bench", "serve"], ["bench", "offline"]):
        text = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).stdout
        assert "Usage" in text and "..." not in text.partition("Commands:\n")[2], words
        assert "[default:" not in text, words


def test_a_router_has_no_options_of_an_engine() -> None:
    assert not {"--role", "--max-waiting", "--served-model-name"} & set().union(*panels("router").values())


@pytest.mark.parametrize("kind", ["serve", "offline"])
def test_what_makes_a_load_stands_together(kind: str) -> None:
    assert {"--rate", "--concurrency", "--requests"} <= panels("bench", kind)["Load"]


def hybridrt(home: Path, *arguments: str, **environment: str) -> str:
    variables = os.environ | {"HOME": str(home)} | environment
    return subprocess.run([*COMMAND, *arguments], env=variables, capture_output=True, text=True, check=True).stdout


def test_completion_scripts_of_shells(tmp_path: Path) -> None:
    """Names of options come from the command line itself, which imports no torch for them."""
    hybridrt(tmp_path, "--install-completion", "bash")
    script = tmp_path / ".bash_completions" / "hybridrt.sh"
    assert str(script) in (tmp_path / ".bashrc").read_text()
    assert "_HYBRIDRT_COMPLETE=complete_bash" in script.read_text()
    asked = {"_HYBRIDRT_COMPLETE": "complete_bash", "COMP_WORDS": "hybridrt serve --specul", "COMP_CWORD": "2"}
    assert hybridrt(tmp_path, **asked).split() == ["--speculative"]


@pytest.mark.parametrize(("parent", "what"), [
    (None, "no shell was found that this command was started from"), ("sh", "'sh' has no completion"),
])  # fmt: skip
@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
def test_a_shell_that_is_not_found_is_asked_for(
    option: str, parent: str | None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service, a cron job and a test have no shell among their parents."""

    def detect_shell() -> tuple[str, str]:
        if parent is None:
            raise shellingham.ShellDetectionFailure
        return parent, f"/bin/{parent}"

    monkeypatch.setattr(shellingham, "detect_shell", detect_shell)
    result = CliRunner().invoke(app, [option])
    names = "bash, zsh, fish, powershell and pwsh"
    wanted = f"error: {what}; name one of {names}, as in `hybridrt {option} bash`\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", wanted)
    result = CliRunner().invoke(app, ["--show-completion", "fish"])
    assert result.exit_code == 0 and result.stdout.startswith("complete --command")
    assert "Usage" in CliRunner().invoke(app, [option, "--help"]).stdout
