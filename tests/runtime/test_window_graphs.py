"""Graphs of a model whose attention layers have several windows, and so several page groups."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridrt.runtime.step import pack_padded as prompt_columns
from tests.attention.test_backends_verify import random_tokens
from tests.runtime import test_graph_runner as decoding
from tests.runtime import test_prompt_graphs as prompting
from tests.support import outside_mixed
from tests.support.by_hand import ByHand, Row, assert_close
from tests.support.prompt_steps import Play


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with outside_mixed.installed():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixed")
    outside_mixed.write_checkpoint(made)
    return made


@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_graphs_equal_eager_steps(tokens: int, path: Path) -> None:
    """Bit for bit; a replay enters the new pages of each group."""
    replayed, eager, lengths = decoding.twins(path, "classic" if tokens == 1 else "intermediate", tokens)
    graphs, tables = decoding.runner_of(replayed), replayed.pools.req_to_token.tables
    assert tables.shape[1] == 4 and len({*tables[5, :, 16].tolist()}) == 4
    generator = torch.Generator().manual_seed(2)
    for count in (1, 4, 6, 3):
        chosen = [*lengths][::-1][:count]
        rows = [Row(row, lengths[row], [10 + row, *random_tokens(generator, tokens - 1)]) for row in chosen]
        bucket = graphs.bucket(count)
        assert bucket is not None
        last = [(row.computed + tokens - 1) // 4 * 4 for row in rows]
        pages = np.array([tables[row.row, :, at].tolist() for row, at in zip(rows, last)], np.int32) // 4
        for row, at in zip(rows, last):
            tables[row.row, :, at:] = 0
        got = graphs.replay(decoding.inputs_of(rows, tokens), pages).clone()
        wanted = decoding.padded_step(eager, rows, bucket - count)
        assert torch.equal(got, wanted[: len(got)])
        if tokens > 1:
            for hand in (replayed, eager):
                hand.commit([tokens] * count + [0] * (bucket - count) if hand is eager else [tokens] * count)
        for row, own, at in zip(chosen, pages, last):
            assert tables[row, :, at].tolist() == (own * 4).tolist()
            tables[row] = eager.pools.req_to_token.tables[row]
            lengths[row] += tokens
            assert_close(replayed.state(row, lengths[row]), eager.state(row, lengths[row]), 0.0)


def test_prompt_graphs_equal_eager_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, of prompts in chunks next to rows that decode."""
    monkeypatch.setattr(prompt_columns, "TOKENS_OF_ONE", 6)
    replayed, other = (ByHand(path, rows=prompting.ROWS) for _ in range(2))
    for hand in (replayed, other):
        hand.admit(*range(1, prompting.ROWS + 1))
    graphs = prompting.runner_of(replayed, False)
    play, decoded = Play(dict.fromkeys(range(1, prompting.ROWS + 1), 0), None, seed=3), 0
    for _ in range(6):
        plan = play.step()
        bucket = graphs.bucket(plan)
        assert bucket is not None
        with torch.inference_mode():
            got = graphs.replay(plan, bucket)
        wanted = prompting.eager(other, plan, bucket, False)[: len(got.rows)]
        assert torch.equal(got.logits, wanted)
        after = replayed.snapshot()
        for what, tensor in other.snapshot().items():
            assert torch.equal(tensor[:, 1:], after[what][:, 1:]), what
        decoded += len(plan.decode)
    assert decoded
