"""What runs by default, and in how many processes."""

from types import SimpleNamespace

import pytest
import torch

from tests.conftest import pytest_cmdline_main
from tests.support.levels import sweep

Source = pytest.Config.ArgsSource


@pytest.mark.parametrize(
    ("source", "asked", "environment", "cuda", "wanted"),
    [
        (Source.TESTPATHS, None, {}, False, (2, "worksteal")),
        (Source.ARGS, None, {}, False, (None, "no")),
        (Source.TESTPATHS, 4, {}, False, (4, "no")),
        (Source.TESTPATHS, None, {}, True, (None, "no")),
        (Source.TESTPATHS, None, {"PYTEST_XDIST_WORKER": "gw0"}, False, (None, "no")),
    ],
    ids=["whole suite", "named files", "-n 4", "a GPU", "within a process of two"],
)
def test_a_whole_run_on_a_cpu_takes_two_processes(
    monkeypatch: pytest.MonkeyPatch, source: Source, asked: int | None, environment: dict[str, str], cuda: bool,
    wanted: tuple[int | None, str],
) -> None:  # fmt: skip
    """A process of the two that started two more would never come to an end."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    option = SimpleNamespace(numprocesses=asked, dist="no")
    plugins = SimpleNamespace(has_plugin=lambda name: name == "xdist")
    pytest_cmdline_main(SimpleNamespace(args_source=source, option=option, pluginmanager=plugins))  # type: ignore[arg-type]
    assert (option.numprocesses, option.dist) == wanted


def test_what_a_sweep_leaves_out_is_slow() -> None:
    found = sweep([1, (2,), 3, 4, 5], 2)
    assert [each.values for each in found] == [(1,), (2,), (3,), (4,), (5,)]
    assert [bool(each.marks) for each in found] == [False, True, False, True, False]
    assert {mark.name for each in found for mark in each.marks} == {"slow"}
