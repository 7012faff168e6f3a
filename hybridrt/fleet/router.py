"""The router: one address in front of several replicas of a model."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import FrameType
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hybridrt.base.errors import ConfigError, MessageError, shown
from hybridrt.fleet.body_room import BodyRoom
from hybridrt.fleet.fleet_metrics import MAX_BYTES, RouterMetrics, merged
from hybridrt.fleet.forward import headers_for, target_of
from hybridrt.fleet.placement import Placement
from hybridrt.fleet.prompt_names import MAX_TOKENS, PromptNames
from hybridrt.fleet.replica_client import HEALTH_SECONDS, MAX_ENTRIES, ReplicaClient
from hybridrt.fleet.sender import RoutedRequest, Sender, nothing
from hybridrt.fleet.short_answer import short_answer
from hybridrt.server.core.bodies import SMALL, check_body
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.guard import FLEET_PATH, OPEN_PATHS, Guard
from hybridrt.server.core.metrics import CONTENT_TYPE
from hybridrt.server.core.respond import while_connected
from hybridrt.server.run import http_settings
from hybridrt.server.wire.errors import APIError, error_response

FLEET = ("/fleet/replicas", "/fleet/drain")
TO_ALL = ("/abort", "/reset_prefix_cache")
STORED = "/v1/responses/"
FIND_SECONDS = 2.0  # between two questions to DNS
CONNECT_SECONDS, WRITE_SECONDS, ANSWER_SECONDS = 2.0, 30.0, 5.0
MAX_REPLICAS = 256
METRICS_AT_ONCE = 4  # questions for the metrics of all replicas
MAX_LISTS = 2**17  # of a body, or brackets of its text; reading one takes a microsecond
MAX_STORED = 2**26  # bytes of a stored response
log = logging.getLogger("hybridrt.router")


@dataclass(frozen=True)
class RouterConfig:
    """Settings of a router.

    Args:
        server: where it listens, its keys and limits.
        replicas: URLs of the replicas, such as http://10.0.0.1:8000.
        replica_key: API key for replicas. None: the key that a client has brought.
        fleet_key: of the replicas. None: nothing is known of their caches, and requests go where
            there is room.
        discover: a URL whose name stands for the addresses of all replicas in DNS, such as a
            headless service of Kubernetes. They may come and go.
        tokenizer: directory of the model. None: text is not tokenised, so only prompts of token ids
            are matched with caches.
        resume: a stream whose replica is lost goes on at another one. False: it ends with an error
            that says how the client can resume it.
        changing: `Router.replace` says which replicas there are.

    Raises:
        ConfigError: a field cannot be used.
    """

    server: ServerConfig
    replicas: tuple[str, ...]
    replica_key: str | None = field(default=None, repr=False)
    fleet_key: str | None = field(default=None, repr=False)
    tokenizer: str | None = None
    discover: str | None = None
    resume: bool = False
    changing: bool = False

    def __post_init__(self) -> None:
        given = (*self.replicas, *(() if self.discover is None else (self.discover,)))
        if not (self.changing or len(given) > 0) or len(given) > MAX_REPLICAS:
            raise ConfigError(f"{len(given)} replicas; pass 1 to {MAX_REPLICAS} by --replica URL, or --discover URL")
        for url in given:
            if not _is_base_url(url):
                raise ConfigError(f"replica {url!r}: it must be a URL such as http://127.0.0.1:8001")
        if len({url.rstrip("/") for url in self.replicas}) < len(self.replicas):
            raise ConfigError("a replica is there twice; remove one of them")


def _is_base_url(text: str) -> bool:
    """Whether a URL has a scheme, a host and maybe a port, and nothing else."""
    try:
        parts, known = urlsplit(text), httpx.URL(text)
        host = known.host.encode("idna")  # as DNS is asked; its parts have at most 63 characters
    except (ValueError, httpx.InvalidURL):
        return False
    bare = not (parts.query or parts.fragment or "@" in parts.netloc) and text.isprintable()
    return bare and parts.scheme in ("http", "https") and bool(host) and (known.port is None or 0 < known.port < 2**16)


class Router:
    """An ASGI application that forwards requests.

    Attributes:
        draining: no further request is taken.
        open: requests that have not ended.
    """

    def __init__(self, config: RouterConfig) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1024)
        seconds = httpx.Timeout(None, connect=CONNECT_SECONDS, write=WRITE_SECONDS)
        self._client = httpx.AsyncClient(
            limits=limits, timeout=seconds, trust_env=False, follow_redirects=False,
            headers={"Accept-Encoding": "identity"},  # answers are passed on as they come
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # one client's are no other's
        )  # fmt: skip
        self._config = config
        self._placement, self._names = Placement(), PromptNames(config.tokenizer, config.server)
        self._known: dict[str, ReplicaClient] = {}
        self._watches: dict[str, list[asyncio.Task[None]]] = {}
        self._leaving = set[asyncio.Task[None]]()
        self._finder: asyncio.Task[None] | None = None
        self.metrics = RouterMetrics()
        self._sender = Sender(self._known, self._placement, self.metrics, config.replica_key, config.resume)
        self._asking_metrics = asyncio.Semaphore(METRICS_AT_ONCE)
        self._room = BodyRoom()
        self.draining, self.open = False, 0

    @property
    def replicas(self) -> list[ReplicaClient]:
        return list(self._known.values())

    async def start(self) -> None:
        """Asks all replicas once, then watches them until `close`."""
        for url in self._config.replicas:
            self._add(url.rstrip("/"))
        if self._config.discover is not None:
            await self._find(self._config.discover)
            self._finder = asyncio.create_task(self._find_again(self._config.discover))
        await asyncio.gather(*(replica.ask() for replica in self.replicas))

    async def close(self) -> None:
        tasks = [task for watches in self._watches.values() for task in watches]
        tasks += [*self._leaving, *([] if self._finder is None else [self._finder])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _add(self, url: str) -> None:
        key, on_wrong = self._config.fleet_key, self.metrics.count_wrong
        replica = self._known[url] = ReplicaClient(url, self._client, key, self._compare, on_wrong)
        self._placement.add(replica.placed)
        self.metrics.add(url)
        self._watches[url] = [asyncio.create_task(replica.watch()), asyncio.create_task(replica.follow())]
        self._share_entries()

    def _compare(self, replica: ReplicaClient) -> None:
        """Says if another replica has another model, or other weights."""
        others = [other.url for other in self.replicas if other.model and replica.model not in ("", other.model)]
        if others:
            text = "replica %s has another model than %s: requests get answers of either"
            log.warning(text, replica.url, others[0])

    def _remove(self, url: str) -> None:
        """What runs there goes on, and is watched until it has ended: if the replica no longer answers, clients are
        told so, or other replicas asked."""
        log.info("replica %s has gone", url)
        self.metrics.forget(url)
        replica = self._known.pop(url)
        replica.ready = False
        self._placement.remove(url)
        watch, follow = self._watches.pop(url)
        follow.cancel()
        leaving = asyncio.create_task(self._let_end(replica, watch))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        self._share_entries()

    @staticmethod
    async def _let_end(replica: ReplicaClient, watch: asyncio.Task[None]) -> None:
        try:
            while replica.exchanges:
                await asyncio.sleep(HEALTH_SECONDS)
        finally:
            watch.cancel()

    def _share_entries(self) -> None:
        for replica in self._known.values():
            replica.max_entries = MAX_ENTRIES // len(self._known)

    async def _find_again(self, url: str) -> None:
        while True:
            await asyncio.sleep(FIND_SECONDS)
            await self._find(url)

    async def _find(self, url: str) -> None:
        """Compares the replicas with the addresses of a name. If DNS fails they stay as they are."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(str(parts.hostname), port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as e:
            log.warning("the addresses of %s are not found: %s", parts.hostname, e or type(e).__name__)
            return
        hosts = [f"[{address[4][0]}]" if ":" in str(address[4][0]) else str(address[4][0]) for address in found]
        self.replace([f"{parts.scheme}://{host}:{port}" for host in hosts])

    def replace(self, found: Sequence[str]) -> None:
        """Replaces all replicas by those at these URLs, except for those of the configuration."""
        urls = set(found[:MAX_REPLICAS])
        fixed = {url.rstrip("/") for url in self._config.replicas}
        for gone in self._known.keys() - urls - fixed:
            self._remove(gone)
        for fresh in sorted(urls - self._known.keys()):
            self._add(fresh)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        own = path in FLEET or not path.startswith(FLEET_PATH)
        # A path that leads up would be another one at the replica.
        if not path.startswith("/") or not {".", ".."}.isdisjoint(path.split("/")) or not own:
            raise APIError(404, "the router has no such path")
        if path in (*OPEN_PATHS, "/metrics", "/fleet/replicas"):
            answer = await self._own(path, scope)
            await answer(scope, receive, send)
            return
        if self.draining:
            raise APIError(503, "the router is shutting down; send the request to another one", code="unavailable")
        self.open += 1
        try:
            async with self._room.read(receive) as body:
                await while_connected(receive, self._route(scope, send, body))
        finally:
            self.open -= 1

    async def _own(self, path: str, scope: Scope) -> Response:
        if path == "/metrics":
            async with self._asking_metrics:
                found = await self._answers("/metrics", scope, MAX_BYTES)
            text = await asyncio.to_thread(merged, {url: body.decode(errors="replace") for url, body in found.items()})
            return Response(self.metrics.text(self.replicas) + text, media_type=CONTENT_TYPE)
        if path == "/fleet/replicas":
            return JSONResponse([self._facts(replica) for replica in self.replicas])
        ready = not self.draining and any(replica.serves for replica in self.replicas)
        if path == "/ready" and not ready:
            return error_response(APIError(503, "no replica is ready", code="not_ready"), scope)
        return Response()

    def _facts(self, replica: ReplicaClient) -> dict[str, Any]:
        mirror = replica.placed.mirror
        return {
            "url": replica.url, "ready": replica.ready, "problem": replica.problem, "drained": replica.drained,
            "aside": replica.circuit.is_aside, "wrong_answer": replica.circuit.why,
            "model": replica.model or None,
            "requests": replica.placed.requests, "waiting_tokens": replica.placed.tokens,
            "cache_entries": None if mirror is None else len(mirror),
        }  # fmt: skip

    async def _answers(self, path: str, scope: Scope, most: int | None) -> dict[str, bytes]:
        """What each replica that answers says to GET. `most` as in `short_answer`."""
        headers = headers_for(scope, self._config.replica_key)

        async def one(replica: ReplicaClient) -> tuple[str, bytes | None]:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await short_answer(self._client, "GET", replica.url + path, most, headers)
            except (httpx.HTTPError, TimeoutError, MessageError):
                return replica.url, None
            return replica.url, answer.body if answer.status == 200 else None

        found = await asyncio.gather(*(one(replica) for replica in self.replicas if replica.ready))
        return {url: body for url, body in found if body is not None}

    async def _route(self, scope: Scope, send: Send, body: bytes) -> None:
        path = scope["path"]
        fields = _fields(body) if len(body) <= SMALL else await asyncio.to_thread(_fields, body)
        if path == "/fleet/drain":
            await self._drain(scope, send, fields)
        elif path in TO_ALL or path.startswith(STORED):
            await self._ask_all(scope, send, body)
        else:
            names = await self._names.of_request(path, fields)
            among = await self._with_response(scope, fields)
            await self._sender.send(RoutedRequest(body, fields, names, _session(scope, fields), among), scope, send)

    async def _with_response(self, scope: Scope, fields: dict[str, Any]) -> set[str] | None:
        """Replicas that keep the response which a request continues. None: it continues none."""
        name = fields.get("previous_response_id")
        if not isinstance(name, str) or scope["path"] != "/v1/responses":
            return None
        found = await self._answers(STORED + quote(name[:256], safe=""), scope, None)
        return set(found) or None

    async def _ask_all(self, scope: Scope, send: Send, body: bytes) -> None:
        """For what only one replica knows: the first answer that is not "unknown" counts."""
        headers, best = headers_for(scope, self._config.replica_key), None
        for replica in [replica for replica in self.replicas if replica.ready]:
            url = replica.url + target_of(scope)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    found = await short_answer(self._client, scope["method"], url, MAX_STORED, headers, body or None)
            except (httpx.HTTPError, TimeoutError, MessageError):
                continue
            best = min(best or found, found, key=lambda each: (each.status >= 300, b"false" in each.body[:64]))
        if best is None:
            raise APIError(503, "no replica answers; send the request again later", code="unavailable")
        await Response(best.body, best.status, media_type=best.kind)(scope, nothing, send)

    async def _drain(self, scope: Scope, send: Send, fields: dict[str, Any]) -> None:
        if unknown := fields.keys() - {"url", "drained"}:  # a wrong name for "drained" would drain
            raise APIError(400, f"the fields are url and drained, not {shown(min(unknown))}")
        url, drained = str(fields.get("url")).rstrip("/"), fields.get("drained", True)
        found = [replica for replica in self.replicas if replica.url == url]
        if not found or not isinstance(drained, bool):
            raise APIError(400, "url must be that of a replica, as in --replica, and drained true or false", "url")
        found[0].drained = drained
        await JSONResponse(self._facts(found[0]))(scope, nothing, send)


class RouterServer(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C, then lets requests end. A second signal ends at once."""

    def __init__(self, config: RouterConfig) -> None:
        self.router = Router(config)
        guarded = Guard(self.router, config.server)
        super().__init__(http_settings(guarded, config.server))
        self._settings = config.server
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.router.draining:
            self.should_exit = self.force_exit = True
            return
        self.router.draining = True

    async def startup(self, sockets: Sequence[Any] | None = None) -> None:
        await self.router.start()
        self._drain = asyncio.create_task(self._end_when_drained())
        for listener in sockets or ():
            listener.listen(self.config.backlog)
        await super().startup(list(sockets) if sockets else None)
        ready = sum(replica.ready for replica in self.router.replicas)
        log.info("routing to %d replicas, %d of them ready", len(self.router.replicas), ready)
        for replica in self.router.replicas:
            if replica.problem is not None:
                log.warning("replica %s is not ready: %s", replica.url, replica.problem)

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        if self._drain is not None:
            self._drain.cancel()
        await self.router.close()

    async def _end_when_drained(self) -> None:
        while not self.router.draining:
            await asyncio.sleep(0.1)
        try:
            async with asyncio.timeout(self._settings.drain_timeout):
                while self.router.open:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            log.warning("%d requests have not ended", self.router.open)
        self.should_exit = True


def _fields(body: bytes) -> dict[str, Any]:
    """{} for what is no JSON object, or has too many values: the replica says what is wrong. Reading
    keeps Python's lock to its end, so values are counted before."""
    if body.count(b"[") > MAX_LISTS:
        return {}
    try:
        check_body(body, MAX_TOKENS + SMALL)
        found = msgspec.json.decode(body) if body else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, HTTPException):
        return {}
    return found if isinstance(found, dict) else {}


def _session(scope: Scope, fields: dict[str, Any]) -> str | None:
    given = dict(scope["headers"]).get(b"x-session-id", b"").decode("latin-1") or fields.get("prompt_cache_key")
    return given[:256] if isinstance(given, str) and given else None
