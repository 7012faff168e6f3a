"""Launched steps: their results are copied to pinned memory behind the step, and read when `result` is called."""

from collections.abc import Sequence

import torch

from hybridrt.base.device import PAST, record_event
from hybridrt.kernels.sampling.sampling import token_logprobs
from hybridrt.runtime.step.plan import StepHandle, StepResult, TokenLogprobs


class LaunchedStep:
    """A launched step. Its results are copied to pinned memory behind it, so that reading them waits for this step
    alone and not for the one launched after it.

    Args:
        tokens: [n, T], None if nothing was sampled.
        accepted: [n], how many of a row's tokens count; None for all.
        logits: [n * T, vocab] that `tokens` were drawn from.
        wanted: how many alternatives to its token each row needs log-probabilities of, None for no log-probabilities;
            empty if no row needs any.
        path: [n, T], the nodes of a draft tree whose draws `tokens` are; None where they come in order.
    """

    def __init__(
        self,
        tokens: torch.Tensor | None,
        accepted: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        wanted: Sequence[int | None] = (),
        path: torch.Tensor | None = None,
    ) -> None:
        logprobs: tuple[torch.Tensor, ...] = ()
        if wanted and tokens is not None and logits is not None:
            if path is not None:
                logits = logits.view(*path.shape, -1).take_along_dim(path.unsqueeze(-1), 1).flatten(0, 1)
            logprobs = token_logprobs(logits, tokens.flatten(), max(n for n in wanted if n is not None))
        self._tokens = None if tokens is None else to_host(tokens)
        self._accepted = None if accepted is None else to_host(accepted)
        self._logprobs = tuple(to_host(t) for t in logprobs)
        self._wanted = wanted
        self._event = PAST if tokens is None else record_event(tokens.device)

    def ready(self) -> bool:
        return self._event.query()

    def result(self) -> StepResult:
        self._event.synchronize()
        rows = self._tokens.tolist() if self._tokens is not None else []
        counts = self._accepted.tolist() if self._accepted is not None else None
        tokens = rows if counts is None else [row[:count] for row, count in zip(rows, counts)]
        if not self._logprobs:
            return StepResult(tokens, [None] * len(rows))
        own, top_ids, top = (t.tolist() for t in self._logprobs)
        width = len(rows[0]) if rows else 0

        def entries(row: int, n: int) -> list[TokenLogprobs]:
            lines = enumerate(tokens[row], row * width)
            return [{token: own[i], **dict(zip(top_ids[i][:n], top[i][:n]))} for i, token in lines]

        return StepResult(tokens, [None if n is None else entries(i, n) for i, n in enumerate(self._wanted)])


class JoinedSteps:
    """Two launches of one plan: its decode rows, then its extend rows."""

    def __init__(self, first: StepHandle, second: StepHandle) -> None:
        self._parts = (first, second)

    def ready(self) -> bool:
        return all(part.ready() for part in self._parts)

    def result(self) -> StepResult:
        first, second = (part.result() for part in self._parts)
        scores = first.prompt_logprobs | second.prompt_logprobs
        return StepResult(first.tokens + second.tokens, first.logprobs + second.logprobs, scores)


def to_host(t: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, which is there once the stream has come so far; on a CPU the tensor itself."""
    if not t.is_cuda:
        return t
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
