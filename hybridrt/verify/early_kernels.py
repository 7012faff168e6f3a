"""Compiles kernels of engines that a run starts later, while transformers' model is loaded and asked."""

from collections.abc import Sequence
from pathlib import Path

from hybridrt.base.device import resolve_device
from hybridrt.base.engine_config import EngineConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.runtime.precompile.compile_ahead import KernelsAhead, default_workers


class EarlyKernels:
    """Processes that compile, by the engine that launches the kernels. On a CPU there are none."""

    def __init__(self) -> None:
        self._started: dict[EngineConfig, KernelsAhead] = {}

    def start(self, configs: Sequence[EngineConfig]) -> None:
        """Compiles for these engines at the same time, each with an equal share of the processes.

        Called while the GPU's memory is free: the sizes of pools follow from it, and some kernels from these.

        Args:
            configs: their models are directories.
        """
        for config in configs:
            kernels = KernelsAhead(config, TPGroup(), max(default_workers() // len(configs), 1))
            self._started[config] = kernels
            kernels.start_compiling(resolve_device(config.device), Path(config.model))

    def wait(self, config: EngineConfig) -> None:
        """Returns when this engine's kernels are in Triton's cache, where its start finds them."""
        if (kernels := self._started.pop(config, None)) is not None:
            with kernels:
                pass  # which waits at its end

    def close(self) -> None:
        """Ends the processes at once."""
        while self._started:
            self._started.popitem()[1].close()
