"""An interrupt at any line of the engine loses nothing: no row, slot, page or request, and the next call is right."""

import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hybridrt.engine.engine
import hybridrt.mem_cache.allocator
import hybridrt.runtime.interrupts
from hybridrt.engine.llm import LLM
from hybridrt.errors import EngineError
from hybridrt.runtime.interrupts import Interrupts
from hybridrt.sampling_params import SamplingParams
from tests.engine_harness import ByteTokenizer
from tests.fake_llm import FIVE, VOCAB, assert_clean, make
from tests.mock_executor import tokens_alone

ENGINE = Path(hybridrt.engine.engine.__file__).parent
LOCKS = {str(ENGINE / "turns.py"), hybridrt.runtime.interrupts.__file__}
FILES = {str(file) for file in ENGINE.glob("*.py")} | LOCKS | {hybridrt.mem_cache.allocator.__file__}
# 3 samples of 30 tokens and a prompt of 24 do not fit 32 pages of 4 tokens: one is retracted.
LONG = SamplingParams(max_tokens=30, ignore_eos=True, seed=3, n=3, stop="never")
SHORT = SamplingParams(max_tokens=6, ignore_eos=True, seed=4)


class Lines:
    """Counts the lines that run in some files, and calls `strike` at line number `at`."""

    def __init__(self, strike: Callable[[], None] | None = None, at: int = -1, files: set[str] = FILES) -> None:
        self.strike, self.at, self.files = strike, at, files
        self.seen: list[tuple[str, int]] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.seen.append((frame.f_code.co_filename, frame.f_lineno))
            if self.strike is not None and len(self.seen) == self.at + 1:
                self.strike()
        return self

    @contextmanager
    def traced(self) -> Iterator[None]:
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


def sigint() -> None:
    signal.raise_signal(signal.SIGINT)


def anything() -> None:
    raise KeyboardInterrupt


def generate(llm: LLM) -> None:
    llm.generate(["a" * 24, "bc", [5]], [LONG, SHORT, FIVE])


def stream(llm: LLM) -> None:
    deltas = llm.stream("abc", LONG)
    for _ in range(5):
        next(deltas)
    other = llm.stream([7], FIVE)
    assert sum(len(delta.token_ids) for delta in other) == 5
    deltas.close()  # type: ignore[attr-defined]


def by_engine(llm: LLM) -> None:
    request_id = llm.engine.add_request("abcdef", LONG)
    for _ in range(6):
        llm.engine.step()
    llm.engine.abort(request_id)
    llm.engine.drain()


SCENES = {"generate": generate, "stream": stream, "engine": by_engine}


def struck(scene: Callable[[LLM], None], lines: Lines, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Plays a scene, which an interrupt strikes; True if it was raised. Then checks that nothing was lost."""
    llm, _ = make(monkeypatch, ByteTokenizer())
    raised = False
    try:
        with lines.traced():
            scene(llm)
    except (KeyboardInterrupt, EngineError) as e:
        raised = isinstance(e, KeyboardInterrupt) or "broke a step off" in str(e)
        assert raised, e
    with Interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Requests that were added to the engine itself belong to nobody else, and end here.
    llm.engine.abort_all()
    llm.engine.drain()
    (output,) = llm.generate([[1]], FIVE)
    assert output.token_ids == tokens_alone([1], 1, 5, VOCAB)
    assert_clean(llm)
    llm.engine._coordinator.check()
    llm.close()
    return raised


def sample(scene: Callable[[LLM], None], files: set[str], monkeypatch: pytest.MonkeyPatch, every: int) -> list[int]:
    """Numbers of lines to strike: the first time that each line runs, and every so many of the rest."""
    lines = Lines(files=files)
    assert not struck(scene, lines, monkeypatch)
    times: Counter[tuple[str, int]] = Counter()
    chosen = []
    for i, line in enumerate(lines.seen):
        times[line] += 1
        if (times[line] == 1 and every > 1) or i % every == 0:
            chosen.append(i)
    return chosen


def sweep(name: str, strike: Callable[[], None], every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, files = SCENES[name], FILES if strike is sigint else FILES - LOCKS
    lost = []
    chosen = sample(scene, files, monkeypatch, every)
    assert len(chosen) > 100
    for at in chosen:
        lines = Lines(strike, at, files)
        try:
            raised = struck(scene, lines, monkeypatch)
            assert raised, "the interrupt was swallowed"
        except (AssertionError, EngineError) as e:
            file, line = lines.seen[at]
            lost.append(f"{Path(file).name}:{line} (line {at} of the run): {type(e).__name__}: {str(e)[:80]}")
    assert not lost, f"{len(lost)} of {len(chosen)} lines:\n" + "\n".join(lost)


@pytest.mark.parametrize("strike", [sigint, anything])
@pytest.mark.parametrize("name", SCENES)
def test_an_interrupt_at_any_line_leaves_nothing_behind(
    name: str, strike: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sigint` is Ctrl-C; `anything` is an exception that some other means raises in the middle of a line."""
    sweep(name, strike, 499, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("strike", [sigint, anything])
@pytest.mark.parametrize("name", SCENES)
def test_an_interrupt_at_every_line_every_time_it_runs(
    name: str, strike: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(name, strike, 1, monkeypatch)
