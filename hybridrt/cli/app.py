"""The commands together, and how each reports an error."""

import errno
import itertools
import re
import sys
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import shellingham
import typer
from typer.completion import install_callback, show_callback
from typer.core import TyperCommand, TyperGroup

import hybridrt
from hybridrt.base.errors import EngineError, HybridrtError, PoolError, RequestError, ServerError, TransferError
from hybridrt.cli import bench
from hybridrt.cli.chat import chat
from hybridrt.cli.compare import compare
from hybridrt.cli.compile import compile
from hybridrt.cli.doctor import doctor
from hybridrt.cli.explain import explain
from hybridrt.cli.foreign_options import refusal
from hybridrt.cli.generate import generate
from hybridrt.cli.inspect import inspect
from hybridrt.cli.option_names import in_options
from hybridrt.cli.options import with_options
from hybridrt.cli.quantise import quantize
from hybridrt.cli.router import router
from hybridrt.cli.serve import serve
from hybridrt.cli.terminal import discard_output, open_streams
from hybridrt.cli.tune import tune
from hybridrt.cli.verify import verify

RUNTIME_FAILURES = (EngineError, PoolError, ServerError, TransferError)
COMPLETION = {"--install-completion": install_callback, "--show-completion": show_callback}
INVOKED = "hybridrt.params"  # key of the running command in what nested contexts share
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


class ErrorLineGroup(TyperGroup):
    """Prints errors of hybridrt and exits with a status. The options that install and show
    completion take the name of a shell: typer's own take none and ask the parent processes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = list(itertools.takewhile(lambda arg: arg.startswith("-"), args))
        others = {"-h", "--help", "--version"} & set(options)
        for param in () if others or ctx.resilient_parsing else self.get_params(ctx):
            for option in COMPLETION.keys() & set(options) & set(param.opts):
                COMPLETION[option](ctx, param, _shell(option, *args[len(options) :][:1]))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HybridrtError as e:
            if ctx.params["traceback"]:
                raise
            _print_error(in_options(str(e), ctx.meta.get(INVOKED, ())), keeps_lines=isinstance(e, RequestError))
            raise typer.Exit(1 if isinstance(e, RUNTIME_FAILURES) else 2) from e


class PanelCommand(TyperCommand):
    """Groups options in the help by panels, in plain lines for pipes and narrow terminals. Says
    whether the model is an argument or `--model` if it is in the wrong place, and names all options that
    it lacks in one error."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes = {param.name: param.param_type_name for param in self.get_params(ctx)}
        named = {"--model", "-m"} & {arg.partition("=")[0] for arg in args}
        if takes.get("model") == "argument" and named and not ctx.resilient_parsing:
            self._refuse(f"{min(named)}: the model is an argument here, as in `{ctx.command_path} ./checkpoint`")
        if not ctx.resilient_parsing and (text := refusal(args, self.get_params(ctx))):
            self._refuse(text)
        alone = takes.get("model") == "option" and "argument" not in takes.values()
        ctx.allow_extra_args |= alone
        rest = super().parse_args(ctx, args)
        if alone and rest and not ctx.resilient_parsing:
            self._refuse(f"{rest[0]!r} is no option; name a model with --model, as in `--model {rest[0]}`")
        return rest

    def _refuse(self, text: str) -> NoReturn:
        _print_error(text, keeps_lines=True)
        raise typer.Exit(2)

    def invoke(self, ctx: Any) -> Any:
        ctx.meta[INVOKED] = self.get_params(ctx)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                title = "Arguments" if is_argument else "Options"
                # Typer adds the Python type to an argument's name.
                name = param.metavar if is_argument and param.metavar else record[0]
                line = name, re.sub(r" *\[default: ([^]]*)\]", r" [\1]", record[1])  # as other options show theirs
                sections.setdefault(getattr(param, "rich_help_panel", None) or title, []).append(line)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _shell(option: str, named: str = "") -> str:
    shell = named
    if not named:
        with suppress(shellingham.ShellDetectionFailure, RuntimeError):  # no parent is a shell
            shell = shellingham.detect_shell()[0]
    if shell in SHELLS:
        return shell
    known = f"{', '.join(SHELLS[:-1])} and {SHELLS[-1]}"
    what = f"{shell!r} has no completion" if shell else "no shell was found that this command was started from"
    _print_error(f"{what}; name one of {known}, as in `hybridrt {option} bash`")
    raise typer.Exit(2)


def _print_error(text: str, keeps_lines: bool = False) -> None:
    """Prints one line, or lines as they are: an expression has a mark below the wrong place, and each option of
    several a line."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    said = "\n".join(lines) if keeps_lines else " ".join(text.split())
    typer.echo(typer.style("error: ", fg="red", bold=True) + said, err=True)


app = typer.Typer(
    cls=ErrorLineGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hybridrt {hybridrt.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Runs hybrid language models: softmax attention mixed with Mamba and Gated Delta Net layers."""


for command in (generate, chat, serve, router, inspect, explain, quantize, compile, tune, verify, compare, doctor):
    app.command(cls=PanelCommand)(with_options(command))
benchmarks = typer.Typer(no_args_is_help=True, help="Measure a server, or an engine without one.")
for measurement in (bench.serve, bench.offline):
    benchmarks.command(cls=PanelCommand)(with_options(measurement))
app.add_typer(benchmarks, name="bench")


def run() -> NoReturn:
    """Runs the command in sys.argv and exits. A stream or file that fails gives one line on
    standard error."""
    if "stdout" in open_streams():
        _fail("standard output is closed; send it to a terminal, a file or /dev/null")
    try:
        try:
            app(prog_name="hybridrt")
        finally:
            sys.stdout.flush()
    except OSError as e:
        if "--traceback" in sys.argv:
            raise
        discard_output()
        # A closed pipe has no reader.
        _fail("" if e.errno == errno.EPIPE else f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}")
    raise SystemExit


def _fail(text: str) -> NoReturn:
    try:
        if text:
            _print_error(text)
    except OSError:
        pass
    raise SystemExit(1)
