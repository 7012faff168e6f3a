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
    own = thetas.pop()
    tokens = subject.tokenizer.encode(inspect.getsource(textwrap))[:TOKENS]
    if max(tokens) >= subject.config.vocab_size:
        return result.leave_out("the tokenizer has more tokens than the model")
    found = {}
    for factor in (1.0, *FACTORS):
        subject.progress(f"perplexity with rope_theta {own * factor:g}")
        with _with_theta(subject, own * factor) as path, engine(subject, path=path, prefix_cache=False) as llm:
            found[own * factor] = perplexity(llm, tokens)
    result.figures["perplexity_by_rope_theta"] = {f"{theta:g}": value for theta, value in found.items()}
    if not _judge(own, found, subject.config.vocab_size, result):
        _keep_doubts(subject, result)


def _keep_doubts(subject: Subject, result: Result) -> None:
    for doubt in subject.doubts:
        result.warn(doubt)


def _judge(own: float, found: dict[float, float], vocabulary: int, result: Result) -> bool:
    """Returns whether the weights can tell."""
    best, worst = min(found, key=lambda theta: found[theta]), max(found.values())
    if found[own] > vocabulary**0.9 or math.log(worst / found[best]) < CLEAR:
        result.done("these weights do not tell rope_theta: the text is as likely with others, as with random weights")
        return False
    if found[own] > found[best] * (1 + CLEAR):
        result.fail(
            f"config.json: rope_theta is {own:g}, with which the perplexity of a text is {found[own]:.3f}; with "
            f"{best:g} it is {found[best]:.3f}"
        )
    else:
        result.done(f"perplexity {found[own]:.3f} with rope_theta {own:g}; with others up to {worst:.3f}")
    return True


@contextmanager
def _with_theta(subject: Subject, theta: float) -> Iterator[Path]:
    """A folder with links to the checkpoint's files and a config.json of another rope_theta."""
    with TemporaryDirectory(prefix="hybridrt-verify-") as folder:
        for file in subject.path.iterdir():
            if file.is_file() and file.name != "config.json":
                os.symlink(file.resolve(), Path(folder) / file.name)
        (Path(folder) / "config.json").write_text(json.dumps(_replaced(subject.raw, theta)))
        yield Path(folder)


def _replaced(raw: Any, theta: float) -> Any:
    if isinstance(raw, dict):
        return {k: theta if k == "rope_theta" and v is not None else _replaced(v, theta) for k, v in raw.items()}
    return [_replaced(each, theta) for each in raw] if isinstance(raw, list) else raw
