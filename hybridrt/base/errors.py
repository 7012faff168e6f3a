"""Typed errors: each is raised before any state changes, and its text says what to do."""

from typing import TYPE_CHECKING


class HybridrtError(Exception):
    """Base class of everything that this package raises on purpose."""


class ConfigError(HybridrtError, ValueError):
    """An argument, a combination of arguments or a checkpoint's config.json cannot be used."""


class UnknownNameError(ConfigError, TypeError):
    """There is no argument of this name; the text gives the right one."""


class UnsupportedModelError(ConfigError):
    """The checkpoint names an architecture that no registered model implements."""


class UnsupportedLayerError(ConfigError, NotImplementedError):
    """This operation does not know the kind of recurrent layer."""


class CheckpointError(HybridrtError):
    """A checkpoint does not fit its model: keys missing, left over, misshapen or unreadable."""


class RequestError(HybridrtError, ValueError):
    """A request is invalid (empty prompt, too long, token id out of range). The engine is
    unchanged.

    Attributes:
        field: the wrong field of SamplingParams or of a conversation, or "prompt"; None: something
            else.
    """

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an output within `max_model_len`."""


class MemoryBudgetError(HybridrtError):
    """The memory budget is too small; the text names the number to change."""


class PoolError(HybridrtError):
    """A pool's bookkeeping was violated: double free, use after free, a stale handle."""


class OutOfSlotsError(PoolError):
    """A pool has no free entry. The scheduler queues or retracts; no user sees this error."""


class CacheDumpError(HybridrtError, ValueError):
    """A file is no prefix cache dump, or a damaged one."""


class SessionError(HybridrtError, ValueError):
    """A session cannot be saved, or a file is no session for this model. Nothing has changed."""


class BackendError(HybridrtError, ValueError):
    """An attention or linear backend cannot serve this model, mode or platform."""


class ProviderNotInstalledError(HybridrtError, ImportError):
    """The package of a requested kernel provider is missing; the text names the extra to install."""


class DeviceError(HybridrtError, RuntimeError):
    """The requested device is not available on this machine."""


class EngineError(HybridrtError, RuntimeError):
    """The engine cannot go on: an executor failed or an internal invariant broke."""


class GrammarError(EngineError):
    """A request's structured_outputs exceed a limit after some of its output. Other requests go on."""


class NoTokenLeftError(EngineError):
    """A request allows no token after some of its output: structured_outputs, allowed_token_ids,
    bad_words and min_tokens together forbid all. Other requests go on."""


class RankError(EngineError):
    """A tensor-parallel rank failed or was lost. The run cannot go on: build a new LLM."""


class QueueFullError(HybridrtError):
    """The limit of running and waiting requests is reached. Send this valid request again later."""


class UnavailableError(EngineError):
    """The engine has failed or is shutting down."""


class ServerError(HybridrtError):
    """An OpenAI-compatible server that this process asked cannot be reached, refuses, or breaks
    off."""


class TransferError(HybridrtError, RuntimeError):
    """State transfer between workers was refused or broken off."""


class HandshakeError(TransferError):
    """Two workers disagree on something that their states depend on; no byte of state has moved.

    Attributes:
        field: name of a field of hybridrt.transfer.handshake.handshake_of.
        ours, theirs: its values here and there.
    """

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} is {ours!r} here and {theirs!r} there; start both workers with the same {field}")
        self.field, self.ours, self.theirs = field, ours, theirs


class PeerGoneError(TransferError):
    """The process at the other end of a channel closed it, died, or was silent for too long."""


class AuthenticationError(PeerGoneError):
    """The process at the other end does not have the same key. The connection is closed."""


class MessageError(PeerGoneError):
    """A message on a channel has the wrong form. The channel is closed."""


if not TYPE_CHECKING:  # a type checker takes every public name
    __all__ = [name for name, value in vars().items() if isinstance(value, type)]


def shown(value: object) -> str:
    """A value's repr for an error's text, cut to 80 characters."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or a failing __repr__
        text = f"a value of type {type(value).__name__}"
    text = " ".join(text.split())  # arrays take several lines
    return text if len(text) <= 80 else f"{text[:77]}..."


def reason(error: BaseException) -> str:
    """Another library's error in one line, cut to 300 characters: it may contain whole values of a
    file."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def is_failure(error: BaseException) -> bool:
    """True for an Exception and for a Rust panic, which pyo3 raises as a BaseException. False for
    KeyboardInterrupt, SystemExit and the cancellation of a task."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def is_text(value: str) -> bool:
    """False for a string with a lone surrogate, which cannot be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
