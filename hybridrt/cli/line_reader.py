"""Reads messages from standard input, on a terminal with editing and history."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hybridrt.base.errors import RequestError
from hybridrt.base.files import check_file
from hybridrt.cli.options import MAX_CHARS

PROMPT, CONTINUED = "> ", ". "


class LineReader(Protocol):
    """Reads one message a call. A line that ends with a backslash continues.

    Attributes:
        interactive: standard input is a terminal.
    """

    interactive: bool

    def read(self) -> str | None:
        """The next message; None at the end of the input.

        Raises:
            KeyboardInterrupt: Ctrl-C was typed.
            RequestError: it has more than MAX_CHARS characters.
        """


def make_reader(commands: Sequence[str]) -> LineReader:
    """A reader with editing if both streams are a terminal that can move its cursor."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return EditedLines(commands)
    return PlainLines()


class PlainLines:
    """Reads from a file, a pipe, or a terminal without an editor of lines."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        stdin: Any = sys.stdin
        stdin.reconfigure(errors="surrogateescape")  # refused later, with their message

    def read(self) -> str | None:
        lines: list[str] = []
        size = 0
        while True:
            if self.interactive:
                print(CONTINUED if lines else PROMPT, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline(MAX_CHARS + 1 - size)
            size += len(line)
            if size > MAX_CHARS:
                raise RequestError(f"a message has more than {MAX_CHARS} characters; end it with a newline earlier")
            if not line:
                return "\n".join(lines) if lines else None
            line = line.removesuffix("\n")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])


class EditedLines:
    """Lines with prompt_toolkit: Enter sends, Alt-Enter begins another line, Tab completes
    commands."""

    interactive = True

    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter

        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            multiline=True,
            key_bindings=_bindings(),
            prompt_continuation=CONTINUED,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            reserve_space_for_menu=min(8, len(commands)),
        )

    def read(self) -> str | None:
        try:
            return self._session.prompt(PROMPT)
        except EOFError:
            return None


def _bindings() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


def _history() -> Any:
    """Uses a private file, or memory if that fails."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    file = Path(base) / "hybridrt" / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        check_file(file)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
