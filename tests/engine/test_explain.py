"""Planted causes of misses are each named exactly by `explain`, from the log of requests."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import CacheDumpError, ConfigError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.cli.app import app
from hybridrt.engine.cache import request_log
from hybridrt.engine.cache.explain import WHY_HELPS, Explanation, explain
from hybridrt.engine.cache.request_log import LoggedRequest, RequestLog, read_log
from hybridrt.engine.core import load_engine
from hybridrt.engine.core.engine import Engine
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from tests.engine.test_cache_miss import ROOM, TEXT, ask, other
from tests.engine.test_prefix_states import rig_with_cache
from tests.support.engine_harness import ByteTokenizer, Rig
from tests.support.fake_llm import make

PIECES = ["<think>", "</think>", "ab", "a", "b", *(f" {i}" for i in range(5, 23))]
OPEN, CLOSE, AB, A, B = range(5)
WORDS = [5 + token % 18 for token in TEXT]


class Planted:
    """An engine with a log. The last request is the one that is explained."""

    def __init__(self, path: Path, name: str = "requests.jsonl", **config: Any) -> None:
        self.path = path / name
        self.rig = rig_with_cache(**ROOM | config)
        self.logged()

    def logged(self) -> None:
        self.rig.engine._samples.log = RequestLog(str(self.path), self.rig.pools.prefixes, lambda token: PIECES[token])

    def ask(self, prompt: list[int], **params: Any) -> list[int]:
        return ask(self.rig, prompt, **params)

    def found(self) -> Explanation:
        """Of the request that was added last."""
        return max(explain(*read_log(self.path)), key=lambda each: each.request_id)

    def answering(self, prompt: list[int], answer: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """A request that gives this answer."""
        with monkeypatch.context() as patch:
            coming = iter([*answer, 9])
            patch.setattr(self.rig.executor, "draw", lambda tenant: self._draw(tenant, next(coming)))
            assert self.ask(prompt, max_tokens=len(answer)) == answer

    @staticmethod
    def _draw(tenant: Any, token: int) -> int:
        tenant.last = token
        tenant.outputs += 1
        return token


def new(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:40])
    p.ask([other(t) for t in WORDS[100:140]])


def too_short(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:12])
    p.ask([*WORDS[:9], other(WORDS[9])])


def no_state(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:80])
    p.ask([*WORDS[:50], other(WORDS[50]), *WORDS[200:220]])


def state_evicted(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:81])
    p.rig.pools.prefixes.evict([0], 9)
    p.ask([*WORDS[:81], 9, 8])


def state_superseded(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:81])
    p.rig.pools.prefixes.evict([0], 9, why="superseded")
    p.ask([*WORDS[:81], 9, 8])


def state_thinned(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:81])
    p.rig.pools.prefixes.evict([0], 9, why="thinned")
    p.ask([*WORDS[:81], 9, 8])


def evicted(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:200])
    p.rig.pools.prefixes.evict([400], 9)
    p.ask([*WORDS[:200], 9])


def reset(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:200])
    p.rig.engine.reset_prefix_cache()
    p.ask([*WORDS[:200], 9])


def dropped(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:200])
    p.rig.pools.prefixes.evict([400], 9, why="dropped")
    p.ask([*WORDS[:200], 9])


def running(p: Planted, patch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        p.rig.add([*WORDS[:200], *([9] if name == "b" else [])], name, max_tokens=3, ignore_eos=True, seed=1)
        p.rig.step()
    p.rig.run()


def failed(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.rig.executor.fail_result[0] = RuntimeError("no")
    p.ask(WORDS[:200])
    p.ask([*WORDS[:200], 9])


def no_room(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:34])
    p.rig.add(WORDS[100:130], max_tokens=30, ignore_eos=True, seed=1)
    p.rig.step()
    p.rig.add([*WORDS[:34], 9, 8], max_tokens=1, ignore_eos=True)
    p.rig.run()


def prompt_logprobs(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask(WORDS[:40])
    p.ask(WORDS[:40], prompt_logprobs=0)


def off(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.rig = Rig(rows=2, slots=2, pages=400, page_size=4, max_model_len=400, chunk=256)
    p.logged()
    p.ask(WORDS[:40])
    p.ask(WORDS[:40])


def key(field: str) -> Callable[[Planted, pytest.MonkeyPatch], None]:
    def plant(p: Planted, patch: pytest.MonkeyPatch) -> None:
        for value in ("one", "two"):
            patch.setattr(Engine, "cache_key", lambda self, params, value=value: CacheKey(**{field: value}))
            p.ask([*WORDS[:40], *([9] if value == "two" else [])])

    return plant


def prompt_changed(p: Planted, patch: pytest.MonkeyPatch) -> None:
    """A date at the beginning."""
    p.ask([5, 6, *WORDS[:80]])
    p.ask([7, 8, 9, *WORDS[:80]])


def later_prompt_changed(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.ask([*WORDS[:33], 5, *WORDS[60:100]])
    p.ask([*WORDS[:33], 7, *WORDS[60:100]])
    p.ask([*WORDS[:33], 9, *WORDS[60:100]])


def answer_changed(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.answering(WORDS[:20], WORDS[50:110], patch)
    p.ask([*WORDS[:20], *WORDS[50:55], other(WORDS[55]), *WORDS[56:110], 9, 8])


def part_removed(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.answering(WORDS[:20], WORDS[50:110], patch)
    p.ask([*WORDS[:20], *WORDS[70:110], 9, 8])


def thinking_removed(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.answering(WORDS[:20], [OPEN, *WORDS[50:80], CLOSE, *WORDS[80:110]], patch)
    p.ask([*WORDS[:20], *WORDS[80:110], 9, 8])


def retokenised(p: Planted, patch: pytest.MonkeyPatch) -> None:
    p.answering(WORDS[:20], [*WORDS[50:60], A, B, *WORDS[60:90]], patch)
    p.ask([*WORDS[:20], *WORDS[50:60], AB, *WORDS[60:90], 9, 8])


ROWS: list[tuple[str, Callable[[Planted, pytest.MonkeyPatch], None], int, dict[str, Any]]] = [
    ("new", new, 0, {}), ("too_short", too_short, 0, {}), ("no_state", no_state, 0, {}),
    ("state_evicted", state_evicted, 0, {}), ("state_superseded", state_superseded, 0, {}),
    ("state_thinned", state_thinned, 0, {}), ("evicted", evicted, 0, {}), ("reset", reset, 0, {}),
    ("dropped", dropped, 0, {}), ("running", running, 0, {}), ("failed", failed, 0, {}),
    ("no_room", no_room, 0, {"slots": 2}), ("prompt_logprobs", prompt_logprobs, 0, {}), ("off", off, 0, {}),
    ("other_salt", key("salt"), 0, {}), ("other_weights", key("weights"), 0, {}),
    ("other_adapter", key("adapter"), 0, {}), ("prompt_changed", prompt_changed, 0, {}),
    ("prompt_changed", later_prompt_changed, 33, {}), ("answer_changed", answer_changed, 25, {}),
    ("part_removed", part_removed, 20, {}), ("thinking_removed", thinking_removed, 20, {}),
    ("retokenised", retokenised, 30, {}),
]  # fmt: skip


@pytest.mark.parametrize(("why", "plant", "token", "config"), ROWS, ids=[row[1].__name__ for row in ROWS])
def test_a_planted_cause_is_named(
    why: str, plant: Any, token: int, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Planted(tmp_path, **config)
    plant(planted, monkeypatch)
    found = planted.found()
    assert (found.why, found.token) == (why, token), found
    assert found.helps == WHY_HELPS[why] and (found.tokens > 0) == (why != "new")


def test_what_was_reused_as_far_as_possible_is_no_miss(tmp_path: Path) -> None:
    planted = Planted(tmp_path)
    planted.ask(WORDS[:33])
    planted.ask(WORDS[:33])
    assert [(each.why, each.cached) for each in explain(*read_log(planted.path))] == [("new", 0), ("", 32)]


def test_a_request_that_was_never_started_is_not_explained(tmp_path: Path) -> None:
    planted = Planted(tmp_path)
    planted.rig.engine.abort(planted.rig.add(WORDS[:40], max_tokens=1))
    planted.rig.run()
    assert not list(explain(*read_log(planted.path)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda lines: lines[1:], "is no log of requests"),
        (lambda lines: [], "is no log of requests"),
        (lambda lines: [*lines, lines[0]], "logs of several engines"),
        (lambda lines: [lines[0], lines[1][:50]], "line 2 of the log"),
        (lambda lines: [lines[0], lines[1].replace('"cached":0', '"cached":-1')], "line 2 of the log"),
    ],
)
def test_files_that_are_no_logs(change: Any, text: str, tmp_path: Path) -> None:
    planted = Planted(tmp_path)
    planted.ask(WORDS[:40])
    lines = change(planted.path.read_text().splitlines())
    planted.path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(CacheDumpError, match=text):
        read_log(planted.path)
    with pytest.raises(CacheDumpError, match="cannot be read"):
        read_log(tmp_path / "nowhere")


def test_a_line_that_is_cut_off_at_the_end_is_left_out(tmp_path: Path) -> None:
    planted = Planted(tmp_path)
    planted.ask(WORDS[:40])
    planted.path.write_text(planted.path.read_text() + '{"type":"requ')
    assert len(read_log(planted.path)[1]) == 1


def test_a_full_disk_ends_the_log_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted = Planted(tmp_path)
    monkeypatch.setattr(request_log, "MAX_BYTES", 200)
    for _ in range(3):
        planted.ask(WORDS[:40])
    assert planted.path.stat().st_size < 200
    assert [record.message for record in caplog.records] == [
        "the log of requests ends: it would have more than 200 bytes"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_is_full_at_the_end_of_a_line_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    planted = Planted(Path("/dev"), name="full")
    assert planted.ask(WORDS[:40])
    assert [record.message for record in caplog.records] == [
        "the log of requests ends: [Errno 28] No space left on device"
    ]


def test_a_miss_is_a_line_of_the_log_at_debug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hybridrt.cache")
    planted = Planted(tmp_path)
    planted.ask(WORDS[:80])
    planted.ask([*WORDS[:50], other(WORDS[50]), *WORDS[200:220]])
    text = "request request-1: 0 of 71 tokens were cached; from token 0 on 50 were not (no_state)"
    assert any(record.message.startswith(text) for record in caplog.records)


def test_the_command_shows_causes_and_what_helps(tmp_path: Path) -> None:
    planted = Planted(tmp_path)
    for _ in range(2):
        planted.ask(WORDS[:40], prompt_logprobs=0)
    shown = CliRunner().invoke(app, ["explain", str(planted.path)]).stdout
    assert "prompt_logprobs" in shown and "leave prompt_logprobs out" in shown
    found = json.loads(CliRunner().invoke(app, ["explain", str(planted.path), "--json"]).stdout)
    assert [(each["why"], each["tokens"]) for each in found] == 2 * [("prompt_logprobs", 39)]
    assert CliRunner().invoke(app, ["explain", str(tmp_path)]).exit_code == 2


def test_the_option_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, ByteTokenizer(), request_log=str(tmp_path / "log"))
    llm.generate("abc", SamplingParams(max_tokens=1))
    _, (line,) = read_log(tmp_path / "log")
    assert isinstance(line, LoggedRequest) and line.prompt == list(b"abc") and line.pieces[97] == "a"
    with pytest.raises(ConfigError, match="request_log is"):
        make(monkeypatch, request_log=str(tmp_path / "no" / "log"))


def test_a_log_that_cannot_be_written_is_refused_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights take minutes. An earlier log stays as it is until the model is there."""
    monkeypatch.setattr(load_engine, "read_tokenizer", broken := Mock(side_effect=OSError("no model")))
    with pytest.raises(ConfigError, match="request_log is"):
        load_engine.load_engine(EngineConfig("nothing", request_log=str(tmp_path)), progress=False)
    broken.assert_not_called()
    (earlier := tmp_path / "log").write_bytes(b"earlier")
    with pytest.raises(OSError, match="no model"):
        load_engine.load_engine(EngineConfig("nothing", request_log=str(earlier)), progress=False)
    assert earlier.read_bytes() == b"earlier"
