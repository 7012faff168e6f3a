"""Child processes that decode pictures: each decodes one at a time."""

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import LifoQueue

import msgspec
import numpy as np

from hybridrt.base.errors import EngineError
from hybridrt.base.fair_threads import FairThreads
from hybridrt.channel.request_child import ChildNotStartedError, RequestChild, RequestRefusedError
from hybridrt.images.jobs import Decoded, Job, UnreadablePicture


@dataclass(frozen=True)
class PoolLimits:
    """
    Attributes:
        children: processes. One client has all but one of them at most: its slow pictures delay no other's.
        seconds: for one picture, with its way to the process and back.
        max_bytes: memory of a process, in addition to that at its start.
        max_pixels: of a picture, as its header says.
    """

    children: int = 1 + max(1, min(4, (os.cpu_count() or 1) // 2))
    seconds: float = 20.0
    max_bytes: int = 1 << 30
    max_pixels: int = 2**25

    @property
    def of_client(self) -> int:
        """Pictures of one client that are decoded at once."""
        return max(1, self.children - 1)


class ImagePool:
    """Child processes, started by the first pictures or by `start`. Thread-safe.

    Args:
        weights: shares by client; others have 1.

    Attributes:
        threads: as many as processes; each reads a picture.
    """

    def __init__(self, limits: PoolLimits, weights: Mapping[str, float] | None = None) -> None:
        self.limits = limits
        arguments = {"max_bytes": limits.max_bytes}
        self._children = [RequestChild("hybridrt.images.image_child", arguments) for _ in range(limits.children)]
        self._idle = LifoQueue[RequestChild]()
        for child in self._children:
            self._idle.put(child)
        self.threads = FairThreads(limits.children, limits.of_client, "hybridrt-image", weights)
        self._end = weakref.finalize(self, _end_all, self._children, self.threads)

    def start(self) -> None:
        """Starts all processes before they are needed. EngineError if one does not start."""
        for child in self._children:
            try:
                child.start()
            except ChildNotStartedError as e:
                raise _not_started() from e

    def close(self) -> None:
        self._end()

    def decode(self, job: Job) -> tuple[np.ndarray, bytes]:
        """[h, w, 3] uint8 and a digest of a picture. Blocks until a process is free.

        Raises:
            UnreadablePicture: it cannot be decoded. EngineError: no process starts.
        """
        child = self._idle.get()
        try:
            answer = child.ask(msgspec.msgpack.encode(job), self.limits.seconds)
        except TimeoutError as e:
            raise UnreadablePicture(f"decoding takes more than {self.limits.seconds:g} seconds") from e
        except EOFError as e:
            raise UnreadablePicture("decoding it has ended its process") from e
        except RequestRefusedError as e:
            raise UnreadablePicture(str(e)) from e
        except ChildNotStartedError as e:
            raise _not_started() from e
        finally:
            self._idle.put(child)
        start = 4 + int.from_bytes(answer[:4], "little")
        facts = msgspec.msgpack.decode(answer[4:start], type=Decoded)
        pixels = np.frombuffer(answer, np.uint8, facts.height * facts.width * 3, start)
        return pixels.reshape(facts.height, facts.width, 3), facts.digest


def _not_started() -> EngineError:
    return EngineError("the process that decodes images does not start; try `import hybridrt, PIL`")


def _end_all(children: Sequence[RequestChild], threads: FairThreads) -> None:
    threads.close(cancel=True)
    for child in children:
        child.end()
