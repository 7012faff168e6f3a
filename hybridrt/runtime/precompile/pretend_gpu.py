"""A pretended GPU: tensors have shapes and dtypes but no memory, and kernels are only noted.

torch.cuda and Triton are changed for the whole process, which must do nothing else.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hybridrt.base.device import GPUFacts
from hybridrt.runtime.precompile.replaced import replaced


@contextmanager
def pretended(gpu: GPUFacts) -> Iterator[None]:
    """Within it torch.cuda has this one GPU, and its tensors are on torch's "meta" device but say
    "cuda"."""
    with replaced(torch.cuda, **_functions(gpu)), _MetaTensors():
        yield


def _functions(gpu: GPUFacts) -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1], multi_processor_count=gpu.multiprocessors,
        shared_memory_per_block_optin=gpu.shared_memory, total_memory=gpu.total_bytes,
    )  # fmt: skip
    values = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
        "get_device_capability": gpu.capability, "get_device_name": gpu.name, "is_bf16_supported": True,
        "mem_get_info": (gpu.free_bytes, gpu.total_bytes), "memory_reserved": 0, "memory_allocated": 0,
        "max_memory_allocated": 0, "reset_peak_memory_stats": None, "empty_cache": None, "synchronize": None,
        "is_current_stream_capturing": False, "set_device": None, "graph_pool_handle": None,
    }  # fmt: skip
    functions: dict[str, Any] = {name: _returning(value) for name, value in values.items()}
    contexts = {"stream": nullcontext, "device": nullcontext}
    return functions | contexts | {name: Nothing for name in ("Event", "Stream", "current_stream", "CUDAGraph")}


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class Nothing:
    """A stream, an event or a graph on which every method does nothing and is complete."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _returning(True)


class _MetaTensors(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if function == _DEVICE:
            device = function(*args)
            return CUDA if device.type == "meta" else device
        if function == _IS_CUDA:
            return args[0].is_meta
        if function is _COPY and args[1].is_meta and not args[0].is_meta:
            return args[0]  # a copy to the host
        given.pop("pin_memory", None)
        if function is _PIN:
            return args[0]
        if given.get("device") is not None:
            given["device"] = _on_meta(given["device"])
        if function is _TO:
            args = tuple(_on_meta(each) for each in args)
        return function(*args, **given)


CUDA, _META = torch.device("cuda", 0), torch.device("meta")
_DEVICE, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_COPY, _TO, _PIN = torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.pin_memory


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _META if value.type == "cuda" else value
    return _META if isinstance(value, str) and value.startswith("cuda") else value


class CompilingDriver:
    """Triton's driver where nothing runs: it knows the target."""

    def __init__(self, capability: Sequence[int]) -> None:
        from triton.backends.compiler import GPUTarget

        major, minor = capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        """A GPUTarget."""
        return self._target
