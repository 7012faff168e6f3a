"""Reasoning efforts that callers may ask for, and those that a chat template has."""

import re
from collections.abc import Callable, Mapping

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_LEVELS = EFFORTS[1:]
_NONSENSE = "qeffort5"
_ON, _OFF = ({"enable_thinking": on, "thinking": on} for on in (True, False))
# A template may have no "medium" of its own if that is its default: so a level between two of its
# own may be the default, and one outside is none.
_LOW, _HIGH = EFFORTS.index("low"), EFFORTS.index("high")


def supported_efforts(render: Callable[..., str | None]) -> dict[str, str]:
    """For each effort the one to pass: itself, or the nearest that the template has; of two at
    equal distance the higher.

    Args:
        render: a short conversation with these variables of the template; None if the template
            fails.
    """
    plain = render(**_ON)
    nonsense = render(**_ON, reasoning_effort=_NONSENSE)
    texts = {effort: render(**_ON, reasoning_effort=effort) for effort in EFFORTS}
    accepted = {effort: text for effort, text in texts.items() if text is not None}
    own = [effort for effort, text in accepted.items() if _has(effort, text, nonsense)]
    levels = [effort for effort in own if effort in _LEVELS]
    keeps = set(own)
    if not levels or (nonsense is not None and _NONSENSE in nonsense.lower()):
        keeps = set(accepted)
    else:
        keeps |= {e for e, text in accepted.items() if text == plain and not _is_beyond(e, levels)}
    if "none" in accepted and plain != render(**_OFF):
        keeps.add("none")  # the switch turns reasoning off for any effort
    nearest = levels or [effort for effort in accepted if effort in _LEVELS] or list(accepted)
    return {effort: effort if effort in keeps or not nearest else _nearest(effort, nearest) for effort in EFFORTS}


def template_variables(effort: str | None, supported: Mapping[str, str]) -> dict[str, object]:
    """Variables for an effort. Templates without degrees have a switch, which "none" turns off."""
    if effort is None:
        return {}
    return {"reasoning_effort": supported.get(effort, effort), **(_OFF if effort == "none" else {})}


def _has(effort: str, text: str, nonsense: str | None) -> bool:
    if nonsense is None:
        return True
    ours, other = (re.sub(re.escape(effort), _NONSENSE, found.lower()) for found in (text, nonsense))
    return ours != other


def _is_beyond(effort: str, levels: list[str]) -> bool:
    place, places = EFFORTS.index(effort), [EFFORTS.index(level) for level in levels]
    return (place < min(places) <= _LOW) or (place > max(places) >= _HIGH)


def _nearest(effort: str, levels: list[str]) -> str:
    place = EFFORTS.index(effort)
    return min(levels, key=lambda level: (abs(EFFORTS.index(level) - place), -EFFORTS.index(level)))
