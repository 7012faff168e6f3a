"""Positions of tokens on three axes: those of transformers, in any chunk."""

import numpy as np
import pytest
import torch

from hybridrt.base.spans import EncoderInput, Span, mrope_delta, mrope_positions
from tests.support.newer_checkpoints import known, qwen35_seeing
from tests.support.sizes import VOCAB

PROMPTS = [
    [],
    [(2, 3), "text", (1, 8), (8, 1), "text", (4, 4)],
    ["text", (3, 2), "text"],
    ["text", (1, 1), (2, 2), "text", "text"],
]


def prompt(parts: list[str | tuple[int, int]]) -> tuple[list[int], list[Span]]:
    """Token types and spans; a text has three tokens."""
    types, spans = [0, 0], list[Span]()
    for part in parts:
        if isinstance(part, str):
            types += [0] * 3
            continue
        length = part[0] * part[1]
        patches = EncoderInput(np.empty((0, 0), np.uint8), (2 * part[0], 2 * part[1]))
        spans.append(Span(len(types), length, bytes(32), part, patches))
        types += [1] * length + [0]  # pictures do not touch: their ends are marked
    return types, spans


@pytest.mark.parametrize("parts", PROMPTS)
def test_positions_are_those_of_transformers(parts: list[str | tuple[int, int]]) -> None:
    types, spans = prompt(parts)
    config, _ = qwen35_seeing()()
    oracle = known("Qwen3_5ForConditionalGeneration")._from_config(config, dtype=torch.float32).model
    grids = torch.tensor([[1, *span.input.grid] for span in spans]) if spans else None
    ids = torch.tensor([[VOCAB - 1 if kind else 3 for kind in types]])
    want, delta = oracle.get_rope_index(ids, torch.tensor([types]), grids)
    assert np.array_equal(mrope_positions(spans, 0, len(types)), want[:, 0].numpy())
    assert mrope_delta(spans) == int(delta)


def test_chunks_have_their_part_and_generated_tokens_go_on() -> None:
    types, spans = prompt(PROMPTS[1])
    count = len(types)
    whole = mrope_positions(spans, 0, count + 5)
    for start in range(0, count + 5, 3):
        for end in range(start, count + 6, 2):
            assert np.array_equal(mrope_positions(spans, start, end), whole[:, start:end])
    after = np.arange(count, count + 5) + mrope_delta(spans)
    assert np.array_equal(whole[:, count:], np.tile(after, (3, 1)))
