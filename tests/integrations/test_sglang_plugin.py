"""The plugin of SGLang: a hook around its kernel, which computes the same steps over the same states and rings."""

import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import sglang_stub
from tests.support.gdn_loops import relative_error
from tests.support.mamba2_oracle import int32, poisoned
from tests.support.peer_modules import installed

pytestmark = pytest.mark.usefixtures("provider")
HEADS, KEY_HEADS, V, K, SLOTS = 4, 2, 5, 6, 8
CHANNELS = 2 * KEY_HEADS * K + HEADS * V


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.setattr(sglang_stub.HookRegistry, "_hooks", {})
    original = sglang_stub.TritonGDNKernel.packed_decode
    with installed(sglang_stub, sglang_stub.MODULES, "sglang"):
        package = importlib.import_module("hybridrt_sglang")
        yield SimpleNamespace(package=package, decode=importlib.import_module("hybridrt_sglang.decode"))
    sglang_stub.TritonGDNKernel.packed_decode = original


class Engine:
    """One layer's memory, its kernel, and the cursors as SGLang moves them."""

    def __init__(self, columns: int | None, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.kernel = sglang_stub.TritonGDNKernel()
        self.weights = {"A_log": torch.randn(HEADS, generator=generator) - 3}
        self.weights["dt_bias"] = torch.randn(HEADS, generator=generator)
        self.states = torch.randn(SLOTS, HEADS, V, K, generator=generator).to(dtype)
        self.ring, self.columns, self.written = {}, columns, torch.zeros(SLOTS, dtype=torch.int32)
        if columns is not None:
            shapes = (HEADS, columns, V), (KEY_HEADS, columns, K), (HEADS, columns)
            for name, shape in zip(sglang_stub.RING, shapes):
                self.ring[name] = poisoned(SLOTS, *shape, dtype=torch.float32 if name[-1] == "g" else dtype)

    def step(self, merged: torch.Tensor, slots: list[int], forced: list[int]) -> torch.Tensor:
        """merged [B, C + 2 Hv]. Rows of slot -1 are padding."""
        qkv, a, b = merged.split([CHANNELS, HEADS, HEADS], -1)
        extra: dict[str, Any] = dict(self.ring)
        if self.columns is not None:
            written = self.written[torch.tensor(slots).clamp(min=0)]
            extra |= {"replayssm_write_pos": written, "replayssm_force_flush": int32(*forced)}
            for slot, at, force in zip(slots, written.tolist(), forced):
                self.written[slot] = 0 if force or at == self.columns - 1 else at + 1
        return self.kernel.packed_decode(
            qkv, a.contiguous(), b.contiguous(), **self.weights, scale=K**-0.5, ssm_states=self.states,
            cache_indices=int32(*slots), num_v_heads=HEADS, head_v_dim=V, **extra,
        )  # fmt: skip


def run(engine: Engine, steps: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    merged = [torch.randn(len(slots), CHANNELS + 2 * HEADS, generator=generator) for slots, _ in steps]
    return [engine.step(inputs, slots, forced) for inputs, (slots, forced) in zip(merged, steps, strict=True)]


@pytest.mark.parametrize("columns", [1, 3, 16])
def test_the_hook_computes_what_sglangs_kernel_does(plugin: SimpleNamespace, columns: int) -> None:
    """Through full rings, forced folds at different lengths, padding and rows that come and go. Each of the two may go
    on where the other one stopped, because the ring's entries are the same."""
    steps = (
        [([3, 6, -1], [0, 0, 0])] * 4 + [([6, 3], [0, 1]), ([3, 5, 6], [0, 0, 0]), ([5], [1])] + [([5, 3], [0, 0])] * 3
    )
    own = Engine(columns)
    expected = run(own, steps)
    plugin.package.register()
    sglang_stub.HookRegistry.apply_hooks()
    ours = Engine(columns)
    for out, want in zip(run(ours, steps), expected, strict=True):
        assert out.shape == want.shape and relative_error(out, want) < 1e-5
    assert own.kernel.calls == len(steps) and ours.kernel.calls == 0
    assert relative_error(ours.states, own.states) < 1e-5
    for slot in (3, 5, 6):
        for name, ring in ours.ring.items():
            live = ring[slot][:, : own.written[slot]], own.ring[name][slot][:, : own.written[slot]]
            assert torch.allclose(*live, rtol=1e-4, atol=1e-5), (slot, name)


def test_a_state_is_written_when_its_ring_is_full_or_forced(plugin: SimpleNamespace) -> None:
    plugin.package.register()
    sglang_stub.HookRegistry.apply_hooks()
    engine, written = Engine(3), []
    for forced in (0, 0, 0, 0, 1, 0):
        before = engine.states.clone()
        run(engine, [([4], [forced])])
        written.append(not torch.equal(before[4], engine.states[4]))
        assert torch.equal(before[[0, 1, 2, 3, 5, 6, 7]], engine.states[[0, 1, 2, 3, 5, 6, 7]])
    assert written == [False, False, True, False, True, False]


def test_without_a_ring_sglangs_kernel_runs_and_the_log_says_so(
    plugin: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.package.register()
    sglang_stub.HookRegistry.apply_hooks()
    engine = Engine(None)
    with caplog.at_level(logging.WARNING, "sglang.srt.hybridrt"):
        run(engine, [([1, 2], [0, 0])] * 3)
    assert engine.kernel.calls == 3
    assert len(caplog.records) == 1 and "--enable-linear-replayssm" in caplog.text, "once, not by step"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda terms: terms | {"ssm_states": terms["ssm_states"].double()}, "float64"),
        (lambda terms: terms | {"ssm_states": terms["ssm_states"].transpose(2, 3)}, "contiguous"),
        (lambda terms: terms | {"scale": 1.0}, "scaled by 1.0"),
    ],
)
def test_what_the_plugin_does_not_serve_is_named(plugin: SimpleNamespace, change: Any, reason: str) -> None:
    ring = dict.fromkeys(sglang_stub.RING, torch.zeros(1))
    terms = {"ssm_states": torch.zeros(2, HEADS, V, K), "scale": K**-0.5, **ring}
    assert plugin.decode.reason_against(torch.zeros(1, CHANNELS), terms) is None
    assert reason in plugin.decode.reason_against(torch.zeros(1, CHANNELS), change(terms))


def test_the_switch(plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDRT_SGLANG", "off")
    plugin.package.register()
    assert not sglang_stub.HookRegistry._hooks
    monkeypatch.setenv("HYBRIDRT_SGLANG", "yes")
    with pytest.raises(ValueError, match=r"'yes'.*'on' or 'off'"):
        plugin.package.register()
    monkeypatch.setenv("HYBRIDRT_SGLANG", "on")
    plugin.package.register()
    assert list(sglang_stub.HookRegistry._hooks) == [plugin.package.TARGET]


def test_padding_has_a_ring_that_exists(plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel reads a row's ring before it knows that the row is padding."""
    rows = list[torch.Tensor]()

    def gdn_decode(qkv: torch.Tensor, *args: Any, step: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(step.ring.rows)
        return torch.zeros(len(qkv), 1, HEADS, V)

    monkeypatch.setattr(plugin.decode, "gdn_decode", gdn_decode)
    plugin.package.register()
    sglang_stub.HookRegistry.apply_hooks()
    run(Engine(3), [([4, -1], [0, 0])])
    assert rows[0].tolist() == [4, 0]
