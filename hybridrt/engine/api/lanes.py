"""Threads for work that would block an event loop, separate for each kind of work."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

from hybridrt.base.fair_threads import FairThreads
from hybridrt.base.pace import paced
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.grammar.grammar_compiler import WAITING

# "long text": its threads rest most of the time (hybridrt/base/pace.py), else they would hold up
# running requests. "compile": waits for grammars. "template": runs chat templates of requests.
# "answer": makes large answers, a part at a time. "images": waits for processes that decode.
Lane = Literal["text", "long text", "images", "compile", "template", "answer"]
_COMPILING = 16  # threads besides those for large grammars
THREADS: dict[Lane, int] = {
    "text": 2, "long text": 2, "images": 64, "compile": WAITING + _COMPILING, "template": 2, "answer": 2,
}  # fmt: skip
# Threads of a lane that one client may have; of other lanes all. Those of images may be held for minutes.
OF_CLIENT: dict[Lane, int] = {"images": 4}
LONG_CHARACTERS = 2**16  # tens of milliseconds
# Takes as long as a switch of threads.
INLINE, _IDS_PER_CHARACTER = 1000, 10


def lane_of(characters: int) -> Lane:
    return "long text" if characters >= LONG_CHARACTERS else "text"


class Lanes:
    """The threads, started when there is work. `weights`: shares by client."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._threads = {
            lane: FairThreads(count, OF_CLIENT.get(lane, count), f"hybridrt-{lane.replace(' ', '-')}", weights)
            for lane, count in THREADS.items()
        }

    def submit(self, lane: Lane, work: Callable[[], Any], client: str = "") -> "Future[Any]":
        return self._threads[lane].submit(client, partial(paced, work) if lane == "long text" else work)

    def close(self) -> None:
        """Refuses further work; what was submitted is done."""
        for threads in self._threads.values():
            threads.close()


def size_of(prompt: object) -> int:
    held = next(iter(prompt.values()), "") if isinstance(prompt, dict) else prompt
    length = len(held) if isinstance(held, Sized) else 1
    return length if isinstance(held, str) else length // _IDS_PER_CHARACTER


def is_quick(params: object) -> bool:
    """True if the parameters need little work. Wrong ones are refused at once."""
    if not isinstance(params, SamplingParams):
        return True
    quick = not params.uses_rules and params.structured_outputs is None
    return quick and sum(map(len, params.stop)) <= INLINE


def in_parts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of parts of a batch, each of about INLINE characters or one prompt."""
    start, held = 0, 0
    for end, size in enumerate(sizes, 1):
        held += 1 + size
        if held > INLINE or end == len(sizes):
            yield start, end
            start, held = end, 0
