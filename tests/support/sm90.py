"""Compiles the Triton kernels of operations for sm_90, without a GPU, and prints what they need of the hardware.

    echo TABLE | python -m tests.support.sm90 [GPU]

GPU is a name of `hybridrt.base.device.KNOWN`: tiles are those of this GPU, and kernels are compiled for it. What does
not compile is a line with an error. TABLE is one of `sm90_cases.py`, "optional" or "optional whole". Of a table of
`sm90_cases.py` for sm_90 each thirteenth launch of a kernel is compiled, unless " whole" follows its name. Each line
that is read is one, and an empty line ends what is printed of it. It runs where Triton's interpreter is off, so tests
start it as another process.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.errors import PTXASError
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from hybridrt.base.device import GPUFacts, known_gpu
from hybridrt.kernels.core import providers
from hybridrt.runtime.precompile.pretend_gpu import pretended
from tests.support.flat import flat
from tests.support.sm90_cases import TABLES as PLAIN_TABLES
from tests.support.sm90_codes import coded_attention
from tests.support.sm90_demanding import demanding
from tests.support.sm90_optional import others, recurrent
from tests.support.sm90_states import coded_states

TABLES = PLAIN_TABLES | {"codes": coded_attention, "states": coded_states, "demanding": demanding}
WHOLE = " whole"  # ends the name of a table of which all is compiled
EVERY = 13  # of so many launches of a kernel one is compiled, and the first one
SM90 = (9, 0)
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
_OPTIONS = ("launch_pdl", "num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True)
class Usage:
    """Of a compiled kernel: registers of a thread, its bytes of stack (spills), bytes of a program's shared memory."""

    module: str
    kernel: str
    registers: int
    stack: int
    shared: int


class FrontEndPassed(Exception):
    """Triton's front end took a kernel: its branches and types fit the arguments."""


@contextmanager
def launches(do: Callable[[JITFunction, Any, dict[str, Any]], object]) -> Iterator[None]:
    """Within it, launching a kernel calls `do` with the kernel and its arguments instead.

    Call the launchers with tensors on the "meta" device.
    """
    run = JITFunction.run

    def instead(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        do(self, args, kwargs)

    JITFunction.run = instead
    try:
        yield
    finally:
        JITFunction.run = run


@contextmanager
def front_end_alone() -> Iterator[None]:
    """Within it, a compilation that Triton's cache does not have ends with FrontEndPassed before it gets to the GPU's
    own code, which takes nine tenths of the time."""
    add = CUDABackend.add_stages

    def stop(*_: Any) -> None:
        raise FrontEndPassed

    def first_alone(self: CUDABackend, stages: dict[str, Any], *args: Any) -> None:
        add(self, stages, *args)
        stages.update(dict.fromkeys(list(stages)[1:], stop))

    CUDABackend.add_stages = first_alone
    try:
        yield
    finally:
        CUDABackend.add_stages = add


def cases(table: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cases of a table. Those of "optional" come without optional arguments and with them, for every operation."""
    if not table.startswith("optional"):
        yield from TABLES[table.removesuffix(WHOLE)]()
        return
    left = {op for op, by in providers._IMPLEMENTATIONS.items() if "triton" in by}
    for op, args, optional in (*recurrent(), *others()):
        yield op, args
        if optional:
            yield op, args | optional
        left.discard(op)
    assert not left, f"operations without a call: {left}"


def main(gpu: GPUFacts | None) -> None:
    """`gpu`: None for sm_90, with tiles of a GPU that starts no kernel early."""
    providers._import_operations()
    with nullcontext() if gpu is None else pretended(gpu):
        for line in sys.stdin:
            compile_all(line.strip(), gpu)
            print(flush=True)


def compile_all(table: str, gpu: GPUFacts | None) -> None:
    elsewhere: set[JITFunction] = set()  # kernels that other tables compile for the GPU, at the sizes of real models
    few, seen = gpu is None and table in TABLES, Counter[JITFunction]()
    if table == "optional":
        with launches(lambda fn, *_: elsewhere.add(fn)):
            for other in TABLES:
                call_all(other)

    def compile_it(fn: JITFunction, args: Any, kwargs: dict[str, Any]) -> None:
        seen[fn] += 1
        if few and (seen[fn] - 1) % EVERY:
            return
        if gpu is not None:
            print(json.dumps(_line(fn, args, kwargs, gpu)), flush=True)
            return
        if fn not in elsewhere:
            print(json.dumps(asdict(usage(fn, _compile(fn, args, kwargs, SM90)))), flush=True)
            return
        with front_end_alone(), suppress(FrontEndPassed):
            _compile(fn, args, kwargs, SM90)
        print(json.dumps({"module": _module(fn), "kernel": fn.__name__}), flush=True)

    with launches(compile_it):
        call_all(table)


def call_all(table: str) -> None:
    for op, args in cases(table):
        try:
            flat(providers._IMPLEMENTATIONS[op]["triton"].load(), **args)
        except Exception as e:
            raise RuntimeError(f"{op} with {sorted(args)}: {e}") from e


def _line(fn: JITFunction, args: Any, kwargs: dict[str, Any], gpu: GPUFacts) -> dict[str, Any]:
    """Usage, or why there is none."""
    try:
        return asdict(usage(fn, _compile(fn, args, kwargs, gpu.capability)))
    except (CompilationError, PTXASError) as e:
        return {"module": _module(fn), "kernel": fn.__name__, "error": f"{type(e).__name__}: {e}"[:2000]}


def _compile(fn: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], capability: tuple[int, int]) -> Any:
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    bound = fn.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(fn.params):
        value = bound.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        else:
            signature[parameter.name] = _type(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if fn.is_gluon() else ASTSource)(fn, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options=options)


def _type(value: Any) -> str:
    if isinstance(value, GluonDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype][1:]}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def usage(fn: JITFunction, compiled: Any) -> Usage:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return Usage(_module(fn), fn.__name__, int(found[1]), int(found[2]), compiled.metadata.shared)


def _module(fn: JITFunction) -> str:
    name: str = fn.fn.__module__
    return name.rpartition(".")[2]


if __name__ == "__main__":
    main(known_gpu(sys.argv[1]) if sys.argv[1:] else None)
