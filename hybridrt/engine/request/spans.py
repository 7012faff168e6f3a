"""Spans of a request: their checks, and their tokens' ids in the prefix cache."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrt.base.draft_methods import load_method
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import RequestError, shown
from hybridrt.base.model_config import ModelConfig
from hybridrt.base.spans import EncoderInput, Span
from hybridrt.base.vision import patch_form

KEY_BIT = np.int64(1 << 62)  # ids of the prefix cache from here on name tokens of spans
DIGEST_BYTES = 32
EMBEDS_TOKEN = 0  # the id of tokens that are embeddings


@dataclass(frozen=True)
class SpanLimits:
    """The spans that an engine takes.

    Attributes:
        token: placeholder of an image's tokens; None: there is no tower.
        patch_size, patch_dtype: numbers of a patch, and their dtype.
        merge: a token has merge * merge patches.
        most_tokens: longest span: the device keeps so many embeddings.
        hidden: numbers of an embedding.
        embeds: spans may be embeddings themselves.
        refusal: why no span is taken; "" if some are.
    """

    token: int | None
    patch_size: int
    patch_dtype: str
    merge: int
    most_tokens: int
    hidden: int
    embeds: bool = False
    refusal: str = ""


def span_limits(config: EngineConfig, model: ModelConfig) -> SpanLimits | None:
    """None: no encoder is loaded, and prompts are no embeddings."""
    spec, refusal = model.vision, ""
    if spec is None and not config.prompt_embeds:
        return None
    if config.speculative is not None and load_method(config.speculative.method).takes_model:
        refusal = (
            f'speculative method "{config.speculative.method}" drafts with a smaller model, which sees no images: '
            'leave images out, or use method "ngram" or "mtp"'
        )
    numbers, dtype = patch_form(spec)
    token, merge = (None, 1) if spec is None else (spec.token, spec.merge)
    most, hidden = config.encoder_cache_tokens, model.hidden_size
    return SpanLimits(token, numbers, dtype, merge, most, hidden, config.prompt_embeds, refusal)


def check_spans(spans: object, tokens: Sequence[int], limits: SpanLimits | None) -> tuple[Span, ...]:
    """The spans of a prompt. RequestError unless they are in order, cover the prompt's placeholders
    and nothing else, and have inputs of the model's form.
    """
    if not isinstance(spans, Sequence) or not all(isinstance(span, Span) for span in spans):
        raise _refused(f"spans is {shown(spans)}; pass a list of hybridrt.base.spans.Span")
    if (limits is None or not limits.embeds) and any(_is_embeds(span) for span in spans):
        raise _refused("embeddings as prompts are off: start with prompt_embeds=True, or pass text or token ids")
    if limits is None:
        raise _refused("this model reads text alone: it has no encoder for images; leave images out")
    if limits.refusal:
        raise _refused(limits.refusal)
    end = 0
    for i, span in enumerate(spans):
        _check_span(i, span, limits)
        if not end <= span.start <= span.start + span.length <= len(tokens):
            raise _refused(
                f"span {i} has tokens {span.start} to {span.start + span.length - 1}; it must begin at {end} or later "
                f"and end within the prompt of {len(tokens)} tokens"
            )
        end = span.start + span.length
    if limits.token is not None:
        _check_cover(spans, tokens, limits.token)
    return tuple(spans)


def _check_span(i: int, span: Span, limits: SpanLimits) -> None:
    numbers = (span.start, span.length, *_pair(span.grid))
    if not all(type(n) is int and 0 <= n < 2**31 for n in numbers) or len(numbers) != 4 or not span.length:
        raise _refused(f"span {i} has start, length and grid {shown(numbers)}; pass integers from 0 on, and a length")
    if not isinstance(span.digest, bytes) or len(span.digest) != DIGEST_BYTES:
        raise _refused(f"span {i} has the digest {shown(span.digest)}; pass {DIGEST_BYTES} bytes")
    if span.length > limits.most_tokens:
        raise _refused(
            f"an image has {span.length} tokens; the device keeps the embeddings of {limits.most_tokens}: make it "
            "smaller, or raise encoder_cache_tokens"
        )
    if _is_embeds(span):
        return _check_embeds(i, span, limits)
    if limits.token is None:
        raise _refused("this model reads text alone: it has no encoder for images; leave images out")
    rows, columns = span.grid
    if rows * columns != span.length:
        raise _refused(f"span {i} has {span.length} tokens and the grid {rows} x {columns}; pass its product")
    given, wanted = span.input, (rows * limits.merge, columns * limits.merge)
    if not isinstance(given, EncoderInput) or tuple(_pair(given.grid)) != wanted:
        raise _refused(f"span {i} of {rows} x {columns} tokens has no input of {wanted[0]} x {wanted[1]} patches")
    shape, held = (wanted[0] * wanted[1], limits.patch_size), given.patches
    if not isinstance(held, np.ndarray) or held.dtype != limits.patch_dtype or held.shape != shape:
        raise _refused(f"the patches of span {i} are no {limits.patch_dtype} array of {shape[0]} x {shape[1]}")


def _is_embeds(span: Span) -> bool:
    return isinstance(span.input, EncoderInput) and span.input.embeds


def _check_embeds(i: int, span: Span, limits: SpanLimits) -> None:
    given, shape = span.input.patches, (span.length, limits.hidden)
    if tuple(_pair(span.grid)) != (1, span.length) or tuple(_pair(span.input.grid)) != (1, span.length):
        raise _refused(f"span {i} of {span.length} embeddings has the grid {shown(span.grid)}; pass (1, {span.length})")
    if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.shape != shape:
        raise _refused(f"the embeddings of span {i} are no float32 array of {shape[0]} x {shape[1]}")
    if not np.isfinite(given).all():
        raise _refused(f"an embedding of span {i} is not finite")


def _pair(value: object) -> Sequence[Any]:
    return value if isinstance(value, tuple) and len(value) == 2 else ()


def _check_cover(spans: Sequence[Span], tokens: Sequence[int], token: int) -> None:
    covered = np.zeros(len(tokens), bool)
    for span in spans:
        covered[span.start : span.start + span.length] = not span.input.embeds
    wrong = np.flatnonzero(covered != (np.asarray(tokens) == token))
    if len(wrong):
        at = int(wrong[0])
        what = "a span, but it is not" if covered[at] else "no span, but it is"
        raise _refused(f"token {at} of the prompt is in {what} the placeholder {token} of images")


def _refused(text: str) -> RequestError:
    return RequestError(text, "spans")


def cache_ids(tokens: Sequence[int] | np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Ids of a prompt [n] for the prefix cache, a copy: int32 token ids; with spans int64, in which each
    token of a span has 62 bits of a hash of the span's digest and its place there. So another image
    is another text.
    """
    ids = np.array(tokens, np.int32)
    if not spans:
        return ids
    ids = ids.astype(np.int64)
    for span in spans:
        named = hashlib.shake_128(span.digest + np.array(span.grid, "<u4").tobytes()).digest(8 * span.length)
        ids[span.start : span.start + span.length] = np.frombuffer(named, "<i8") & (KEY_BIT - 1) | KEY_BIT
    return ids


def without_keys(ids: np.ndarray) -> np.ndarray:
    """Ids of the prefix cache without those of spans: what a tokenizer can read."""
    return ids[ids < KEY_BIT]


def with_placeholders(ids: np.ndarray, model: ModelConfig) -> list[int]:
    """Ids of the prefix cache as token ids."""
    return np.where(ids < KEY_BIT, ids, EMBEDS_TOKEN if model.vision is None else model.vision.token).tolist()
