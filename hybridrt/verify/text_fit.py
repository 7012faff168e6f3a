"""Tells weights that know a text from random ones, and from those of another tokenizer, by what they predict."""

import inspect
import math
import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridrt.verify.prompts import random_tokens
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject

TOKENS = 400
TOLD = 0.9  # of the loss of a model that knows nothing: above it, a text tells nothing
REPEATED, TIMES = (8, 16), 4  # random tokens, and how often they follow each other
COPIED = 0.7  # of that loss: a model continues what it has read three times
PREFERRED = 1.5  # nats: weights of normal numbers with a deviation of 0.02 and 4096 inputs have at most 0.8


@dataclass(frozen=True)
class Knowledge:
    """What a model predicts, in nats a token.

    Attributes:
        loss: of a text. known: below it, the model knows the text.
        copied: the loss of random tokens when they come for the last time; the least of two lengths.
        preferred: how far its mean prediction is from one that likes all tokens alike.
    """

    loss: float
    known: float
    copied: float
    preferred: float

    @property
    def knows(self) -> bool:
        return self.loss < self.known


def text_tokens(subject: Subject) -> list[int]:
    """A text of this Python's own library; [] without a tokenizer, if it has tokens that the model has not, or if the
    library is here without its source."""
    if subject.tokenizer is None or subject.config is None:
        return []
    count = min(TOKENS, subject.config.max_position_embeddings)
    try:
        tokens: list[int] = subject.tokenizer.encode(inspect.getsource(textwrap))[:count]
    except OSError:
        return []
    return tokens if max(tokens, default=0) < subject.config.vocab_size else []


@torch.inference_mode()
def knowledge(model: Any, subject: Subject, tokens: Sequence[int]) -> Knowledge:
    """`model`: transformers'."""
    assert subject.config is not None, "it was read"
    scores, most = _scores(model, tokens), math.log(subject.config.vocab_size)
    mean = scores.double().exp().mean(0)
    preferred = float(torch.xlogy(mean, mean).sum()) + most
    return Knowledge(_loss(scores, tokens), TOLD * most, min(_copied(model, subject, n) for n in REPEATED), preferred)


def _copied(model: Any, subject: Subject, length: int) -> float:
    tokens = random_tokens(subject, length, random.Random(0)) * TIMES
    return _loss(_scores(model, tokens), tokens, last=length)


def _scores(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([tokens], device=model.get_input_embeddings().weight.device)
    return model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)


def _loss(scores: torch.Tensor, tokens: Sequence[int], last: int | None = None) -> float:
    """Of all tokens but the first, or of the last ones; infinite if it is no number."""
    targets = torch.tensor(tokens[1:], device=scores.device)
    found = -scores[:-1].gather(1, targets[:, None])[:, 0]
    loss = float((found if last is None else found[-last:]).mean())
    return loss if math.isfinite(loss) else math.inf


def judge_text(found: Knowledge, result: Result) -> None:
    """Fails if weights are trained and know no text as the tokenizer reads it."""
    result.figures |= {"text_loss": found.loss, "repeated_loss": found.copied, "preferred": found.preferred}
    if found.knows:
        result.notes.append(f"a text has a loss of {found.loss:.3f} nats a token")
        return
    most = found.known / TOLD
    text = f"the loss of a text is {found.loss:.1f} nats a token, and {most:.1f} if all tokens were as likely"
    if found.copied < COPIED * most:
        result.fail(
            f"{text}, but the weights continue repeated tokens (loss {found.copied:.1f}): they are trained, and with "
            "another tokenizer, or with other embeddings"
        )
    elif found.preferred > PREFERRED:
        result.warn(
            f"{text}, but the weights prefer some tokens in any text, as trained ones do: is a weight, a factor of "
            "config.json or the tokenizer of another model?"
        )
    else:
        result.notes.append(f"{text}: the weights know no text, as random ones")
