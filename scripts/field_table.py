"""Writes docs/request-fields.md: a line for each field of the request forms that the server knows.

python scripts/field_table.py
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from hybridrt.server.core.request_fields import FORMS, ROWS

DOCUMENT = Path(__file__).parents[1] / "docs" / "request-fields.md"
HEAD = """# Fields of requests

Every field of the request forms of OpenAI, Anthropic and vLLM, and some of SGLang and llama.cpp. A
field is done, ignored because the answer does not depend on it, or refused by name with status 400.
A refused field that asks for nothing (null, false, 0, empty) is taken. Fields that are not listed
are ignored. `/tokenize` takes `prompt` with `add_special_tokens`, or the fields of a chat that make
its prompt (`messages`, `tools`, `chat_template_kwargs` and others), and `return_token_strs`. It
refuses what a chat refuses. `/detokenize` takes `tokens`. `python scripts/field_table.py` writes
this page from `hybridrt/server/core/request_fields.py`.
"""
NESTED = """
## Fields of fields

`tools.name` is the field `name` of each entry of `tools`.
"""


def document() -> str:
    """The page."""
    names = sorted({row.name for row in ROWS})
    lines = [HEAD, *_table(name for name in names if "." not in name), NESTED]
    return "\n".join([*lines, *_table(name for name in names if "." in name)]) + "\n"


def _table(names: Iterable[str]) -> Iterator[str]:
    forms = [f"`{path}`" for path in FORMS.values()]
    yield f"| field | {' | '.join(forms)} | |"
    yield "|---" * (len(forms) + 2) + "|"
    for name in names:
        rows = [row for row in ROWS if row.name == name]
        states = [next(filter(None, (row.state(form) for row in rows)), "") for form in FORMS]
        notes = "; ".join(dict.fromkeys(row.note for row in rows))
        yield f"| `{name}` | {' | '.join(states)} | {notes} |"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
