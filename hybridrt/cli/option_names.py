"""Errors of a command in the words of its command line: options instead of arguments of Python."""

import re
from collections.abc import Sequence
from typing import Any

# What EngineConfig and others call a setting that an option has another name for.
_OTHER_NAMES = {"method": "speculative", "seed": "workload_seed"}
# A word that is a name of Python and of the language: an argument is meant where a text begins with it like this.
_BEGINS = r"(?=\s(?:is|has|holds|needs|takes|goes|asks)\s|\s[\"']|\s>)"
# An error about the form of the output, and the option that sets this form.
_FORMS = {"json": "json_schema", "regex": "regex"}
_FORM = re.compile(r"^structured_outputs(: this| has) (json|regex)\b(=?)")


def in_options(text: str, params: Sequence[Any]) -> str:
    """An error's text with each argument that an option of the command sets under the option's name. What follows the
    name of a JSON file is about that file, which has fields of its own.

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
    """The option for each argument, and the one that turns it off, or ""."""
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
