"""Decode steps on a CPU that are recorded, against the same steps without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybridrt import LLM, SamplingParams
from hybridrt.attention.base import AttentionInputs
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode
from hybridrt.runtime.replay import cpu_steps
from hybridrt.runtime.replay.cpu_steps import RECORDS_AFTER, Recordings
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
# Experts are counted on the host, and a history branch is run by the backend of its layer.
HOST_READERS = "hybridrt.layers.moe", "hybridrt.models.hybrid_attention"
LEFT = [(name, mode) for name in WRITTEN for mode in state_modes(name) if (name, mode) not in WAYS]


@pytest.fixture(autouse=True)
def known_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of tests are recorded as if they were parts of this package."""
    monkeypatch.setattr(cpu_steps, "KNOWN", (*cpu_steps.KNOWN, "tests"))


class Doubling(nn.Module):
    """A step whose repetitions can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.calls = torch.ones(2), 0
        self.batch = ForwardBatch(ForwardMode.IDLE, *[self.inputs] * 6, 0, 0, None)  # type: ignore[arg-type]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.calls += 1
        return self.inputs * 2

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Reading(Doubling):
    """Every other step cannot be repeated."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        doubled = super().forward(batch)
        return doubled if self.calls % 2 else doubled * self.inputs[0].item()


class Mixing(Doubling):
    """A layer of attention, then a recurrent one."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        run = batch.attn_backend.run
        return run("mixer", batch, run("attention", batch, AttentionInputs(self.inputs)))


class Sum:
    """A method of a layer, which is no module."""


def run(kept: Recordings, slot: int | None, step: Doubling) -> torch.Tensor:
    return kept.run(slot, step.batch)


def answers(path: Path, mode: str, cuda_graph: bool) -> list[list[int]]:
    """Of requests alone, together, of unequal lengths, greedy and drawn. Two of them fill their rings of recent inputs
    next to each other, and one goes on alone."""
    with LLM(
        str(path), device="cpu", dtype="float32", load_format="dummy", max_model_len=96, max_running_requests=4,
        page_size=4, state_mode=mode, prefix_cache=False, cuda_graph=cuda_graph,
    ) as llm:  # fmt: skip
        greedy = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (18, 23, 15)]
        drawn = SamplingParams(max_tokens=5, temperature=1.0, seed=3, ignore_eos=True)
        outputs = llm.generate(PROMPTS, greedy) + llm.generate(PROMPTS[:2], drawn) + llm.generate(PROMPTS[1:2], drawn)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("name", "mode"), sweep(WAYS, 90, thin=23) + [pytest.param(*way, marks=pytest.mark.soak) for way in LEFT]
)
def test_every_family_gives_the_same_tokens(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path, CASES[name], tokenizer=False)
    made: list[Any] = []

    class Listed(Recordings):
        def __init__(self, model: nn.Module, on: bool) -> None:
            super().__init__(model, on)
            self.reads = any(type(part).__module__ in HOST_READERS for part in model.modules())
            made.append(self)

    monkeypatch.setattr(cpu_steps, "RECORDS_AFTER", 2)
    monkeypatch.setattr("hybridrt.runtime.run.step_runner.Recordings", Listed)
    assert answers(path, mode, True) == answers(path, mode, False)
    recorded, without = made
    assert recorded._kept and not without._kept
    assert (None in recorded._kept.values()) == bool(recorded.problems) == recorded.reads


@torch.inference_mode()
def test_records_what_comes_again() -> None:
    step = Doubling()
    kept = Recordings(step, True)
    for _ in range(RECORDS_AFTER - 1):
        run(kept, 1, step)
    run(kept, 2, step)  # another step begins to count anew
    for i in range(RECORDS_AFTER):
        assert step.calls == RECORDS_AFTER + i
        run(kept, 1, step)
    step.inputs.fill_(3)
    assert run(kept, 1, step).tolist() == [6, 6]
    run(kept, None, step)
    assert step.calls == 2 * RECORDS_AFTER + 1


@torch.inference_mode()
def test_hooks_are_called() -> None:
    step, seen = Doubling(), list[int]()
    kept = Recordings(step, True)
    for _ in range(RECORDS_AFTER):
        run(kept, 1, step)
    calls = step.calls
    of_all = nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook
    for register in (step.register_forward_hook, step.register_forward_pre_hook, *of_all):
        hook = register(lambda *_: seen.append(1))
        run(kept, 1, step)
        hook.remove()
        assert seen.pop() and not seen
    run(kept, 1, step)
    assert step.calls == calls + 4


@torch.inference_mode()
def test_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of a step is 8 bytes."""
    monkeypatch.setattr(cpu_steps, "MOST_BYTES", 16)
    monkeypatch.setattr(cpu_steps, "RECORDS_AFTER", 1)
    step = Doubling()
    kept = Recordings(step, True)
    for key in (1, 2, 3):
        run(kept, key, step)
    assert list(kept._kept) == [2, 3]
    monkeypatch.setattr(cpu_steps, "MOST_BYTES", 4)
    for _ in range(2):
        run(kept, 4, step)
    assert step.calls == 5 and kept._kept[4] is None
    assert kept.problems == {"the tensors of a step take more than 4 bytes"}


@torch.inference_mode()
def test_keys_are_kept_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of steps that cannot be repeated too."""
    monkeypatch.setattr(cpu_steps, "MOST_KEPT", 3)
    monkeypatch.setattr(cpu_steps, "RECORDS_AFTER", 1)
    step = Reading()
    kept = Recordings(step, True)
    for key in range(1, 9):
        run(kept, key, step)
    assert [recording is None for recording in kept._kept.values()] == [True, False, True]
    assert list(kept._kept) == [6, 7, 8]


@torch.inference_mode()
def test_another_pytorch_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lacks what is not documented."""
    monkeypatch.delattr(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    monkeypatch.setattr(cpu_steps, "RECORDS_AFTER", 1)
    step = Doubling()
    kept = Recordings(step, True)
    for _ in range(2):
        assert run(kept, 1, step).tolist() == [2, 2]
    assert step.calls == 2 and not kept._kept
    assert kept.problems == {f"PyTorch {torch.__version__} has no _dispatch_has_kernel_for_dispatch_key"}
    assert not Recordings(step, False).problems


def test_parts_from_outside_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may call libraries that PyTorch does not see. So may kernels that are chosen by name."""
    assert not Recordings(Doubling(), True).problems
    monkeypatch.setattr(cpu_steps, "KNOWN", ("hybridrt", "torch"))
    assert Recordings(Doubling(), True).problems == {"Doubling is not part of hybridrt"}
    layer = nn.Identity()
    layer.method = Sum()  # type: ignore[assignment]
    assert Recordings(layer, True).problems == {"Sum is not part of hybridrt"}
    monkeypatch.setenv("HYBRIDRT_PROVIDERS", "silu_and_mul=triton")
    assert len(Recordings(nn.Identity(), True).problems) == 1


@torch.inference_mode()
def test_attention_is_called_again() -> None:
    """Its context grows. Recurrent layers go to the backend itself."""
    seen: list[str] = []

    class Backend:
        def run(self, layer: str, batch: ForwardBatch, inputs: Any, out: torch.Tensor | None = None) -> torch.Tensor:
            seen.append(layer)
            return inputs.q * float(len(seen)) if layer == "attention" else inputs * 2

    step = Mixing()
    step.batch.attn_backend = Backend()  # type: ignore[assignment]
    kept = Recordings(step, True)
    results = [run(kept, 1, step).tolist() for _ in range(RECORDS_AFTER + 2)]
    assert seen == ["attention", "mixer"] * RECORDS_AFTER + ["attention"] * 2
    calls = [2 * i + 1 for i in range(RECORDS_AFTER)]
    assert results == [[2.0 * n] * 2 for n in (*calls, calls[-1] + 2, calls[-1] + 3)]
    assert isinstance(step.batch.attn_backend, Backend)


@torch.inference_mode()
def test_a_step_that_fails_is_not_kept() -> None:
    step = Doubling()
    kept = Recordings(step, True)
    for _ in range(RECORDS_AFTER - 1):
        run(kept, 1, step)
    step.inputs = step.batch.attn_backend = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        run(kept, 1, step)
    assert not kept._kept and step.batch.attn_backend is None
