"""Starts the driver of a GPU before torch is there, or next to its imports."""

import ctypes
import threading


def start_driver(index: int | None) -> None:
    """Does in a thread what the first use of a GPU does, which takes seconds. Ignores a missing GPU; its first
    use then raises.

    Args:
        index: of the GPU whose context is made; None: the driver alone starts.
    """
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
