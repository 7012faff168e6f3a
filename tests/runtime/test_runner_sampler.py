"""Rows of a batch draw with their own constants, in whatever order they stand."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.core.packed import map_arrays
from hybridrt.parallel.messages import decode, encode
from hybridrt.runtime.sampling.sampler import Sampler, used_parts
from hybridrt.runtime.step.plan import Admission, StepPlan
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
    admissions = [
        Admission.from_prompt(row, row, [row, 5], params, 100 + row, None, [9, 9]) for row, params in PARAMS.items()
    ]
    arrays = map_arrays(torch.from_numpy, SamplingTable.pack(admissions))
    table.enter_rows(torch.tensor(list(PARAMS)), arrays)
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
        admission = Admission.from_prompt(2, 2, prompt, SamplingParams(presence_penalty=1.0), 0, None, output)
        arrays = map_arrays(torch.from_numpy, SamplingTable.pack([admission]))
        table.enter_rows(torch.tensor([2]), arrays)
        assert table.prompt_mask[2].nonzero().flatten().tolist() == prompt
        assert table.output_counts[2].nonzero().flatten().tolist() == sorted(set(output))
        assert int(table.output_counts[2].sum()) == len(output)


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=60)
PENALTY = st.sampled_from([-1.5, 0.0, 0.5, 2.0])


@settings(max_examples=40, deadline=None)
@given(
    prompt=TOKENS.filter(bool), output=TOKENS, presence=PENALTY, frequency=PENALTY,
    repetition=st.sampled_from([0.5, 1.0, 1.7]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_penalties_are_those_of_all_tokens_of_a_request(
    prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float, seed: int
) -> None:
    """On every rank, also for a request that comes back with output, and on a row that had a tenant before."""
    params = SamplingParams(
        temperature=0.0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    table = SamplingTable(2, VOCAB, torch.device("cpu"))
    others = SamplingParams(presence_penalty=1.0)
    for admissions in (
        [Admission.from_prompt(2, 2, [*range(VOCAB)], others, 0, None, [*range(VOCAB)])],
        [Admission.from_prompt(1, 1, [3], others, 0), Admission.from_prompt(2, 1, prompt, params, 0, None, output)],
    ):
        found = decode(encode(StepPlan(admissions))).admissions
        table.enter_rows(torch.tensor([a.row for a in found]), map_arrays(torch.from_numpy, SamplingTable.pack(found)))
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed))
    wanted = logits.clone()
    for token in {*prompt, *output}:
        column = wanted[:, token]
        column = torch.where(column > 0, column / repetition, column * repetition)
        wanted[:, token] = column - frequency * output.count(token) - presence * (token in output)
    rows = torch.full((5,), 2, dtype=torch.int32)
    drawn = Sampler(table)(logits, rows, rows, used_parts([params]))
    assert drawn.tolist() == wanted.argmax(1).tolist()
