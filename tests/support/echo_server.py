"""A small server of OpenAI's completions in a thread: tokens follow from the prompt, and can be changed."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Tokens = Callable[[list[int]], list[int]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
MODELS = b'{"data": [{"id": "echo"}]}'


def usual(prompt: list[int]) -> list[int]:
    return [(sum(prompt) * 31 + i) % 997 for i in range(4)]


def chunk(token: int, body: dict[str, Any]) -> bytes:
    name = f"t{token}"
    scores = {"tokens": [name], "token_logprobs": [-0.5], "top_logprobs": [{name: -0.5, f"t{token + 1}": -0.9}]}
    choice: dict[str, Any] = {"index": 0, "text": name, "logprobs": scores if body.get("logprobs") else None}
    if body.get("return_token_ids"):
        choice["token_ids"] = [token]
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@contextmanager
def echoing(tokens: Tokens = usual, fails: Callable[[list[int]], bool] = lambda prompt: False) -> Iterator[str]:
    """The URL of a server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(MODELS) + MODELS)
        else:
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            if fails(body["prompt"]):
                writer.write(b"HTTP/1.1 500 Error\r\nConnection: close\r\n\r\nbroken")
            else:
                writer.write(HEAD + b"".join(chunk(t, body) for t in tokens(body["prompt"])) + b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(quiet, "127.0.0.1", 0, backlog=1024))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()
