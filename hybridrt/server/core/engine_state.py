"""What `GET /engine` answers: the engine now, for the page and for people. It has no text, no token and no name."""

import asyncio
import time
from typing import Any

import msgspec

from hybridrt.base.dtypes import dtype_name, resolve_dtype
from hybridrt.base.version import __version__
from hybridrt.engine.core.engine_view import EngineView
from hybridrt.engine.request.outputs import EngineCounters
from hybridrt.server.core.service import Service

MADE_SECONDS = 0.4  # all readers within this time get the same answer


class EngineState:
    """Makes the answer, at most once in MADE_SECONDS, whoever asks and however often.

    It is made in a thread, because it waits for the end of the engine's step.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._making: asyncio.Task[bytes] | None = None
        self._made = -MADE_SECONDS

    async def read(self) -> bytes:
        """JSON. A reader that leaves does not stop the others' answer."""
        old = self._making is None or (self._making.done() and time.monotonic() - self._made >= MADE_SECONDS)
        if old:
            self._making = asyncio.create_task(self._make())
        assert self._making is not None
        return await asyncio.shield(self._making)

    async def _make(self) -> bytes:
        try:
            found: bytes = await self._service.llm.in_thread(self._encoded, lane="answer")
            return found
        finally:
            self._made = time.monotonic()

    def _encoded(self) -> bytes:
        engine = self._service.llm.llm.engine
        with engine.turns:
            view, counters = engine.view(), engine.counters()
        return msgspec.json.encode(self._answer(view, counters))

    def _answer(self, view: EngineView | None, now: EngineCounters) -> dict[str, Any]:
        llm = self._service.llm.llm
        plan = llm.plan
        return {
            "about": self._about(),
            "seconds": time.monotonic(),
            "running": now.running,
            "waiting": max(self._service.llm.unfinished - now.running, 0),
            "rows": plan.num_rows,
            "kv_pages": _shares(now.total_pages, view.pages_used if view else None, now.cached_pages, now.free_pages),
            "state_slots": _shares(plan.num_slots, view.slots_used if view else None, now.cached_slots, now.free_slots),
            "tokens": {"computed": now.prompt_tokens, "output": now.output_tokens},
            "prefix_cache": {"asked": now.cache_asked, "hit": now.cache_hit, "no_state": now.cache_without_state},
            "drafts": {"proposed": now.proposed, "accepted": now.accepted},
            "folds": now.folds,
            "view": view,
        }

    def _about(self) -> dict[str, Any]:
        llm = self._service.llm.llm
        return {
            "version": __version__,
            "model": self._service.names[0],
            "architecture": llm.model_config.architecture,
            "dtype": dtype_name(resolve_dtype(llm.config.dtype, llm.model_config.dtype, llm.device)),
            "device": str(llm.device),
            "max_model_len": llm.plan.max_model_len,
            "page_size": llm.plan.page_size,
            "sees_images": llm.image_reader is not None,
            "has_tokenizer": llm.tokenizer is not None,
        }


def _shares(total: int, used: int | None, cached: int, free: int) -> dict[str, int]:
    """Entries of `total`. `used`: those of requests, and what they read of the cache; `cached`: the
    others of the cache. Where pages and states share memory, what one of them has is neither of
    these of the other; replicas (`used` is None) do not tell it from what requests use."""
    return {
        "total": total,
        "used": max(total - cached - free, 0) if used is None else used,
        "cached": cached,
        "free": free,
    }
