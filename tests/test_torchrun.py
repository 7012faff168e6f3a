"""Environments that torchrun did not make whole: a typed error, and one line on the command line."""

import socket

import pytest
from torch import distributed
from typer.testing import CliRunner

from hybridrt import LLM
from hybridrt.base.errors import ConfigError, RankError
from hybridrt.cli.app import app
from hybridrt.parallel import rank_start
from hybridrt.parallel.ranks import Ranks
from hybridrt.parallel.torchrun import World, world

WHOLE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"), ("RANK", ""), ("RANK", "-1"), ("RANK", "2"), ("RANK", "²"), ("RANK", "1" * 5000),
        ("WORLD_SIZE", "two"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "1e3"), ("LOCAL_RANK", "x"), ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "0"),
    ],
)  # fmt: skip
def test_a_variable_of_torchrun_that_is_no_such_number_is_one_line(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        LLM("embedded", device="cpu", tp_size=2)
    result = CliRunner().invoke(app, ["generate", "--device", "cpu"], input="x")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1) and name in result.stderr


def test_a_rank_without_a_number_of_ranks_is_none_of_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other launchers and shells set RANK too; standard input was not read then."""
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "x")
    assert world() is None
    result = CliRunner().invoke(app, ["generate", "--device", "cpu", "--max-tokens", "1"], input="def f():")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_store_that_is_not_named_is_an_error_of_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv(name)
    with pytest.raises((ConfigError, RankError), match=name):
        LLM("embedded", device="cpu", tp_size=2)


def test_a_store_whose_port_is_in_use_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        result = CliRunner().invoke(app, ["generate", "x", "--device", "cpu"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.output
    assert "torchrun's store" in result.stderr


def test_a_rank_0_that_does_not_come_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def get(self, name: str) -> bytes:
            raise distributed.DistNetworkError("gone")

    monkeypatch.setattr(rank_start, "_torchrun_store", Lost)
    with pytest.raises(RankError, match="rank 0 did not come"):
        rank_start.torchrun_place(World(1, 2, 1, 2))


def test_ranks_of_one_host_meet_on_it_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_ADDR is set wherever clusters set it for others."""
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    ranks = object.__new__(Ranks)
    ranks._directory = "/a/directory/of/this/host"
    assert ranks.host == "127.0.0.1"
    ranks._directory = None
    assert ranks.host == "192.0.2.1"
