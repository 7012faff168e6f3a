"""Prompts with images, {"prompt": text, "images": [...]}, and embeddings, as token ids and spans."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from hybridrt.base.errors import RequestError, shown
from hybridrt.base.spans import EncoderInput, Span
from hybridrt.engine.request.spans import EMBEDS_TOKEN
from hybridrt.engine.text.tokenizer import Tokenizer, encode_prompt
from hybridrt.images.reader import ImageReader
from hybridrt.images.source import read_image


def has_images(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and "images" in prompt


def takes_time(prompt: object) -> bool:
    """Whether a prompt has images to decode, or embeddings to hash."""
    return has_images(prompt) or has_embeddings(prompt)


def with_embeddings(prompts: Any) -> Any:
    """One prompt or several, {"prompt_embeds": [n, hidden]} as token ids and a span. Others stay as
    they are. RequestError: it is no such array."""
    if has_embeddings(prompts):
        return _embedded(prompts)
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        return prompts
    if not prompts or isinstance(prompts[0], int) or not any(map(has_embeddings, prompts)):
        return prompts
    return [_embedded(each) if has_embeddings(each) else each for each in prompts]


def has_embeddings(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and "prompt_embeds" in prompt


def _embedded(prompt: Mapping[str, Any]) -> dict[str, Any]:
    given = prompt["prompt_embeds"]
    if set(prompt) != {"prompt_embeds"}:
        raise RequestError(f"prompt_embeds goes alone; the prompt has {', '.join(map(str, prompt))}", "prompt_embeds")
    # Others would lose something, or have no array.
    if isinstance(given, torch.Tensor) and given.is_floating_point() and _has_numbers(given):
        given = given.detach().float().cpu().numpy()
    if not isinstance(given, np.ndarray) or given.ndim != 2 or given.dtype.kind != "f" or not len(given):
        raise RequestError(f"prompt_embeds is {shown(given)}; pass an array of floats [n, hidden]", "prompt_embeds")
    values, length = np.array(given, np.float32), len(given)  # a copy: the caller may change its own
    digest = sha256(b"hybridrt embeddings 1" + repr(values.shape).encode() + values.tobytes()).digest()
    span = Span(0, length, digest, (1, length), EncoderInput(values, (1, length), embeds=True))
    return {"prompt_token_ids": [EMBEDS_TOKEN] * length, "spans": [span]}


def _has_numbers(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def read_images(prompts: Any, reader: ImageReader, tokenizer: Tokenizer, max_tokens: int, client: str = "") -> Any:
    """One prompt or several, with images decoded. Those without images stay as they are.

    Args:
        client: for whom. Clients share the processes that decode.

    Raises:
        RequestError: an image cannot be read, or the text has not as many placeholders as there
            are images.
    """
    if has_images(prompts):
        return _read(prompts, reader, tokenizer, max_tokens, client)
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        return prompts
    # Of token ids only the first is looked at: a prompt may have very many.
    if not prompts or isinstance(prompts[0], int) or not any(map(has_images, prompts)):
        return prompts
    return [_read(each, reader, tokenizer, max_tokens, client) if has_images(each) else each for each in prompts]


def _read(
    prompt: Mapping[str, Any], reader: ImageReader, tokenizer: Tokenizer, max_tokens: int, client: str
) -> dict[str, Any]:
    text, images = prompt.get("prompt"), prompt["images"]
    if set(prompt) != {"prompt", "images"} or not isinstance(text, str):
        held = ", ".join(map(str, prompt))
        raise RequestError(f"the prompt is a dictionary of {held}; images go with prompt, a text, alone", "prompt")
    if isinstance(images, (str, bytes, Mapping)) or not isinstance(images, Sequence):
        raise RequestError(f"images is {shown(images)}; pass a list of images", "images")
    sources = [read_image(image, f"images.{i}") for i, image in enumerate(images)]
    tokens, spans = reader.expand(encode_prompt(tokenizer, text, max_tokens), sources, max_tokens, client)
    return {"prompt_token_ids": tokens, "spans": spans}
