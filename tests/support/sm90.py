"""Compiles Triton kernels for sm_90 without a GPU and reports what they need of the hardware.

It runs where Triton's interpreter is off, so tests start it as another process.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Usage:
    """Per thread: registers and bytes of stack (spills); per program: bytes of shared memory."""

    kernel: str
    registers: int
    stack: int
    shared: int


@contextmanager
def compiled_only() -> Iterator[list[Usage]]:
    """Within it, launching a kernel compiles it for sm_90 instead, and the list grows by what it uses.

    Call the launchers with tensors on the "meta" device.
    """
    used: list[Usage] = []
    with _instead_of_launches(lambda fn, compiled: used.append(_usage(fn.__name__, compiled))):
        yield used


@contextmanager
def compiled_names() -> Iterator[set[str]]:
    """Like `compiled_only`, for module and name of each kernel alone."""
    names: set[str] = set()
    with _instead_of_launches(lambda fn, _: names.add(f"{fn.fn.__module__.rpartition('.')[2]} {fn.fn.__name__}")):
        yield names


@contextmanager
def _instead_of_launches(note: Callable[[JITFunction, Any], object]) -> Iterator[None]:
    run = JITFunction.run

    def compile_instead(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        note(self, _compile(self, args, kwargs))

    JITFunction.run = compile_instead
    try:
        yield
    finally:
        JITFunction.run = run


def usage(launch: Callable[[], Any]) -> list[Usage]:
    with compiled_only() as used:
        launch()
    return used


def _compile(fn: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    source = ASTSource(fn, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _type(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _usage(name: str, compiled: Any) -> Usage:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return Usage(name, int(found[1]), int(found[2]), compiled.metadata.shared)
