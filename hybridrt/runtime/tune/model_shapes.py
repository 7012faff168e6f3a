"""The shapes that a model's launches will have, found without weights and without a GPU."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import msgspec
import torch

from hybridrt.base.child_process import ending_of, start_child
from hybridrt.base.device import GPUFacts, multiprocessors, shared_memory
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import EngineError
from hybridrt.kernels.core.launch_choice import LAUNCHES
from hybridrt.runtime.load.tuned_choices import import_launches, shape_of
from hybridrt.runtime.precompile.compile_ahead import DEADLINE_S, ENVIRONMENT, WORKER
from hybridrt.runtime.precompile.pretend_gpu import CUDA, pretended

MAX_SHAPES = 4096


def model_shapes(config: EngineConfig, gpu: GPUFacts, deadline_s: float = DEADLINE_S) -> list[tuple[str, Any]]:
    """(launch, shape) of decode steps in all graphs, of prompts, and of the largest step, in the order of LAUNCHES.

    A process of its own runs the steps on a pretended GPU. EngineError: it failed, or a step did.

    Args:
        config: its model is a directory.
    """
    requests = ({"gpu": asdict(gpu)}, {"shapes": asdict(config)})
    lines = b"".join(msgspec.json.encode(request) + b"\n" for request in requests)
    process = start_child(WORKER, {}, ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        answer = process.communicate(lines, timeout=deadline_s)[0]
        found = msgspec.json.decode(answer, type=dict[str, Any])
    except subprocess.TimeoutExpired as e:
        raise EngineError(f"finding the model's shapes took more than {deadline_s:g} seconds") from e
    except msgspec.DecodeError as e:
        raise EngineError(f"the process that finds the model's shapes {ending_of(process.returncode)}") from e
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it has a session of its own
            process.wait()
    if found["problems"]:
        raise EngineError(f"the model's shapes were not found: {'; '.join(found['problems'])}")
    import_launches()
    shapes = [(name, shape_of(LAUNCHES[name].shape, fields, "the trace")) for name, fields in found["shapes"]]
    return sorted(shapes[:MAX_SHAPES], key=lambda pair: list(LAUNCHES).index(pair[0]))


@contextmanager
def choosing_for(gpu: GPUFacts) -> Iterator[torch.device]:
    """Within it the device that it gives has the facts of this GPU, which need not be here. Only tiles are chosen for
    it meanwhile."""
    facts = multiprocessors, shared_memory  # kept for each device
    for fact in facts:
        fact.cache_clear()
    try:
        with pretended(gpu):
            yield CUDA
    finally:
        for fact in facts:
            fact.cache_clear()
