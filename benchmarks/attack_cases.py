"""Requests that cost a server far more than their sender: the cases of benchmarks.attacks, and files of others."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrt.base.structured_outputs import MAX_CHARACTERS

COUNTER = b"%%%%%%%%"  # replaced by a number of as many digits, another one each time that a request is sent
MAX_FILE_BYTES = 1 << 28
# Keys of the two clients, where the server asks for some.
ATTACKER, NEIGHBOUR = "attacker", "neighbour"


@dataclass(frozen=True)
class Attack:
    """What one client sends, again and again, over several connections.

    Args:
        name: on the command line and in the table.
        parts: bytes; connection i sends the part i, and begins with the first where there are fewer.
        connections: open at once.
        waits: for the answer, before the same is sent again; the part asks the server to close.
        sees: the server has a model that sees.
    """

    name: str
    parts: tuple[bytes, ...] = field(repr=False)
    connections: int = 1
    waits: bool = True
    sees: bool = False


def request(path: str, body: Any, closes: bool = True) -> bytes:
    """A request as a client sends it."""
    content = json.dumps(body).encode()
    headers = {"Host": "localhost", **({"Connection": "close"} if closes else {}), "Content-Type": "application/json"}
    headers |= {"X-Api-Key": ATTACKER, "Content-Length": str(len(content))}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


def cases() -> list[Attack]:
    """All cases, in the order of the table."""
    return [*_pipelines(), *_masks(), *_prompt_logprobs(), *_schemas(), *_chats()]


def _pipelines() -> list[Attack]:
    get = b"GET / HTTP/1.1\r\n\r\n"
    named = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    tokens = request("/tokenize", {"prompt": "a"}, closes=False)
    head = b"POST /abort HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    return [
        Attack("pipeline", (get * (256 * 1024 // len(get)),), waits=False),
        Attack("pipeline-of-versions", (named * (1024 * 1024 // len(named)),), waits=False),
        Attack("pipeline-of-bodies", (tokens * (1024 * 1024 // len(tokens)),), 4, waits=False),
        Attack("small-chunks", (chunked + b"1\r\n \r\n" * 1_000_000 + b"0\r\n\r\n",), 4, waits=False),
    ]


def _masks() -> list[Attack]:
    def choice(*texts: str) -> bytes:
        body = {"prompt": [5], "max_tokens": 200, "temperature": 1.0, "guided_choice": texts}
        return request("/v1/completions", body)

    def regex(text: str) -> bytes:
        return request("/v1/completions", {"prompt": [5], "max_tokens": 200, "guided_regex": text})

    return [
        Attack("long-choices", (choice("a" * 260_000 + "x", "a" * 260_000 + "y"),), 8),
        Attack("many-choices", (choice(*(f"{i:05}" * 60 for i in range(4000))),), 8),
        Attack("long-pattern", (regex("(" + "|".join(f"{i}[a-z]{{1,99}}" for i in range(2000)) + ")*"),), 8),
    ]


def _prompt_logprobs() -> list[Attack]:
    prompts = [[5 + (i + j) % 200 for j in range(500)] for i in range(64)]
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 64}
    echoed = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 64}
    return [
        Attack("prompt-logprobs", (request("/v1/completions", body),)),
        Attack("echoed-logprobs", (request("/v1/completions", echoed),)),
    ]


def _schemas() -> list[Attack]:
    counter = COUNTER.decode()

    def schema(count: int, kind: dict[str, Any]) -> bytes:
        properties = {f"p{counter}_{i}": kind for i in range(count)}
        body = {"prompt": [5], "max_tokens": 4, "guided_json": {"type": "object", "properties": properties}}
        return request("/v1/completions", body)

    def enumeration(characters: int) -> bytes:
        values = [counter, *(f"{i:05}" * 4 for i in range(characters // 23))]
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"enum": values}}}
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "response_format": form}
        return request("/v1/chat/completions", body)

    return [
        Attack("large-schemas", (schema(5000, {"type": "string"}),), 10),
        Attack("schemas-of-patterns", (schema(300, {"type": "string", "pattern": "^[a-z]{1,200}$"}),), 10),
        Attack("long-enumerations", (enumeration(400_000),), 8),
        Attack("enumerations-at-the-limit", (enumeration(MAX_CHARACTERS - 1000),), 8),
    ]


def _chats() -> list[Attack]:
    def chat(messages: list[dict[str, Any]]) -> bytes:
        return request("/v1/chat/completions", {"messages": messages, "max_tokens": 1})

    parts = [{"type": "text", "text": "a"}] * 250_000
    return [
        Attack("long-chats", (chat([{"role": "user", "content": "word " * 1_800_000}]),), 4),
        Attack("chats-of-parts", (chat([{"role": "user", "content": parts}]),), 4),
        Attack("chats-of-turns", (chat([{"role": "user", "content": "a " * 250}] * 16_000),), 4),
    ]


def read_cases(path: str) -> list[Attack]:
    """Cases of a JSON file: a list of objects with `name`, and either `path` and `body` or `raw` (text) and perhaps
    `times`; perhaps `connections` and `waits`. "%%%%%%%%" in a body becomes a new number for each request.

    Raises:
        ValueError: the file is too long, or an object has another form.
    """
    file = Path(path)
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    found = []
    for entry in json.loads(file.read_text()):
        if "raw" in entry:
            part = entry["raw"].encode("latin-1") * entry.get("times", 1)
        elif "path" in entry and "body" in entry:
            part = request(entry["path"], entry["body"])
        else:
            raise ValueError(f"{entry.get('name')}: it needs path and body, or raw")
        waits = entry.get("waits", "raw" not in entry)
        found.append(Attack(entry["name"], (part,), entry.get("connections", 1), waits))
    return found
