"""Large bodies that are taken: they are read in a thread that rests, whatever their kind."""

import threading
from typing import Any

import pytest

from hybridrt.base import pace
from hybridrt.base.pace import REST, WORK_SECONDS, paced, rest, with_rests
from hybridrt.engine.api.lanes import Lanes
from tests.support.http_server import Served
from tests.support.levels import sweep

COUNT = 2000


class Clock:
    """A thread's CPU time, which passes when the test says so, and its rests."""

    def __init__(self) -> None:
        self.now, self.slept = 5.0, list[tuple[str, float]]()

    def thread_time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append((threading.current_thread().name, seconds))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pace, "time", made)
    return made


def test_paced_work_rests_as_its_cpu_time_demands(clock: Clock) -> None:
    def work() -> int:
        for _ in with_rests(range(6)):
            clock.now += WORK_SECONDS / 2
        clock.now += 1.0  # one long call
        return 7

    assert paced(work) == 7
    taken = [seconds for _, seconds in clock.slept]
    assert taken == [pytest.approx(REST * WORK_SECONDS)] * 2 + [pytest.approx(REST * (1.0 + WORK_SECONDS))]


def test_other_work_never_rests(clock: Clock) -> None:
    with pytest.raises(KeyError):
        paced(lambda: {}["none"])
    clock.now += 1.0
    rest()
    assert clock.slept == []


def test_long_texts_alone_have_a_paced_lane(clock: Clock) -> None:
    lanes = Lanes()

    def work() -> None:
        clock.now += 1.0
        rest()

    for lane in ("text", "compile", "answer", "long text"):
        lanes.submit(lane, work).result()  # type: ignore[arg-type]
    lanes.close()
    assert [name.startswith("hybridrt-long-text") for name, _ in clock.slept] == [True]


TURN = {"role": "user", "content": "a " * 20}
PART = {"type": "text", "text": "a " * 20}
CHATS = [
    ("/v1/chat/completions", {"messages": [TURN] * COUNT}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * COUNT}]}),
    ("/v1/messages", {"messages": [TURN] * COUNT, "max_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [PART] * COUNT}], "max_tokens": 1}),
    ("/v1/responses", {"input": [TURN] * COUNT}),
    ("/v1/responses", {"input": [{**TURN, "content": [PART] * COUNT}]}),
    ("/v1/completions", {"prompt": ["a " * 20] * COUNT}),
    ("/tokenize", {"messages": [TURN] * COUNT}),
]


@pytest.mark.parametrize(("path", "body"), sweep(CHATS, 3))
def test_large_bodies_are_checked_outside_the_event_loop(
    path: str, body: dict[str, Any], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may rest at each element, whichever list holds them."""
    elements = list[str]()

    def rests() -> None:
        elements.append(threading.current_thread().name)

    monkeypatch.setattr("hybridrt.server.core.protocol.rest", rests)
    answer = served.post(path, {"model": "tested", **body})
    assert answer.status_code == 400 and "error" in answer.json()  # too long, or too many
    assert len(elements) >= COUNT and all(name.startswith("hybridrt-long-text") for name in elements)


def test_a_large_body_is_refused_as_a_small_one(served: Served) -> None:
    """With the same words, by the field that is wrong."""
    for last in ({"role": "user", "content": 5}, {"role": 5}, 7, None):
        small, large = (
            served.post("/v1/chat/completions", {"model": "tested", "messages": [TURN] * many + [last]})
            for many in (1, COUNT)
        )
        found = small.json()["error"]
        expected = {key: text and text.replace("messages.1", f"messages.{COUNT}") for key, text in found.items()}
        assert small.status_code == large.status_code == 400 and large.json()["error"] == expected
    with served.http() as client:
        headers = {"Content-Type": "application/json"}
        for start, end in (("", ""), ("[", "]"), ("{", "{"), ('"', '"'), ("[" * 20000, "")):
            texts = [start + " " * size + end for size in (10, 100_000)]
            answers = [client.post("/v1/completions", content=text, headers=headers) for text in texts]
            assert answers[0].status_code == answers[1].status_code == 400
            assert answers[0].json() == answers[1].json()


def test_a_large_body_that_is_taken_gives_the_answer_of_its_fields(served: Served) -> None:
    """`user` is ignored, so that the same request is small and large."""
    body = {"model": "tested", "prompt": [5, 6], "max_tokens": 3, "temperature": 0.0}
    answers = [served.post("/v1/completions", {**body, "user": "u" * size}).json() for size in (1, 200_000)]
    assert answers[0]["choices"] == answers[1]["choices"]
