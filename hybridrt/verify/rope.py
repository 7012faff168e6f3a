"""Checks of rotary embeddings: fields of config.json that disagree, or do not fit the context length."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from hybridrt.base.errors import shown
from hybridrt.base.model_config import AttentionConfig
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Doubt, Subject

_DEPTH = 4  # of objects within config.json
# Of published checkpoints, where they differ from transformers' own values.
_QWEN = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
PUBLISHED = {"falcon_h1": {"rope_theta": 1e11}, "qwen3_next": _QWEN, "qwen3_5": _QWEN, "qwen3_5_moe": _QWEN}
SHORT = 1.0  # turns of the slowest pair within the context: more is unusual


def check_rope(subject: Subject, result: Result) -> None:
    """config.json tells one rotary embedding, which reaches as far as the context."""
    if subject.config is None:
        return result.leave_out("config.json cannot be read")
    _check_places(subject, result)
    ropes = _ropes(subject)
    if not ropes:
        return result.done("no layer has rotary embeddings")
    _check_usual(subject, result)
    for attention in ropes:
        _check_reach(attention, subject.config.max_position_embeddings, result)
        _check_factor(dict(attention.rope or {}), subject.config.max_position_embeddings, result)
    shown_ropes = {shown({k: v for k, v in (a.rope or {}).items() if v is not None}) for a in ropes}
    result.done(f"rotary embeddings: {'; '.join(sorted(shown_ropes))}")


def _ropes(subject: Subject) -> list[AttentionConfig]:
    config = subject.config
    assert config is not None, "it was read"
    found: list[AttentionConfig] = []
    for i in config.full_attention_layer_ids:
        attention = config.attention_of(i)
        if attention.rope is not None and attention not in found:
            found.append(attention)
    return found


def fields_named(
    raw: Mapping[str, Any], name: str, where: str = "config.json", depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """(place, value) of each field of that name, in objects too."""
    if raw.get(name) is not None and not isinstance(raw[name], Mapping):
        yield f"{where}: {name}", raw[name]
    for key, value in raw.items():
        if isinstance(value, Mapping) and depth < _DEPTH and not key.startswith(("vision", "audio", "visual")):
            yield from fields_named(value, name, f"{where}: {key}", depth + 1)


def _check_places(subject: Subject, result: Result) -> None:
    by_kind = subject.text_fields.get("rope_parameters")
    if isinstance(by_kind, Mapping) and any(isinstance(value, Mapping) for value in by_kind.values()):
        return  # each kind of layer has its own
    for name in ("rope_theta", "rope_type", "factor", "original_max_position_embeddings", "partial_rotary_factor"):
        places = [place for place in fields_named(subject.raw, name) if "rope" in place[0] or "rotary" in place[0]]
        if name == "original_max_position_embeddings":
            places = list(fields_named(subject.raw, name))
        values = {value if isinstance(value, str) else float(value) for _, value in places if _is_plain(value)}
        if len(values) > 1:
            listed = ", ".join(f"{place} is {shown(value)}" for place, value in places)
            result.fail(f"{listed}: only one of them can be right, and runtimes differ in which they read")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or _is_number(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_usual(subject: Subject, result: Result) -> None:
    """Compares the rotary embedding with the default of transformers' class, and with published models."""
    kind = str(subject.text_fields.get("model_type"))
    usual = _usual(kind)
    if not usual:
        result.notes.append("transformers has no usual value for this model type")
        return
    rope = dict(_ropes(subject)[0].rope or {})
    own = {
        "rope_theta": rope.get("rope_theta"), "rope_type": rope.get("rope_type", "default"),
        "partial_rotary_factor": _first(subject, "partial_rotary_factor"),
    }  # fmt: skip
    for name, values in usual.items():
        if own[name] is not None and own[name] not in values:
            subject.doubts.append(Doubt(_doubt(kind, name, own[name], values), name, values[0]))
    if subject.quick:
        for doubt in subject.doubts:
            result.warn(doubt.text)


def _usual(kind: str) -> dict[str, list[Any]]:
    """The values that models of a type have, by field; the first one is transformers' own."""
    from transformers import AutoConfig

    try:
        own = AutoConfig.for_model(kind).get_text_config().rope_parameters
    except Exception:  # unknown to transformers, or without such a field
        own = None
    if not isinstance(own, Mapping):
        return {}
    published = PUBLISHED.get(kind.removesuffix("_text"), {})
    found = {"rope_type": [own.get("rope_type", "default")]}
    for name in ("rope_theta", "partial_rotary_factor"):
        values = [each.get(name) for each in (own, published) if each.get(name) is not None]
        found |= {name: list(dict.fromkeys(values))} if values else {}
    return found


def _first(subject: Subject, name: str) -> Any:
    return next((value for _, value in fields_named(subject.text_fields, name)), None)


def _doubt(kind: str, name: str, own: Any, values: list[Any]) -> str:
    first, *others = (f"{value:g}" if _is_number(value) else str(value) for value in values)
    rest = f", and published models have {', '.join(others)}" if others else ""
    shown_own = f"{own:g}" if _is_number(own) else own
    return (
        f"config.json: {name} is {shown_own}; transformers' own value for {kind} is {first}{rest}. Compare it with "
        "the model's page"
    )


def _check_reach(attention: AttentionConfig, context: int, result: Result) -> None:
    rope = dict(attention.rope or {})
    if rope.get("rope_type", "default") != "default" or context >= 1 << 20:
        return
    size = int(attention.rotary_dim * (rope.get("partial_rotary_factor") or 1.0))
    theta = float(rope["rope_theta"])
    slowest = theta ** (-(max(size - 2, 0)) / max(size, 1))
    turns = context * slowest / (2 * math.pi)
    result.figures |= {"rope_theta": theta, "turns_of_slowest_pair": turns}
    if size > 32 and turns > SHORT:
        result.warn(
            f"config.json: with rope_theta {theta:g} the slowest of {size // 2} pairs turns {turns:.1f} times within "
            f"max_position_embeddings {context}; positions far apart then look alike. Is rope_theta too small?"
        )


def _check_factor(rope: Mapping[str, Any], context: int, result: Result) -> None:
    factor, original = (rope.get(name) for name in ("factor", "original_max_position_embeddings"))
    if rope.get("rope_type", "default") == "default" or not (_is_number(factor) and _is_number(original)):
        return
    reach = factor * original
    if context > 1.01 * reach:
        result.fail(
            f"config.json: max_position_embeddings is {context}, but rope_type {rope['rope_type']} reaches "
            f"{reach:g} (factor {factor:g} x original_max_position_embeddings {original:g})"
        )
