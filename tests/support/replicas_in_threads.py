"""Replicas of a data-parallel engine as threads of this process. Their messages are bytes, as on a socket."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from hybridrt import LLM
from hybridrt.base.engine_config import EngineConfig
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.replicas.messages import FromReplica, ReplicaReady, ToReplica, decode, encode
from hybridrt.engine.replicas.replica import ReplicaLoop


class _Stopped(Exception):
    """The test is over."""


class ThreadReplica:
    """A link to one replica, and that replica's front."""

    def __init__(self, number: int, engine: Engine, inbox: "queue.SimpleQueue[tuple[int, Any]]") -> None:
        self.number, self.engine, self._inbox = number, engine, inbox
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            ReplicaLoop(self, self.engine).run()  # type: ignore[arg-type]
        except _Stopped:
            return

    def receive(self, wait_s: float | None) -> Any:
        try:
            data = self._commands.get(wait_s != 0.0, wait_s)
        except queue.Empty:
            return None
        if data is None:
            raise _Stopped
        return decode(data, ToReplica)

    def send(self, message: Any) -> None:
        """Of both sides: an engine's thread sends to the front."""
        if threading.current_thread() is self._thread:
            self._inbox.put((self.number, decode(encode(message), FromReplica)))
        else:
            self._commands.put(message)

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join()


class ThreadReplicas:
    """Takes the place of `hybridrt.engine.replicas.start.Replicas`."""

    def __init__(self, make: Callable[[], LLM], config: EngineConfig) -> None:
        self.inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.llms = [make() for _ in range(config.dp_size)]
        self.ready = [ReplicaReady(llm.plan, llm.engine.cache_layout()) for llm in self.llms]
        self.links = [ThreadReplica(i, llm.engine, self.inbox) for i, llm in enumerate(self.llms)]

    def close(self) -> None:
        for link in self.links:
            link.stop()
        for llm in self.llms:
            llm.close()
