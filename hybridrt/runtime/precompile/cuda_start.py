"""Starts the GPU's driver in a thread: it takes seconds, in which this process imports packages."""

import ctypes
import threading

import torch

from hybridrt.collectives.groups import TPGroup


def start_cuda(device: str, tp: TPGroup) -> None:
    """Does what the first use of a GPU does. Ignores a missing GPU; its first use then raises.

    Args:
        device: the device of EngineConfig.
        tp: with several ranks each makes its context itself, on its own GPU.
    """
    if torch.version.cuda is not None and device != "cpu":
        number = device.partition(":")[2] or "0"
        index = int(number) if tp.size == 1 and number.isdecimal() else None
        threading.Thread(target=_start, args=(index,), daemon=True).start()


def _start(index: int | None) -> None:
    """Releases Python's lock. A failure repeats at the GPU's first use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or index is None or driver.cuDeviceGet(ctypes.byref(device), index):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
