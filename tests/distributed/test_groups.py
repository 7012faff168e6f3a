"""What ranks hold of a model, and the environment in which their groups are made."""

import os

import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.collectives.groups import TPGroup, _loopback_if
from hybridrt.layers.norm import SharedRMSNorm
from hybridrt.layers.weights import Build

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def test_the_environment_is_put_back_after_the_last_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread makes its groups while another one still makes its own."""
    monkeypatch.setenv(NAMES[0], "eth7")
    monkeypatch.delenv(NAMES[1], raising=False)
    first, second = _loopback_if(True), _loopback_if(True)
    with _loopback_if(False):
        assert os.environ[NAMES[0]] == "eth7"
    first.__enter__()
    second.__enter__()
    assert all(os.environ[name].startswith("lo") for name in NAMES)
    first.__exit__(None, None, None)
    assert all(os.environ[name].startswith("lo") for name in NAMES)
    second.__exit__(None, None, None)
    assert os.environ[NAMES[0]] == "eth7" and NAMES[1] not in os.environ


@pytest.mark.parametrize(
    ("ranks", "count", "shards", "text"),
    [
        (3, 2, 2, "2 KV heads in 2 shards .* tp_size=3 ranks; make tp_size a divisor of 2 or a multiple of 2"),
        (2, 3, 2, "3 KV heads cannot be cut into 2 equal shards for tp_size=2; lower tp_size to a divisor of 3"),
    ],
)
def test_what_ranks_cannot_hold_alike_says_what_they_can(ranks: int, count: int, shards: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TPGroup(0, ranks).divide("KV heads", count, shards)
    assert TPGroup(0, 4).divide("KV heads", 2, 2) == 1


def test_a_norm_over_ranks_refuses_a_residual() -> None:
    """It would be left out."""
    build = Build(TPGroup(0, 2), torch.float32, torch.device("cpu"))
    x = torch.ones(3, 4)
    with pytest.raises(AssertionError, match="takes no residual"):
        SharedRMSNorm("norm", 8, 1e-5, shards=2, build=build)(x, x)
    whole = SharedRMSNorm("norm", 4, 1e-5, shards=1, build=build)
    assert torch.equal(whole(x, x)[1], torch.full((3, 4), 2.0))
