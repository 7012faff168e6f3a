"""Rows of a batch draw with their own constants, in whatever order they stand."""

from collections.abc import Sequence

import pytest
import torch

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.core.packed import map_arrays
from hybridrt.runtime.sampling.sampler import Sampler, used_parts
from hybridrt.runtime.step.plan import Admission
from hybridrt.runtime.step.sampling_table import SamplingTable

pytestmark = pytest.mark.usefixtures("provider")
VOCAB = 40
PARAMS = {
    3: SamplingParams(temperature=0.0),
    1: SamplingParams(temperature=1.5, top_p=0.8, seed=1),
    6: SamplingParams(temperature=0.6, top_k=5, min_p=0.1, repetition_penalty=1.5, seed=2),
    2: SamplingParams(temperature=1.0, presence_penalty=2.0, frequency_penalty=-1.0, seed=3),
}


def draw(rows: Sequence[int], logits: torch.Tensor) -> list[int]:
    """One token for each row, out of a table that all rows were admitted to."""
    table = SamplingTable(7, VOCAB, torch.device("cpu"))
    admissions = [Admission(row, row, [row, 5, 9, 9], 2, params, 100 + row) for row, params in PARAMS.items()]
    arrays = map_arrays(torch.from_numpy, SamplingTable.pack(admissions))
    table.admit(torch.tensor(list(PARAMS)), arrays)
    index = torch.tensor(rows, dtype=torch.int32)
    parts = used_parts(PARAMS.values())
    return Sampler(table)(logits[index.long()], index, index + 10, parts).tolist()


def test_a_row_draws_in_a_batch_what_it_draws_alone() -> None:
    torch.manual_seed(0)
    for _ in range(4):
        logits = torch.randn(7, VOCAB) * 3
        together = draw((2, 3, 6, 1), logits)
        assert together == [draw((row,), logits)[0] for row in (2, 3, 6, 1)]


def test_a_new_tenant_of_a_row_forgets_the_old_ones_tokens() -> None:
    table = SamplingTable(3, VOCAB, torch.device("cpu"))
    for prompt, output in (([4, 5], [6, 6]), ([7], [])):
        admission = Admission(2, 2, [*prompt, *output], len(prompt), SamplingParams(presence_penalty=1.0), 0)
        arrays = map_arrays(torch.from_numpy, SamplingTable.pack([admission]))
        table.admit(torch.tensor([2]), arrays)
        assert table.prompt_mask[2].nonzero().flatten().tolist() == prompt
        assert table.output_counts[2].nonzero().flatten().tolist() == sorted(set(output))
        assert int(table.output_counts[2].sum()) == len(output)
