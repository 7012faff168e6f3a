"""The child process that renders chat templates (hybridrt/channel/request_child.py), in transformers' sandbox."""

from contextlib import suppress
from typing import Any

import msgspec
from transformers.utils.chat_template_utils import render_jinja_template

from hybridrt.channel.request_child import Parts, answer_requests

MAX_TEXT_BYTES = 1 << 27
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


def main(max_bytes: int) -> None:
    for template in _FIRST:
        with suppress(Exception):  # some raise, to import what errors need
            _compute(msgspec.msgpack.encode({"template": template, "messages": [], "options": {}}))
    answer_requests(_compute, max_bytes)


def _compute(request: bytes) -> Parts:
    text = _render(msgspec.msgpack.decode(request)).encode()
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"it makes {len(text)} bytes of text, more than {MAX_TEXT_BYTES}")
    return [text]


def _render(request: dict[str, Any]) -> str:
    texts, _ = render_jinja_template([request["messages"]], chat_template=request["template"], **request["options"])
    text: str = texts[0]
    return text
