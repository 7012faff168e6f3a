"""The loop of `hybridrt chat`."""

import difflib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import typer

from hybridrt.base.errors import HybridrtError, RequestError, is_text
from hybridrt.base.interrupts import Interrupts
from hybridrt.cli.conversation import (
    AnswerPiece,
    ChatModel,
    ConversationMessage,
    ImagePart,
    TextPart,
    Totals,
    image_part,
    load,
    save,
)
from hybridrt.cli.line_reader import LineReader

COMMANDS = {
    "/help": "list the commands",
    "/system": "TEXT: set the system prompt; without TEXT remove it",
    "/image": "FILE: the next message has this image; repeatable",
    "/reset": "forget the conversation, but not the system prompt",
    "/save": "FILE: write the conversation as JSON; if FILE ends in .safetensors, with the model's cached states",
    "/load": "FILE: read such a file, and go on with it",
    "/exit": "end, as Ctrl-D does",
}
SESSION = ".safetensors"
_KEYS = (
    "Enter sends; Alt-Enter, or a backslash at the end of a line, begins another line.\n"
    "Ctrl-C stops an answer, Ctrl-D ends the chat. A space before a slash makes it a message."
)
# An answer must not control the terminal.
_CONTROLS = {code: 0xFFFD for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignores a second Ctrl-C: people who stop an answer often press it twice."""
    with suppress(KeyboardInterrupt), Interrupts():
        yield


class Screen:
    """Answers on standard output, notes on standard error; colours on a terminal alone."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._colours = self._terminal and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
        self._column_0, self._reasoned = True, False

    def write(self, piece: AnswerPiece) -> None:
        """A piece of an answer: reasoning dimmed, followed by an empty line."""
        if piece.reasoning:
            self._put(piece.reasoning, dim=True)
            self._reasoned = True
        if piece.text:
            if self._reasoned:
                self._put("\n" if self._column_0 else "\n\n", dim=False)
                self._reasoned = False
            self._put(piece.text, dim=False)

    def end_answer(self) -> None:
        if not self._column_0:
            self._put("\n", dim=False)
        self._reasoned = False

    def note(self, text: str) -> None:
        typer.echo(typer.style(text, dim=True) if self._colours else text, err=True)

    def error(self, text: str) -> None:
        heading = typer.style("error: ", fg="red", bold=True) if self._colours else "error: "
        typer.echo(heading + " ".join(text.split()), err=True)

    def _put(self, text: str, dim: bool) -> None:
        if self._terminal:
            text = text.translate(_CONTROLS)
        self._column_0 = text.endswith("\n")
        typer.echo(typer.style(text, dim=True) if dim and self._colours else text, nl=False)
        sys.stdout.flush()


class Repl:
    """A conversation with a model.

    Attributes:
        messages: the first may be the system prompt.
    """

    def __init__(self, model: ChatModel, reader: LineReader, screen: Screen) -> None:
        self.messages: list[ConversationMessage] = []
        self._images: list[ImagePart] = []  # of the next message
        self._model, self._reader, self._screen = model, reader, screen
        self._actions: dict[str, Callable[[str], None]] = {
            "/help": self._help, "/system": self._set_system, "/image": self._add_image, "/reset": self._reset,
            "/save": self._save, "/load": self._load,
        }  # fmt: skip

    def run(self) -> None:
        """Runs to the end of the input. On a terminal, errors are printed and the loop continues.

        Raises:
            HybridrtError, OSError: a message failed and the input is no terminal: later messages
                may need its answer.
        """
        if self._reader.interactive:
            self._screen.note(f"{self._model.name}: /help lists the commands, Ctrl-D ends.")
        asked = False
        while True:
            try:
                text = self._reader.read()
                if text is None and not asked and not self._reader.interactive:
                    raise RequestError("standard input holds nothing: chat on a terminal, or pipe in a message a line")
                if text is None or text.strip() == "/exit":
                    return
                asked = True
                self.answer_line(text)
            except KeyboardInterrupt:
                with _deaf():
                    self._screen.note("Ctrl-D ends the chat.")
            except (HybridrtError, OSError) as e:
                if not self._reader.interactive or isinstance(e, BrokenPipeError):
                    raise
                self._screen.error(str(e))

    def answer_line(self, text: str) -> None:
        """Answers a message, or runs a command.

        Raises:
            HybridrtError, OSError: it failed; the conversation is as it was.
        """
        if not is_text(text):
            raise RequestError("the message holds bytes that are no text in this terminal's encoding; type it again")
        if text.startswith("/"):
            name, *rest = text.split(maxsplit=1)
            self._action(name)(rest[0].strip() if rest else "")
        elif text.strip():
            images = self._images
            self._answer(ConversationMessage("user", [*images, TextPart(text.strip())] if images else text.strip()))
            self._images = []

    def _action(self, name: str) -> Callable[[str], None]:
        if name in self._actions:
            return self._actions[name]
        near = difflib.get_close_matches(name, COMMANDS, 1)
        advice = f"did you mean {near[0]}?" if near else "/help lists them; a space before the slash makes it a message"
        raise RequestError(f"there is no command {name}: {advice}")

    def _answer(self, question: ConversationMessage) -> None:
        """Ctrl-C keeps the text so far; without text the question is dropped, too."""
        asked, reply, stopped = [*self.messages, question], ConversationMessage("assistant", ""), False
        text, totals = "", None
        try:
            with closing(self._model.answer(asked)) as pieces:
                for piece in pieces:
                    if isinstance(piece, Totals):
                        totals = piece
                        continue
                    text += piece.text
                    reply.reasoning_content = (reply.reasoning_content or "") + piece.reasoning or None
                    self._screen.write(piece)
        except KeyboardInterrupt:
            stopped = True
        finally:
            with _deaf():
                self._screen.end_answer()
        with _deaf():
            if text or not stopped:
                self.messages = [*asked, msgspec.structs.replace(reply, content=text)]
            if stopped:
                self._screen.note("stopped" if text else "stopped: the question is forgotten, too")
            elif totals is not None:
                self._screen.note(str(totals))

    def _help(self, rest: str) -> None:
        self._screen.note("\n".join([*(f"{name:<8} {text}" for name, text in COMMANDS.items()), _KEYS]))

    def _set_system(self, text: str) -> None:
        system = [ConversationMessage("system", text)] if text else []
        self.messages = [*system, *self.messages[len(self._system()) :]]

    def _add_image(self, name: str) -> None:
        self._images.append(image_part(_file("/image", name)))
        self._screen.note(f"{len(self._images)} images go with the next message")

    def _reset(self, rest: str) -> None:
        self.messages, self._images = self._system(), []

    def _system(self) -> list[ConversationMessage]:
        return [message for message in self.messages[:1] if message.role == "system"]

    def _save(self, name: str) -> None:
        file = _file("/save", name)
        if file.suffix != SESSION:
            save(file, self.messages)
            self._screen.note(f"{len(self.messages)} messages written")
            return
        try:
            self._model.save_session(file, self.messages)
            self._screen.note(f"{len(self.messages)} messages written")
        except HybridrtError:
            if not self.messages:
                raise
            # The text is not lost with the states.
            text = file.with_suffix(".json")
            save(text, self.messages)
            self._screen.note(f"without states, {len(self.messages)} messages written to {text}")
            raise

    def _load(self, name: str) -> None:
        file = _file("/load", name)
        self.messages = (self._model.load_session if file.suffix == SESSION else load)(file)
        self._screen.note(f"{len(self.messages)} messages read")


def _file(command: str, name: str) -> Path:
    if not name or "\0" in name:
        raise RequestError(f"{command} needs the name of a file: {command} talk.json")
    try:
        return Path(name).expanduser()
    except RuntimeError as e:  # "~name" of no user
        raise RequestError(f"{name}: {e} Write ./ before a name that begins with ~") from e
