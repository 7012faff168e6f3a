"""Values that are accepted as a prompt, and their text or token ids."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, SupportsIndex, TypedDict, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch

from hybridrt.base.errors import RequestError, shown
from hybridrt.base.spans import Span

TokenIds = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | torch.Tensor


class TextPrompt(TypedDict):
    """Text under its name."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids under their name."""

    prompt_token_ids: TokenIds


class SpansPrompt(TokensPrompt):
    """Token ids, and the spans of those that take their embeddings from an encoder."""

    spans: Sequence[Span]


class EmbedsPrompt(TypedDict):
    """Embeddings [n, hidden] instead of tokens: an array of numpy or torch. `LLM` makes a SpansPrompt
    of it, where `prompt_embeds` is on."""

    prompt_embeds: npt.NDArray[np.floating[Any]] | torch.Tensor


class ImagesPrompt(TextPrompt):
    """Text with a placeholder for each of its images: see hybridrt/images/source.py for these.
    `LLM` makes a SpansPrompt of it."""

    images: Sequence[Any]


Prompt = str | TokenIds | TextPrompt | TokensPrompt | SpansPrompt | ImagesPrompt | EmbedsPrompt
ACCEPTED = (
    'a prompt is a string, token ids (a list, a tuple, or a 1-D integer array of numpy or torch), {"prompt": text}, '
    '{"prompt": text, "images": [...]} or {"prompt_token_ids": ids}'
)
Ids = Sequence[Any] | npt.NDArray[Any] | torch.Tensor


def text_or_ids(prompt: object) -> str | Ids:
    """The text of a prompt, or its unchecked token ids: a caller can check their number before
    `token_ids`. RequestError if it is no prompt.
    """
    named = _only_value(prompt) if isinstance(prompt, Mapping) else prompt
    if isinstance(named, (np.ndarray, torch.Tensor)):
        accepted = named.ndim == 1 and _is_integer_array(named)
    else:
        accepted = _is_sequence(named)
    if not accepted:
        raise _not_a_prompt(named)
    return cast(str | Ids, named)


def as_prompts(prompts: object) -> list[Any]:
    """One prompt as a list of one; a sequence of prompts as a list. `text_or_ids` checks the
    prompts. RequestError if it is neither.
    """
    if isinstance(prompts, (str, Mapping, np.ndarray, torch.Tensor)):
        return [prompts]
    if not _is_sequence(prompts):
        raise _not_a_prompt(prompts)
    return [prompts] if len(prompts) and _is_token_id(prompts[0]) else list(prompts)


def token_ids(ids: Ids) -> list[int]:
    """Token ids as Python integers. RequestError if one is not an integer."""
    if isinstance(ids, (np.ndarray, torch.Tensor)):
        ids = ids.tolist()
    if set(map(type, ids)) <= {int}:
        return list(ids)
    bad = next(((i, t) for i, t in enumerate(ids) if not _is_token_id(t)), None)
    if bad is not None:
        raise RequestError(
            f"token id {bad[0]} of the prompt is {shown(bad[1])}, a {_kind(bad[1])}; {ACCEPTED}", "prompt"
        )
    return [int(t) for t in ids]


def _is_token_id(value: object) -> bool:
    """True for Python, numpy and torch, but not for a bool."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.ndim == 0 and _is_integer_array(value)
    return is_integer(value)


def is_integer(value: object) -> bool:
    """True for Python and numpy, but not for a bool, or a duration of numpy, which is an integer there."""
    return isinstance(value, Integral) and not isinstance(value, (bool, np.timedelta64))


def _only_value(prompt: Mapping[Any, Any]) -> object:
    if list(prompt) == ["prompt"] and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    named = [name for name in prompt if name != "spans"]
    if named == ["prompt_token_ids"] and not isinstance(prompt["prompt_token_ids"], (str, Mapping)):
        return prompt["prompt_token_ids"]
    if "prompt_embeds" in prompt:
        text = "embeddings as prompts are off: start with prompt_embeds=True, or pass text or token ids"
        raise RequestError(text, "prompt_embeds")
    if "images" in prompt:
        raise RequestError(
            "images go with prompt, a text, and this model reads text alone here: leave images out", "images"
        )
    held = ", ".join(f"{shown(key)}: {_kind(value)}" for key, value in list(prompt.items())[:4])
    raise RequestError(f"the prompt is a dictionary with {{{held}}}; {ACCEPTED}", "prompt")


def _is_integer_array(array: npt.NDArray[Any] | torch.Tensor) -> bool:
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu"  # a duration is a numpy integer, too
    if array.is_meta or array.is_quantized or array.layout is not torch.strided:
        return False
    return not array.dtype.is_floating_point and not array.dtype.is_complex and array.dtype != torch.bool


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview))


def _not_a_prompt(value: object) -> RequestError:
    kind = _kind(value)
    return RequestError(f"the prompt is {'an' if kind[0] in 'aeiou' else 'a'} {kind}; {ACCEPTED}", "prompt")


def _kind(value: object) -> str:
    name = type(value).__name__
    if isinstance(value, torch.Tensor) and (value.is_meta or value.layout is not torch.strided):
        name = f"{'meta' if value.is_meta else str(value.layout).removeprefix('torch.')} {name}"
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"{value.ndim}-D {name} of {value.dtype}"
    return name
