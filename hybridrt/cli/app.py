"""The commands put together, and what every one of them does with an error."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import hybridrt
from hybridrt.cli.doctor import doctor
from hybridrt.cli.generate import generate
from hybridrt.cli.inspect import inspect
from hybridrt.cli.options import with_options
from hybridrt.errors import EngineError, HybridrtError, PoolError, TransferError

RUNTIME_FAILURES = (EngineError, PoolError, TransferError)


class ErrorLineGroup(TyperGroup):
    """Turns an error that hybridrt raises on purpose into one line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HybridrtError as e:
            if ctx.params["traceback"]:
                raise
            typer.echo(typer.style("error: ", fg="red", bold=True) + " ".join(str(e).split()), err=True)
            raise typer.Exit(1 if isinstance(e, RUNTIME_FAILURES) else 2) from e


app = typer.Typer(
    cls=ErrorLineGroup,
    no_args_is_help=True,
    add_completion=False,
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


for command in (generate, inspect, doctor):
    app.command()(with_options(command))
