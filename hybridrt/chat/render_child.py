"""Renders chat templates for another process, over standard input and output.

A script that imports transformers' sandboxed renderer and nothing of hybridrt. It cannot open files
while templates run. A frame is four bytes of length, then msgpack.
"""

import resource
import signal
import sys
from typing import Any, BinaryIO

import msgspec
import psutil
from transformers.utils.chat_template_utils import render_jinja_template

MAX_TEXT_BYTES = 1 << 27
_LAST_SECONDS = 60.0  # life of a process without its parent
# These import all modules that later renderings need, while files can be opened.
_FIRST = (
    "{{ strftime_now('%Y %B') }}{{ messages | tojson }}{{ messages | pprint }}{{ lipsum(1) }}{{ 'ä' | upper }}",
    "{{ 'x' | urlize }}{{ 1.5 | round }}{{ [2, 1] | sort }}{{ [1] | random }}{{ 'x' | escape | striptags }}",
    "{{ '%s' | format(1) }}",
    "{{ raise_exception('no') }}",
    "{{ nothing.at.all }}",
    "{% for %}",
    "{{ ''.__class__ }}",
    "{% include 'x' %}",
)


def main() -> None:
    """Reads `max_bytes` and answers requests until the other process closes its end."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    for template in _FIRST:
        _answer(msgspec.msgpack.encode({"template": template, "messages": [], "options": {}}))
    max_bytes = int(sys.argv[1])
    limit = psutil.Process().memory_info().vms + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    _write(answers, b"")
    while head := requests.read(4):
        request = requests.read(int.from_bytes(head, "little"))
        signal.setitimer(signal.ITIMER_REAL, _LAST_SECONDS)
        answer = _answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, answer)


def _answer(request: bytes) -> bytes:
    """Returns the text after "+"; an error after "-", or after "!" if this process must be
    replaced: out of memory, any object may be incomplete.
    """
    try:
        text = _render(msgspec.msgpack.decode(request)).encode()
        if len(text) > MAX_TEXT_BYTES:
            raise ValueError(f"it makes {len(text)} bytes of text, more than {MAX_TEXT_BYTES}")
        return b"+" + text
    except MemoryError as e:
        return b"!" + type(e).__name__.encode()
    except BaseException as e:
        return b"-" + f"{type(e).__name__}: {e}"[:1000].encode(errors="replace")


def _render(request: dict[str, Any]) -> str:
    texts, _ = render_jinja_template([request["messages"]], chat_template=request["template"], **request["options"])
    text: str = texts[0]
    return text


def _write(stream: BinaryIO, data: bytes) -> None:
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


if __name__ == "__main__":
    main()
