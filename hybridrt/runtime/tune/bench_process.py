"""Runs candidates in a process of their own: both of its sides.

A candidate that reads outside of its tensors ends all use of the GPU by its process, and one may never end. What a
compiler makes of a tile can do either: on an H200 some tiles of the delta rule's pass did. The process is started again
after it was lost.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from hybridrt.base.device import use_gpu
from hybridrt.base.errors import EngineError
from hybridrt.channel.request_child import (
    ChildNotStartedError,
    ChildReplacedError,
    Parts,
    RequestChild,
    RequestRefusedError,
    answer_requests,
)
from hybridrt.kernels.core.launch_choice import LAUNCHES, Tuned, Values, use_tuned
from hybridrt.runtime.load.tuned_choices import fields_of, import_launches, shape_of
from hybridrt.runtime.tune.gpu_timer import GPUTimer
from hybridrt.runtime.tune.measure import BenchLostError, Check, LocalBench, Race, ShapeSkippedError, Timer
from hybridrt.runtime.tune.tune import TRIALS

SECONDS = 300.0  # of one candidate, compiled and run, or of one race
Fields = dict[str, int | bool | str]


class Request(msgspec.Struct):
    """What is to be run for a shape of a launch: nothing, a check of `values`, or a race of `choices`. `tuned`: launch,
    shape and values of what won before."""

    launch: str
    shape: Fields
    tuned: list[tuple[str, Fields, dict[str, int]]]
    values: dict[str, int] | None = None
    choices: list[dict[str, int]] | None = None


class Answer(msgspec.Struct):
    """`skipped`: why the shape cannot be measured."""

    check: Check | None = None
    race: Race | None = None
    skipped: str | None = None


class BenchProcess:
    """The parent's side. Call `end` when all is measured.

    Args:
        module: its `main(device)` calls `serve`.
    """

    def __init__(self, device: torch.device, module: str = __name__, seconds: float = SECONDS) -> None:
        self._child, self._seconds = RequestChild(module, {"device": str(device)}), seconds

    def bench(self, launch: str, shape: Any, tuned: Tuned) -> "RemoteBench":
        """ShapeSkippedError if the built-in choice fails."""
        found = RemoteBench(self, launch, shape, tuned)
        try:
            found.ask()
        except BenchLostError as e:
            raise ShapeSkippedError(f"with its built-in choice {e}") from e
        return found

    def ask(self, request: Request) -> Answer:
        """Runs what the request names.

        Raises:
            ShapeSkippedError: the shape cannot be measured.
            BenchLostError: the process has ended, or was ended.
            EngineError: it does not start, or has failed.
        """
        try:
            answer = msgspec.json.decode(self._child.ask(msgspec.json.encode(request), self._seconds), type=Answer)
        except ChildReplacedError as e:
            raise BenchLostError(str(e)) from e
        except TimeoutError as e:
            raise BenchLostError(f"it was not done after {self._seconds:g} s") from e
        except EOFError as e:
            raise BenchLostError("its process has ended") from e
        except RequestRefusedError as e:
            raise EngineError(f"a measurement has failed: {e}") from e
        except ChildNotStartedError as e:
            raise EngineError("the process that measures does not start; does another process use the GPU?") from e
        if answer.skipped is not None:
            raise ShapeSkippedError(answer.skipped)
        return answer

    def end(self) -> None:
        """Ends the process."""
        self._child.end()


class RemoteBench:
    """A `measure.Bench` in another process."""

    def __init__(self, process: BenchProcess, launch: str, shape: Any, tuned: Tuned) -> None:
        entries = [(name, fields_of(each), dict(values)) for name, of in tuned.items() for each, values in of.items()]
        self._process, self._request = process, Request(launch, fields_of(shape), entries)

    def check(self, values: Values) -> Check:
        found = self.ask(values=dict(values)).check
        assert found is not None, "it was asked for"
        return found

    def race(self, choices: Sequence[Values]) -> Race:
        found = self.ask(choices=[dict(values) for values in choices]).race
        assert found is not None, "it was asked for"
        return found

    def ask(self, **wanted: Any) -> Answer:
        """Runs what `Request` names."""
        return self._process.ask(msgspec.structs.replace(self._request, **wanted))


def main(device: str) -> None:
    """The child's side."""
    gpu = torch.device(device)
    use_gpu(gpu)
    serve(gpu, GPUTimer(gpu))


def serve(device: torch.device, timer: Timer) -> None:
    """Answers requests until the parent closes its end."""
    import_launches()
    answer_requests(_Server(device, timer).answer, None)


class _Server:
    """Keeps the bench of the latest shape."""

    def __init__(self, device: torch.device, timer: Timer) -> None:
        self._device, self._timer = device, timer
        self._of: tuple[str, Fields] | None = None
        self._bench: LocalBench | None = None

    @torch.no_grad()
    def answer(self, data: bytes) -> Parts:
        request = msgspec.json.decode(data, type=Request)
        try:
            answer = self._run(request)
        except ShapeSkippedError as e:
            answer = Answer(skipped=str(e))
        except torch.AcceleratorError as e:  # nothing more runs on this GPU in this process
            raise ChildReplacedError(str(e).partition("\n")[0]) from e
        return [msgspec.json.encode(answer)]

    def _run(self, request: Request) -> Answer:
        bench = self._bench_for(request)
        if request.values is not None:
            return Answer(check=bench.check(request.values))
        if request.choices is not None:
            return Answer(race=bench.race(request.choices))
        return Answer()

    def _bench_for(self, request: Request) -> LocalBench:
        of = request.launch, request.shape
        if self._bench is None or self._of != of:
            self._bench = None  # its memory is free for the next one
            tuned: dict[str, dict[Any, Values]] = {}
            for name, fields, values in request.tuned:
                tuned.setdefault(name, {})[_shape(name, fields)] = values
            use_tuned(self._device, tuned)
            launch, shape = LAUNCHES[request.launch], _shape(*of)
            self._bench = LocalBench(launch, shape, self._device, TRIALS[request.launch], self._timer)
            self._of = of
        return self._bench


def _shape(launch: str, fields: Fields) -> Any:
    return shape_of(LAUNCHES[launch].shape, fields, "a request")
