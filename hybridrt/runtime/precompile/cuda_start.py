"""Starts the GPU's driver in a thread, while this process imports packages."""

import torch

from hybridrt.base.cuda_driver import start_driver
from hybridrt.collectives.groups import TPGroup


def start_cuda(device: str, tp: TPGroup) -> None:
    """Starts the driver, and makes a GPU's context.

    Args:
        device: the device of EngineConfig.
        tp: with several ranks each makes its context itself, on its own GPU.
    """
    if torch.version.cuda is not None and device != "cpu":
        number = device.partition(":")[2] or "0"
        start_driver(int(number) if tp.size == 1 and number.isdecimal() else None)
