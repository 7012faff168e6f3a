"""Random schedules through pools that are too small for them: recorded decode steps against eager ones."""

from pathlib import Path
from typing import Any

import pytest

from hybridrt.runtime.replay import cpu_steps
from tests.support.checkpoints import CASES
from tests.support.levels import sweep
from tests.support.samples import Sample
from tests.support.soak import Soak
from tests.support.tiny import write_tiny

# Mamba-2 next to attention, layers one by one, short convolutions, a delta rule.
MODELS = ["falcon-plain", "nemotron-plain", "lfm2-plain", "qwen-dense"]
CHANGES: list[dict[str, Any]] = [
    {},
    {"state_mode": "classic", "overlap": False},
    {"dtype": "bfloat16"},
]


class Told(Soak):
    """One that keeps what every sample got. Some prompts begin alike, so that the prefix cache has them."""

    def __init__(self, path: Path, seed: int, **changes: Any) -> None:
        super().__init__(path, seed, **changes)
        self.told: list[tuple[str, int, list[int], Any]] = []

    def arrive(self) -> None:
        if len(self.running) < 3 and self.random.random() < 0.2:
            prompt, params = [*range(3, 43), self.random.randrange(3, 40)], self.params()
            self.running[self.engine.add_request(prompt, params)] = prompt, params, params.n
        elif not self.running or self.random.random() < 0.2:  # between arrivals the same rows run on
            super().arrive()

    def finish(self, out: Sample) -> None:
        self.told.append((out.request_id, out.index, out.token_ids, out.logprobs))
        super().finish(out)


# Half of the schedules are recorded at once, half of them late; each model and each change is among both.
SCHEDULES = [
    (name, changes, 2 * more + (i + k + more) % 2)
    for more in range(4) for i, changes in enumerate(CHANGES) for k, name in enumerate(MODELS)
]  # fmt: skip


# The soak level has other seeds, and longer runs.
@pytest.mark.parametrize(
    ("name", "changes", "seed", "steps"),
    sweep([(*schedule, 70) for schedule in SCHEDULES[: len(SCHEDULES) // 4]], 15, thin=7)
    + [pytest.param(*schedule, 120, marks=pytest.mark.soak) for schedule in SCHEDULES],
)
def test_schedules_give_the_same_samples(
    name: str, changes: dict[str, Any], seed: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_steps, "RECORDS_AFTER", 1 + seed % 2)
    path = write_tiny(tmp_path, CASES[name], tokenizer=False)
    runs = [Told(path, seed, device="cpu", load_format="dummy", cuda_graph=on, **changes) for on in (True, False)]
    for run in runs:
        run.run(steps)
    kept = runs[0].runner.recordings
    assert kept._kept and not kept.problems and not runs[1].runner.recordings._kept
    assert runs[0].told == runs[1].told
