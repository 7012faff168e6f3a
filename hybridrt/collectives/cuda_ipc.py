"""Memory of a GPU that another process opens, by the driver's cuIpc functions.

torch.multiprocessing shares tensors too, but counts users across processes, and warns when a process
ends before the others.
"""

import ctypes

import torch

from hybridrt.base.device import gpu_identity
from hybridrt.base.errors import RankError
from hybridrt.channel.codec import Message

_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


class SharedBox(Message):
    """Where another process of this host finds a tensor.

    Attributes:
        gpu: `gpu_identity` of its GPU, which has other numbers in other processes.
        handle: of the allocation that the tensor is in.
        offset: bytes from the allocation's first one to the tensor's.
    """

    gpu: str
    handle: bytes
    offset: int


def share(tensor: torch.Tensor) -> SharedBox:
    """RankError if the driver refuses, for example because a container forbids it."""
    address, base, size, handle = tensor.data_ptr(), ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return SharedBox(gpu_identity(tensor.device), bytes(handle), address - base.value)


def open_shared(box: SharedBox) -> int:
    """Maps another process's tensor for the current device: its address here. RankError as `share`."""
    base = ctypes.c_uint64()
    handle = _Handle.from_buffer_copy(box.handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_PEER_ACCESS))
    return base.value + box.offset


def close_shared(address: int, box: SharedBox) -> None:
    """Takes back `open_shared`, after all kernels that used the address."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address - box.offset))


def _call(name: str, *arguments: object) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise RankError(f"{name} failed with code {code} of the CUDA driver: GPUs cannot share memory here")
