"""Runs audits of cached prefixes while no request runs."""

from collections.abc import Callable, Sequence

import numpy as np

from hybridrt.base.turns import Change
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.hit_audit import Hit, HitAudit, Running
from hybridrt.engine.core.samples import Samples
from hybridrt.engine.request.outputs import DeltaQueue
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey

NAME = "audit "  # what the ids of audits begin with


class Audits:
    """An audit is two requests of one token: one starts from the cached prefix, the other one
    computes it. They evict nothing and leave nothing in the cache.

    Args:
        chosen: hits to audit.
        new_request: makes a request of tokens, a key, an id and a queue.
    """

    def __init__(
        self,
        chosen: HitAudit,
        samples: Samples,
        coordinator: CacheCoordinator,
        change: Change,
        new_request: Callable[[Sequence[int], CacheKey, str, DeltaQueue], Request],
    ) -> None:
        self.chosen = chosen
        self._samples, self._coordinator, self._change, self._new_request = samples, coordinator, change, new_request
        self._count = 0

    def begin(self) -> bool:
        """Starts the next audit if no request runs. True while one runs."""
        while self.chosen.running is None and not self._samples and (hit := self.chosen.next()) is not None:
            if self._can_run(hit):
                self._start(hit)
        return self.chosen.running is not None

    def note_step(self) -> None:
        """Call after a step. Compares the requests once both have ended."""
        running = self.chosen.running
        if running is None:
            return
        running.ended |= {delta.request_id: delta for delta in running.queue.take_deltas()}
        if len(running.ended) < len(running.names):
            return
        cached, anew = [running.ended[name] for name in running.names]
        self.chosen.running = None
        if cached.metrics is None or cached.metrics.cached_tokens < running.hit.length:
            return  # it was evicted meanwhile
        if self.chosen.compare(cached, anew):
            with self._change:
                tokens = np.array(running.hit.tokens[:-1], np.int32)
                self._coordinator.drop_text(tokens, running.hit.key)
                self._coordinator.prefixes.counts.dropped += 1

    def break_off(self) -> None:
        """A request comes. The audit that runs is done later."""
        running = self.chosen.running
        if running is None:
            return
        self.chosen.put_back()
        with self._change:
            for name in running.names:
                for request in self._samples.samples_of_request(name):
                    self._samples.abort(request)

    def _can_run(self, hit: Hit) -> bool:
        """Whether the entry is there, and nothing needs to be evicted for the audit."""
        held, _ = self._coordinator.prefixes.path(np.array(hit.tokens[:-1], np.int32), hit.key)
        return held.length == hit.length and self._coordinator.has_free(len(hit.tokens) + 1, 2)

    def _start(self, hit: Hit) -> None:
        names = f"{NAME}{self._count} cached", f"{NAME}{self._count} anew"
        running, self._count = Running(hit, names), self._count + 1
        requests = [self._new_request(hit.tokens, hit.key, name, running.queue) for name in names]
        requests[1].afresh = True
        self.chosen.running = running
        with self._change:
            for name, request in zip(names, requests, strict=True):
                self._samples.add(name, [request])
                self._samples.queue(name, None)
