"""`hybridrt bench serve` and `hybridrt bench offline`."""

import asyncio
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from hybridrt.base.errors import ConfigError, EngineError
from hybridrt.base.formats import Format
from hybridrt.bench.energy import Energy, measured, nvml
from hybridrt.bench.suites import ALL, COLUMNS, SUITE, Load, page, row
from hybridrt.bench.suites import chosen as suite_loads
from hybridrt.bench.timing import Goal, Timing, check_picture, plot, summary
from hybridrt.bench.workload import WorkloadConfig, make_work
from hybridrt.cli.options import EMBEDDED, EngineOptions, ModelOption, Overrides, SpeculativeOptions, option, setting
from hybridrt.cli.tables import console, print_table

FORMAT = Format("hybridrt bench report", 1, "run hybridrt bench again")
_BUSY = 0.7  # share of time; above, tokens are stamped late
_KINDS = ("time_to_first_token_ms", "inter_token_latency_ms", "time_per_output_token_ms", "end_to_end_latency_ms")


@dataclass(frozen=True)
class LoadOptions(Overrides):
    """Fields of WorkloadConfig, and how many requests run at a time."""

    panel: ClassVar = "Load"
    data: str | None = setting("Prompts.", "random", "random|shared-prefix|FILE")
    requests: int | None = setting("Number of requests; of a trace the first N.", "100", "N")
    prompt_tokens: int | None = setting("Mean length of prompts.", "128", "N")
    output_tokens: int | None = setting("Mean length of outputs.", "64", "N")
    fixed: bool | None = setting("All lengths are the means.", "half to one and a half times")
    prefixes: int | None = setting("Number of prefixes of shared-prefix.", "4", "N")
    prefix_tokens: int | None = setting("Tokens of each of these prefixes.", "256", "N")
    rate: float | None = setting(
        "Requests a second, a Poisson process; inf: all at once.", "at once, or the trace's", "X"
    )
    concurrency: int | None = setting("At most so many at a time.", "no limit", "N")
    vocab: int | None = setting("Token ids are below this number.", "1000", "N")
    workload_seed: int | None = setting("Seed of prompts, lengths and arrivals.", "0", "N")

    def suite(self, name: str) -> dict[str, Load]:
        """Loads by name. Raises ConfigError for other load options than a seed, or another name."""
        if others := self.given().keys() - {"workload_seed"}:
            raise ConfigError(f"{min(others)} does not go with suite, which names whole loads: leave one of them out")
        return suite_loads(name, self.workload_seed)

    def workload(self) -> WorkloadConfig:
        """Raises ConfigError for impossible requests."""
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; it must be at least 1")
        given = self.given()
        given.pop("concurrency", None)
        if "workload_seed" in given:
            given["seed"] = given.pop("workload_seed")
        return WorkloadConfig(**given)


@dataclass(frozen=True)
class ServerLoadOptions(LoadOptions):
    """Options of a load on a server, whose requests may have images."""

    images: int | None = setting("Pictures in each request, all different.", "0", "N")
    image_size: str | None = setting("Their width and height.", "512x512", "WxH")


@dataclass(frozen=True)
class ResultOptions:
    """What is done with the times."""

    panel: ClassVar = "Results"
    slo_ttft: float | None = setting("Goodput: milliseconds to the first token at most.", "any", "MS")
    slo_tpot: float | None = setting("Goodput: mean milliseconds between tokens at most.", "any", "MS")
    slo_e2e: float | None = setting("Goodput: milliseconds of a request at most.", "any", "MS")
    output: str | None = setting("File for the results as JSON.", "none", "FILE")
    picture: str | None = setting("File for a picture of the times.", "none", "FILE")
    energy: Annotated[bool, typer.Option("--energy", help="Measure the joules of all visible GPUs (NVML).")] = False
    json_only: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False

    def goal(self) -> Goal | None:
        """None where no limit is set."""
        limits = [None if ms is None else ms / 1000 for ms in (self.slo_ttft, self.slo_tpot, self.slo_e2e)]
        return None if limits == [None] * 3 else Goal(*limits)

    def check_options(self) -> None:
        """Checks options before the load.

        Raises:
            ConfigError: a limit is no limit, or a result could not be written.
            ProviderNotInstalledError: there is no matplotlib for the picture.
        """
        for name in ("slo_ttft", "slo_tpot", "slo_e2e"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(f"{name} is {limit}; it must be more than 0 milliseconds")
        for file in filter(None, (self.output, self.picture)):
            path = Path(file)
            if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
                raise ConfigError(f"{file} cannot be written; pass a file in a directory that exists")
        if self.picture is not None:
            check_picture(self.picture)

    @contextmanager
    def metered(self) -> Iterator[Energy | None]:
        """None without --energy. Raises as hybridrt.bench.energy.nvml."""
        if not self.energy:
            yield None
            return
        with nvml() as read, measured(read) as energy:
            yield energy

    def show_suite(self, rows: Sequence[Sequence[str]], facts: dict[str, Any]) -> None:
        """Writes the page of the loads so far, and prints the last of them."""
        if self.json_only:
            typer.echo(json.dumps(dict(zip(COLUMNS, rows[-1], strict=True))))
        else:
            print_table(console(), "Milliseconds", COLUMNS, rows[-1:], right=COLUMNS[1:])
        if self.output is not None:  # after the results are shown: the disk may be full
            Path(self.output).write_text(page(rows, facts))

    def show(
        self, timings: Sequence[Timing], planned: int, load: WorkloadConfig, energy: Energy | None, **facts: Any
    ) -> None:
        """Prints and writes results. Fewer timings than planned: Ctrl-C ended the run.

        Raises:
            EngineError: every request failed.
            typer.Exit: with 130, after an interrupted run.
        """
        found = {"format": str(FORMAT), **facts, "workload": _plain(asdict(load))}
        found |= {"interrupted": len(timings) < planned} | summary(timings, self.goal())
        if energy is not None:
            found["energy"] = energy.figures(found)
        text = json.dumps(found, indent=2)
        if self.json_only:
            typer.echo(text)
        else:
            _print(found)
        if self.output is not None:
            Path(self.output).write_text(text + "\n")
        if self.picture is not None:
            plot(timings, self.picture)
        if found["interrupted"]:
            raise typer.Exit(130)
        if found["failed"] == found["requests"]:
            raise EngineError(f"every request has failed: {'; '.join(found['errors'])}")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {k: "inf" if isinstance(v, float) and math.isinf(v) else v for k, v in values.items()}


def _print(found: dict[str, Any]) -> None:
    typer.echo(
        f"{found['requests']} requests, {found['failed']} failed, in {found['seconds']:.2f} s: "
        f"{found['requests_per_second']:.2f} requests/s, {found['output_tokens_per_second']:.1f} output tokens/s"
    )
    if found["interrupted"]:
        typer.echo("interrupted: requests that had not ended are not counted")
    if (share := found.get("client_cpu_share", 0.0)) > _BUSY:
        typer.echo(f"the client itself has computed for {100 * share:.0f}% of the time: it may be what limits the load")
    if found["goodput_requests_per_second"] is not None:
        typer.echo(f"goodput {found['goodput_requests_per_second']:.2f} requests/s")
    if (energy := found.get("energy")) is not None:
        typer.echo(
            f"energy without idle ({energy['idle_watts']:.0f} W): {energy['joules_per_output_token']:.3f} J an output "
            f"token, {energy['joules_per_request']:.1f} J a request; {energy['mean_watts']:.0f} W in the mean"
        )
    for error in found["errors"]:
        typer.echo(f"failed: {error}")
    if found["failed"] == found["requests"]:
        return  # nothing was timed
    columns = list(found[_KINDS[0]])
    names = [kind.removesuffix("_ms").replace("_", " ") for kind in _KINDS]
    rows = [[name, *(f"{found[kind][column]:.2f}" for column in columns)] for name, kind in zip(names, _KINDS)]
    print_table(console(), "Milliseconds", ["", *columns], rows, right=columns)


def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Server with OpenAI's API.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, option("The model's name there.", "the server's first", "NAME")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="HYBRIDRT_API_KEY", metavar="KEY", help="Sent with each request.")
    ] = None,
    extra_body: Annotated[str | None, option("JSON object: fields added to each request.", "none", "JSON")] = None,
    suite: Annotated[
        str | None,
        option(f"Whole loads; --output is a page: {ALL}, {', '.join(SUITE)}.", "none", "NAME"),
    ] = None,
    load: ServerLoadOptions = ServerLoadOptions(),
    results: ResultOptions = ResultOptions(),
) -> None:
    """Load a server and measure its answers.

    Requests arrive at --rate whatever the server does, or --concurrency of them run at a time.
    """
    from hybridrt.bench.http_load import Target, new_event_loop, run_load
    from hybridrt.cli.openai_server import OpenAIServer

    results.check_options()
    if results.energy and suite is not None:
        raise ConfigError("energy does not go with suite: measure one load at a time")
    chosen = {"": Load(load.workload(), load.concurrency)} if suite is None else load.suite(suite)
    works = {name: make_work(load.workload) for name, load in chosen.items()}
    target = Target(url, model or OpenAIServer(url, api_key).first_model(), api_key, _object(extra_body))
    rows = list[Sequence[str]]()
    for name, (workload, concurrency) in chosen.items():
        work = works.pop(name)
        with results.metered() as energy, asyncio.Runner(loop_factory=new_event_loop) as runner:
            found = runner.run(run_load(target, work, concurrency))
        client = {"client_cpu_share": found.client_cpu_share, "client_loop": found.client_loop}
        facts = {"url": url, "model": target.model, "concurrency": concurrency}
        if suite is None:
            results.show(found.timings, len(work), workload, energy, **facts, **client)
        else:
            rows.append(row(name, summary(found.timings)))
            results.show_suite(rows, {"url": url, "model": target.model})
            if len(found.timings) < len(work):
                raise typer.Exit(130)


def offline(
    model: ModelOption = None,
    temperature: Annotated[float, typer.Option("--temperature", metavar="X", help="For all requests.")] = 1.0,
    load: LoadOptions = LoadOptions(),
    results: ResultOptions = ResultOptions(),
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    speculation: SpeculativeOptions = SpeculativeOptions(),  # noqa: B008
) -> None:
    """Load an engine in this process, without a server."""
    from hybridrt.bench.engine_load import run_engine
    from hybridrt.engine.api.llm import LLM

    model = model or EMBEDDED
    results.check_options()
    workload = load.workload()
    work = make_work(workload)
    with LLM(model, **engine.given(), **speculation.given(model)) as llm:
        # The first steps compile.
        timings = run_engine(llm, work[:1], 1, temperature=temperature)
        with results.metered() as energy:
            timings = timings and run_engine(llm, work, load.concurrency, temperature=temperature)
    results.show(timings, len(work), workload, energy, model=model, concurrency=load.concurrency)


def _object(text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"--extra-body is no JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return value
