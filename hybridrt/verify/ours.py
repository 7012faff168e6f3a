"""Answers of hybridrt, and how they are compared with transformers' and with each other."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM
from hybridrt.verify.oracle import OracleAnswer
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject

LONGEST = 1024  # tokens of a request, and of a step
TOP = 8  # likely tokens that are compared
LEAST = -8.0  # log-probability of those, at least, less the likeliest token's: random weights make all tokens unlikely
# By dtype, without a float32 run: the largest difference of log-probabilities, and that of a tie.
TOLERANCE = {torch.float32: (2e-3, 1e-3), torch.float16: (0.1, 0.1), torch.bfloat16: (0.5, 0.5)}
ROUNDING = 3.0  # times transformers' own error in the same dtype
SMALLEST = 0.05  # limit: some models round little by chance
DRAFTS = 3
DRAFT_MODELS = {"draft": "embedded_draft"}  # by method


@dataclass(frozen=True)
class GreedyAnswer:
    """A greedy answer.

    Attributes:
        likely: log-probabilities of likely tokens at each of `tokens`.
        prompt: log-probabilities of the prompt's own tokens.
    """

    tokens: list[int]
    likely: list[dict[int, float]]
    prompt: list[dict[int, float] | None]
    cached_tokens: int


@contextmanager
def engine(subject: Subject, path: Path | None = None, **options: Any) -> Iterator[LLM]:
    """An LLM with small pools, and without graphs of prompts if nothing else is said: their capture takes
    seconds, and runs the kernels that steps without a graph run. `path`: instead of the checkpoint's."""
    subject.close()  # a kept engine has most of the device's memory
    with _started(subject, path, options) as llm:
        yield llm


def _started(subject: Subject, path: Path | None, options: Mapping[str, Any]) -> LLM:
    given = engine_options(subject, options)
    subject.early.wait(EngineConfig(str(path or subject.path), **given))
    return LLM(str(path or subject.path), **given)


def engine_options(subject: Subject, options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of EngineConfig: `options`, and those that all engines of a run have."""
    assert subject.config is not None, "it was read"
    limit = min(LONGEST, subject.config.max_position_embeddings)
    usual = {
        "device": subject.device, "dtype": subject.dtype, "max_model_len": limit, "max_running_requests": 8,
        "chunked_prefill_size": LONGEST, "cuda_graph_prompts": False,
    }  # fmt: skip
    return usual | dict(options)


def kept_options(dtype: str) -> dict[str, Any]:
    """Options of the engine that a quick run keeps."""
    return {"dtype": dtype, "cuda_graph_prompts": True}


@contextmanager
def plain_engine(subject: Subject, dtype: str, **options: Any) -> Iterator[LLM]:
    """An engine without chunks and drafts. A quick run keeps it for its next check, with a prefix cache and graphs
    whatever the check asks for: a start takes seconds, and prompts that must be computed have a salt of their own."""
    if not subject.quick:
        with engine(subject, dtype=dtype, **options) as llm:
            yield llm
        return
    wanted = kept_options(dtype)
    if subject.kept is None or subject.kept[0] != wanted:
        subject.close()
        subject.kept = wanted, _started(subject, None, wanted)
    try:
        yield subject.kept[1]
    except BaseException:
        subject.close()  # it may have failed
        raise


def answers(
    llm: LLM, prompts: Sequence[Sequence[int]], count: int, *, together: bool = False, salt: str | None = None,
    scored: bool = False,
) -> list[GreedyAnswer]:  # fmt: skip
    """Greedy answers, one request after the other or all at once. `scored`: with those of prompts."""
    params = SamplingParams(
        max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=TOP, prompt_logprobs=0 if scored else None,
        cache_salt=salt,
    )  # fmt: skip
    given = [list(prompt) for prompt in prompts]
    outputs = llm.generate(given, params) if together else [llm.generate([p], params)[0] for p in given]
    return [
        GreedyAnswer(list(o.token_ids), list(o.logprobs or []), list(o.prompt_logprobs or []), o.metrics.cached_tokens)
        for o in outputs
    ]


def speculative(method: str) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_draft_tokens=DRAFTS, draft_model=DRAFT_MODELS.get(method))


def within(
    dtype: torch.dtype, told: Sequence[OracleAnswer], exact: Sequence[OracleAnswer] | None
) -> tuple[float, float]:
    """Allowed differences of a run in `dtype`. If transformers ran in float32 too, its own rounding
    decides.
    """
    if dtype == torch.float32 or exact is None:
        return TOLERANCE[dtype]
    own = max(float(_at_likely(a.scores, b.scores).max()) for a, b in zip(told, exact))
    limit = max(ROUNDING * own, SMALLEST)
    return limit, limit


def _least(exact: torch.Tensor) -> torch.Tensor:
    """Log-probabilities above which tokens are compared: [..., vocab] to [...]."""
    return exact.max(-1).values + LEAST


def _at_likely(scores: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    likely = exact > _least(exact)[:, None]
    return (scores - exact).abs().where(likely, 0.0)


def compare_with_theirs(
    what: str,
    prompt: Sequence[int],
    ours: GreedyAnswer,
    theirs: OracleAnswer,
    limits: tuple[float, float],
    result: Result,
) -> float:
    """Compares log-probabilities up to the first token that differs, and greedy tokens but for ties.
    Returns the largest difference."""
    if not all(scores.isfinite().all() for scores in (theirs.scores, *theirs.steps)):
        result.fail(f"{what}: transformers' logits are not finite")
        return math.inf
    least = _least(theirs.scores).tolist()
    found = [
        _difference(scores[token], theirs.scores[i, token])
        for i, (scores, token) in enumerate(zip(ours.prompt[1:], prompt[1:]))
        if scores and float(theirs.scores[i, token]) > least[i]
    ]
    if max(found, default=0.0) > limits[0]:
        where = found.index(max(found)) + 1
        result.fail(f"{what}: log-probabilities differ from transformers' by {max(found):.3g}, first at token {where}")
    for step, (a, b) in enumerate(zip(ours.tokens, theirs.tokens)):
        exact = theirs.steps[step]
        threshold = float(_least(exact))
        found += [_difference(score, exact[t]) for t, score in ours.likely[step].items() if float(exact[t]) > threshold]
        if a != b:
            margin = float(exact[b] - exact[a])
            if margin > limits[1]:
                result.fail(f"{what}: greedy token {step} is {a}; transformers' is {b}, likelier by {margin:.3g}")
            break
    if max(found, default=0.0) > limits[0]:
        result.fail(f"{what}: log-probabilities of the answer differ from transformers' by {max(found):.3g}")
    if not found:
        result.fail(f"{what}: no log-probability could be compared with transformers'")
    return max(found, default=math.inf)


def _difference(ours: float, theirs: torch.Tensor) -> float:
    """Infinite for NaN, which is larger than no limit."""
    found = abs(ours - float(theirs))
    return math.inf if math.isnan(found) else found


def compare_runs(
    what: str, first: GreedyAnswer, other: GreedyAnswer, limits: tuple[float, float], result: Result
) -> bool:
    """Whether two runs of hybridrt gave the same tokens. Fails if they differ where there was no
    tie."""
    for step, (a, b) in enumerate(zip(first.tokens, other.tokens)):
        if a != b:
            margin = first.likely[step][a] - first.likely[step].get(b, float("-inf"))
            if margin > limits[1]:
                result.fail(f"{what}: token {step} is {b}; it was {a}, likelier by {margin:.3g}")
            return False
    return len(first.tokens) == len(other.tokens)
