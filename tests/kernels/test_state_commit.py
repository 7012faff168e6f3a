import pytest
import torch

from hybridrt.kernels.records import IntermediateStates
from hybridrt.kernels.state_commit import commit_intermediate
from tests.support.mamba2_oracle import changed_rows, int32, poisoned, same_bytes

pytestmark = pytest.mark.usefixtures("provider")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copies_the_last_accepted_state_of_each_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    temporal, intermediate = poisoned(40, 3, 7, 5, dtype=dtype), torch.randn(6, 4, 3, 7, 5).to(dtype)
    before = temporal.clone()
    stored = IntermediateStates(intermediate, int32(5, 3, 1, 2))
    commit_intermediate(temporal, stored, int32(39, -1, 2, 7), int32(4, 2, 1, 0))
    assert same_bytes(temporal[39], intermediate[5, 3]) and same_bytes(temporal[2], intermediate[1, 0])
    assert changed_rows(before, temporal) == {2, 39}


def test_states_of_more_than_a_block() -> None:
    torch.manual_seed(1)
    temporal, intermediate = poisoned(3, 5, 30, 61), torch.randn(2, 2, 5, 30, 61)
    commit_intermediate(temporal, IntermediateStates(intermediate, int32(1)), int32(1), int32(2))
    assert same_bytes(temporal[1], intermediate[1, 1]) and temporal[2].isnan().all()
