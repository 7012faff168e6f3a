"""Checks of rotary embeddings: fields of config.json that disagree, or do not fit the context length."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from hybridrt.base.errors import shown
from hybridrt.base.model_config import AttentionConfig
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject

_DEPTH = 4  # of objects within config.json
SHORT = 1.0  # turns of the slowest pair within the context: more is unusual


def check_rope(subject: Subject, result: Result) -> None:
    """config.json tells one rotary embedding, which reaches as far as the context."""
    if subject.config is None:
        return result.leave_out("config.json cannot be read")
    _check_places(subject, result)
    ropes = _ropes(subject)
    if not ropes:
        return result.done("no layer has rotary embeddings")
    _check_default(subject, result)
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


def _check_default(subject: Subject, result: Result) -> None:
    """Compares rope_theta with the default of transformers' class."""
    from transformers import AutoConfig

    kind = subject.text_fields.get("model_type")
    try:
        usual = AutoConfig.for_model(kind).get_text_config().rope_parameters
    except Exception:  # unknown to transformers, or without such a field
        result.notes.append("transformers has no usual value for this model type")
        return
    theta = usual.get("rope_theta") if isinstance(usual, Mapping) else None
    for attention in _ropes(subject):
        own = (attention.rope or {}).get("rope_theta")
        if theta is not None and own is not None and float(own) != float(theta):
            subject.doubts.append(
                f"config.json: rope_theta is {own:g}; transformers' own value for {kind} is {theta:g}. Compare it with "
                "the model's page"
            )
    if subject.quick:
        for doubt in subject.doubts:
            result.warn(doubt)


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
