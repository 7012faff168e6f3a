"""The one copy of a step to the device: what it holds, and when its memory is written again."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.forward_batch import SpecInfo
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.core.chunk_plan import plan_chunks
from hybridrt.kernels.core.packed import arrays_of, map_arrays, pack_arrays, packed_size, section_starts, unpack
from hybridrt.recurrent import backend as linear
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.pack import (
    DraftArrays,
    StagingRing,
    StepArrays,
    fill_relations,
    pack_rows,
    pack_step,
    spec_info_of,
)
from hybridrt.runtime.step.plan import (
    NO_INTEGERS,
    Admission,
    DecodeRow,
    DecodeRows,
    ExtendRow,
    PageCopy,
    PageWrite,
    StepPlan,
    int32s,
)
from tests.support.page_sets import page_sets
from tests.support.tiny import write_tiny
from tests.support.tree_paths import ancestry


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
            partial(ring.copy, into, [column]),
            partial(ring.copy_rows, into, [line], column, [0]),
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
    decode = DecodeRows.from_rows([DecodeRow(4, 9, 2, [7, 8]), DecodeRow(2, 5, 1), DecodeRow(3, 6, 0, [1], [0])])
    return StepPlan(decode=decode, extend=[ExtendRow(1, 3, [5, 6, 7], 0, False, 8), ExtendRow(5, 0, [9], 4, True)])


@pytest.mark.parametrize("tree", [False, True])
def test_graphs_and_eager_steps_pack_rows_alike(tree: bool) -> None:
    plan = plan_of_three()
    eager = pack_step(StepPlan(decode=plan.decode), 3, forks=tree)
    padding = pack_rows(DecodeRows.from_rows([DecodeRow(0, 0, 0)]), 3, tree, np.array([[-1]], np.int32))
    whole: StepArrays[np.ndarray] = map_arrays(lambda array: array.repeat(8, 0), padding)
    flat, starts = np.empty(packed_size(arrays_of(whole)), np.int32), section_starts(arrays_of(whole))
    pack_arrays(arrays_of(whole), flat)
    into = torch.empty(len(flat), dtype=torch.int32)
    rows = arrays_of(pack_rows(plan.decode, 3, tree, NO_INTEGERS))
    StagingRing(torch.device("cpu")).copy_rows(into, rows, flat, starts)
    padded: StepArrays[torch.Tensor] = unpack(whole, into)
    for array, other in zip(arrays_of(padded), arrays_of(eager), strict=True):
        assert len(array) == 8 and array[:3].tolist() == other.tolist()
    assert padded.seq_lens.tolist() == [12, 8, 9, 3, 3, 3, 3, 3]
    assert padded.new_pages.tolist() == [[-1]] * 8
    assert padded.drafts is not None
    assert padded.drafts.tokens.tolist()[:3] == [[7, 8], [0, 0], [1, 0]]
    assert (padded.drafts.predecessors is None) == (padded.drafts.ancestors is None) == (not tree)
    if padded.drafts.predecessors is not None and padded.drafts.ancestors is not None:
        assert padded.drafts.predecessors.tolist()[2:4] == [[-1, 0, 1], [-1, 0, 1]]
        assert padded.drafts.ancestors.tolist()[0] == [0b1, 0b11, 0b111]


def test_inputs_see_what_they_follow() -> None:
    """Drafts that follow the same token share a position; padding goes on as a chain."""
    drafted = [[0, 0, 1, 1, 4], [0, 1]]
    rows = [DecodeRow(row, 7 * row, 0, [5] * len(p), p) for row, p in enumerate(drafted, 1)]
    arrays = pack_rows(DecodeRows.from_rows(rows), 6, True, NO_INTEGERS)
    drafts: DraftArrays[torch.Tensor] = map_arrays(torch.from_numpy, arrays).drafts
    spec = spec_info_of(drafts, 6)
    assert spec is not None and spec.mask is not None
    places = torch.tensor([[7 * row + i for i in range(6)] for row in (1, 2)], dtype=torch.int32).flatten()
    fill_relations(spec, drafts, 2, places)
    parents = [-1, *drafted[0]], [-1, 0, 1, 2, 3, 4]
    paths = [[ancestry(of_row, node) for node in range(6)] for of_row in parents]
    assert [[mask.nonzero()[:, 0].tolist() for mask in row] for row in spec.mask] == paths
    assert places.tolist() == [7 * (row + 1) + len(path) - 1 for row, of_row in enumerate(paths) for path in of_row]
    predecessors, mask = spec.relations(1)
    assert predecessors is not None and mask is not None
    assert predecessors.tolist() == [parents[0]] and torch.equal(mask, spec.mask[:1])
    assert SpecInfo(6).relations(1) == (None, None) and SpecInfo(6).positions(places) is places


def test_an_eager_step_holds_its_chunks() -> None:
    arrays = pack_step(plan_of_three(), 3, following=True, chunk_sizes=(2, 4))
    prompts = arrays.prompts
    assert prompts is not None and prompts.following_ids is not None
    assert arrays.rows.tolist() == [4, 2, 3, 1, 5] and arrays.seq_lens.tolist() == [12, 8, 9, 6, 1]
    assert prompts.query_start_loc.tolist() == [0, 3, 6, 9, 12, 13]
    assert prompts.positions.tolist() == [3, 4, 5, 0] and prompts.rows.tolist() == [1, 1, 1, 5]
    assert prompts.input_ids.tolist() == [5, 6, 7, 9] and prompts.following_ids.tolist() == [6, 7, 8, 0]
    assert prompts.sample_at.tolist() == [*range(9), 12] and prompts.sample_rows.tolist() == [4, 2, 3, 5]
    assert arrays.output_indices.tolist() == [2, 1, 0, 4]
    for size, chunks in zip((2, 4), prompts.recurrent.chunks, strict=True):
        plan = plan_chunks([3, 0], [3, 1], size)
        for name, array in chunks._asdict().items():
            assert array.tolist() == getattr(plan, name).tolist(), (name, size)


def test_a_step_holds_what_changes_in_tables_and_no_more() -> None:
    params, decode = SamplingParams(temperature=0.0), plan_of_three().decode
    assert pack_step(StepPlan(decode=decode), 3).tables is None
    assert pack_step(StepPlan(page_writes=[PageWrite(1, 0, page_sets([]))]), 1).tables is None, "no page, no write"
    tables = pack_step(
        StepPlan(
            [Admission.from_prompt(3, 7, [5, 6], params, 9), Admission.from_prompt(1, 8, [5], params, 2**40)],
            [
                PageWrite(3, 2, page_sets([40, 30], [4, 3])),
                PageWrite(2, 0, page_sets([], [])),
                PageWrite(1, 5, page_sets([20], [0])),
            ],
            page_copies=[PageCopy(int32s([11, 1]), int32s([12, 2])), PageCopy(int32s([11, 0]), int32s([13, 0]))],
        ),
        1,
    ).tables
    assert tables and tables.admissions and tables.pages and tables.copies
    assert (tables.admissions.rows.tolist(), tables.admissions.state_slots.tolist()) == ([3, 1], [7, 8])
    assert np.ascontiguousarray(tables.admissions.sampling.seeds).view(np.int64).tolist() == [[9], [2**40]]
    assert tables.admissions.sampling.penalties is None and tables.admissions.sampling.rules is None
    assert (tables.pages.rows.tolist(), tables.pages.indices.tolist()) == ([3, 3, 1], [2, 3, 5])
    assert tables.pages.pages.tolist() == [[40, 4], [30, 3], [20, 0]]
    assert (tables.copies.sources.tolist(), tables.copies.targets.tolist()) == ([[11, 1], [11, 0]], [[12, 2], [13, 0]])


def test_a_prefill_plans_its_chunks_in_the_copy_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy, from pageable memory, would make the host wait."""
    runner = ModelRunner(EngineConfig(str(write_tiny(tmp_path, tokenizer=False)), device="cpu", load_format="dummy"))
    monkeypatch.setattr(linear, "plan_chunks", lambda *_: pytest.fail("a second copy"))
    params, prompt = SamplingParams(temperature=0.0), [5, 6, 7, 8, 9]
    plan = StepPlan(
        [Admission.from_prompt(1, 1, prompt, params, 0)],
        [PageWrite(1, 0, page_sets([1]))],
        extend=[ExtendRow(1, 0, prompt, 0, True)],
    )
    assert len(runner.launch(plan).result().tokens) == 1
