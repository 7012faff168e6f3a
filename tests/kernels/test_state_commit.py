import pytest
import torch

from hybridrt.kernels.core.records import IntermediateStates
from hybridrt.kernels.state.state_commit import commit_conv_window, commit_intermediate
from tests.support.mamba2_oracle import changed_rows, int32, poisoned, same_bytes

pytestmark = pytest.mark.usefixtures("provider")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copies_the_last_accepted_state_of_each_row_in_all_layers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    temporal, intermediate = (
        torch.stack([poisoned(40, 3, 7, 5, dtype=dtype) for _ in range(2)]),
        torch.randn(2, 6, 4, 3, 7, 5).to(dtype),
    )
    before = temporal.clone()
    stored = IntermediateStates(intermediate, int32(5, 3, 1, 2))
    commit_intermediate(temporal, stored, int32(39, -1, 2, 7), int32(4, 2, 1, 0))
    for layer, was, kept in zip(temporal, before, intermediate):
        assert same_bytes(layer[39], kept[5, 3]) and same_bytes(layer[2], kept[1, 0])
        assert changed_rows(was, layer) == {2, 39}


def test_states_of_more_than_a_block() -> None:
    torch.manual_seed(1)
    temporal, intermediate = poisoned(3, 5, 30, 61)[None], torch.randn(1, 2, 2, 5, 30, 61)
    commit_intermediate(temporal, IntermediateStates(intermediate, int32(1)), int32(1), int32(2))
    assert same_bytes(temporal[0, 1], intermediate[0, 1, 1]) and temporal[0, 2].isnan().all()


@pytest.mark.parametrize("channels", [5, 300])
def test_the_inputs_in_front_of_a_node_enter_the_rings(channels: int) -> None:
    """Two layers, rings of 8 columns, windows of 3 inputs: at the head of a text, across the end of a ring, and padding
    of both kinds."""
    torch.manual_seed(2)
    conv, windows = torch.stack([poisoned(9, channels, 8) for _ in range(2)]), torch.randn(2, 6, 4, channels, 3)
    before, stored = conv.clone(), IntermediateStates(windows, int32(5, 3, 1, 2))
    commit_conv_window(conv, stored, int32(8, -1, 2, 7), int32(4, 2, 1, 0), int32(17, 4, 1, 6))
    for rings, was, kept in zip(conv, before, windows):
        assert same_bytes(rings[8, :, [7, 0, 1]], kept[5, 3]) and same_bytes(rings[2, :, [7, 0, 1]], kept[1, 0])
        assert changed_rows(was, rings) == {2, 8}
        assert same_bytes(rings[8, :, 2:7], was[8, :, 2:7]), "other columns stay"
