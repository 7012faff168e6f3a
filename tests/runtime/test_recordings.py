"""Decode steps on a CPU that are recorded, against the same steps without."""

from collections.abc import Hashable
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridrt import LLM, SamplingParams
from hybridrt.runtime.replay import recordings
from hybridrt.runtime.replay.recordings import RECORDS_AFTER, Recordings
from tests.models.test_models_parity import state_modes
from tests.support.checkpoints import CASES
from tests.support.levels import sweep
from tests.support.tiny import write_tiny

# Steps are recorded once all rows have filled their conv rings of 8; the last one fills it while it decodes.
PROMPTS = [[*range(5, 16)], [*range(13, 4, -1)], [11, 3]]
WRITTEN = [name for name in CASES if name != "nemotron-puzzle"]  # its config.json is one of another family
FIRST = {name.partition("-")[0]: name for name in reversed(WRITTEN)}.values()  # of each family
# Variants of a family differ in what surrounds the decode operation of a mode: one mode is enough for most of them.
WAYS = [(name, mode) for name in WRITTEN for mode in state_modes(name)[0 if name in FIRST else -1 :]]
LEFT = [(name, mode) for name in WRITTEN for mode in state_modes(name) if (name, mode) not in WAYS]


class Doubling(nn.Module):
    """A step whose recordings can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.calls = torch.ones(2), 0

    def forward(self) -> torch.Tensor:
        self.calls += 1
        return self.inputs * 2


class Reading(Doubling):
    """One that cannot be repeated."""

    def forward(self) -> torch.Tensor:
        return self.inputs * self.inputs[0].item()


def run(kept: Recordings, key: Hashable, step: Doubling) -> torch.Tensor:
    found = kept.repeat(key)
    if found is not None:
        return found
    with kept.around(key) as results:
        results.append(step())
    return results[0]


def answers(path: Path, mode: str, cuda_graph: bool) -> list[list[int]]:
    """Of requests alone, together, of unequal lengths, greedy and drawn. Two of them fill their rings of recent inputs
    beside each other, and one goes on alone."""
    with LLM(
        str(path), device="cpu", dtype="float32", load_format="dummy", max_model_len=96, max_running_requests=4,
        page_size=4, state_mode=mode, prefix_cache=False, cuda_graph=cuda_graph,
    ) as llm:  # fmt: skip
        greedy = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (18, 23, 15)]
        drawn = SamplingParams(max_tokens=5, temperature=1.0, seed=3, ignore_eos=True)
        outputs = llm.generate(PROMPTS, greedy) + llm.generate(PROMPTS[:2], drawn) + llm.generate(PROMPTS[1:2], drawn)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("name", "mode"), sweep(WAYS, 16) + [pytest.param(*way, marks=pytest.mark.soak) for way in LEFT]
)
def test_every_family_gives_the_same_tokens(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path, CASES[name], tokenizer=False)
    made: list[Recordings] = []

    class Listed(Recordings):
        def __init__(self, model: nn.Module, on: bool) -> None:
            super().__init__(model, on)
            made.append(self)

    monkeypatch.setattr(recordings, "RECORDS_AFTER", 2)
    monkeypatch.setattr("hybridrt.runtime.run.step_runner.Recordings", Listed)
    assert answers(path, mode, True) == answers(path, mode, False)
    recorded, without = made
    assert not recorded.problems and len(recorded._kept) > 1 and None not in recorded._kept.values()
    assert not without._kept


@torch.inference_mode()
def test_records_what_comes_again() -> None:
    step = Doubling()
    kept = Recordings(step, True)
    for _ in range(RECORDS_AFTER - 1):
        run(kept, "a", step)
    run(kept, "b", step)  # another step begins to count anew
    for i in range(RECORDS_AFTER):
        assert step.calls == RECORDS_AFTER + i
        run(kept, "a", step)
    step.inputs.fill_(3)
    assert run(kept, "a", step).tolist() == [6, 6]
    run(kept, None, step)
    assert step.calls == 2 * RECORDS_AFTER + 1


@torch.inference_mode()
def test_hooks_are_called() -> None:
    step, seen = Doubling(), list[int]()
    kept = Recordings(step, True)
    for _ in range(RECORDS_AFTER):
        run(kept, "a", step)
    calls = step.calls
    of_all = nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook
    for register in (step.register_forward_hook, step.register_forward_pre_hook, *of_all):
        hook = register(lambda *_: seen.append(1))
        run(kept, "a", step)
        hook.remove()
        assert seen.pop() and not seen
    run(kept, "a", step)
    assert step.calls == calls + 4


@torch.inference_mode()
def test_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of a step is 8 bytes."""
    monkeypatch.setattr(recordings, "MOST_BYTES", 16)
    monkeypatch.setattr(recordings, "RECORDS_AFTER", 1)
    step = Doubling()
    kept = Recordings(step, True)
    for key in "abc":
        run(kept, key, step)
    assert list(kept._kept) == ["b", "c"]
    monkeypatch.setattr(recordings, "MOST_BYTES", 4)
    for _ in range(2):
        run(kept, "d", step)
    assert step.calls == 5 and kept._kept["d"] is None
    assert kept.problems == {"the tensors of a step take more than 4 bytes"}


@torch.inference_mode()
def test_keys_are_kept_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of steps that cannot be repeated too."""
    monkeypatch.setattr(recordings, "MOST_KEPT", 3)
    monkeypatch.setattr(recordings, "RECORDS_AFTER", 1)
    steps = Doubling(), Reading()
    kept = Recordings(steps[0], True)
    for i, key in enumerate("abcdefgh"):
        run(kept, key, steps[i % 2])
    assert [recording is None for recording in kept._kept.values()] == [True, False, True]
    assert list(kept._kept) == ["f", "g", "h"]


@torch.inference_mode()
def test_another_pytorch_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lacks what is not documented."""
    monkeypatch.delattr(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    monkeypatch.setattr(recordings, "RECORDS_AFTER", 1)
    step = Doubling()
    kept = Recordings(step, True)
    for _ in range(2):
        assert run(kept, "a", step).tolist() == [2, 2]
    assert step.calls == 2 and not kept._kept
    assert kept.problems == {f"PyTorch {torch.__version__} has no _dispatch_has_kernel_for_dispatch_key"}
    assert not Recordings(step, False).problems
