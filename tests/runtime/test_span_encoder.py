"""The encoder next to decode rows: a part of a picture in each step, and all of it where a chunk needs it."""

from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridrt.base.spans import EncoderInput
from hybridrt.runtime.run import span_encoder
from hybridrt.runtime.run.span_encoder import SpanEncoder
from hybridrt.runtime.step.pack import EmbeddedTokens
from hybridrt.runtime.step.plan import EncoderTask

BLOCKS, BROKEN = 3, 255


class Model:
    """Its embeddings are a picture's first number. A block of n patches costs n."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(hidden_size=2, vision=SimpleNamespace(block_flops=float))
        self.dtype, self.launched = torch.float32, list[int]()

    def encode_in_slices(self, inputs: Sequence[EncoderInput]) -> Generator[None, None, list[Tensor]]:
        for _ in range(BLOCKS):
            self.launched.append(len(inputs))
            yield
        if any(int(each.patches[0, 0]) == BROKEN for each in inputs):
            raise ValueError("broken")
        return [torch.full((len(each.patches) // 4, 2), float(each.patches[0, 0])) for each in inputs]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(span_encoder, "STEP_FLOPS", {"cpu": 20.0})
    monkeypatch.setattr(span_encoder, "GROUP_PATCHES", 16)
    return Model()


def encoder(model: Any) -> SpanEncoder:
    return SpanEncoder(model, 8, torch.device("cpu"))


def task(ticket: int, tokens: int, *rows: int) -> EncoderTask:
    return EncoderTask(
        ticket, EncoderInput(np.full((4 * tokens, 1), ticket, np.uint8), (2, 2 * tokens)), np.int32(rows)
    )


def kept(made: SpanEncoder) -> list[float]:
    rows = torch.arange(8, dtype=torch.int32)
    return made.embeddings(EmbeddedTokens(rows, rows)).rows[:, 0].tolist()


def test_next_to_decode_rows_a_step_computes_a_part(model: Model) -> None:
    """8 patches twice, then 24: two blocks of the first fit in a step, and one of the others."""
    made = encoder(model)
    made.queue([task(1, 2, 0, 1), task(2, 6, 2, 3, 4, 5, 6, 7)], True)
    counts = []
    for _ in range(7):
        before = len(model.launched)
        made.advance(True)
        counts.append(len(model.launched) - before)
    assert counts == [2, 1, 1, 1, 1, 0, 0]
    assert kept(made) == [1, 1, 2, 2, 2, 2, 2, 2]


def test_what_a_chunk_needs_is_computed_before_it(model: Model) -> None:
    made = encoder(model)
    made.queue([task(1, 2, 5, 0), task(2, 2, 3, 4), task(3, 4, 6, 7, 1, 2)], True)
    made.advance(True)
    assert not made.encoded(1)
    made.finish(2)
    assert made.encoded(2) and not made.encoded(3)
    assert kept(made) == [1, 0, 0, 2, 2, 1, 0, 0]
    made.finish(0)
    assert not made.encoded(3)


def test_without_decode_rows_all_pictures_are_encoded_together(model: Model) -> None:
    made = encoder(model)
    made.queue([], False)
    made.queue([task(1, 2, 0, 1), task(2, 6, 2, 3, 4, 5, 6, 7)], False)
    made.advance(False)
    assert made.encoded(2) and model.launched == [2] * BLOCKS


def test_small_pictures_share_a_group(model: Model) -> None:
    made = encoder(model)
    made.queue([task(i, 1, i) for i in range(1, 8)], True)
    made.finish(7)
    assert model.launched == [4] * BLOCKS + [3] * BLOCKS


def test_a_group_that_fails_is_given_up(model: Model) -> None:
    made = encoder(model)
    broken = task(1, 4, 0, 1, 2, 3)
    broken.input.patches[:] = BROKEN
    made.queue([broken, task(2, 4, 4, 5, 6, 7)], True)
    with pytest.raises(ValueError, match="broken"):
        made.finish(2)
    assert not made.encoded(1)
    made.finish(2)
    assert made.encoded(2) and kept(made)[4:] == [2] * 4
