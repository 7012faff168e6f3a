"""Prompts with images, {"prompt": text, "images": [...]}, as token ids and spans."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrt.base.errors import RequestError, shown
from hybridrt.engine.text.tokenizer import Tokenizer, encode_prompt
from hybridrt.images.reader import ImageReader
from hybridrt.images.source import read_image


def has_images(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and "images" in prompt


def read_images(prompts: Any, reader: ImageReader, tokenizer: Tokenizer, max_tokens: int) -> Any:
    """One prompt or several, with images decoded. Those without images stay as they are.

    Raises:
        RequestError: an image cannot be read, or the text has not as many placeholders as there
            are images.
    """
    if has_images(prompts):
        return _read(prompts, reader, tokenizer, max_tokens)
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        return prompts
    # Of token ids only the first is looked at: a prompt may have very many.
    if not prompts or isinstance(prompts[0], int) or not any(map(has_images, prompts)):
        return prompts
    return [_read(each, reader, tokenizer, max_tokens) if has_images(each) else each for each in prompts]


def _read(prompt: Mapping[str, Any], reader: ImageReader, tokenizer: Tokenizer, max_tokens: int) -> dict[str, Any]:
    text, images = prompt.get("prompt"), prompt["images"]
    if set(prompt) != {"prompt", "images"} or not isinstance(text, str):
        held = ", ".join(map(str, prompt))
        raise RequestError(f"the prompt is a dictionary of {held}; images go with prompt, a text, alone", "prompt")
    if isinstance(images, (str, bytes, Mapping)) or not isinstance(images, Sequence):
        raise RequestError(f"images is {shown(images)}; pass a list of images", "images")
    sources = [read_image(image, f"images.{i}") for i, image in enumerate(images)]
    tokens, spans = reader.expand(encode_prompt(tokenizer, text, max_tokens), sources, max_tokens)
    return {"prompt_token_ids": tokens, "spans": spans}
