"""Builds a runner while the GPU's driver starts and kernels are compiled in other processes."""

from typing import Any

from hybridrt.base.config import EngineConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.runtime.precompile.compile_ahead import KernelsAhead
from hybridrt.runtime.precompile.cuda_start import start_cuda
from hybridrt.runtime.run.model_runner import ModelRunner


def build_runner(config: EngineConfig, tp: TPGroup | None = None, **options: Any) -> ModelRunner:
    """A ModelRunner, and its errors; `options` are its other arguments. All ranks of a group call this."""
    tp = tp or TPGroup()
    start_cuda(config.device, tp)
    with KernelsAhead(config, tp) as kernels:
        return ModelRunner(config, tp=tp, kernels=kernels, **options)
