"""Errors in words of the command line: names of options instead of arguments of Python."""

import re
from collections.abc import Sequence
from typing import Any

# Their options have other names.
_OTHER_NAMES = {"method": "speculative", "seed": "workload_seed"}
# Follows a name at the beginning of an error.
_BEGINS = r"(?=\s(?:is|has|holds|needs|takes|goes|asks)\s|\s[\"']|\s>)"
_FORMS = {"json": "json_schema", "regex": "regex"}
_FORM = re.compile(r"^structured_outputs(: this| has) (json|regex)\b(=?)")


def in_options(text: str, params: Sequence[Any]) -> str:
    """Puts options in the place of arguments in an error's text. Text after the name of a JSON file
    is about the fields of that file, and stays.

    Args:
        params: the command's parameters, as click has them.
    """
    own, name, file = text.partition(".json")
    names = option_names(params)
    if not names:
        return text
    own = _FORM.sub(lambda m: names[_FORMS[m[2]]][0] + (" is " if m[3] else ""), own) if "regex" in names else own
    words = "|".join(sorted(names, key=len, reverse=True))
    own = re.sub(rf"(?<![\w./'\"-])({words})=(\"[^\"]*\"|[\w.+-]+)", lambda m: set_option(names[m[1]], m[2]), own)
    own = re.sub(rf"^({words}){_BEGINS}", lambda m: names[m[1]][0], own)
    long = [word for word in names if "_" in word]
    if long:
        words = "|".join(sorted(long, key=len, reverse=True))
        own = re.sub(rf"(?<![\w./'\"-])({words})(?![\w./=('\"]\w)\b", lambda m: names[m[1]][0], own)
    return re.sub(r",? or None\b", "", own) + name + file


def option_names(params: Sequence[Any]) -> dict[str, tuple[str, str]]:
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


def set_option(option: tuple[str, str], value: str) -> str:
    """How a command line sets an option, the one that turns it off included, to a value of Python."""
    on, off = option
    if value in ("True", "False"):
        return on if value == "True" else off or f"no {on}"
    return f"{on} {value.strip(chr(34))}"
