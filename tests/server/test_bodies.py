"""JSON bodies: how many values they have is known before they are read."""

import json
import random
import threading
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from hybridrt.server.core import bodies
from tests.support.http_server import Served


def test_marks_within_strings_are_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of any length: a string, an escape and a run of backslashes may be cut."""
    draw = random.Random(5)

    def text() -> str:
        return "".join(draw.choice('a,[{\\"é\n') for _ in range(draw.randrange(12)))

    def value(depth: int) -> Any:
        kind = draw.randrange(4 if depth else 2)
        if kind == 0:
            return text()
        if kind == 1:
            return draw.randrange(1000)
        found = [value(depth - 1) for _ in range(draw.randrange(4))]
        return found if kind == 2 else {text(): each for each in found}

    def count(each: Any) -> int:
        inside = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        return 1 + sum(map(count, inside))

    for size in (1, 2, 3, 7, 64, 2**18):
        monkeypatch.setattr(bodies, "PART_BYTES", size)
        for _ in range(60):
            made = [value(3) for _ in range(3)]
            body = json.dumps(made, ensure_ascii=draw.random() < 0.5).encode()
            found = b"".join(outside for _, outside in bodies._parts(body))
            values = found.count(b",") + found.count(b"[") + found.count(b"{")
            # A separator before each value but a container's first, and a mark for each container.
            assert count(made) - 1 <= values <= 2 * count(made)
            assert found.count(b"{") == objects(made)


def objects(each: Any) -> int:
    inside = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return isinstance(each, dict) + sum(map(objects, inside))


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"1," * 10**5 + b"1]", b"[" * 10**5, b'[{"a":[' + b"[]," * 10**5 + b"1]}]", b'["' + b'","' * 10**6,
        b"[" + b"{}," * 40000 + b"{}]", b'{"' + b'a":"b","' * 10**6,
    ],
)  # fmt: skip
def test_bodies_of_many_values_are_refused(body: bytes) -> None:
    with pytest.raises(HTTPException, match=r"more than [0-9]+ JSON (values|objects)"):
        bodies.check_body(body, 50000)


def test_a_text_may_hold_any_characters() -> None:
    bodies.check_body(json.dumps({"prompt": ',[{\\"' * 200000}).encode(), 100)


def test_a_large_body_is_counted_and_read_in_a_thread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    check = bodies.check_body

    def note(body: bytes, most: int) -> None:
        seen.append(threading.current_thread().name)
        check(body, most)

    monkeypatch.setattr(bodies, "check_body", note)
    ids = {"model": "tested", "prompt": [1] * 300000, "max_tokens": 1}
    answer = served.post("/v1/completions", ids)
    assert answer.status_code == 413 and "JSON values" in answer.json()["error"]["message"]
    answer = served.post("/v1/completions", {"model": "tested", "prompt": [1] * 20000, "max_tokens": 1})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    text = {"model": "tested", "messages": [{"role": "user", "content": ",[{" * 200000}]}
    assert served.post("/v1/chat/completions", text).json()["error"]["code"] == "context_length_exceeded"
    assert len(seen) == 3 and all(name.startswith("hybridrt-") for name in seen)
