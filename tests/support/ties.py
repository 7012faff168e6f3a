"""Greedy tokens against an oracle's logits: equal, except where the oracle itself can hardly choose."""

from collections.abc import Sequence

from torch import Tensor

MARGIN = 1e-4
COMPARED = [0]
FOUND: list[str] = []


def check_greedy(tokens: Sequence[int], oracle: Tensor, what: str) -> None:
    """Each token is the most likely one in `oracle` [n, vocab], or less than MARGIN of the logits' spread below it.
    The end of a test run prints how often the latter was so."""
    COMPARED[0] += len(tokens)
    for i, (token, logits) in enumerate(zip(tokens, oracle, strict=True)):
        best = int(logits.argmax())
        if token != best:
            margin = ((logits[best] - logits[token]) / (logits.max() - logits.min())).item()
            assert margin < MARGIN, f"{what}: token {i} is {token}, not {best}, {margin:.1e} of the spread behind it"
            FOUND.append(f"{what}, token {i}: {margin:.1e}")
