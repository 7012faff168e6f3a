"""A server in a thread of the tests' process, on a port of its own."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.llm import LLM
from hybridrt.server.app import make_app
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.metrics import Metrics
from hybridrt.server.core.service import Service
from hybridrt.server.run import Server
from tests.support.lazily import lazily

if TYPE_CHECKING:
    import openai
else:
    openai = lazily("openai")

WAIT = 120  # seconds after which a test gives up
# A template as checkpoints bring them: roles in tags, one that fails on a request's fault, one variable.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' + message.role) }}"
    "{% endif %}# {{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{{ greeting }}{% if add_generation_prompt %}# assistant:{% endif %}"
)


@dataclass
class Served:
    """A server that runs."""

    llm: LLM
    service: Service
    server: Server
    url: str

    def client(self, **options: Any) -> "openai.OpenAI":
        """OpenAI's own client of it."""
        options = {"api_key": "none", "max_retries": 0, "timeout": WAIT} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def async_client(self, **options: Any) -> "openai.AsyncOpenAI":
        """The same for asyncio."""
        options = {"api_key": "none", "max_retries": 0, "timeout": WAIT} | options
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options)

    def http(self) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, timeout=WAIT)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """One request."""
        with self.http() as client:
            return client.post(path, json=body, **options)

    def wait_until_idle(self) -> None:
        """Until nothing runs; then nothing may be held."""
        deadline = time.monotonic() + WAIT
        # Another server over the same LLM may still be ending what its clients have left.
        while self.service.llm.unfinished or self.llm.engine.has_unfinished():
            assert time.monotonic() < deadline, f"{self.service.llm.unfinished} samples are left"
            time.sleep(0.01)
        with self.llm.engine.turns:
            counters = self.llm.engine.counters()
            assert (counters.running, counters.waiting) == (0, 0)
            assert counters.free_rows == self.llm.plan.num_rows
            held = self.llm.engine._coordinator
            assert not any(pool.num_used or pool.num_locked for pool in (held.slots, held.pages))
            held.check()


@contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[Served]:
    """Serves an LLM, which stays open."""
    settings = {"port": 0, "served_model_names": ("tested",), "chat_template": CHAT_TEMPLATE} | settings
    config = ServerConfig(**settings)
    with AsyncLLM(llm, max_waiting=config.max_waiting) as served:
        service = Service(served, config)
        server = Server(make_app(service, Metrics(served, service.names[0])), service)
        ready = threading.Event()
        startup = server.startup

        async def noting(sockets: Any = None) -> None:
            await startup(sockets)
            ready.set()

        server.startup = noting  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            assert ready.wait(WAIT), "it does not start"
            yield Served(llm, service, server, server.addresses()[0])
        finally:
            server.handle_exit(15, None)
            if service.llm.unfinished:
                server.handle_exit(15, None)
            thread.join(WAIT)
            assert not thread.is_alive(), "it does not end"
