"""For all tests: one thread (the tensors are tiny), uninitialised memory that shows, checkpoints made once.

Kernel tests run under Triton's interpreter where there is no CUDA device. The interpreter is chosen when triton is
imported, hence here, before any test module.
"""

import atexit
import gc
import logging
import os
import random
import sys
from collections.abc import Generator, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
import typer.testing

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of the many processes would compile all files again
os.environ.setdefault("HYBRIDRT_COMPILE_WORKERS", "0")  # tiny models need few kernels, and tests start many
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: idle threads spin on others' cores
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)  # each HTTP client would read all certificates, for 30 ms
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton

from hybridrt.base import plugins
from hybridrt.kernels.core import launch_choice, providers
from tests.support import interpreter, ties
from tests.support.third import Third

if TYPE_CHECKING:
    from tests.support.checkpoints import CheckpointStore

torch.set_num_threads(1)
# pytest adds two handlers to each logger that does not propagate, and removes them, three times a test. torch has 50.
for name in [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]:
    logging.getLogger(name).propagate = True
# Each start of an engine would read files of all installed packages, for 20 ms, and each `invoke` build all commands.
plugins.entry_points = cache(plugins.entry_points)
if hasattr(typer.testing, "_get_command"):
    typer.testing._get_command = cache(typer.testing._get_command)
sys.dont_write_bytecode = False
if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.spare()


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """torch.empty and its kin give NaN (integers: their largest value), so that a read of memory that was never written
    shows."""
    # torch.use_deterministic_algorithms also imports Inductor and Dynamo, for a second a process.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _logs_end_with_their_test() -> Iterator[None]:
    """`serve` within this process writes to a standard error that pytest closes."""
    loggers = [logging.getLogger(name) for name in (None, "uvicorn", "hybridrt.access")]
    found = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, found, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        if logger.level != level:  # to set a level goes through all loggers
            logger.setLevel(level)


@pytest.fixture(autouse=True)
def _choices_of_launches_are_looked_up_again() -> Iterator[None]:
    """They are kept for each shape, and a test may have changed a built-in table."""
    yield
    launch_choice._tuned.clear()
    for launch in launch_choice.LAUNCHES.values():
        launch._found.clear()


@pytest.fixture(scope="module", autouse=True)
def _collections_are_short() -> Iterator[None]:
    """What is left when a module ends (libraries, checkpoints, oracles) lives to the end. Collections of later modules
    do not go through it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> "CheckpointStore":
    """Tiny checkpoints by name (tests.support.checkpoints.CASES), each written once."""
    from tests.support.checkpoints import CheckpointStore  # transformers takes seconds to import

    return CheckpointStore(tmp_path_factory.mktemp("checkpoints"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--third", metavar="TEXT", help="run a third of the tests; TEXT, such as a commit's id, decides which third"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (text := config.getoption("--third")) is not None:
        config.pluginmanager.register(Third(text))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """On a CPU the whole suite runs in two processes, and files that are named in one; `-n` changes both."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.pluginmanager.has_plugin("xdist"):
        return  # in one of those processes, or without pytest-xdist
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and config.option.numprocesses is None and not torch.cuda.is_available():
        config.option.numprocesses = 2
        config.option.dist = "worksteal"  # neighbours share fixtures, so each process begins with half of the list


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is left to the soak level is not slow, too: one mark may be a parameter's, the other one the test's."""
    for item in items:
        if any(mark.name == "soak" for mark in item.own_markers):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Libraries and collected tests live to the end: the collector need not go through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    atexit.register(gc.unfreeze)  # libraries complain of objects that are left; pytest's collections come before
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ties"] = [ties.COMPARED[0], ties.FOUND]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Counts what a process of `pytest -n` saw."""
    compared, found = getattr(node, "workeroutput", {}).get("ties", (0, []))
    ties.COMPARED[0] += compared
    ties.FOUND.extend(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How often a greedy token differed from transformers' at a tie."""
    if ties.COMPARED[0]:
        found = f"{len(ties.FOUND)} of {ties.COMPARED[0]} greedy tokens differed from transformers', all at ties"
        terminalreporter.write_line(f"{found}: {ties.FOUND[:8]}" if ties.FOUND else found)


def _interpreter_problem() -> str | None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton compiles for the GPU here; the interpreter needs TRITON_INTERPRET=1"
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    if old and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        return f"the interpreter of Triton {triton.__version__} does not work with NumPy {numpy.__version__}"
    return None


PROVIDERS = ["torch", "triton-shuffled", pytest.param("triton", marks=pytest.mark.soak)]


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test with the torch path of every operation, and with the Triton kernels where they exist, in a shuffled
    order of their programs. The interpreter runs one after another, and their own order hides races. It would be the
    same computation again, so it is left to the soak level."""
    if request.param != "torch":
        if problem := _interpreter_problem():
            pytest.skip(problem)
        monkeypatch.setattr(
            providers,
            "_overrides",
            lambda: {op: "triton" for op, by in providers._IMPLEMENTATIONS.items() if "triton" in by},
        )
    if request.param == "triton-shuffled":
        _shuffle_programs(monkeypatch)
    providers.select.cache_clear()
    yield request.param
    providers.select.cache_clear()


def _shuffle_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    place, rng = builder.set_grid_idx, random.Random(0)
    order: dict[tuple[int, ...], list[int]] = {}

    def shuffled(x: int, y: int, z: int) -> None:
        columns, depth = builder.grid_dim[1:]
        count = builder.grid_dim[0] * columns * depth
        programs = order.setdefault(tuple(builder.grid_dim), rng.sample(range(count), count))
        program = programs[(x * columns + y) * depth + z]
        place(program // (columns * depth), program // depth % columns, program % depth)

    monkeypatch.setattr(builder, "set_grid_idx", shuffled)
