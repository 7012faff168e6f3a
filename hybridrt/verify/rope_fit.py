"""Checks rope_theta by a text: is it likelier with another value?"""

import inspect
import json
import math
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hybridrt.bench.perplexity import perplexity
from hybridrt.verify.ours import engine
from hybridrt.verify.results import Result
from hybridrt.verify.rope import fields_named
from hybridrt.verify.subject import Subject

FACTORS = (1 / 64, 1 / 8, 8.0, 64.0)
TOKENS = 900
_OF_ALL_TYPES = ("rope_type", "rope_theta", "partial_rotary_factor")
PROMPTS_ALONE: dict[str, Any] = {"prefix_cache": False, "cuda_graph": False}  # nothing is generated
CLEAR = 0.01  # relative difference of perplexities


def check_rope_fit(subject: Subject, result: Result) -> None:
    """Trained weights know their rotary embedding: a text is likeliest with it. Random weights do
    not."""
    if subject.broken or subject.config is None:
        return result.leave_out(subject.broken or "config.json cannot be read")
    thetas = {float(value) for _, value in fields_named(subject.raw, "rope_theta")}
    if subject.tokenizer is None or len(thetas) != 1:
        _keep_doubts(subject, result)
        return result.leave_out("it needs a tokenizer and one rope_theta in config.json")
    tokens = subject.tokenizer.encode(inspect.getsource(textwrap))[:TOKENS]
    if max(tokens) >= subject.config.vocab_size:
        return result.leave_out("the tokenizer has more tokens than the model")
    theta, found = thetas.pop(), dict[str, float]()
    for name, fields in _variants(subject, theta):
        subject.begin(f"perplexity with {name}")
        with _with_config(subject, fields) as path, engine(subject, path=path, **PROMPTS_ALONE) as llm:
            found[name] = perplexity(llm, tokens)
    result.figures["perplexity_by_rope"] = found
    if not _judge(_named(theta), found, subject.config.vocab_size, result):
        _keep_doubts(subject, result)


def _variants(subject: Subject, theta: float) -> Iterator[tuple[str, Any]]:
    """(name, fields of config.json): the checkpoint's own, other values of rope_theta, and the usual value of each
    field that is in doubt."""
    yield _named(theta), subject.raw
    for factor in FACTORS:
        yield _named(theta * factor), _replaced(subject.raw, "rope_theta", theta * factor)
    for doubt in subject.doubts:
        fields = _unscaled(subject.raw) if doubt.field == "rope_type" else subject.raw
        yield f"{doubt.field} {doubt.usual}", _replaced(fields, doubt.field, doubt.usual)


def _named(theta: float) -> str:
    return f"rope_theta {theta:g}"


def _unscaled(raw: Any) -> Any:
    """The fields without those of a type of scaling."""
    if isinstance(raw, dict):
        scaled = isinstance(raw.get("rope_type"), str)
        return {k: _unscaled(v) for k, v in raw.items() if not scaled or k in _OF_ALL_TYPES or k.startswith("mrope")}
    return raw


def _keep_doubts(subject: Subject, result: Result) -> None:
    for doubt in subject.doubts:
        result.warn(doubt.text)


def _judge(own: str, found: dict[str, float], vocabulary: int, result: Result) -> bool:
    """Returns whether the weights can tell."""
    best, worst = min(found, key=lambda name: found[name]), max(found.values())
    if found[own] > vocabulary**0.9 or math.log(worst / found[best]) < CLEAR:
        result.done("these weights do not tell rope_theta: the text is as likely with others, as with random weights")
        return False
    if found[own] > found[best] * (1 + CLEAR):
        result.fail(
            f"config.json: with its {own} the perplexity of a text is {found[own]:.3f}; with {best} it is "
            f"{found[best]:.3f}"
        )
    else:
        result.done(f"perplexity {found[own]:.3f} with {own}; with others up to {worst:.3f}")
    return True


@contextmanager
def _with_config(subject: Subject, fields: Any) -> Iterator[Path]:
    """A folder with links to the checkpoint's files and another config.json."""
    with TemporaryDirectory(prefix="hybridrt-verify-") as folder:
        for file in subject.path.iterdir():
            if file.is_file() and file.name != "config.json":
                os.symlink(file.resolve(), Path(folder) / file.name)
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        yield Path(folder)


def _replaced(raw: Any, name: str, value: Any) -> Any:
    """The fields with another value of each `name` that has one."""
    if isinstance(raw, dict):
        return {k: value if k == name and v is not None else _replaced(v, name, value) for k, v in raw.items()}
    return [_replaced(each, name, value) for each in raw] if isinstance(raw, list) else raw
