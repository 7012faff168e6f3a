"""Typed errors. Each is raised before any state changes, and its text says what to do about it."""

from typing import TYPE_CHECKING


class HybridrtError(Exception):
    """Base class: `except HybridrtError` catches everything that this package raises on purpose."""


class ConfigError(HybridrtError, ValueError):
    """An argument, a combination of arguments or a checkpoint's config.json cannot be used."""


class UnknownNameError(ConfigError, TypeError):
    """A function or a configuration has no argument of this name; the text says which one it has."""


class UnsupportedModelError(ConfigError):
    """The checkpoint names an architecture that no registered model implements."""


class UnsupportedLayerError(ConfigError, NotImplementedError):
    """A kind of recurrent layer that this operation does not know."""


class CheckpointError(HybridrtError):
    """A checkpoint does not hold what the model needs: keys missing, left over, misshapen or unreadable."""


class RequestError(HybridrtError, ValueError):
    """One request is invalid (empty prompt, too long, token id out of range, ...). The engine is unchanged.

    Attributes:
        field: what is wrong: a field of SamplingParams, "prompt", or a field of a conversation; None: something else.
    """

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an output within `max_model_len`."""


class MemoryBudgetError(HybridrtError):
    """The memory budget cannot hold what was asked for; the text names the number to change."""


class PoolError(HybridrtError):
    """A pool's bookkeeping was violated: double free, use after free, a stale handle."""


class OutOfSlotsError(PoolError):
    """A pool has no free entry. The scheduler turns this into queueing or retraction; it never reaches a user."""


class CacheDumpError(HybridrtError, ValueError):
    """A file is no dump of a prefix cache, or a damaged one."""


class SessionError(HybridrtError, ValueError):
    """A session cannot be saved, or a file is no session that this model can take. Nothing has changed."""


class BackendError(HybridrtError, ValueError):
    """An attention or linear backend cannot serve this model, mode or platform."""


class ProviderNotInstalledError(HybridrtError, ImportError):
    """A kernel provider was asked for by name, but its package is missing; the text names the extra to install."""


class DeviceError(HybridrtError, RuntimeError):
    """The requested device is not available on this machine."""


class EngineError(HybridrtError, RuntimeError):
    """The engine cannot go on: an executor failed or an internal invariant broke."""


class GrammarError(EngineError):
    """A request's structured_outputs exceed a limit behind some of its output. Other requests go on."""


class NoTokenLeftError(EngineError):
    """A request forbids every token behind some of its output: by its structured_outputs, allowed_token_ids, bad_words
    and min_tokens together. Other requests go on."""


class RankError(EngineError):
    """A tensor-parallel rank failed or was lost. The others cannot go on without it: build a new LLM."""


class QueueFullError(HybridrtError):
    """As many requests run and wait as may at a time. Nothing is wrong with this one: send it again later."""


class UnavailableError(EngineError):
    """The engine takes no requests: it has failed, or is shutting down."""


class ServerError(HybridrtError):
    """A server with OpenAI's API, asked by this process, cannot be reached, refuses, or breaks off."""


class TransferError(HybridrtError, RuntimeError):
    """State transfer between workers was refused or broken off."""


class HandshakeError(TransferError):
    """Two workers disagree on something that their states depend on; no byte of state has moved.

    Attributes:
        field: what they disagree on, a field of hybridrt.transfer.handshake.handshake_of.
        ours, theirs: its values here and there.
    """

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} is {ours!r} here and {theirs!r} there; start both workers with the same {field}")
        self.field, self.ours, self.theirs = field, ours, theirs


class PeerGoneError(TransferError):
    """The process at the other end of a channel has closed it, has died, or is silent for too long."""


class AuthenticationError(PeerGoneError):
    """The process at the other end of a connection does not hold the same key. The connection is closed."""


class MessageError(PeerGoneError):
    """What came over a channel is not a message that belongs there. The channel is closed."""


if not TYPE_CHECKING:  # a type checker takes every public name
    __all__ = [name for name, value in vars().items() if isinstance(value, type)]


def shown(value: object) -> str:
    """A value for an error's text: its repr, cut to 80 characters."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or a class whose __repr__ fails
        text = f"a value of type {type(value).__name__}"
    text = " ".join(text.split())  # arrays take several lines
    return text if len(text) <= 80 else f"{text[:77]}..."


def reason(error: BaseException) -> str:
    """What another library's error says, in one line, cut to 300 characters. Such texts may hold whole values of a
    file."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def is_failure(error: BaseException) -> bool:
    """True for an Exception, and for a failed assertion of a library in Rust, which pyo3 raises as a BaseException.
    False for what ends a thread: KeyboardInterrupt, SystemExit, the cancellation of a task."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def is_text(value: str) -> bool:
    """False for a string with a lone surrogate: no encoding, and so no tokenizer and no message, takes it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
