"""From what `LLM.generate` takes to prompts that an engine has checked: one or several, with parameters for each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridrt.engine.limits import Intake, PreparedPrompt
from hybridrt.engine.prompts import is_token_id, not_a_prompt
from hybridrt.errors import RequestError
from hybridrt.sampling_params import SamplingParams


def prepare_prompts(
    intake: Intake, prompts: object, sampling_params: SamplingParams | Sequence[SamplingParams]
) -> list[PreparedPrompt]:
    """Checks one prompt or several. A prompt that is prepared already keeps its own parameters.

    Raises:
        RequestError, MemoryBudgetError: as `Intake.prepare`; also if there are not as many parameters as prompts.
    """
    given = as_prompts(prompts)
    if isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params] * len(given)
    if len(sampling_params) != len(given):
        raise RequestError(
            f"{len(given)} prompts and {len(sampling_params)} SamplingParams; pass one for all, or one each"
        )
    return [
        prompt if isinstance(prompt, PreparedPrompt) else intake.prepare(prompt, params)
        for prompt, params in zip(given, sampling_params, strict=True)
    ]


def as_prompts(prompts: object) -> list[Any]:
    """One prompt as a list of one; a list, tuple or other sequence of prompts as a list. `Intake.prepare` checks the
    prompts themselves.

    Raises:
        RequestError: neither a prompt nor a sequence of prompts.
    """
    if isinstance(prompts, (str, Mapping, np.ndarray, torch.Tensor)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, memoryview)) or not isinstance(prompts, Sequence):
        raise not_a_prompt(prompts)
    return [prompts] if len(prompts) and is_token_id(prompts[0]) else list(prompts)
