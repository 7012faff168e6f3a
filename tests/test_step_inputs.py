"""What travels to the device in one copy lies aligned there, whatever its lengths are."""

import numpy as np
import pytest
import torch

from hybridrt.kernels.chunk_plan import plan_chunks
from hybridrt.runtime.step_inputs import StagingRing

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


@pytest.mark.parametrize("new", [(1,), (3, 40, 9), (17, 1, 1, 1, 1)])
def test_chunk_plans_start_on_16_bytes(new: tuple[int, ...]) -> None:
    plan = plan_chunks([5] * len(new), new, 8)
    for tensor in (plan.cu_chunk_seqlens, plan.seq_idx, plan.first_chunk, plan.last_chunk):
        assert tensor.storage_offset() % 4 == 0
