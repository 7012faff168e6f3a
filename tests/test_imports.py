"""What importing parts of the package loads: one process imports them one after the other, and says what it saw."""

import json
import re
import subprocess
import sys

import pytest

from tests.test_structure import OPTIONAL, ROOT, SOURCES

HEAVY = ("torch", "transformers", "numpy")
SERVERS = ("fastapi", "uvicorn", "starlette", "prometheus_client", "pydantic")
KERNELS = ("triton", "flashinfer", "mamba_ssm", "sgl_kernel")
# A module of these needs what it is named after.
NEEDS_ONE = re.compile(r"_triton$|kernels\.libraries\.(?!common$)|attention\.(flashinfer|fa3)$")
CODE = f"""
import importlib, json, sys
saw = {{}}
def look(after, *names): saw[after] = [name for name in names if name in sys.modules]
import hybridrt, hybridrt.cli.app
look("command", *{HEAVY})
import hybridrt.engine.async_llm
look("engine", *{SERVERS})
from hybridrt.kernels.providers import report
rows = report()
look("report", *{KERNELS})
for module in {[module for module in SOURCES if not NEEDS_ONE.search(module)]}: importlib.import_module(module)
look("everything", *{OPTIONAL})
print(json.dumps([saw, [row.op for row in rows], [row.picked for row in rows if row.device == "cpu"]]))
"""


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, list[str]], list[str], list[str]]:
    saw, operations, picked = json.loads(subprocess.check_output([sys.executable, "-c", CODE], text=True, cwd=ROOT))
    return saw, operations, picked


@pytest.mark.parametrize("after", ["command", "engine", "report", "everything"])
def test_importing_loads_nothing_that_is_not_needed(after: str, found: tuple[dict[str, list[str]], object]) -> None:
    """Help and version need no torch, the engine no server, a report on all operations no library of kernels."""
    assert found[0][after] == []


def test_every_operation_is_reported(found: tuple[object, list[str], list[str]]) -> None:
    _, operations, picked = found
    assert {"rms_norm", "sample", "attention_decode"} <= set(operations)
    assert set(picked) == {"torch"}
