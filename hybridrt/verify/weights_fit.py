"""Finds wrong tensors by a text: is it likelier without a tensor, or with two layers exchanged?"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations

import torch
from torch import Tensor, nn

from hybridrt.base.errors import UnsupportedModelError
from hybridrt.verify import oracle
from hybridrt.verify.outputs import parameter_count, plain_checkpoint
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject
from hybridrt.verify.text_fit import TOLD, text_tokens

DOUBT, WRONG = 0.02, 0.1  # by how much the loss falls without the tensor
SECONDS, SECONDS_UNTOLD = 300.0, 60.0  # the second: of weights that know no text, as random ones
Change = tuple[str, AbstractContextManager[None]]
_LAYER = re.compile(r"(?<=\.)layers\.(\d+)(?=\.)")


def check_weights_fit(subject: Subject, result: Result) -> None:
    """Trained weights work together: a text is less likely without any of them. A tensor that does
    harm is none of theirs. transformers' model computes, in float32.
    """
    if subject.broken or subject.config is None:
        return result.leave_out(subject.broken or "config.json cannot be read")
    if not (tokens := text_tokens(subject)):
        return result.leave_out("it needs a text, and a tokenizer without tokens that the model has not")
    if not oracle.fits(4 * parameter_count(subject), subject.torch_device):
        return result.leave_out("transformers' model in float32 does not fit")
    try:
        with (
            plain_checkpoint(subject, result) as path,
            oracle.loaded(path, subject.config.architecture, torch.float32, subject.torch_device) as model,
        ):
            _judge(subject, model, tokens, result)
    except UnsupportedModelError as e:
        result.leave_out(f"not tried: {e}")


def _judge(subject: Subject, model: nn.Module, tokens: Sequence[int], result: Result) -> None:
    assert subject.config is not None, "it was read"
    own, known = _loss(model, tokens), TOLD * math.log(subject.config.vocab_size)
    seconds = SECONDS if own < known else SECONDS_UNTOLD
    found, tried, deadline = dict[str, float](), 0, time.monotonic() + seconds
    for name, changed in _changes(model):
        subject.progress(f"the text {name}")
        with changed:
            loss = _loss(model, tokens)
        tried += 1
        if own - loss > DOUBT and loss < known:
            found[name] = own - loss
        if time.monotonic() > deadline:
            result.notes.append(f"stopped after {seconds:g} seconds and {tried} changes")
            break
    _say(own, found, result)
    if own > known and not found:
        return result.done("these weights do not know the text: it tells nothing of them")
    result.done(f"the loss of a text is {own:.3f}; {tried} changes of single weights were tried")


def _say(own: float, found: dict[str, float], result: Result) -> None:
    """The change that helps most is told first. What it touches is likely to be wrong."""
    ordered = sorted(found, key=lambda name: -found[name])
    if not ordered:
        return
    text = f"a text is likelier {ordered[0]}: its loss is {own - found[ordered[0]]:.3f} instead of {own:.3f}"
    more = f"; it falls, too, {', '.join(ordered[1:4])}" if ordered[1:] else ""
    result.fail(text + more) if found[ordered[0]] > WRONG else result.warn(text + more)


def _loss(model: nn.Module, tokens: Sequence[int]) -> float:
    """In nats a token; infinite if a logit is not finite."""
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
        loss = float(nn.functional.cross_entropy(logits[:-1], ids[0, 1:]))
    return loss if math.isfinite(loss) else math.inf


def _changes(model: nn.Module) -> Iterator[Change]:
    """Each tensor of a layer without what it has learned: zeros for a matrix, the mean of its siblings for a vector.
    Then all norms moved by 1, which some families store less 1, and each two layers of the same tensors exchanged."""
    groups = defaultdict[str, dict[int, nn.Parameter]](dict)
    for name, parameter in model.named_parameters():
        if place := _LAYER.search(name):
            groups[_LAYER.sub("layers.#", name)][int(place[1])] = parameter
    for name, group in groups.items():
        for layer, parameter in group.items():
            others = [other.data for i, other in group.items() if i != layer and other.shape == parameter.shape]
            key = name.replace("layers.#", f"layers.{layer}")
            if parameter.dim() > 1:
                yield f"without {key}", _changed([(parameter, torch.zeros_like(parameter.data))])
            elif len(others) > 1:
                yield f"with other layers' numbers in {key}", _changed([(parameter, torch.stack(others).mean(0))])
    yield from _moved_norms(model)
    yield from _exchanges(groups)


def _moved_norms(model: nn.Module) -> Iterator[Change]:
    norms = [p for name, p in model.named_parameters() if "norm" in name and p.dim() == 1 and name.endswith("weight")]
    for by in (-1.0, 1.0):
        yield f"with {by:+g} in all norm weights", _changed([(p, p.data + by) for p in norms])


def _exchanges(groups: Mapping[str, Mapping[int, nn.Parameter]]) -> Iterator[Change]:
    """Neighbours first."""
    layers = defaultdict[int, dict[str, nn.Parameter]](dict)
    for name, group in groups.items():
        for layer, parameter in group.items():
            layers[layer][name] = parameter
    pairs = sorted(combinations(sorted(layers), 2), key=lambda pair: pair[1] - pair[0])
    for i, j in pairs:
        one, other = layers[i], layers[j]
        if {n: p.shape for n, p in one.items()} == {n: p.shape for n, p in other.items()}:
            values = [(p, other[n].data) for n, p in one.items()] + [(p, one[n].data) for n, p in other.items()]
            yield f"with layers {i} and {j} exchanged", _changed(values)


@contextmanager
def _changed(values: Sequence[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    before = [parameter.data for parameter, _ in values]
    for parameter, value in values:
        parameter.data = value
    try:
        yield
    finally:
        for (parameter, _), value in zip(values, before):
            parameter.data = value
