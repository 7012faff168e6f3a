"""Sections of the one copy to the device are aligned there, whatever their lengths are."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt.base.config import EngineConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.core.chunk_plan import plan_chunks
from hybridrt.recurrent import backend as linear
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.pack import StagingRing, chunk_names, cut, pack_batch, pack_rows, packed_size
from hybridrt.runtime.step.plan import (
    NO_INTEGERS,
    Admission,
    DecodeRow,
    DecodeRows,
    ExtendRow,
    PageWrite,
    StepPlan,
    int32s,
)
from tests.support.tiny import write_tiny

LENGTHS = [(1, 0, 7, 4), (5, 3, 2, 1), (16, 1, 1, 9), (0, 0, 0, 0)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_sections_start_on_16_bytes(lengths: tuple[int, ...]) -> None:
    """Triton compiles for aligned arguments and again for others: a step must not be the first of its kind."""
    sections = {str(i): np.arange(n, dtype=np.int32) + 10 * i for i, n in enumerate(lengths)}
    found = StagingRing(torch.device("cpu")).upload(sections)
    assert list(found) == list(sections)
    for name, array in sections.items():
        assert found[name].tolist() == array.tolist()
        assert found[name].storage_offset() % 4 == 0


class LateStream:
    """A stream whose work is done when the host waits for it: copies read their sources then."""

    def __init__(self) -> None:
        self.work = list[Callable[[], object]]()

    def drain(self) -> None:
        while self.work:
            self.work.pop(0)()

    def into(self, size: int) -> Any:
        """A tensor of the device."""
        found = torch.zeros(size, dtype=torch.int32)

        def copy_(source: torch.Tensor, non_blocking: bool) -> None:
            assert non_blocking
            self.work.append(lambda: found.__class__.copy_(found, source))

        return SimpleNamespace(numel=found.numel, copy_=copy_, found=found)

    def event(self) -> Any:
        """One of its events; a wait for it does the work in front of it and no more."""
        waits = list[object]()

        def record() -> None:
            waits[:] = [mark := object()]
            self.work.append(lambda: waits.remove(mark) if mark in waits else None)

        def synchronize() -> None:
            while waits:
                self.work.pop(0)()

        return SimpleNamespace(record=record, synchronize=synchronize)


@pytest.mark.parametrize("sizes", [(8,), (8, 24, 20_000, 12)])
def test_staging_is_written_again_once_its_copy_is_done(sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device reads a buffer as late as it may. Copies of all kinds take turns."""
    stream, empty = LateStream(), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **more: empty(*shape, **more))
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    ring, targets = StagingRing(torch.device("cuda")), list[Any]()
    for i in range(17):
        targets.append(into := stream.into(size := sizes[i % len(sizes)]))
        column, line = np.full(size, i, np.int32), np.full(1, i, np.int32)
        copies: tuple[Callable[[], None], ...] = (
            partial(ring.copy_packed, into, column),
            partial(ring.copy, into, {"a": column}),
            partial(ring.copy_rows, into, {"a": line}, {"a": line}, size),
        )
        copies[i % 3]()
        column[:] = line[:] = -1  # what was passed may change at once
    assert len(stream.work) == 2 * 3, "three copies may be under way"
    stream.drain()
    assert [into.found.unique().tolist() for into in targets] == [[i] for i in range(17)]


@pytest.mark.parametrize("new", [(1,), (3, 40, 9), (17, 1, 1, 1, 1)])
def test_chunk_plans_start_on_16_bytes(new: tuple[int, ...]) -> None:
    plan = plan_chunks([5] * len(new), new, 8)
    for tensor in (plan.cu_chunk_seqlens, plan.seq_idx, plan.first_chunk, plan.last_chunk):
        assert tensor.storage_offset() % 4 == 0


def plan_of_three() -> StepPlan:
    decode = DecodeRows.of([DecodeRow(4, 9, 2, [7, 8]), DecodeRow(2, 5, 1), DecodeRow(3, 6, 0, [1], [0])])
    return StepPlan(decode=decode, extend=[ExtendRow(1, 3, [5, 6, 7], 0, False, 8), ExtendRow(5, 0, [9], 4, True)])


@pytest.mark.parametrize("tree", [False, True])
def test_graphs_and_eager_steps_pack_rows_alike(tree: bool) -> None:
    plan = plan_of_three()
    eager = pack_batch(StepPlan(decode=plan.decode), 3, tree)
    padding = pack_rows(DecodeRows.of([DecodeRow(0, 0, 0)]), (), 3, tree, np.array([-1], np.int32))
    rows = pack_rows(plan.decode, (), 3, tree, NO_INTEGERS)
    shapes = {name: (8, *column.shape[1:]) for name, column in padding.items()}
    into = torch.empty(packed_size(shapes), dtype=torch.int32)
    StagingRing(torch.device("cpu")).copy_rows(into, rows, padding, 8)
    padded = {name: section.numpy() for name, section in cut(into, shapes).items()}
    for name, column in padded.items():
        assert column.shape[0] == 8 and np.array_equal(column[:3], eager[name]), name
    assert padded["seq_lens"].tolist() == [12, 8, 9, 3, 3, 3, 3, 3]
    assert padded["new_pages"].tolist() == [-1] * 8
    assert padded["drafts"].tolist()[:3] == [[7, 8], [0, 0], [1, 0]]
    if tree:
        assert padded["parents"].tolist()[2:4] == [[-1, 0, 1], [-1, 0, 1]]
        assert padded["ancestors"].tolist()[0] == [0b1, 0b11, 0b111]


def test_an_eager_step_holds_its_chunks() -> None:
    columns = pack_batch(plan_of_three(), 3, following=True, chunk_sizes=(2, 4))
    assert columns["rows"].tolist() == [4, 2, 3, 1, 5] and columns["seq_lens"].tolist() == [12, 8, 9, 6, 1]
    assert columns["query_start_loc"].tolist() == [0, 3, 6, 9, 12, 13]
    assert columns["extend_positions"].tolist() == [3, 4, 5, 0] and columns["extend_rows"].tolist() == [1, 1, 1, 5]
    assert columns["following_ids"].tolist() == [6, 7, 8, 0]
    assert columns["sample_at"].tolist() == [*range(9), 12] and columns["sample_rows"].tolist() == [4, 2, 3, 5]
    assert columns["output_indices"].tolist() == [2, 1, 0, 4]
    for size in (2, 4):
        plan = plan_chunks([3, 0], [3, 1], size)
        for name, packed in chunk_names(size).items():
            assert columns[packed].tolist() == getattr(plan, name).tolist(), (name, size)


def test_a_prefill_plans_its_chunks_in_the_copy_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy, from pageable memory, would make the host wait."""
    runner = ModelRunner(EngineConfig(str(write_tiny(tmp_path, tokenizer=False)), device="cpu", load_format="dummy"))
    monkeypatch.setattr(linear, "plan_chunks", lambda *_: pytest.fail("a second copy"))
    params, prompt = SamplingParams(temperature=0.0), [5, 6, 7, 8, 9]
    plan = StepPlan(
        [Admission.from_prompt(1, 1, prompt, params, 0)],
        [PageWrite(1, 0, int32s([1]))],
        extend=[ExtendRow(1, 0, prompt, 0, True)],
    )
    assert len(runner.launch(plan).result().tokens) == 1
