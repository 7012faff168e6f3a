"""For tests on a GPU: float32 products as they are, and the numbers that tests report, after the run."""

from collections.abc import Iterator

import pytest
import torch
from triton.runtime.jit import JITFunction


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    """TF32 keeps 10 bits of a float32 operand; a comparison with a float32 oracle needs all of them."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


@pytest.fixture
def production() -> None:
    """Undoes what tests/conftest.py sets: the operations that torch picks for users, and no fills of fresh memory."""
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the name of each kernel that meets arguments of a new kind."""
    names: list[str] = []
    compile_kernel = JITFunction._do_compile

    def record(self: JITFunction, *args: object, **kwargs: object) -> object:
        names.append(self.fn.__name__)
        return compile_kernel(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "_do_compile", record)
    return names


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests recorded with `record_property`: errors, drifts, rates."""
    for report in (r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])):
        if report.when == "call" and "tests/gpu/" in report.nodeid:
            for name, value in report.user_properties:
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {name} {value}")
