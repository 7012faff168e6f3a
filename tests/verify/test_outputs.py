"""How answers are compared with transformers': what is compared, and what no comparison can pass."""

import math

import pytest
import torch

from hybridrt.verify.oracle import OracleAnswer
from hybridrt.verify.ours import SMALLEST, GreedyAnswer, compare_with_theirs, within
from hybridrt.verify.results import Result

VOCAB, PROMPT, COUNT, LIMITS = 100_000, [5, 6, 7], 2, (2e-3, 1e-3)


def theirs(spread: float) -> OracleAnswer:
    scores = (torch.randn(len(PROMPT), VOCAB, generator=torch.manual_seed(0)) * spread).log_softmax(-1)
    steps = [scores[-1], scores[0]]
    return OracleAnswer(scores, [int(each.argmax()) for each in steps], steps)


def ours(told: OracleAnswer, off: float = 0.0) -> GreedyAnswer:
    likely = [{int(t): float(each[t]) + off for t in each.topk(8).indices} for each in told.steps]
    prompt = [None, *({token: float(told.scores[i, token]) + off} for i, token in enumerate(PROMPT[1:]))]
    return GreedyAnswer(told.tokens, likely, prompt, 0)


@pytest.mark.parametrize("spread", [0.01, 10.0])
def test_unlikely_tokens_are_compared_if_all_are_unlikely(spread: float) -> None:
    """Random weights make every token of a large vocabulary unlikely."""
    told = theirs(spread)
    for off, fine in ((1e-4, True), (0.1, False)):
        result = Result("transformers")
        largest = compare_with_theirs("prompt 0", PROMPT, ours(told, off), told, LIMITS, result)
        assert largest == pytest.approx(off, rel=0.05) and (result.status != "failed") == fine
    assert within(torch.bfloat16, [theirs(spread)], [theirs(2 * spread)])[0] > SMALLEST


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_nan_is_no_equal_answer(whose: str) -> None:
    told, result = theirs(0.01), Result("transformers")
    found = ours(told, math.nan if whose == "ours" else 0.0)
    if whose == "theirs":
        told.steps[1].fill_(math.nan)
    assert compare_with_theirs("prompt 0", PROMPT, found, told, LIMITS, result) == math.inf
    assert result.status == "failed"


def test_nothing_compared_is_a_failure() -> None:
    told, result = theirs(0.01), Result("transformers")
    compare_with_theirs("prompt 0", PROMPT[:1], GreedyAnswer([], [], [None], 0), told, LIMITS, result)
    assert result.findings == ["failed: prompt 0: no log-probability could be compared with transformers'"]
