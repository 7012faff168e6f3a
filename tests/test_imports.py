"""What importing parts of the package loads: one process imports them one after the other, and says what it saw."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import write_tiny
from tests.test_structure import OPTIONAL, ROOT, SOURCES

HEAVY = ("torch", "transformers", "numpy")
SERVERS = ("fastapi", "uvicorn", "starlette", "prometheus_client", "pydantic")
COMPILER = ("torch._dynamo", "sympy")  # they take more than a second
KERNELS = ("triton", "flashinfer", "mamba_ssm", "sgl_kernel")
# A module of these needs what it is named after.
NEEDS_ONE = re.compile(r"_triton$|kernels\.libraries\.(?!common$)|attention\.(flashinfer|fa3)$|fleet\.ray_replica$")
CODE = f"""
import importlib, json, sys
saw = {{}}
def look(after, *names): saw[after] = [name for name in names if name in sys.modules]
import hybridrt, hybridrt.cli.app
look("command", *{HEAVY})
import hybridrt.parallel.rank_process
look("a rank's process", *{HEAVY})
import hybridrt.cli.openai_server, hybridrt.cli.repl
look("chat with a server", *{HEAVY})
import hybridrt.engine.api.async_llm
look("engine", *{SERVERS})
import torch
from hybridrt.runtime.replay.recording import Recording
recording = Recording(1 << 20)
with torch.inference_mode(), recording:
    torch.nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2)) + 1
assert recording.problem is None
look("recording", *{COMPILER})
from hybridrt.kernels.core.providers import report
rows = report()
look("report", *{KERNELS})
for module in {[module for module in SOURCES if not NEEDS_ONE.search(module)]}: importlib.import_module(module)
look("everything", *{OPTIONAL})
print(json.dumps([saw, [row.op for row in rows], [row.picked for row in rows if row.device == "cpu"]]))
"""

# A first start, with the modules of the child that finds kernels; its argument: a checkpoint without a tokenizer.
START = """
import sys
import hybridrt.runtime.precompile.compile_trace
from hybridrt import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", load_format="dummy", max_model_len=64) as llm:
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
print([name for name in sys.modules if name.partition(".")[0] == "transformers"])
"""


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, list[str]], list[str], list[str]]:
    saw, operations, picked = json.loads(subprocess.check_output([sys.executable, "-c", CODE], text=True, cwd=ROOT))
    return saw, operations, picked


@pytest.mark.parametrize(
    "after", ["command", "a rank's process", "chat with a server", "engine", "recording", "report", "everything"]
)
def test_importing_loads_nothing_that_is_not_needed(after: str, found: tuple[dict[str, list[str]], object]) -> None:
    """Help, version, a chat with a server and the first part of a rank need no torch, the engine no server, a recorded
    step no compiler, and a report on all operations no library of kernels."""
    assert found[0][after] == []


def test_every_operation_is_reported(found: tuple[object, list[str], list[str]]) -> None:
    _, operations, picked = found
    assert {"rms_norm", "sample", "attention_decode"} <= set(operations)
    assert set(picked) == {"torch"}


@pytest.mark.slow
def test_a_start_without_text_does_not_import_transformers(tmp_path: Path) -> None:
    """It takes seconds, more where opening a file is slow."""
    write_tiny(tmp_path, tokenizer=False)
    command = [sys.executable, "-c", START, str(tmp_path)]
    assert subprocess.check_output(command, text=True, cwd=ROOT, stderr=subprocess.PIPE).strip() == "[]"


# What a process that finds kernels does on "meta", then what another package may ask of torch's compiler.
META = """
import sys, torch
from hybridrt.runtime.precompile.no_dynamo import leave_out_dynamo
leave_out_dynamo()
x = torch.empty(4, 6, device="meta")
(x[1:] - 3).index_fill_(0, torch.zeros(1, dtype=torch.long, device="meta"), 1)
print(sum(name.startswith("torch._dynamo") for name in sys.modules))
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist())
import torch._dynamo.config
print(torch._dynamo.is_compiling(), sum(name.startswith("torch._dynamo") for name in sys.modules) > 20)
"""


@pytest.mark.slow
def test_operations_without_data_do_without_the_compiler_of_torch() -> None:
    """It can still be imported afterwards."""
    shown = subprocess.check_output([sys.executable, "-c", META], text=True, cwd=ROOT)
    assert shown.splitlines() == ["1", "[2.0, 2.0]", "False True"]
