"""dtypes by the names that options give them, on a device that has them."""

from collections.abc import Mapping

import torch

from hybridrt.base.device import gpu_name, has_bfloat16, has_float8
from hybridrt.base.errors import DeviceError
from hybridrt.base.quantization import Scheme

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STATE_DTYPES = DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
KV_CODES = {"fp8_e4m3": torch.float8_e4m3fn}  # codes of numbers that were divided by a scale


def resolve_dtype(name: str, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """dtype of weights and activations. On a CPU "auto" is float32, faster and more exact there.

    Raises:
        DeviceError: bfloat16, requested or the model's own, on a GPU that has none.
    """
    automatic = torch.float32 if device.type == "cpu" else model_dtype
    return _on_device("dtype", automatic if name == "auto" else DTYPES[name], device)


def resolve_state_dtype(name: str, device: torch.device, gpu: str | None = None) -> torch.dtype:
    """dtype of the recurrent state. Raises DeviceError as `resolve_dtype` does, and for "fp8" on a GPU
    that does not convert such numbers. `gpu`: a name of GPUS that `device` means; it need not be here."""
    dtype = STATE_DTYPES[name]
    if dtype == torch.float8_e4m3fn and not has_float8(device, gpu):
        raise DeviceError(f'{_no_float8(device, gpu)}; pass mamba_ssm_dtype="int8" or "bfloat16"')
    return _on_device("mamba_ssm_dtype", dtype, device, gpu)


def resolve_kv_codes(name: str, device: torch.device, gpu: str | None = None) -> torch.dtype | None:
    """dtype of the KV cache's codes; None for plain numbers.

    Raises:
        DeviceError: a GPU that has no such numbers.
    """
    if name != "auto" and not has_float8(device, gpu):
        raise DeviceError(f'{_no_float8(device, gpu)}; pass kv_cache_dtype="auto"')
    return KV_CODES.get(name)


def check_schemes(table: Mapping[str, Scheme], device: torch.device, gpu: str | None = None) -> None:
    """Raises DeviceError if weights (schemes by part of the model) have e4m3 codes or scales, and the GPU
    does not convert such numbers."""
    if has_float8(device, gpu):
        return
    for part, scheme in table.items():
        if scheme.method == "fp8" or scheme.scale_dtype == torch.float8_e4m3fn:
            raise DeviceError(
                f"{_no_float8(device, gpu)}, and {part} is stored as {scheme}; use a plain checkpoint, or one in int4, "
                "int8 or MXFP4"
            )


def _no_float8(device: torch.device, gpu: str | None) -> str:
    return f"{gpu_name(device, gpu)} has no e4m3 numbers (sm_89 and later have)"


def _on_device(option: str, dtype: torch.dtype, device: torch.device, gpu: str | None = None) -> torch.dtype:
    # All of GPUS have bfloat16.
    if dtype == torch.bfloat16 and gpu is None and not has_bfloat16(device):
        raise DeviceError(f'{gpu_name(device)} has no bfloat16; pass {option}="float16" or "float32"')
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The spelling of options: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
