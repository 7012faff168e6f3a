"""Log-probabilities of prompts: computed behind a step's chunks, a few hundred lines of logits at a time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hybridrt.base.sampling_params import MAX_LOGPROBS
from hybridrt.kernels.sampling.sampling import token_logprobs
from hybridrt.runtime.step.launched_step import to_host
from hybridrt.runtime.step.pack import ScoredTokens
from hybridrt.runtime.step.plan import Admission, ExtendRow, StepHandle, StepResult
from hybridrt.runtime.step.token_scores import TokenScores

# Prompt tokens whose logits are there at a time: enough that reading the head's weights does not decide how long they
# take, and few enough that their logits are small beside the activations of a step.
LINES = 128


def prompt_logprob_bytes(vocab_size: int, itemsize: int) -> int:
    """Bytes on the device at a time: logits, those of all ranks, two copies in float32, and the results."""
    return LINES * (vocab_size * (2 * itemsize + 8) + (MAX_LOGPROBS + 1) * 12)


class Wanted(NamedTuple):
    """What a chunk gives: the log-probabilities of these prompt tokens, with `top` alternatives each."""

    row: int
    tokens: Sequence[int]
    top: int


class PromptRequirements:
    """Which request rows need log-probabilities of their prompts, on the host."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, int]] = {}  # alternatives, and tokens of the prompt

    def admit(self, admissions: Sequence[Admission]) -> None:
        for a in admissions:
            self._rows.pop(a.row, None)
            if a.params.prompt_logprobs is not None:
                self._rows[a.row] = a.params.prompt_logprobs, a.prompt_len

    def of(self, extend: Sequence[ExtendRow], decoded: int) -> tuple[list[Wanted], ScoredTokens[np.ndarray] | None]:
        """What a step's chunks give, after `decoded` tokens of decode rows, and what the step packs for it: the places
        in the batch, and the tokens that follow there. None where they give nothing."""
        wanted, places = list[Wanted](), list[np.ndarray]()
        for chunk in extend if self._rows else ():
            top, prompt_len = self._rows.get(chunk.row, (0, 0))
            count = min(len(chunk.tokens), prompt_len - 1 - chunk.computed)
            if count > 0:
                wanted.append(Wanted(chunk.row, [*chunk.tokens[1:], chunk.following][:count], top))
                places.append(np.arange(decoded, decoded + count, dtype=np.int32))
            decoded += len(chunk.tokens)
        if not wanted:
            return [], None
        tokens = np.array([token for each in wanted for token in each.tokens], np.int32)
        return wanted, ScoredTokens(np.concatenate(places), tokens)


class ScoredStep:
    """A launched step, and the log-probabilities of prompts behind it.

    Args:
        step: what the step gives besides.
        wanted: whose log-probabilities they are, in order.
        hidden: [T, hidden] of the step; places, tokens: [N] int32, as `PromptRequirements.of` packs them.
        logits: from hidden states to logits.
    """

    def __init__(
        self,
        step: StepHandle,
        wanted: Sequence[Wanted],
        hidden: torch.Tensor,
        places: torch.Tensor,
        tokens: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._step, self._wanted = step, wanted
        top = max(w.top for w in wanted)
        # Each part leaves the device before the next is computed: the memory plan counts the results of one.
        self._found = [
            tuple(map(to_host, token_logprobs(logits(hidden.index_select(0, at)), following.long(), top)))
            for at, following in zip(places.split(LINES), tokens.split(LINES))
        ]
        self._event: torch.cuda.Event | None = None
        if hidden.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        return self._step.ready() and (self._event is None or self._event.query())

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        result, end = self._step.result(), 0
        own, ids, best = (torch.cat(parts).numpy() for parts in zip(*self._found))
        for row, tokens, top in self._wanted:
            at, end = slice(end, end + len(tokens)), end + len(tokens)
            # Copies: a request keeps these for longer than the step's pinned memory should be taken.
            result.prompt_logprobs[row] = TokenScores(
                np.array(tokens, np.int32), own[at].copy(), ids[at, :top].astype(np.int32), best[at, :top].copy()
            )
        return result
