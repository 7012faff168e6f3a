"""Starts the driver of a GPU in a thread. It takes seconds, in which this process imports packages."""

import ctypes
import threading

import torch

from hybridrt.collectives.groups import TPGroup


def start_cuda(device: str, tp: TPGroup) -> None:
    """Begins what the first use of a GPU does. Does nothing where there is none; its first use then says so.

    Args:
        device: as in EngineConfig.
        tp: of several ranks each makes its context by itself, on its own GPU.
    """
    if torch.version.cuda is not None and device != "cpu":
        number = device.partition(":")[2] or "0"
        index = int(number) if tp.size == 1 and number.isdecimal() else None
        threading.Thread(target=_start, args=(index,), daemon=True).start()


def _start(index: int | None) -> None:
    """Calls that leave the interpreter to other threads. What fails here fails again where it is waited for."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or index is None or driver.cuDeviceGet(ctypes.byref(device), index):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
