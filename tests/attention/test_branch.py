"""The second stream, played by an object that writes down what it is told."""

from contextlib import contextmanager

import pytest
import torch

from hybridrt.attention.base import Branch


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    log = []
    current = [FakeStream("main", log)]

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", log))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return log


def run(branch, log):
    with branch.side_stream():
        log.append(f"first on {torch.cuda.current_stream().name}")
    log.append(f"second on {torch.cuda.current_stream().name}")
    branch.join()


def test_a_captured_step_forks_and_joins(log):
    run(Branch(torch.device("cuda")), log)
    assert log == ["side waits for main", "first on side", "second on main", "main waits for side"]


@pytest.mark.parametrize(("device", "capturing"), [("cpu", True), ("cuda", False)])
def test_anything_else_stays_in_line(device, capturing, log, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    run(Branch(torch.device(device)), log)
    assert log == ["first on main", "second on main"]


def test_segments_leave_their_parts_in_place(log):
    out, branch = torch.zeros(5, 2), Branch(torch.device("cuda"))
    total = branch.segments(2, out, lambda place: place.fill_(1.0), lambda place: place.fill_(2.0))
    assert total.data_ptr() == out.data_ptr() and out[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert log == ["side waits for main", "main waits for side"]


@pytest.mark.parametrize("out", [None, torch.zeros(5, 2)])
def test_segments_that_make_their_own_tensors_are_joined(out, log):
    ones, twos = torch.ones(2, 2), torch.full((3, 2), 2.0)
    decode = lambda place: ones if place is None else place.copy_(ones)  # noqa: E731
    total = Branch(torch.device("cpu")).segments(2, out, decode, lambda place: twos)
    assert total[:, 1].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
