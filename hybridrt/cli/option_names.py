"""Errors in words of the command line: names of options instead of arguments of Python."""

import re
from collections.abc import Sequence
from typing import Any

from hybridrt.base.errors_foreign import ENGINE, SAMPLING

# Their options have other names.
_OTHER_NAMES = {"method": "speculative", "seed": "workload_seed"}
# Follows a name at the beginning of an error.
_BEGINS = r"(?=\s(?:is|has|holds|needs|takes|goes|asks)\s|\s[\"']|\s>)"
_FORMS = {"json": "json_schema", "regex": "regex"}
_FORM = re.compile(r"^structured_outputs(: this| has) (json|regex)\b(=?)")

_DRAFTS = ("speculative_config", "speculative_model", "num_speculative_tokens", "speculative_algorithm")
# Except names that have another meaning here.
_FOREIGN = {
    **SAMPLING,
    **ENGINE,
    **dict.fromkeys((*_DRAFTS, "speculative_num_draft_tokens"), "speculative"),
    **dict.fromkeys(("guided_json", "json_schema"), "json_schema"),
    "guided_regex": "regex",
}


def foreign_option(argument: str, params: Sequence[Any]) -> str:
    """Advice for an option of vLLM or SGLang that the command lacks; "" for everything else.

    Args:
        argument: a word of the command line.
        params: the command's parameters, as click has them.
    """
    option = argument.partition("=")[0]
    name, known = option[2:].replace("-", "_"), {opt for p in params for opt in (*p.opts, *p.secondary_opts)}
    ours = _FOREIGN.get(name)
    if not option.startswith("--") or option in known or ours is None:
        return ""
    if ours.startswith("!"):
        return f"{option}: {in_options(ours[1:], params)}"
    names, (target, _, value) = _names(params), ours.partition("=")
    if target in names:
        return f"no option {option}: write {_set(names[target], value) if value else names[target][0]} instead"
    is_argument = any(p.name == target and p.param_type_name == "argument" for p in params)
    return f"no option {option}: the {target} is an argument here" if is_argument else ""


def in_options(text: str, params: Sequence[Any]) -> str:
    """Puts options in the place of arguments in an error's text. Text after the name of a JSON file
    is about the fields of that file, and stays.

    Args:
        params: the command's parameters, as click has them.
    """
    own, name, file = text.partition(".json")
    names = _names(params)
    if not names:
        return text
    own = _FORM.sub(lambda m: names[_FORMS[m[2]]][0] + (" is " if m[3] else ""), own) if "regex" in names else own
    words = "|".join(sorted(names, key=len, reverse=True))
    own = re.sub(rf"(?<![\w./'\"-])({words})=(\"[^\"]*\"|[\w.+-]+)", lambda m: _set(names[m[1]], m[2]), own)
    own = re.sub(rf"^({words}){_BEGINS}", lambda m: names[m[1]][0], own)
    long = [word for word in names if "_" in word]
    if long:
        words = "|".join(sorted(long, key=len, reverse=True))
        own = re.sub(rf"(?<![\w./'\"-])({words})(?![\w./=('\"]\w)\b", lambda m: names[m[1]][0], own)
    return re.sub(r",? or None\b", "", own) + name + file


def _names(params: Sequence[Any]) -> dict[str, tuple[str, str]]:
    """Maps arguments to their option, and to the one that turns it off or ""."""
    found = {
        param.name: (max(param.opts, key=len), max(param.secondary_opts, key=len, default=""))
        for param in params
        if param.param_type_name == "option"
    }
    for other, name in _OTHER_NAMES.items():
        if name in found:
            found.setdefault(other, found[name])
    return found


def _set(option: tuple[str, str], value: str) -> str:
    on, off = option
    if value in ("True", "False"):
        return on if value == "True" else off or f"no {on}"
    return f"{on} {value.strip(chr(34))}"
