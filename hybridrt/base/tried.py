"""What was tried on which GPU, with which torch and Triton: the one list, which `hybridrt doctor` shows."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """What was tried on GPUs of one compute capability.

    Attributes:
        gpus: words of their names.
        torch: as `torch.__version__`; empty if nothing was run.
        triton: version.
        what: in words.
    """

    gpus: tuple[str, ...]
    capability: tuple[int, int]
    torch: str
    triton: str
    what: str

    @property
    def ran(self) -> bool:
        """Whether kernels were run, and not only compiled."""
        return bool(self.torch)


_COMPILED = "kernels were compiled without a GPU (docs/start.md), and never run on one"
TRIALS = (
    Trial(
        ("H200",), (9, 0), "2.15.0+cu132", "3.9.0",
        "tests/gpu ran without a failure; not run: the soak in full, most of test_pipeline_linear, tests of two GPUs; "
        "figures of docs/performance.md",
    ),
    Trial(("H200",), (9, 0), "2.11.0+cu130", "3.6.0", "all of tests/gpu ran"),
    Trial(("H100",), (9, 0), "2.11.0+cu130", "3.6.0", "all of tests/gpu ran"),
    Trial(("A100",), (8, 0), "", "3.9.0", _COMPILED),
    Trial(("L40S",), (8, 9), "", "3.9.0", _COMPILED),
    Trial(("B200",), (10, 0), "", "3.9.0", _COMPILED),
    Trial(("RTX", "5090"), (12, 0), "", "3.9.0", _COMPILED),
)  # fmt: skip
# Compute capabilities of GPUs that nothing was run on.
COMPILED = tuple(trial.capability for trial in TRIALS if not trial.ran)


def trials_like(capability: tuple[int, int]) -> list[Trial]:
    """What was tried on GPUs of a compute capability, the newest software first."""
    return [trial for trial in TRIALS if trial.capability == capability]


def compared(name: str, trials: Sequence[Trial], torch: str, triton: str | None) -> str:
    """How a GPU and its software differ from what was tried, in a sentence.

    Args:
        name: as the driver has it, such as "NVIDIA H100 80GB HBM3".
        trials: those of its compute capability.
        triton: None if it is not installed.
    """
    here = f"torch {torch} with Triton {triton or '(not installed)'}"
    if not trials:
        return f"Kernels were neither run on a GPU like {name} nor compiled for one."
    if not any(trial.ran for trial in trials):
        return f"Nothing was run on a GPU like {name}, with any torch or Triton."
    same = [trial for trial in trials if (trial.torch, trial.triton) == (torch, triton)]
    if not same:
        return f"{here} was not tried on a GPU like {name}. It may work as well."
    if not any(set(trial.gpus) <= set(name.split()) for trial in same):
        tried = " and ".join(" ".join(trial.gpus) for trial in same)
        return f"{here} was tried on {tried}, which has the same compute capability, and not on {name}."
    return f"{here} was tried on {name}."
