"""`hybridrt verify`: checks a checkpoint on this machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridrt.cli.options import EMBEDDED, JsonOption, ModelArgument, check_out

if TYPE_CHECKING:
    from hybridrt.verify.results import Report

_COLOURS = {"passed": "green", "warned": "yellow", "failed": "red", "left out": "dim"}


def verify(
    model: ModelArgument = EMBEDDED,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter runs: about a minute.")] = False,
    out: Annotated[str | None, typer.Option(metavar="NAME", help="Write NAME.md and NAME.json.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="REPORT", help="JSON of another run: name what differs from it.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(metavar="TASK", help="Run a task of lm-eval; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Questions of each task.")] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="Kept in the report, such as: random weights.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 after a warning, too.")] = False,
    device: Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Where to run.")] = "auto",
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16|float16", help="Dtype of the runs.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Check a checkpoint, and compare it with transformers.

    Files, keys, values of tensors, tokenizer, template, rotary embeddings, logits and greedy tokens, batches, chunks,
    cached prefixes, drafts, speed. Exits with 0 if nothing has failed, else with 1. Runs no code of the checkpoint.
    """
    from hybridrt.base.errors import ConfigError
    from hybridrt.verify.against import read_report

    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}; it must be at least 1")
    check_out(out, (".md", ".json"))
    other = None if against is None else read_report(against)
    report = _run(model, quick, device, dtype, tuple(task or ()), limit, other)
    report.note = note
    found = report.as_json()
    typer.echo(json.dumps(found, indent=2)) if as_json else _print(report)
    if out is not None:  # after the results are shown: the disk may be full
        _write(out, found)
    if report.status == "failed" or (strict and report.status == "warned"):
        raise typer.Exit(1)


def _run(
    model: str, quick: bool, device: str, dtype: str, tasks: tuple[str, ...], limit: int | None, other: Any
) -> "Report":
    from tqdm.auto import tqdm

    from hybridrt.verify.run import names, verify
    from hybridrt.verify.subject import Subject

    planned = names(quick, bool(tasks), other is not None)
    with tqdm(total=len(planned), desc="verify", unit="check", disable=None) as bar:

        def begin(name: str) -> None:
            bar.n = planned.index(name)
            bar.set_postfix_str(name)

        subject = Subject(model, device, dtype, quick, bar.set_postfix_str)
        report = verify(subject, tasks=tasks, limit=limit, against=other, begin=begin)
        bar.n = len(planned)
        return report


def _write(name: str, found: dict[str, Any]) -> None:
    from hybridrt.verify.page import page

    Path(f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    Path(f"{name}.md").write_text(page(found), encoding="utf-8")


def _print(report: "Report") -> None:
    from hybridrt.cli.tables import console

    out = console()
    out.print(f"{report.model} on {report.machine['device']}", style="bold", markup=False)
    for result in report.results:
        colour = _COLOURS[result.status]
        out.print(f"{result.status:9} {result.name} ({result.seconds:.1f} s)", style=colour, markup=False)
        for line in (*result.findings, *result.notes):
            out.print(f"          {line}", markup=False)
        if more := result.figures.get("more_findings"):
            out.print(f"          and {more} more")
    out.print(report.status, style=f"bold {_COLOURS[report.status]}")
