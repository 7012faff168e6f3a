"""What runs by default, and in how many processes."""

import gc
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from hypothesis import strategies as st

from tests.conftest import PROVIDERS, pytest_cmdline_main, pytest_collection_modifyitems
from tests.kernels.conftest import pytest_collection_modifyitems as kernel_levels
from tests.support.lazily import lazily
from tests.support.levels import draw, drawn, examples, sweep

Source = pytest.Config.ArgsSource


class Collected:
    """What a collected test says of itself."""

    def __init__(self, path: Path, name: str, params: dict[str, object], *marks: str) -> None:
        self.path, self.nodeid, self.params, self.found = path, name, params, [*marks]
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.found else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.found.append(mark.name)


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
    marks = [[mark.name for mark in each.marks] for each in sweep(range(5), 2, 3)]
    assert marks == [[], ["slow"], [], ["soak"], ["soak"]]
    marks = [[mark.name for mark in each.marks] for each in sweep(range(5), 5)]
    assert marks == [[], ["slow"], ["soak"], ["slow"], ["soak"]]
    marks = [[mark.name for mark in each.marks] for each in sweep(range(7), 4, thin=2)]
    assert marks == [[], ["soak"], ["slow"], ["soak"], [], ["soak"], ["slow"]]


def test_a_thin_draw_leaves_values_to_the_soak_level() -> None:
    slow = [each.values for each in drawn("abcde", 5, 4, 10, thin=2) if "slow" in [mark.name for mark in each.marks]]
    assert slow == [("a", 10), ("c", 10), ("e", 10)]
    soak = [each.values for each in drawn("abcde", 5, 4, 10, thin=2) if "soak" in [mark.name for mark in each.marks]]
    assert [name for name, _ in soak] == [*"abcde"]


def test_a_grid_of_a_kernel_is_in_three_levels() -> None:
    """Each value of each parameter is in each of them."""
    file = Path(__file__).with_name("kernels") / "test_x.py"
    items = [Collected(file, f"test_x[{provider}-{a}-{b}]", {"provider": provider, "a": a, "b": b})
             for provider in ("torch", "triton") for a in range(3) for b in range(3)]  # fmt: skip
    few = [Collected(file, f"test_few[{a}]", {"a": a}) for a in range(4)]
    slow = [Collected(file, f"test_slow[{a}]", {"a": a}, "slow") for a in range(6)]
    kernel_levels([*items, *few, *slow])  # type: ignore[arg-type, list-item]
    assert [item.params["a"] for item in slow if item.found == ["slow"]] == [0, 3, 4]
    assert [item.params["a"] for item in slow if item.found == ["slow", "soak"]] == [1, 2, 5]
    assert not any(item.found for item in few)
    for provider in ("torch", "triton"):
        for level in ([], ["slow"], ["soak"]):
            kept = [item.params for item in items if item.found == level and item.params["provider"] == provider]
            assert {each["a"] for each in kept} == {each["b"] for each in kept} == {0, 1, 2}


def test_each_level_draws_more() -> None:
    found = [(each.values, [mark.name for mark in each.marks]) for each in drawn("abc", 2, 4, 10)]
    slow, soak = ([((name, count), [mark]) for name in "abc"] for count, mark in ((10, "slow"), (50, "soak")))
    assert found == [(("a", 4), []), (("c", 4), []), *slow, *soak]
    found = [(each.values, [mark.name for mark in each.marks]) for each in drawn("abc", 2, 4, 4)]
    assert found[:3] == [(("a", 4), []), (("c", 4), []), (("b", 4), ["slow"])], "not what the default level draws"
    assert [marks for _, marks in found[3:]] == [["soak"]] * 3
    found = [(each.values, [mark.name for mark in each.marks]) for each in drawn("ab", 2, 4, 1)]
    assert found == [(("a", 4), []), (("b", 1), ["slow"]), (("a", 20), ["soak"]), (("b", 20), ["soak"])]


def test_properties_draw_more_in_the_slow_level() -> None:
    quick, *more = examples(3, 17).args[1]
    assert quick == 3 and [(each.values, *[mark.name for mark in each.marks]) for each in more] == [
        ((4,), "slow"), ((17,), "soak"),
    ]  # fmt: skip
    drawn_numbers: list[int] = []

    def note(number: int) -> None:
        drawn_numbers.append(number)

    draw(3, note, st.integers(), derandomize=True)
    assert len(drawn_numbers) == 3


def test_what_is_left_to_the_soak_level_does_not_run_in_the_slow_one(request: pytest.FixtureRequest) -> None:
    """One mark may be the provider's, the other one the test's."""
    item = pytest.Function.from_parent(request.node.parent, name="one", callobj=lambda: None)
    item.add_marker("slow")
    item.add_marker("soak")
    pytest_collection_modifyitems([item])
    assert [each.name for each in item.own_markers] == ["soak"]


def test_kernels_run_in_a_shuffled_order_in_every_level_but_the_last() -> None:
    values = {getattr(each, "values", (each,))[0]: [m.name for m in getattr(each, "marks", ())] for each in PROVIDERS}
    assert values == {"torch": [], "triton-shuffled": [], "triton": ["soak"]}


def test_what_pytest_asks_of_a_global_loads_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    module = lazily("wave")
    assert not any(hasattr(module, name) for name in ("_mock_name", "__wrapped__", "__bases__"))
    assert "wave" not in sys.modules
    assert module.Error is importlib.import_module("wave").Error
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        lazily("no_such_library")


def test_processes_share_byte_code() -> None:
    assert not sys.dont_write_bytecode and "PYTHONDONTWRITEBYTECODE" not in os.environ


def test_the_garbage_collector_rests_during_collection_alone() -> None:
    assert gc.isenabled() and gc.get_freeze_count()


def test_clients_read_no_certificates() -> None:
    assert httpx.create_ssl_context().get_ca_certs() == []
