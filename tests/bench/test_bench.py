"""`hybridrt bench`: workloads, what times come to, and both commands on the built-in model."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hybridrt.base.errors import ConfigError
from hybridrt.bench import http_load, suites
from hybridrt.bench.http_load import Received, Target, _Dechunker, run_load
from hybridrt.bench.timing import Goal, Timing, percentile, plot, summary
from hybridrt.bench.workload import Work, WorkloadConfig, make_work
from hybridrt.cli import bench
from hybridrt.cli.app import app
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.core.engine import Engine
from tests.support.http_server import WAIT, Served, serving

PLOTS = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")

runner = CliRunner()
EVENT = 'data: {"choices": [{"index": 0, "text": "%s"}]}\n\n'
SMALL = ["--requests", "6", "--prompt-tokens", "8", "--output-tokens", "5", "--json"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from tests.support.one_layer import write_first_layer

    path = write_first_layer(tmp_path_factory.mktemp("bench") / "embedded")
    with (
        LLM(str(path), device="cpu", max_running_requests=8, max_model_len=128) as llm,
        serving(llm, api_keys=("key",)) as served,
    ):
        yield served


def test_random_work_is_the_same_for_the_same_seed() -> None:
    config = WorkloadConfig(requests=50, prompt_tokens=20, output_tokens=10, rate=5.0)
    work = make_work(config)
    assert work == make_work(config) != make_work(WorkloadConfig(requests=50, seed=1))
    assert {len(w.prompt) for w in work} <= set(range(10, 31)) and {w.max_tokens for w in work} <= set(range(5, 16))
    assert all(a.arrival < b.arrival for a, b in pairwise(work))
    assert 50 / work[-1].arrival == pytest.approx(5, rel=0.5), "five a second"
    fixed = make_work(WorkloadConfig(requests=5, prompt_tokens=20, output_tokens=10, fixed=True))
    assert {(len(w.prompt), w.max_tokens, w.arrival) for w in fixed} == {(20, 10, 0.0)}


def test_shared_prefixes() -> None:
    work = make_work(WorkloadConfig(data="shared-prefix", requests=9, prefixes=3, prefix_tokens=40, prompt_tokens=10))
    heads = [tuple(w.prompt[:40]) for w in work]
    assert len(set(heads)) == 3 and heads[0] == heads[3] and len({tuple(w.prompt[40:]) for w in work}) == 9


def test_traces(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    entries: list[dict[str, Any]] = [
        {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 700, "output_length": 6, "hash_ids": [1, 3]},
        {"timestamp": 4000, "input_length": 10, "output_length": 7},
    ]
    file.write_text("\n".join(map(json.dumps, entries)))
    work = make_work(WorkloadConfig(data=str(file)))
    assert [len(w.prompt) for w in work] == [600, 700, 10] and [w.max_tokens for w in work] == [5, 6, 7]
    assert [w.arrival for w in work] == [0.0, 0.5, 3.0]
    assert work[0].prompt[:512] == work[1].prompt[:512] and work[0].prompt[512:] != work[1].prompt[512:600]
    assert make_work(WorkloadConfig(data=str(file), rate=1.0))[2].arrival != 3.0
    for text in ("", "{", "[]", '{"input_length": "x"}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="cannot be used"):
            make_work(WorkloadConfig(data=str(file)))
    with pytest.raises(ConfigError, match="cannot be used"):
        make_work(WorkloadConfig(data="/nowhere"))


@pytest.mark.parametrize(
    "change",
    [{"requests": 0}, {"output_tokens": 0}, {"vocab": 2}, {"rate": 0.0}, {"images": 129}, {"image_size": "0x5"}],
)
def test_workloads_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        WorkloadConfig(**change)


def test_what_times_come_to(tmp_path: Path) -> None:
    fast = Timing(1.0, 10, gains=[(1.1, 1), (1.2, 1), (1.4, 2)], end=1.4, output_tokens=4)
    slow = Timing(0.0, 20, gains=[(2.0, 1)], end=2.0, output_tokens=1)
    assert fast.first == pytest.approx(0.1) and fast.between == pytest.approx([0.1] * 3)
    assert fast.per_token == pytest.approx(0.1) and slow.per_token == 0
    found = summary([fast, slow, Timing(0.0, 5, end=0.1, error="refused")], Goal(first=1.0))
    assert (found["requests"], found["failed"], found["errors"]) == (3, 1, ["refused"])
    assert found["output_tokens_per_second"] == pytest.approx(5 / 2)
    assert found["goodput_requests_per_second"] == pytest.approx(1 / 2)
    assert found["time_to_first_token_ms"]["p50"] == pytest.approx(1050)
    assert [percentile([3, 1, 2], p) for p in (0, 50, 75, 100)] == [1, 2, 2.5, 3] and percentile([], 50) == 0
    pytest.importorskip("matplotlib")
    plot([fast, slow], str(tmp_path / "times.png"))
    assert (tmp_path / "times.png").stat().st_size > 1000


def test_chunks_of_http_may_be_cut_anywhere() -> None:
    body = (
        b"".join(b"%x;x=y\r\n%b\r\n" % (len(part), part) for part in (b"data: 1\n\n", b"d" * 300, b"\r\n"))
        + b"0\r\n\r\n"
    )
    for size in (1, 2, 3, 7, 1000):
        dechunk = _Dechunker()
        got = b"".join(dechunk(body[i : i + size]) for i in range(0, len(body), size))
        assert got == b"data: 1\n\n" + b"d" * 300 + b"\r\n"


def test_load_on_a_server(served: Served) -> None:
    work = [Work([5, 6, 7], 4 + i, i) for i in range(10)]
    target = Target(served.url, "tested", "key", {"return_token_ids": True})
    for concurrency in (None, 2):
        timings = asyncio.run(run_load(target, work, concurrency)).timings
        assert [t.output_tokens for t in timings] == [4 + i for i in range(10)]
        assert [sum(count for _, count in t.gains) for t in timings] == [4 + i for i in range(10)]
        assert all(t.due <= t.gains[0][0] <= t.end and t.error is None for t in timings)
    refused = asyncio.run(run_load(Target(served.url, "tested", "wrong"), work[:2], None)).timings
    assert all(t.error is not None and "HTTP 401" in t.error for t in refused)


def answers_of(parts: Sequence[bytes], closes: bool = True) -> Timing:
    """What one request finds at a server that answers with these parts."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.001)
            if not closes:
                await reader.read()  # until the client closes
        finally:
            writer.close()  # the server's end waits for it

    async def main() -> list[Timing]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return (await run_load(Target(f"http://127.0.0.1:{port}", "m"), [Work([5], 2, 0)], None)).timings

    (timing,) = asyncio.run(asyncio.wait_for(main(), WAIT))
    return timing


@pytest.mark.parametrize(
    ("body", "tokens", "error"),
    [
        (EVENT % "a" + EVENT % "b" + "data: [DONE]\n\n", 2, None),
        ((EVENT % "a" + ": a comment\n\ndata:[DONE]\n\n").replace("\n", "\r\n"), 1, None),
        (EVENT % "a" + EVENT % "b", 2, "broke off before [DONE]"),
        ("data: [DONE]\n\n", 0, "has no tokens"),
        (EVENT % "a" + 'data: {"error": {"message": "gone"}}\n\n', 1, "gone"),
        (EVENT % "a" + "data: {]\n\n", 1, "DecodeError"),
        (EVENT % "a" + 'data: {"choices": [{}], "usage": 5}\n\n', 2, "TypeError"),
    ],
)
def test_streams_of_other_servers(body: str, tokens: int, error: str | None) -> None:
    """Without a usage and without chunks of HTTP. What breaks off has failed, whatever came before."""
    timing = answers_of([b"HTTP/1.1 200 OK\r\n\r\n" + body.encode()])
    assert len(timing.gains) == tokens and (timing.error is None) == (error is None)
    assert error is None or error in str(timing.error)


def test_servers_that_keep_the_connection() -> None:
    """[DONE] ends an answer, in whatever pieces it comes, and so does a refusal. Text may say data: [DONE], too."""
    stream = b"HTTP/1.1 200 OK\r\n\r\n" + (EVENT % "data: [DONE]" + EVENT % "b" + "data: [DONE]\n\n").encode()
    for size in (4, 17):
        parts = [stream[i : i + size] for i in range(0, len(stream), size)]
        timing = answers_of(parts, closes=False)
        assert timing.error is None and timing.output_tokens == 2
    refused = answers_of([b"HTTP/1.1 429 Slow down\r\nContent-Length: 4\r\n\r\n", b"wait"], closes=False)
    assert refused.error == "ValueError: HTTP 429: wait"
    assert "without an answer" in str(answers_of([b""]).error)


def test_tokens_are_stamped_before_any_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that takes long to parse does not delay the stamps of those after it."""
    take = http_load._read_chunk

    def slow(event: bytes, timing: Timing, now: float) -> None:
        time.sleep(0.2)
        take(event, timing, now)

    monkeypatch.setattr(http_load, "_read_chunk", slow)
    events = [(EVENT % text).encode() for text in "abc"]
    timing = answers_of([b"HTTP/1.1 200 OK\r\n\r\n", *events, b"data: [DONE]\n\n"])
    assert timing.output_tokens == 3 and timing.end < 0.2


def test_times_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    timing = Timing(0.0, 3, [(70.0 + i, 1) for i in range(5)], 80.0, 5)
    monkeypatch.setattr(bench, "console", lambda: Console(width=60))
    found = summary([timing], None) | {"interrupted": False, "errors": []}
    bench._print(found | {"client_cpu_share": 0.1})
    text = capsys.readouterr().out
    assert "time to first token" in text and "70000.00" in text and "client" not in text
    assert max(map(len, text.splitlines()[1:])) <= 60
    bench._print(found | {"client_cpu_share": 0.8})
    assert "the client itself has computed for 80% of the time" in capsys.readouterr().out
    bench._print(summary([], None) | {"interrupted": True, "errors": []})
    assert "time to first token" not in capsys.readouterr().out, "nothing was timed"


def test_bench_serve_without_uvloop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    result = runner.invoke(app, ["bench", "serve", served.url, *SMALL, "--api-key", "key"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["requests"], found["failed"], found["client_loop"]) == (6, 0, "asyncio")


def test_bench_serve(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = ["--api-key", "key", "--rate", "50", "--slo-ttft", "60000", "--output", str(file)]
    result = runner.invoke(app, ["bench", "serve", served.url, *SMALL, *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found == json.loads(file.read_text())
    assert (found["requests"], found["failed"], found["model"]) == (6, 0, "tested")
    assert found["client_loop"] == "uvloop"
    assert found["goodput_requests_per_second"] == found["requests_per_second"] > 0
    text = runner.invoke(app, ["bench", "serve", served.url, *SMALL[:-1], "--api-key", "key", "--concurrency", "2"])
    assert "6 requests, 0 failed" in text.output and "time to first token" in text.output


def test_a_full_disk_loses_no_result(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(suites, "SUITE", {"one": suites.Load(WorkloadConfig(requests=2, output_tokens=5), 2)})
    common = ["bench", "serve", served.url, "--api-key", "key", "--output", str(tmp_path / "r"), "--json"]
    for more in (SMALL[:-1], ["--suite", "all"]):
        result = runner.invoke(app, [*common, *more])
        assert isinstance(result.exception, OSError) and json.loads(result.stdout)


@pytest.mark.parametrize(
    ("options", "text", "status"),
    [
        (["http://127.0.0.1:1"], "check the URL and the server", 1),
        (["nonsense", "--model", "x"], "is no URL", 2),
        (["--requests", "0"], "requests is 0", 2),
        (["--extra-body", "[]", "--model", "x"], "must be a JSON object", 2),
        (["--extra-body", "[" * 100_000, "--model", "x"], "is no JSON", 2),
        (["--output", "/nowhere/x.json"], "/nowhere/x.json cannot be written", 2),
        (["--picture", "/tmp"], "/tmp cannot be written", 2),
        pytest.param(["--picture", "/tmp/x.xyz"], "no format of pictures", 2, marks=PLOTS),
        (["--concurrency", "0"], "concurrency is 0", 2),
        (["--slo-tpot", "-1"], "--slo-tpot is -1.0", 2),
        (["--slo-e2e", "nan"], "--slo-e2e is nan", 2),
    ],
)
def test_bench_says_what_is_wrong(options: list[str], text: str, status: int) -> None:
    result = runner.invoke(app, ["bench", "serve", *options])
    assert result.exit_code == status and text in result.output


def test_bench_serve_runs_loads_by_name(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = WorkloadConfig(requests=3, prompt_tokens=8, output_tokens=5)
    monkeypatch.setattr(suites, "SUITE", {"one": suites.Load(small, 2), "two": suites.Load(small)})
    common, file = ["bench", "serve", served.url, "--api-key", "key"], tmp_path / "page.md"
    result = runner.invoke(app, [*common, "--suite", "all", "--output", str(file)])
    assert result.exit_code == 0, result.output
    lines = [line.split(" | ") for line in file.read_text().splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines] == ["| load", "| ---", "| one", "| two"]
    assert [line[1:3] for line in lines[2:]] == [["3", "0"], ["3", "0"]]
    (found,) = runner.invoke(app, [*common, "--suite", "two", "--json"]).stdout.splitlines()
    assert json.loads(found)["load"] == "two"
    for options, text in ((["--suite", "three"], "one of one, two"), (["--suite", "one", "--rate", "3"], "rate")):
        result = runner.invoke(app, [*common, *options])
        assert result.exit_code == 2 and text in result.output


def test_the_loads_of_the_suite() -> None:
    assert {"30/s", "saturated", "very-long", "shared", "mix"} <= suites.SUITE.keys()
    work = make_work(replace(suites.chosen("mix", 7)["mix"].workload, requests=200))
    sizes = [len(each.prompt) for each in work]
    assert 120 < sum(384 <= size <= 640 for size in sizes) < 190 and max(sizes) > 20_000
    assert work[-1].arrival > 10 and {each.max_tokens for each in work} == {128, 256}


def test_loads_of_the_suite_have_no_prompt_in_common() -> None:
    """Else a server would have the prompts of a load from the one before."""
    short = [
        make_work(replace(suites.chosen(suites.ALL)[name].workload, requests=5)) for name in ("10/s", "20/s", "30/s")
    ]
    first = [each.prompt[0] for work in short for each in work]
    assert len(set(first)) == len(first)
    assert suites.chosen("20/s", 1)["20/s"] != suites.chosen("20/s", 0)["20/s"] == suites.chosen(suites.ALL)["20/s"]


def test_bench_serve_says_why_all_failed(served: Served) -> None:
    result = runner.invoke(app, ["bench", "serve", served.url, *SMALL, "--model", "other", "--api-key", "key"])
    assert result.exit_code == 1 and "every request has failed" in result.output


@pytest.mark.parametrize("data", ["random", "shared-prefix", "trace"])
@pytest.mark.parametrize("arrivals", [["--rate", "200"], ["--concurrency", "3"], []])
def test_every_kind_of_data_ends(data: str, arrivals: list[str], served: Served, tmp_path: Path) -> None:
    """Requests that cannot be served are counted as failed."""
    options = ["--prefixes", "2", "--prefix-tokens", "20"]
    if data == "trace":
        data, lengths = str(tmp_path / "trace.jsonl"), (3, 70, 9, 500, 12, 5)
        entries = [{"timestamp": 9 * i, "input_length": n, "output_length": 4} for i, n in enumerate(lengths)]
        Path(data).write_text("\n".join(map(json.dumps, entries)))
        options = []
    given = [*SMALL, "--data", data, *options, *arrivals, "--api-key", "key"]
    result = runner.invoke(app, ["bench", "serve", served.url, *given])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["requests"], found["failed"], found["interrupted"]) == (6, int(not options), False)
    served.wait_until_idle()


@pytest.mark.parametrize("ended", [0, 2])
def test_an_interrupt_gives_what_has_ended(ended: int, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections of the others are closed, and the server forgets their requests."""
    receive, request = Received.data_received, http_load.send_request
    done, struck = list[Received](), list[bool]()

    async def note(target: Target, work: Work, now: Any) -> Received:
        done.append(await request(target, work, now))
        return done[-1]

    def strike(received: Received, data: bytes) -> None:
        receive(received, data)
        if len(done) == ended and not struck:
            struck.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(http_load, "send_request", note)
    monkeypatch.setattr(Received, "data_received", strike)
    work = [Work([5] * (i + 1), 2 if i < 2 else 100, i) for i in range(6)]
    monkeypatch.setattr("hybridrt.cli.bench.make_work", lambda config: work)
    result = runner.invoke(app, ["bench", "serve", served.url, *SMALL, "--api-key", "key"])
    assert result.exit_code == 130
    found = json.loads(result.output)
    assert found["interrupted"] and (found["failed"], found["requests"]) == (0, ended)
    assert found["output_tokens"] == 2 * ended
    served.wait_until_idle()


@pytest.mark.parametrize("steps", [1, 14])
def test_an_interrupt_of_an_offline_run_gives_what_has_ended(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_step, count = Engine.run_step, iter(range(1000))

    def strike(engine: Engine) -> Any:
        if next(count) == steps:
            os.kill(os.getpid(), signal.SIGINT)
        return run_step(engine)

    monkeypatch.setattr(Engine, "run_step", strike)
    options = ["--device", "cpu", "--max-running-requests", "2", "--max-model-len", "64"]
    result = runner.invoke(app, ["bench", "offline", *SMALL, *options])
    assert result.exit_code == 130
    found = json.loads(result.output)
    assert found["interrupted"] and found["failed"] == 0 and found["requests"] < 6
    assert (found["requests"] > 0) == (steps > 1)


def test_bench_offline() -> None:
    options = [*SMALL, "--device", "cpu", "--max-running-requests", "4", "--max-model-len", "64"]
    for more in (["--concurrency", "3"], ["--rate", "100"]):
        result = runner.invoke(app, ["bench", "offline", *options, *more])
        assert result.exit_code == 0, result.output
        found = json.loads(result.output)
        work = make_work(WorkloadConfig(requests=6, prompt_tokens=8, output_tokens=5, rate=None))
        assert (found["requests"], found["failed"]) == (6, 0)
        assert found["output_tokens"] == sum(w.max_tokens for w in work)
