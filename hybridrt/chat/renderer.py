"""Renders chat templates, which are programs of checkpoints, in a child process with limits of time and memory.

transformers' sandbox limits neither loops nor sizes, and a process that computes `{{ 9 ** (9 ** 9)
}}` cannot be interrupted from inside.
"""

import atexit
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hybridrt.base.errors import CheckpointError, RequestError
from hybridrt.channel.request_child import ChildNotStartedError, RequestChild, RequestRefusedError

TIMEOUT_S = 10.0
FOREIGN_TIMEOUT_S = 2.0  # of a template that comes with a request: other clients' wait for it
MAX_BYTES = 1 << 30  # memory for a template, in addition to the process at its start


class Renderer:
    """A child process, started by the first call and again after it was killed. Calls of several
    threads wait for each other: RENDERER is for small conversations, LARGE_RENDERER for others,
    which take up to TIMEOUT_S each, FOREIGN_RENDERER for templates of requests.

    Args:
        seconds: that a rendering may take.
    """

    def __init__(self, seconds: float = TIMEOUT_S) -> None:
        self._seconds = seconds
        self._child = RequestChild("hybridrt.chat.render_child", {"max_bytes": MAX_BYTES})
        atexit.register(self.close)

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """A conversation as text.

        Args:
            template: Jinja text.
            options: keyword arguments of transformers' render_jinja_template, and variables of the
                template.

        Raises:
            CheckpointError: the template raises, or exceeds its seconds or MAX_BYTES of memory.
            RequestError: a message or an option is no plain data.
        """
        request = {"template": template, "messages": messages, "options": options}
        try:
            data = msgspec.msgpack.encode(request)
        except (TypeError, ValueError, OverflowError, RecursionError) as e:
            text = f"the conversation cannot be passed on to its template: {e}"
            raise RequestError(text, _unfit(messages, options.get("tools"))) from e
        if len(data) > MAX_BYTES:
            raise RequestError(f"the conversation has {len(data)} bytes; there may be {MAX_BYTES}", "messages")
        try:
            return str(self._child.ask(data, self._seconds), errors="replace")
        except TimeoutError as e:
            raise _failed(f"it has not ended within {self._seconds:g} seconds") from e
        except EOFError as e:
            raise _failed("its process was killed") from e
        except RequestRefusedError as e:
            raise _failed(str(e)) from e
        except ChildNotStartedError as e:
            raise _not_started() from e

    def start(self) -> None:
        """Starts the child before it is needed. CheckpointError if it does not start."""
        try:
            self._child.start()
        except ChildNotStartedError as e:
            raise _not_started() from e

    def close(self) -> None:
        """Ends the child process. A later call starts another one."""
        self._child.end()


def _failed(text: str) -> CheckpointError:
    return CheckpointError(
        f"the chat template fails ({text}); repair it, or write the prompt in the model's format yourself"
    )


def _not_started() -> CheckpointError:
    return CheckpointError("the process for chat templates does not start; try `import hybridrt, transformers`")


def _unfit(messages: Any, tools: Any) -> str:
    for name, value in (("messages", messages), ("tools", tools)):
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return name
    return "chat_template_kwargs"


RENDERER, LARGE_RENDERER, FOREIGN_RENDERER = Renderer(), Renderer(), Renderer(FOREIGN_TIMEOUT_S)
