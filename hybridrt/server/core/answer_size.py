"""Limits the size of an answer before its request starts: it may be a thousand times its request.

Log-probabilities are counted in entries (a token's own, and each alternative): 8 bytes while a
request runs, up to a hundred as JSON text.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from hybridrt.base.errors import QueueFullError
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.request.intake import PreparedPrompt
from hybridrt.server.wire.errors import APIError

MAX_PROMPT_ENTRIES = 2**18  # entries of prompts in one answer: 131,072 tokens with one alternative
MAX_RUNNING_ENTRIES = 2**20  # entries of all running requests
MAX_OUTPUT_ENTRIES = 2**22  # entries of outputs in one answer: 131,072 tokens with 31 alternatives
MAX_REPEATED = 2**24  # characters or token ids, repeated for each sample


def prompt_entries(prompts: Iterable[PreparedPrompt], forms: int) -> int:
    """Entries of prompts in an answer.

    Args:
        forms: how many fields of the answer have them, all samples together.

    Raises:
        APIError: more than MAX_PROMPT_ENTRIES.
    """
    scored = [p for p in prompts if p.params.prompt_logprobs is not None]
    found = forms * sum(len(p.tokens) * (1 + (p.params.prompt_logprobs or 0)) for p in scored)
    if found > MAX_PROMPT_ENTRIES:
        most = max(p.params.prompt_logprobs or 0 for p in scored)
        raise APIError(
            400,
            f"the log-probabilities of the prompts would have {found} entries (prompt tokens * (prompt_logprobs + 1) * "
            f"samples, here with up to {most} alternatives); an answer has at most {MAX_PROMPT_ENTRIES}: ask for fewer "
            "alternatives, or send fewer prompts at a time",
            "prompt_logprobs",
        )
    return found


def check_output(prompts: Iterable[PreparedPrompt]) -> None:
    """Raises APIError for outputs whose log-probabilities may become more than MAX_OUTPUT_ENTRIES."""
    found = sum(
        (p.max_len - len(p.tokens)) * (1 + p.params.alternatives) * p.params.n
        for p in prompts
        if p.params.alternatives is not None
    )
    if found > MAX_OUTPUT_ENTRIES:
        raise APIError(
            400,
            f"the log-probabilities of the output may become {found} entries (output tokens * (logprobs + 1) * "
            f"samples); an answer has at most {MAX_OUTPUT_ENTRIES}: lower max_tokens, logprobs or n",
            "logprobs",
        )


def check_repeated(lengths: Iterable[int], n: int, what: str, field: str) -> None:
    """APIError if an answer would repeat too much of its prompts, `lengths` long, for each of `n`
    samples."""
    found = n * sum(lengths)
    if n > 1 and found > MAX_REPEATED:
        raise APIError(
            400,
            f"the answer would repeat {found} {what} of the prompts, once for each sample; at most {MAX_REPEATED}: "
            f"leave {field} out, or lower n",
            field,
        )


class EntryRoom:
    """Counts the entries of prompts that running requests hold, until their streams are dropped."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[DeltaStream, int] = WeakKeyDictionary()

    def check_room(self, entries: int) -> None:
        """Raises QueueFullError if there is no room for so many more."""
        held = sum(list(self._held.values())) if entries else 0
        if held + entries > MAX_RUNNING_ENTRIES:
            raise QueueFullError(
                f"running requests have asked for {held} log-probabilities of prompts, this one asks for {entries}, "
                f"and {MAX_RUNNING_ENTRIES} may be there at a time: try again later"
            )

    def hold(self, deltas: DeltaStream, entries: int) -> None:
        if entries:
            self._held[deltas] = entries
