"""The arrays of a step that is padded to a bucket: filled in place, step after step, and equal to plain ones."""

import random
from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np
import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.core.chunk_plan import chunk_lists
from hybridrt.kernels.core.packed import Record, arrays_of
from hybridrt.runtime.step.pack_padded import Bucket, PaddedStep, StateSaves
from hybridrt.runtime.step.plan import Admission, ExtendRow, PageWrite, StepPlan
from tests.support.page_sets import page_sets
from tests.support.plain_arrays import pack_plainly
from tests.support.prompt_steps import Play

SPARE = 50  # the first state slot that belongs to no row
CASES = list(product(StateSaves, ((16,), (64, 256), ()), (0, 1)))


def steps(bucket: Bucket, saves: StateSaves, seed: int, groups: int) -> Iterator[StepPlan]:
    """Steps that fit a bucket, with admissions, page writes and cached states; one fills it, and one is of decode rows
    and one token."""
    draw, rows = random.Random(seed), range(1, 30)
    play = Play(
        dict.fromkeys(rows, 0), SPARE if saves.most else None, seed, tokens=bucket.tokens, longest=2000,
        decoding=bucket.decode_rows, prompts=bucket.prompts, most_saves=saves.most,
    )  # fmt: skip
    yield StepPlan(extend=[ExtendRow(1, 0, [7] * bucket.tokens, 0, True)])
    for _ in range(12):
        plan = play.step()
        plan.extend = [
            msgspec.structs.replace(
                row, read_state_slot=draw.choice((0, 9)), output_index=draw.randrange(5),
                mrope=draw.choice((None, np.tile(np.arange(len(row.tokens), dtype=np.int32) + 3, (3, 1)))),
            )
            for row in plan.extend
        ]  # fmt: skip
        for row in draw.sample(rows, draw.randint(0, bucket.prompts)):
            params = SamplingParams(temperature=draw.random(), top_p=0.5, top_k=draw.randint(1, 9))
            prompt, seed = list(range(row, 70)), draw.randrange(2**63)
            plan.admissions.append(Admission.from_prompt(row, row + 1, prompt, params, seed))
        for row in draw.sample(rows, draw.randint(0, 4)):
            count = draw.randint(1, 60)
            pages = page_sets(*[[draw.randrange(1, 5000) for _ in range(count)] for _ in range(groups)])
            plan.page_writes.append(PageWrite(row, draw.randrange(40), pages))
        yield plan
    yield StepPlan(decode=plan.decode, extend=[ExtendRow(2, 5, [3], 1, False)])


@pytest.mark.parametrize(("bucket", "groups"), [(Bucket(0, 128), 1), (Bucket(8, 320), 2)])
@pytest.mark.parametrize(("saves", "sizes", "fill"), CASES)
def test_arrays_that_are_filled_again_equal_plain_ones(
    saves: StateSaves, sizes: tuple[int, ...], fill: int, bucket: Bucket, groups: int
) -> None:
    """Nothing of an earlier step is left. All arrays are views of what is copied to the device."""
    mrope = groups == 2
    padded, seen = PaddedStep(bucket, sizes, saves, fill, groups, mrope=mrope), set[int]()
    for plan in steps(bucket, saves, len(sizes), groups):
        padded.pack(plan)
        wanted = pack_plainly(plan, bucket, sizes, saves, fill, groups, mrope)
        arrays, plain = arrays_of(padded.arrays), arrays_of(wanted)
        assert shape_of(padded.arrays) == shape_of(wanted)
        for i, (array, other) in enumerate(zip(arrays, plain, strict=True)):
            assert array.dtype == np.int32 and np.array_equal(array, other), i
            assert np.shares_memory(array, padded.flat) or not array.size
            seen |= {i} if other.any() else set()
    zero = {i for i, array in enumerate(arrays) if array.size} - seen
    assert len(zero) <= 2 * len(sizes), "of the tables and the prompts, every array has been used"


def shape_of(record: Record) -> Record:
    """The parts of a record and the shapes of its arrays."""
    return type(record), *(p if p is None else shape_of(p) if isinstance(p, tuple) else p.shape for p in record)


def test_chunks_end_where_states_are_saved_and_nowhere_twice() -> None:
    """Of 8 tokens: a request after 5 others, one that saves at the end of a chunk, one without tokens, one that saves
    its first token's state."""
    plan = chunk_lists([5, 0, 3, 6], [9, 16, 0, 4], 8, [(7, 0), (8, 0), (0, 0), (1, 0)])
    assert plan.cu_chunk_seqlens == [0, 3, 7, 9, 17, 25, 26, 27, 29]
    assert plan.seq_idx == [0, 0, 0, 1, 1, 3, 3, 3]
    assert (plan.first_chunk, plan.last_chunk) == ([0, 3, 0, 5], [2, 4, -1, 7])
    assert chunk_lists([5], [9], 8) == chunk_lists([5], [9], 8, [()]) != chunk_lists([5], [9], 8, [(7,)])
    assert chunk_lists([5], [9], 8, [(2, 7)]).cu_chunk_seqlens == [0, 2, 3, 7, 9]
