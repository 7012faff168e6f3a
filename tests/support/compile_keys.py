"""What a start compiles ahead is what launches ask for. Runs without Triton's interpreter and without a GPU.

    python -m tests.support.compile_keys kernels MODEL    compiles kernels as a worker does, and prints which,
                                                          how many there are, and how many more all layers launch
    python -m tests.support.compile_keys names MODEL      the names of kernels alone, of a model without weights
    python -m tests.support.compile_keys images MODEL     the names of those that images alone launch
    python -m tests.support.compile_keys launches MODEL   launches the same without a GPU: prints what the cache lacked,
                                                          and whose keys were computed too late

The kernels are those of NAMES; to compile all of them takes a minute.
"""

import io
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from hybridrt.base.device import KNOWN
from hybridrt.base.engine_config import EngineConfig
from hybridrt.layers.norm import ResidualStack
from hybridrt.runtime.precompile import compile_trace
from hybridrt.runtime.precompile.compile_trace import Kernel, trace
from hybridrt.runtime.precompile.compile_worker import _Worker
from hybridrt.runtime.precompile.no_dynamo import leave_out_dynamo
from hybridrt.runtime.precompile.pretend_gpu import CompilingDriver
from hybridrt.runtime.precompile.triton_key import TritonKey, use_key

GPU = KNOWN["h200"]
NAMES = ("_rms_norm_kernel", "_few_tokens_states_kernel")  # _few_tokens_states_kernel has tuples


def found(config: EngineConfig) -> list[Kernel]:
    leave_out_dynamo()
    kernels: list[Kernel] = []
    problems = trace(config, GPU, kernels.append)
    assert problems == [], problems
    # Seconds of a start with an empty cache.
    assert not {"transformers", "torch._dynamo.convert_frame"} & sys.modules.keys()
    return kernels


def names(config: EngineConfig) -> list[str]:
    driver.set_active(CompilingDriver(GPU.capability))  # type: ignore[arg-type]
    return sorted({kernel.name for kernel in found(replace(config, load_format="dummy", dtype="bfloat16"))})


def of_images(config: EngineConfig) -> list[str]:
    """The names of kernels that images alone launch, of a model without weights."""
    driver.set_active(CompilingDriver(GPU.capability))  # type: ignore[arg-type]
    config = replace(config, load_format="dummy", dtype="bfloat16")
    with mock.patch.object(compile_trace, "IMAGES", ()):
        text = found(config)
    return sorted(kernel.name for kernel in set(found(config)) - set(text))


def compile_kernels(config: EngineConfig) -> dict[str, Any]:
    answers = io.BytesIO()
    worker, kernels = _Worker(GPU, answers), found(config)
    use_key(*TritonKey().wait() or ("", ""))
    with mock.patch.object(ResidualStack, "shortened", lambda stack, sorts: nullcontext()):
        others = set(found(config)) ^ set(kernels)
    compiled = [kernel for kernel in kernels if kernel.name in NAMES]
    for kernel in compiled:
        worker.compile(*kernel)
    problems = [json.loads(line)["problem"] for line in answers.getvalue().splitlines()]
    assert not any(problems), problems
    return {"compiled": sorted(kernel.name for kernel in compiled), "all": len(kernels), "others": len(others)}


def launch(config: EngineConfig) -> dict[str, list[str]]:
    """Launches by Triton's own path: what it finds in the cache, and what not."""
    names: dict[bool, list[str]] = {True: [], False: []}
    late: set[str] = set()
    run = JITFunction.run

    def listen(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        names[cache_hit].append(src.name)

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if self.hash is None:
            late.add(self.__name__)
        if self.__name__ in NAMES:
            addresses = {name: compile_trace._address(value) for name, value in kwargs.items()}
            run(self, *map(compile_trace._address, args), grid=grid, warmup=True, **addresses)

    driver.set_active(CompilingDriver(GPU.capability))  # type: ignore[arg-type]
    triton.knobs.compilation.listener = listen  # type: ignore[assignment]
    with mock.patch.object(JITFunction, "run", warm), mock.patch.object(compile_trace, "noted", mock.MagicMock()):
        assert trace(config, GPU, lambda kernel: None) == []
    return {"hit": sorted(names[True]), "missed": sorted(names[False]), "late": sorted(late)}


def main() -> None:
    config = EngineConfig(sys.argv[2], device="cuda", max_running_requests=2, max_model_len=64, chunked_prefill_size=32)
    does: dict[str, Any] = {"kernels": compile_kernels, "launches": launch, "names": names, "images": of_images}
    print(json.dumps(does[sys.argv[1]](config)))


if __name__ == "__main__":
    main()
