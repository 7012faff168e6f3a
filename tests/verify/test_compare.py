"""`hybridrt compare` finds what differs between two servers, and names it."""

import json
import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridrt.base.errors import ConfigError
from hybridrt.bench.timing import Timing
from hybridrt.cli.app import app
from hybridrt.engine.api.llm import LLM
from hybridrt.verify.differences import Comparison
from hybridrt.verify.trace import ComparedTarget, read_trace
from hybridrt.verify.two_servers import Answered, _read_chunk
from tests.support.echo_server import echoing, usual
from tests.support.http_server import serving

runner = CliRunner()


def written(path: Path, requests: int) -> str:
    lines = [json.dumps({"input_length": 5, "output_length": 4}) for _ in range(requests)]
    (path / "trace.jsonl").write_text("\n".join(lines))
    return str(path / "trace.jsonl")


def compared(a: str, b: str, trace: str, *more: str) -> tuple[int, dict[str, Any]]:
    result = runner.invoke(app, ["compare", a, b, "--trace", trace, "--json", *more])
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize(
    "requests", [700, pytest.param(3000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]
)
def test_one_changed_token_is_found(tmp_path: Path, requests: int) -> None:
    """The trace has more requests than a batch."""
    trace, asked = written(tmp_path, requests), count()
    wrong = read_trace(trace, None, 1000)[requests - 7].prompt

    def other(prompt: list[int]) -> list[int]:
        next(asked)
        tokens = usual(prompt)
        return [*tokens[:2], tokens[2] + 1, tokens[3]] if prompt == wrong else tokens

    with echoing() as a, echoing(other) as b:
        code, found = compared(a, b, trace, "--concurrency", "32")
    assert next(asked) == requests
    assert (code, found["changed"], found["equal"], found["failed"]) == (1, 1, requests - 1, [0, 0])
    (changed,) = found["changed_requests"]
    token = usual(wrong)[2]
    assert changed == {
        "request": requests - 7, "place": 2, "a": f"{token} 't{token}'", "b": f"{token + 1} 't{token + 1}'",
        "margin": pytest.approx(0.4),
    }  # fmt: skip
    assert found["compared_by"] == {"ids": requests}


def test_equal_servers_and_a_page(tmp_path: Path) -> None:
    trace = written(tmp_path, 20)
    with echoing() as a:
        code, found = compared(a, a, trace, "--out", str(tmp_path / "r"))
    assert (code, found["equal"], found["logprob_difference"]["largest"]) == (0, 20, 0.0)
    assert found["logprob_difference"]["tokens"] == 80 and found["a"]["time_to_first_token_ms"]["p50"] > 0
    page = (tmp_path / "r.md").read_text()
    assert "equal answers: 20, changed: 0" in page and "![Times of both servers](r.svg)" in page
    assert (tmp_path / "r.svg").read_text().count("<polyline") == 4


def test_a_full_disk_loses_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    trace = written(tmp_path, 3)
    monkeypatch.setattr(Path, "write_text", full)
    with echoing() as a:
        result = runner.invoke(app, ["compare", a, a, "--trace", trace, "--json", "--out", str(tmp_path / "r")])
    assert isinstance(result.exception, OSError) and json.loads(result.stdout)["equal"] == 3


@pytest.mark.parametrize("allow", [0, 20])
def test_failures_at_one_server_are_counted(tmp_path: Path, allow: int) -> None:
    prompt = read_trace(trace := written(tmp_path, 20), None, 1000)[3].prompt
    with echoing() as a, echoing(fails=lambda given: given == prompt) as b:
        code, found = compared(a, b, trace, "--allow", str(allow))
    assert (code, found["failed"], found["equal"]) == (1, [0, 1], 19)
    assert "HTTP 500" in found["b"]["errors"][0]


def test_as_many_failures_at_each_server_are_no_equal_servers(tmp_path: Path) -> None:
    """Another request fails at each, so that the counts are equal."""
    first, second = (read_trace(trace := written(tmp_path, 20), None, 1000)[i].prompt for i in (3, 5))
    with echoing(fails=lambda given: given == first) as a, echoing(fails=lambda given: given == second) as b:
        code, found = compared(a, b, trace)
    assert (code, found["failed"], found["failed_at_one"], found["equal"]) == (1, [1, 1], 2, 18)


def test_changes_that_are_allowed(tmp_path: Path) -> None:
    trace = written(tmp_path, 5)
    with echoing() as a, echoing(lambda prompt: usual(prompt)[:3]) as b:
        code, found = compared(a, b, trace, "--allow", "5")
    assert (code, found["changed"], found["changed_requests"][0]["b"]) == (0, 5, "the end")


def test_recorded_bodies(tmp_path: Path) -> None:
    """Chats and completions as they were sent: greedy, and in the form that is compared."""
    bodies = [
        {"prompt": "import ", "max_tokens": 4, "temperature": 1.0, "model": "gone", "n": 2},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    ]
    (tmp_path / "t").write_text("\n".join(map(json.dumps, bodies)))
    work = read_trace(str(tmp_path / "t"), None, 10)
    target = ComparedTarget("http://x", "m")
    fields = target.fields(work[0])
    assert (fields["temperature"], fields["model"], fields["max_tokens"], "n" in fields) == (0.0, "m", 4, False)
    assert b"/v1/chat/completions" in target.request(work[1]) and fields["logprobs"] == 5


@pytest.mark.slow
def test_a_server_of_ours_next_to_itself(tmp_path: Path) -> None:
    bodies = [{"prompt": "import ", "max_tokens": 4}, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}]
    (tmp_path / "t").write_text("\n".join(map(json.dumps, bodies)))
    with LLM("embedded", device="cpu", max_running_requests=4, max_model_len=128) as llm, serving(llm) as served:
        code, found = compared(served.url, served.url, str(tmp_path / "t"))
    assert (code, found["equal"], found["compared_by"]) == (0, 2, {"ids": 2})
    assert found["logprob_difference"]["tokens"] == 7


@pytest.mark.parametrize("text", ["", "[]", "{", '{"other": 1}', '{"prompt": "x"}\n[]'])
def test_traces_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError):
        read_trace(str(tmp_path / "t"), None, 10)


def test_odd_chunks_are_an_answers_failure() -> None:
    """A server's numbers may be texts or missing: the answer counts as failed, and the comparison goes on."""
    good: dict[str, Any] = {"text": "a", "token_ids": [1], "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5]}}
    chat: dict[str, Any] = {"logprobs": {"content": [{"token": "a", "logprob": -1, "top_logprobs": [{"token": "b"}]}]}}
    odd: list[Any] = [None, "x", 5, [], {}, [None], [[1]], {"a": "x"}, float("nan")]
    rng, comparison = random.Random(0), Comparison()

    def changed(value: Any) -> Any:
        if rng.random() < 0.2:
            return rng.choice(odd)
        if isinstance(value, dict):
            return {key: changed(each) for key, each in value.items()}
        return [changed(each) for each in value] if isinstance(value, list) else value

    refused = 0
    for _ in range(600):
        pair = Answered(Timing(0.0, 1)), Answered(Timing(0.0, 1))
        for answer in pair:
            chunk = changed({"choices": [rng.choice([good, chat])], "usage": {"completion_tokens": 1}})
            try:
                _read_chunk(chunk if isinstance(chunk, dict) else {}, answer, 1.0)
            except (ValueError, LookupError, TypeError, AttributeError) as e:
                answer.timing.error, refused = type(e).__name__, refused + 1
        comparison.add([pair[0]], [pair[1]])
    assert comparison.requests == 600 and refused > 100
    assert json.dumps(comparison.as_json())
