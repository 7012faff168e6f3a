"""Child processes for hostile work: both of those that exist get the same attacks."""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from hybridrt.base.child_process import ending_of
from hybridrt.channel import request_child
from hybridrt.channel.request_child import ChildNotStartedError, RequestChild, RequestRefusedError
from hybridrt.images.jobs import Job
from tests.support.pictures import png, saved

RENDER, DECODE = "hybridrt.chat.render_child", "hybridrt.images.image_child"
SECONDS = 60.0
CHAT = {"template": "{{ messages[0].content * 3 }}", "messages": [{"role": "user", "content": "é"}], "options": {}}
GOOD = {RENDER: msgspec.msgpack.encode(CHAT), DECODE: msgspec.msgpack.encode(Job("file", png(1, 20, 10), 1000))}


@pytest.fixture(scope="module", params=[DECODE, pytest.param(RENDER, marks=pytest.mark.soak)])
def child(request: pytest.FixtureRequest) -> Iterator[RequestChild]:
    own = RequestChild(request.param, {"max_bytes": 1 << 26})
    yield own
    process = own.process
    own.end()
    assert process is not None and process.poll() is not None, "it has ended"


def works(child: RequestChild) -> bool:
    result = bytes(child.ask(GOOD[child._module], SECONDS))
    return result == "ééé".encode() if child._module == RENDER else len(result) > 600


def pid_of(child: RequestChild) -> int:
    child.start()
    assert child.process is not None
    return child.process.pid


def test_requests_that_are_none_are_refused_and_leave_the_process_alone(child: RequestChild) -> None:
    before, good, rng = pid_of(child), GOOD[child._module], random.Random(1)
    odd = [b"", b"+", b"\xff" * 9, good[:-1], good[1:], good + good, b"\x91" * 100_000, bytes(1 << 20)]
    for _ in range(40):
        changed = bytearray(good)
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        odd.append(bytes(changed))
    refused = 0
    for request in odd:
        try:
            child.ask(request, SECONDS)
        except RequestRefusedError as e:
            refused += 1
            assert len(str(e)) <= 1000
    assert refused >= 8 and works(child) and pid_of(child) == before


def test_a_killed_process_is_started_again(child: RequestChild) -> None:
    os.kill(pid := pid_of(child), signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert works(child) and pid_of(child) != pid


def test_a_process_killed_meanwhile_is_said_and_started_again(child: RequestChild) -> None:
    os.kill(pid := pid_of(child), signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(EOFError):
        child.ask(bytes(1 << 20), SECONDS)  # more than a pipe holds
    assert child.process is None and works(child)


@pytest.mark.parametrize("size", [10, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_a_process_that_hangs_is_ended(child: RequestChild, size: int) -> None:
    os.kill(pid_of(child), signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        child.ask(bytes(size), 0.1)
    assert child.process is None and works(child)


def test_an_end_waits_for_no_request(child: RequestChild, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes would wait as long as a picture may take."""
    os.kill(pid := pid_of(child), signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)  # until then it may still answer
    reads, read = threading.Event(), request_child._read_frame

    def waits(*arguments: Any) -> bytearray:
        reads.set()
        return read(*arguments)

    monkeypatch.setattr(request_child, "_read_frame", waits)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(child.ask, bytes(10), SECONDS)
        assert reads.wait(SECONDS)
        child.end()
        with pytest.raises(EOFError):
            asked.result(SECONDS / 2)
    assert works(child)


def test_an_end_kills_a_process_that_a_request_has_just_started(
    child: RequestChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    child.end()
    starts, start = threading.Event(), request_child.start_child

    def late(*arguments: Any, **pipes: Any) -> "subprocess.Popen[bytes]":
        starts.set()
        time.sleep(0.2)  # the end is called before there is a process
        process = start(*arguments, **pipes)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as threads:
        patch.setattr(request_child, "start_child", late)
        asked = threads.submit(child.ask, bytes(10), SECONDS)
        assert starts.wait(SECONDS)
        child.end()
        with pytest.raises(ChildNotStartedError) as error:
            asked.result(SECONDS)
    assert isinstance(error.value.__cause__, EOFError), "not the limit of time"
    assert works(child)


def test_an_interrupted_request_leaves_no_answer_for_the_next_one(
    child: RequestChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    child.start()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(request_child, "_read_frame", interrupt)
        child.ask(GOOD[child._module], SECONDS)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(request_child, "_read_frame", interrupt)
        child.start()
    assert works(child)


def test_memory_is_limited(child: RequestChild) -> None:
    if child._module == RENDER:
        request = msgspec.msgpack.encode({"template": "{{ 'ab' * 2**30 }}", "messages": [], "options": {}})
    else:
        request = msgspec.msgpack.encode(Job("file", saved(Image.new("1", (6000, 6000)), "PNG"), 2**26))
    child.start()
    with pytest.raises(RequestRefusedError, match="too much memory"):
        child.ask(request, SECONDS)
    assert child.process is None and works(child)


def test_threads_wait_for_each_other(child: RequestChild) -> None:
    before = pid_of(child)
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda _: works(child), range(40)))
    assert pid_of(child) == before


def test_it_can_open_no_file_and_leaves_no_core(child: RequestChild) -> None:
    with open(f"/proc/{pid_of(child)}/limits") as limits:
        found = {line[:26].strip(): line[26:].split()[:2] for line in limits}
    assert found["Max open files"] == found["Max core file size"] == ["0", "0"]


def test_a_forked_process_leaves_it_to_its_parent(child: RequestChild) -> None:
    before = pid_of(child)
    with child._lock:  # of another thread
        pid = os.fork()
        if pid == 0:
            ended = 1
            try:
                ended = int(not works(child))
                child.end()
            finally:
                os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert works(child) and pid_of(child) == before


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "ended with status 0"), (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")],
)
def test_the_ending_of_a_process_has_a_name(status: int, text: str) -> None:
    """Real-time signals have none, and a thread that watches a rank must not die of that."""
    assert ending_of(status) == text


def test_a_module_that_does_not_start_is_said() -> None:
    with pytest.raises(ChildNotStartedError):
        RequestChild("hybridrt.no_such_module", {}).ask(b"x", SECONDS)
