"""A process without a GPU that compiles kernels into Triton's cache, and traces a configuration.

`compile_ahead.py` starts it, and exchanges lines of JSON with it.

    {"gpu": fields of GPUFacts}                  comes first
    {"trace": fields of EngineConfig}            {"kernel": [module, name, specialisation]} for each kernel,
                                                 {"started": seconds} after those of the start, and at the end
                                                 {"problems": [...], "seconds": number}
    {"shapes": fields of EngineConfig}           {"shapes": [[launch, fields of its shape], ...], "problems": [...]}
    {"key": [file, digest]}                      as in `triton_key.use_key`; before the first of
    {"compile": [module, name, specialisation]}  {"problem": null or text, "seconds": number}
"""

import atexit
import ctypes.util
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

from hybridrt.base.device import GPUFacts
from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.runtime.precompile.no_dynamo import leave_out_dynamo
from hybridrt.runtime.precompile.pretend_gpu import CompilingDriver, Nothing
from hybridrt.runtime.precompile.replaced import replaced
from hybridrt.runtime.precompile.triton_key import use_key

LAUNCHER = ("triton", "launcher", "")  # the C module with which Triton launches


def main() -> None:
    """Serves lines of the standard input until it ends, or until nobody reads the answers."""
    try:
        _serve(_own_output())
    except BrokenPipeError:  # whoever started this process was killed
        sys.exit(1)


def _serve(answers: BinaryIO) -> None:
    facts = json.loads(sys.stdin.readline() or "null")
    if facts is None:
        return
    gpu = facts["gpu"]
    worker = _Worker(GPUFacts(**{**gpu, "capability": tuple(gpu["capability"])}), answers)
    for line in sys.stdin:
        request = json.loads(line)
        if "trace" in request:
            worker.trace_config(request["trace"])
        elif "shapes" in request:
            worker.find_shapes(request["shapes"])
        elif "key" in request:
            use_key(*request["key"])
        else:
            worker.compile(*request["compile"])


def _own_output() -> BinaryIO:
    """Reserves standard output for answers, without a buffer: nothing is left to write when nobody reads.
    Other prints go to standard error."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return answers


class _Worker:
    def __init__(self, gpu: GPUFacts, answers: BinaryIO) -> None:
        from triton.runtime.driver import driver

        leave_out_dynamo()
        self._gpu, self._answers = gpu, answers
        active: Any = CompilingDriver(gpu.capability)
        driver.set_active(active)

    def _say(self, **answer: Any) -> None:
        self._answers.write(f"{json.dumps(answer)}\n".encode())

    def trace_config(self, fields: dict[str, Any]) -> None:
        # Imported here because the other workers only compile.
        from hybridrt.runtime.precompile.compile_trace import described, trace

        start, problems = time.perf_counter(), list[str]()
        try:
            problems += trace(
                _config_of(fields), self._gpu, lambda kernel: self._say(kernel=list(kernel)),
                lambda: self._say(started=time.perf_counter() - start),
            )  # fmt: skip
        except Exception as e:
            problems.append(f"the model: {described(e)}")
        self._say(problems=problems, seconds=time.perf_counter() - start)

    def find_shapes(self, fields: dict[str, Any]) -> None:
        """The shapes for which a configuration's launches look choices up."""
        from hybridrt.kernels.core.launch_choice import LAUNCHES
        from hybridrt.runtime.load.tuned_choices import fields_of
        from hybridrt.runtime.precompile.compile_trace import described, trace
        from hybridrt.runtime.precompile.pretend_gpu import CUDA

        shapes, problems = list[Any](), list[str]()
        try:
            problems += trace(_config_of(fields), self._gpu, lambda kernel: None)
            shapes = [(name, fields_of(shape)) for name, launch in LAUNCHES.items() for shape in launch.seen(CUDA)]
        except Exception as e:
            problems.append(f"the model: {described(e)}")
        self._say(shapes=shapes, problems=problems)

    def compile(self, module: str, name: str, specialisation: str) -> None:
        from triton.runtime import build

        start, problem = time.perf_counter(), None
        try:
            with replaced(build, _load_module_from_path=_not_loaded):
                if (module, name) == LAUNCHER[:2]:
                    _launcher_module()
                else:
                    shared = _compile(module, name, specialisation)
                    if shared > self._gpu.shared_memory:
                        problem = f"it needs {shared} bytes of shared memory, and the GPU has {self._gpu.shared_memory}"
        except Exception as e:
            problem = f"{type(e).__name__}: {e}"
        self._say(problem=problem, seconds=time.perf_counter() - start)


def _config_of(fields: dict[str, Any]) -> EngineConfig:
    speculative = fields.pop("speculative")
    return EngineConfig(**fields, speculative=SpeculativeConfig(**speculative) if speculative else None)


def _compile(module: str, name: str, specialisation: str) -> int:
    """Compiles a kernel and its launcher, where Triton has one per kernel. Returns bytes of a program's shared
    memory."""
    from triton.backends.nvidia import driver

    from hybridrt.kernels.core.launch import compute_keys

    imported = importlib.import_module(module)
    compute_keys(imported)
    function = getattr(imported, name)
    _ = function.device_caches[0]  # which sets `ASTSource`
    source = function.ASTSource

    def with_tuples(fn: Any, signature: Any, constants: dict[Any, Any], attributes: Any) -> Any:
        return source(fn, signature, {place: _tuples(value) for place, value in constants.items()}, attributes)

    # JSON has no tuples; with lists the kernel would get another name.
    with replaced(function, ASTSource=with_tuples):
        kernel = function.preload(specialisation)
    if hasattr(driver, "make_launcher"):
        _provide_libcuda()
        driver.CudaLauncher(kernel.src, kernel.metadata)
    return int(kernel.metadata.shared)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _launcher_module() -> None:
    from triton.backends.nvidia.driver import CudaUtils

    _provide_libcuda()
    CudaUtils()


def _not_loaded(name: str, path: str) -> Any:
    """Replaces loading a C module: it would need the GPU's driver."""
    return Nothing()


def _provide_libcuda() -> None:
    if "TRITON_LIBCUDA_PATH" in os.environ or ctypes.util.find_library("cuda"):
        return
    folder = Path(tempfile.mkdtemp(prefix="hybridrt-libcuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True, capture_output=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
