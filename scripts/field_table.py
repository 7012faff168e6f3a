"""Writes docs/request-fields.md: a line for each field of the request forms that the server knows.

python scripts/field_table.py
"""

from pathlib import Path

from hybridrt.server.core.request_fields import FORMS, ROWS

DOCUMENT = Path(__file__).parents[1] / "docs" / "request-fields.md"
HEAD = """# Fields of requests

Every field of the request forms of OpenAI, Anthropic and vLLM, and some of SGLang and llama.cpp. A
field is done, ignored because the answer does not depend on it, or refused by name with status 400.
A refused field that asks for nothing (null, false, 0, empty) is taken. Fields that are not listed
are ignored. `python scripts/field_table.py` writes this page from
`hybridrt/server/core/request_fields.py`.
"""


def document() -> str:
    """The page."""
    forms = [f"`{path}`" for path in FORMS.values()]
    lines = [HEAD, f"| field | {' | '.join(forms)} | |", "|---" * (len(forms) + 2) + "|"]
    for name in sorted({row.name for row in ROWS}):
        rows = [row for row in ROWS if row.name == name]
        states = [next(filter(None, (row.state(form) for row in rows)), "") for form in FORMS]
        notes = "; ".join(dict.fromkeys(row.note for row in rows))
        lines.append(f"| `{name}` | {' | '.join(states)} | {notes} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
