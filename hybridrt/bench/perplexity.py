"""The perplexity of a model on a text."""

from collections.abc import Sequence
from math import exp

from hybridrt.base.errors import RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM

WINDOW, BATCH = 1024, 64  # tokens of a window; windows at a time


def perplexity(llm: LLM, tokens: Sequence[int], window: int = WINDOW) -> float:
    """exp of the mean negative log-likelihood of all tokens but the first of each window.

    Raises:
        RequestError: there are less than two tokens.
    """
    size = min(window, llm.plan.max_model_len - 1)
    windows = [list(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    windows = [each for each in windows if len(each) > 1]
    if not windows:
        raise RequestError(f"the text has {len(tokens)} tokens; perplexity needs two or more")
    total, count = 0.0, 0
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for at in range(0, len(windows), BATCH):
        batch = windows[at : at + BATCH]
        for prompt, output in zip(batch, llm.generate(batch, params), strict=True):
            scores = output.prompt_logprobs or []
            total -= sum(entry[token] for token, entry in zip(prompt, scores, strict=True) if entry is not None)
            count += len(prompt) - 1
    return exp(total / count)
