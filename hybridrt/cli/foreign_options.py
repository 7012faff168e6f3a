"""Options that a command lacks, and what to write instead of those of vLLM and SGLang."""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hybridrt
from hybridrt.base.errors_foreign import ENGINE, SAMPLING, VALUES
from hybridrt.cli.option_names import in_options, option_names, set_option

# The tables of docs/migrate.md (scripts/option_rows.py).
ROWS = Path(hybridrt.__file__).parent / "assets" / "option_rows.json"
LEAVE_OUT, NOT_THERE, MODEL = ("-",), ("not there",), ("MODEL",)
_FEW = 4  # names of a row that is about them, rather than about a subject
# vLLM's short options.
SHORT = {
    "-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size", "-ep": "--enable-expert-parallel",
    "-pp": "--pipeline-parallel-size", "-q": "--quantization", "-sc": "--speculative-config",
    "-cc": "--compilation-config", "-ac": "--attention-config", "-O": "--optimization-level",
    "-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size",
    "-asc": "--api-server-count", "-dc": "--diffusion-config", "-n": "--nnodes", "-r": "--node-rank",
}  # fmt: skip
_DRAFTS = ("speculative_config", "speculative_model", "num_speculative_tokens", "speculative_algorithm")
# Arguments of Python, except names that have another meaning here.
_ARGUMENTS = {
    **SAMPLING,
    **ENGINE,
    **dict.fromkeys((*_DRAFTS, "speculative_num_draft_tokens"), "speculative"),
    **dict.fromkeys(("guided_json", "json_schema"), "json_schema"),
    "guided_regex": "regex",
}


def refusal(words: Sequence[str], params: Sequence[Any]) -> str:
    """One error for all options that a command lacks and all values that have another name here; "" if there are none.

    Args:
        words: the command line after the command.
        params: the command's parameters, as click has them.
    """
    known = {name: param for param in params for name in (*param.opts, *param.secondary_opts)}
    said: dict[str, str] = {}
    for option, value in _given(words, params):
        if option not in known:
            said[option] = _advice(option, value, params, known.keys())
        elif text := _elsewhere(known[option].name, value):
            said[f"{option} {value}"] = text[1:] if text.startswith("!") else f"write {text} instead"
    if len(said) == 1:
        ((what, text),) = said.items()
        return f"{'' if ' ' in what else 'no option '}{what}: {text}"
    return f"{len(said)} options cannot be used:" + "".join(f"\n  {w}: {t}" for w, t in said.items()) if said else ""


def _given(words: Sequence[str], params: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Options of a command line with their values. Of an unknown one, the next word may be none."""
    options = [param for param in params if param.param_type_name == "option"]
    takes_value = {name: not param.is_flag for param in options for name in (*param.opts, *param.secondary_opts)}
    rest = iter(enumerate(words, 1))
    for following, word in rest:
        if word == "--":
            return
        name, has_value, value = word.partition("=")
        short_with_value = not word.startswith("--") and word[:2] in takes_value and name not in takes_value
        if short_with_value or not re.match(r"--?[A-Za-z]", word):
            continue
        if not has_value:
            value = words[following] if following < len(words) else ""
            if takes_value.get(name):
                next(rest, None)
        yield name, value


def _elsewhere(name: str, value: str) -> str:
    """Our value, or advice after "!", of a parameter's value that has another name here; else ""."""
    ours = VALUES.get(name, {}).get(value, "")
    if ours and name in ("tool_parser", "reasoning_parser"):
        from hybridrt.chat.registry import REASONING_PARSERS, TOOL_PARSERS

        registry = TOOL_PARSERS if name == "tool_parser" else REASONING_PARSERS
        return "" if value in registry.names() else ours  # an entry point may have their name
    return ours


def _advice(option: str, value: str, params: Sequence[Any], known: Collection[str]) -> str:
    whole = SHORT.get(option.rstrip("0123456789"), option) if not option.startswith("--") else option
    whole = whole.partition(".")[0].replace("_", "-")  # a field of a JSON option
    if whole in known:
        return f"write {whole}"
    close = difflib.get_close_matches(whole, known, 1, cutoff=0.8)
    other = f"did you mean {close[0]}?" if close else "--help lists all"
    return _of_row(whole, value, params, known) or _of_argument(whole[2:].replace("-", "_"), params) or other


def _of_row(option: str, value: str, params: Sequence[Any], known: Collection[str]) -> str:
    """What the first row of docs/migrate.md that has the option says; "" if none does."""
    theirs, ours, remark = next((row for row in _rows() if option in row[0]), ((), (), ""))
    if not ours or ours == MODEL:
        return _of_argument("model_path", params) if ours else ""
    if ours == LEAVE_OUT:
        return f"leave it out: {remark}"
    if ours == NOT_THERE:
        return f"there is no such feature{': ' if remark else ''}{remark}"
    few = len(theirs) <= _FEW
    if few and len(ours) == len(theirs):
        ours = (ours[theirs.index(option)],)
    names = ", ".join(name for name in ours if name in known)
    if not names:
        return f"leave it out here: `hybridrt serve` has {', '.join(ours)}"
    if few and len(ours) == 1:
        translated = _elsewhere(names[2:].replace("-", "_"), value)
        said = f"write {names}{f' {translated}' if translated[:1] not in ('', '!') else ''} instead"
    else:
        said = f"see {names}" if few else f"leave it out, or see {names}"
    return f"{said}{'; ' if remark else ''}{remark}"


@cache
def _rows() -> list[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Options of theirs, ours, and a remark."""
    return [(tuple(theirs), tuple(ours), remark) for theirs, ours, remark in json.loads(ROWS.read_text())]


def _of_argument(name: str, params: Sequence[Any]) -> str:
    ours = _ARGUMENTS.get(name, "")
    if ours.startswith("!"):
        return in_options(ours[1:], params)
    names, (target, _, value) = option_names(params), ours.partition("=")
    if target in names:
        return f"write {set_option(names[target], value) if value else names[target][0]} instead"
    is_argument = any(p.name == target and p.param_type_name == "argument" for p in params)
    return f"the {target} is an argument here" if is_argument else ""
