"""`hybridrt compare`: the same requests to two servers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridrt.base.errors import ConfigError, EngineError, ServerError
from hybridrt.base.formats import Format
from hybridrt.cli.options import JsonOption, check_out

if TYPE_CHECKING:
    from hybridrt.verify.differences import Comparison

FORMAT = Format("hybridrt compare report", 1, "run hybridrt compare again")


def compare(
    url_a: Annotated[str, typer.Argument(metavar="URL_A", help="Server with OpenAI's API, such as the old one.")],
    url_b: Annotated[str, typer.Argument(metavar="URL_B", help="The other one.")],
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Requests: a JSON body a line, or lengths as of `hybridrt bench`.")
    ],
    model_a: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name at URL_A. [the first]")] = None,
    model_b: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name at URL_B. [the first]")] = None,
    requests: Annotated[int | None, typer.Option(metavar="N", help="At most so many.")] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", help="At most so many at a time.")] = 8,
    vocab: Annotated[int, typer.Option(metavar="N", help="Token ids of a trace of lengths are below this.")] = 1000,
    allow: Annotated[int, typer.Option(metavar="N", help="Changed answers for which to exit with 0.")] = 0,
    out: Annotated[str | None, typer.Option(metavar="NAME", help="Write NAME.md, NAME.json and NAME.svg.")] = None,
    api_key_a: Annotated[
        str | None, typer.Option(envvar="HYBRIDRT_API_KEY_A", metavar="KEY", help="Key for URL_A.")
    ] = None,
    api_key_b: Annotated[
        str | None, typer.Option(envvar="HYBRIDRT_API_KEY_B", metavar="KEY", help="Key for URL_B.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send the same requests to two servers, and compare them.

    Tokens, log-probabilities, times and errors are compared. Sampling is greedy. Exits with 1 if more answers have
    changed than --allow, or if requests have failed at one server alone.
    """
    from hybridrt.verify.trace import ComparedTarget, read_trace

    for name, value, low in (("concurrency", concurrency, 1), ("requests", requests, 1), ("allow", allow, 0)):
        if value is not None and value < low:
            raise ConfigError(f"--{name} is {value}; it must be at least {low}")
    check_out(out, (".md", ".json", ".svg"))
    work = read_trace(trace, requests, vocab)
    targets = (
        ComparedTarget(url_a, model_a or _first_model(url_a, api_key_a), api_key_a),
        ComparedTarget(url_b, model_b or _first_model(url_b, api_key_b), api_key_b),
    )
    comparison = _run(targets, work, concurrency)
    found = {"format": str(FORMAT), "url_a": url_a, "url_b": url_b, **comparison.as_json()}
    typer.echo(json.dumps(found, indent=2)) if as_json else _print(comparison, found)
    if out is not None:  # after the results are shown: the disk may be full
        _write(out, comparison, found)
    if comparison.failed[0] == comparison.failed[1] == comparison.requests:
        raise EngineError(f"every request has failed at both servers: {found['a']['errors'][0]}")
    if comparison.changed_count > allow or comparison.failed_at_one:
        raise typer.Exit(1)


def _first_model(url: str, api_key: str | None) -> str:
    from hybridrt.cli.openai_server import OpenAIServer

    return OpenAIServer(url, api_key).first_model()


def _run(targets: Any, work: Any, concurrency: int) -> "Comparison":
    from tqdm.auto import tqdm

    from hybridrt.verify.differences import Comparison
    from hybridrt.verify.two_servers import ask_both

    comparison = Comparison()
    with tqdm(total=len(work), desc="compare", unit="request", disable=None) as bar:

        def took(a: Any, b: Any) -> None:
            comparison.add(a, b)
            bar.update(len(a))
            bar.set_postfix_str(f"{comparison.changed_count} changed")

        try:
            ask_both(targets, work, concurrency, took)
        except OSError as e:
            raise ServerError(f"a server cannot be reached: {e}") from e
    return comparison


def _write(name: str, comparison: "Comparison", found: dict[str, Any]) -> None:
    from hybridrt.verify.two_servers_page import page, svg

    urls = found["url_a"], found["url_b"]
    Path(f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    Path(f"{name}.svg").write_text(svg(comparison.timings, ["A", "B"]), encoding="utf-8")
    Path(f"{name}.md").write_text(page(found, urls, f"{Path(name).name}.svg"), encoding="utf-8")


def _print(comparison: "Comparison", found: dict[str, Any]) -> None:
    from hybridrt.cli.tables import console, print_table

    scores = found["logprob_difference"]
    typer.echo(
        f"{comparison.requests} requests: {comparison.equal} answers equal, {comparison.changed_count} changed "
        f"({comparison.ties} at ties), {comparison.failed[0]} failed at A and {comparison.failed[1]} at B; "
        f"log-probabilities of {scores['tokens']} tokens differ by at most {scores['largest']:.4g}"
    )
    for each in comparison.changed[:10]:
        typer.echo(f"request {each.request}: token {each.place} is {each.a} at A and {each.b} at B")
    columns = ["", "A mean", "B mean", "A p50", "B p50", "A p99", "B p99"]
    rows = []
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "end_to_end_latency_ms"):
        cells = [f"{found[side][name][column]:.2f}" for column in ("mean", "p50", "p99") for side in "ab"]
        rows.append([name.removesuffix("_ms").replace("_", " "), *cells])
    print_table(console(), "Milliseconds", columns, rows, right=columns[1:])
