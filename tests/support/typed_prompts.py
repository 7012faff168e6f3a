"""What a type checker must take, and what it must refuse; `.ci/run` and tests/test_public_names.py run mypy on it."""

import numpy as np
import torch

from hybridrt import LLM, Delta, FinishReason, Prompt, RequestError, RequestMetrics, RequestOutput, SamplingParams


def prompts_that_run(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    """One prompt of every kind, then several at once."""
    for_one = llm.generate("text") + llm.generate([5, 6]) + llm.generate((5, 6), params)
    for_one += llm.generate({"prompt": "text"}) + llm.generate({"prompt_token_ids": [5, 6]})
    for_one += llm.generate(np.array([5, 6])) + llm.generate(torch.tensor([5, 6])) + llm.generate([np.int64(5), 6])
    mixed = llm.generate(
        ["text", [5, 6], (7,), {"prompt": "text"}, {"prompt_token_ids": (5, 6)}, np.array([5]), torch.tensor([6])],
        params,
    )
    named: list[Prompt] = ["text", [5, 6], {"prompt": "text"}]
    tokens = [[5, 6], [7]]
    return for_one + mixed + llm.generate(named, [params] * 3) + llm.generate(tokens)


def outputs_that_come(llm: LLM) -> tuple[list[FinishReason | None], list[RequestMetrics]]:
    """What the results are."""
    deltas: list[Delta] = list(llm.stream({"prompt_token_ids": np.array([5, 6])}))
    try:
        outputs = llm.generate([[5, 6]], llm.default_sampling_params)
    except RequestError:
        outputs = []
    return [delta.finish_reason for delta in deltas], [output.metrics for output in outputs]


def prompts_that_do_not_run(llm: LLM) -> None:
    """Each is an error at run time too."""
    llm.generate(None)  # type: ignore[call-overload]
    llm.generate(5)  # type: ignore[call-overload]
    llm.generate({"text": "a"})  # type: ignore[call-overload]
    llm.stream(None)  # type: ignore[arg-type]


def models_that_do_not_load() -> None:
    """The options are those of EngineConfig, with their types."""
    LLM("model", device=3)  # type: ignore[arg-type]
    LLM("model", "cpu")  # type: ignore[call-arg]
    LLM("model", no_such_option=1)  # type: ignore[call-arg]
