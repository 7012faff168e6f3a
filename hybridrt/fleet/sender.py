"""Finds a replica for a request, and another one if that has no room or is lost."""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from hybridrt.fleet.answer_form import AnswerForm
from hybridrt.fleet.counted_stream import MAX_IDS
from hybridrt.fleet.fleet_metrics import RouterMetrics
from hybridrt.fleet.forward import BUSY, Forward, NotAnswered, headers_for
from hybridrt.fleet.placement import Placement
from hybridrt.fleet.prefix_mirror import PrefixNames
from hybridrt.fleet.replica_client import ReplicaClient
from hybridrt.fleet.suspects import Suspects
from hybridrt.server.wire.errors import APIError

TRIES = 4  # replicas that a request is sent to, one after the other
WRONG_TRIES = 4  # further ones, if so many have answered wrongly
READY_SECONDS = 10.0  # that a request waits for a replica while none is ready
RESUMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
log = logging.getLogger("hybridrt.router")


@dataclass(frozen=True)
class RoutedRequest:
    """A request that a replica is chosen for.

    Attributes:
        fields: of the body; empty if it was not parsed.
        names: of the prefixes of its prompt.
        session: requests of one session go to one replica. None: it names none.
        among: URLs of the replicas that may get it. None: all.
    """

    body: bytes
    fields: Mapping[str, Any]
    names: PrefixNames
    session: str | None
    among: set[str] | None

    @property
    def resumed(self) -> list[int]:
        """First tokens of the answer that the client has already."""
        ids = self.fields.get("resume_token_ids")
        if not isinstance(ids, list) or len(ids) > MAX_IDS:
            return []
        return ids if all(isinstance(i, int) and 0 <= i < 2**31 for i in ids) else []

    def can_go_on(self, path: str) -> bool:
        """Whether another replica can continue its stream."""
        one = self.fields.get("n") in (None, 1) and not self.fields.get("background")
        return path in RESUMED and self.fields.get("stream") is True and one


class Sender:
    """Sends requests to replicas.

    A replica that has no room, or takes no connection, has done nothing for a request, which goes to
    another one; so it does if the answer has not the form of one. If a replica is lost while it has the
    request, the request may be the reason: it goes to one other, and to none if a replica was lost by the
    same request before.

    Args:
        replicas: by URL. May change.
        resumes: a stream that is cut goes on at the other replica.
    """

    def __init__(
        self, replicas: Mapping[str, ReplicaClient], placement: Placement, metrics: RouterMetrics,
        replica_key: str | None, resumes: bool,
    ) -> None:  # fmt: skip
        self._replicas, self._placement, self._metrics = replicas, placement, metrics
        self._replica_key, self._resumes = replica_key, resumes
        self._suspects = Suspects()

    async def send(self, asked: RoutedRequest, scope: Scope, send: Send) -> None:
        """Sends the answer to the client.

        Raises:
            APIError: no replica has answered.
        """
        body = self._named(asked, scope["path"])
        form = AnswerForm.of_request(scope["method"], scope["path"], asked.fields)
        forward = Forward(scope, send, body, headers_for(scope, self._replica_key), form, asked.resumed)
        failure, tried = _Failure(), set[str]()
        for attempt in range(TRIES + WRONG_TRIES):
            wanted = self._wanted(asked.among, forward) - tried
            if attempt - failure.wrong >= TRIES:
                break
            if (
                not wanted
                and attempt < TRIES
                and failure.refusal is None
                and await self._one_is_ready(asked.among, forward)
            ):
                wanted, tried = self._wanted(asked.among, forward), set()
            if not wanted:
                break
            try:
                await self._send_to_one(forward, asked, wanted, tried, attempt)
                await self._suspects.clear(scope["path"], asked.body)
                return
            except NotAnswered as e:
                log.info("a request is not answered: %s", e)
                failure.add(e)
                if not await self._may_go_on(failure, forward, asked, scope["path"], body):
                    break
        await self._give_up(failure, forward, scope, send)

    async def _send_to_one(
        self, forward: Forward, asked: RoutedRequest, wanted: set[str], tried: set[str], attempt: int
    ) -> None:
        placed, first = self._placement.place(asked.names, asked.session, wanted), asyncio.Event()
        replica = self._replicas[placed.replica.name]
        tried.add(replica.url)
        self._metrics.count(replica.url, asked.names.length, placed.prefix, attempt)
        watch = asyncio.create_task(_when(first, placed.computed))
        try:
            await forward.send_to(replica, first)
        finally:
            watch.cancel()
            placed.ended()

    def _named(self, asked: RoutedRequest, path: str) -> bytes:
        """The body. With a seed and a name, the rest of a stream that is cut is what would have come,
        under the same name."""
        if not (self._resumes and asked.can_go_on(path)):
            return asked.body
        more = {"seed": secrets.randbits(63), "request_id": secrets.token_hex(16)}
        return with_fields(asked.body, {name: v for name, v in more.items() if asked.fields.get(name) is None})

    async def _may_go_on(
        self, failure: "_Failure", forward: Forward, asked: RoutedRequest, path: str, body: bytes
    ) -> bool:
        """Whether another replica may have the request, or the rest of its stream."""
        if failure.last is None:
            return False
        if failure.last.lost and max(await self._suspects.add_loss(path, asked.body), failure.losses) > 1:
            failure.blamed = True
            return False
        if not forward.begun:
            return True
        if not (self._resumes and asked.can_go_on(path)) or not (ids := forward.ids):
            return False
        forward.body = with_fields(body, {"resume_token_ids": ids})
        self._metrics.resumed.inc(failure.last.cut)
        return True

    async def _give_up(self, failure: "_Failure", forward: Forward, scope: Scope, send: Send) -> None:
        if forward.begun:
            self._metrics.cut.inc()
            await forward.end_cut(failure.why)
        elif failure.blamed:
            text = f"{failure.why}. The request may be the reason, so it is sent to no other replica"
            raise APIError(502, text, code="replica_lost")
        elif failure.refusal is not None:
            await failure.refusal(scope, nothing, send)
        elif failure.last is not None and failure.last.wrong:
            raise APIError(502, failure.why, code="wrong_answer")
        else:
            raise APIError(503, "no replica takes the request now; send it again later", code="unavailable")

    def _wanted(self, among: set[str] | None, forward: Forward) -> set[str]:
        ready = {url for url, each in self._replicas.items() if each.wants_requests and forward.may_have(each)}
        return ready if among is None else ready & among

    async def _one_is_ready(self, among: set[str] | None, forward: Forward) -> bool:
        """Waits for a while: a replica may be starting again, or be slow to say that it is ready."""
        deadline = time.monotonic() + READY_SECONDS
        while not (found := bool(self._wanted(among, forward))) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return found


class _Failure:
    """Why a request is not answered yet. `refusal`: what a replica has said; `blamed`: the request may
    be the reason why replicas were lost; `wrong`: answers that were none."""

    def __init__(self) -> None:
        self.last: NotAnswered | None = None
        self.refusal: Response | None = None
        self.losses, self.wrong, self.blamed = 0, 0, False

    @property
    def why(self) -> str:
        return "no replica is ready" if self.last is None else str(self.last)

    def add(self, e: NotAnswered) -> None:
        self.last, self.losses, self.wrong = e, self.losses + e.lost, self.wrong + e.wrong
        if self.refusal is None or (e.answer is not None and e.answer.status_code in BUSY):
            self.refusal = e.answer  # a replica without room has the model; one that lacks it says less


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """A JSON object, not empty, with more fields. Of two with one name the last one counts."""
    if not fields:
        return body
    end = body.rindex(b"}")
    return b"%b,%b}" % (body[:end], msgspec.json.encode(fields)[1:-1])


async def nothing() -> Message:
    """The body of a request that has been read."""
    return {"type": "http.request", "body": b"", "more_body": False}


async def _when(event: asyncio.Event, call: Any) -> None:
    await event.wait()
    call()
