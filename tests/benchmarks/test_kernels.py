from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from benchmarks import step_peers
from benchmarks.bench_kernels import callables
from benchmarks.kernel_cases import DECODE, PREFILL, Case, Load, linears
from benchmarks.library_cases import Args, beside
from benchmarks.timeline import Span, draw
from hybridrt.kernels.core import providers
from hybridrt.models.config.read_config import read_model_config
from tests.support.checkpoints import falcon, jamba, nemotron, qwen
from tests.support.levels import sweep
from tests.support.newer_checkpoints import ling, minimax
from tests.support.tiny import write_tiny

MODELS = {
    "falcon": falcon(),
    "nemotron": nemotron("M*-ME"),
    "qwen": qwen(),
    "jamba": jamba(),
    "minimax": minimax(),
    "ling": ling(),
}


def results(case: Case, args: Args, name: str) -> list[Tensor]:
    """What one way to compute a case returns, and what it leaves in the states, scratch apart."""
    own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in args.items()}
    own |= {"write_state_slots": own["read_state_slots"]} if "read_state_slots" in own else {}
    found = dict(callables(case, "cpu"))[name](own)
    outputs = found if isinstance(found, tuple) else (found,)
    return [outputs[0], *(own[key][1:] for key in ("states", "conv") if key in own)]


@pytest.mark.parametrize("name", sweep(MODELS, 3))
def test_cases_are_what_the_operations_take(name, tmp_path):
    """And what is next to them computes the same. (On a CPU the references stand in for the kernels.)"""
    config = read_model_config(write_tiny(tmp_path, MODELS[name], tokenizer=False))
    torch.manual_seed(0)
    uneven = {name: cases for name, cases in DECODE.items() if "attention" in name or "latent" in name}
    loads = [
        (DECODE, Load(2, context=20)),
        (uneven, Load(3, context=20, long=(1, 70), table=96)),
        (PREFILL, Load(2, 19)),
    ]
    found = [case for ops, load in loads for cases in ops.values() for case in cases(config, load, "cpu")]
    extend = "latent_extend" if config.attention.latent else "attention_extend"
    assert {case.op for case in found} >= {"attention_decode", extend, "skinny_linear", "add_rms_norm"}
    for case in found:
        args = case.make()
        wanted = results(case, args, "torch")
        assert all(part.isfinite().all() for part in wanted), case.op
        for other in case.baselines:
            torch.testing.assert_close(results(case, args, other)[0], wanted[0], rtol=0.02, atol=0.02)
        assert (case.bytes > 0) != (case.flops > 0) and case.copies >= 1, case.op


def test_steps_of_libraries_stand_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are after our kernels in the order, and no part of the runtime."""
    own = {op: dict(by) for op, by in providers._IMPLEMENTATIONS.items()}
    peers = {"selective_state_update": {"flashinfer", "mamba_ssm"}, "recurrent_gated_delta_rule": {"fla"}}
    peers["attention_extend"] = {"flashinfer"}
    monkeypatch.setattr(providers, "_IMPLEMENTATIONS", {op: dict(by) for op, by in own.items()})
    step_peers.register_peers()
    for op, names in peers.items():
        assert not own[op].keys() & names
        ranked = [by.provider for by in providers._ranked(op, "cuda")]
        assert ranked[0] == "triton" and ranked[-1] == "torch" and names <= set(ranked[1:-1])
        assert all(providers._IMPLEMENTATIONS[op][name].load().__module__ == step_peers.__name__ for name in names)


def test_linears_of_a_model_with_their_norms_and_activations(tmp_path):
    found = linears(read_model_config(write_tiny(tmp_path, nemotron("M*-"), tokenizer=False)))
    kinds = {name: key[2:] for key, name in found.items()}
    assert kinds["in_proj"] == kinds["qkv"] == (True, None) and kinds["up"] == (True, "relu2")
    assert kinds["out_proj"] == kinds["head"] == (False, None)


def test_a_timeline_names_its_kernels(tmp_path: Path) -> None:
    spans = [Span("stream", 7, 0.0, 30.0), Span("attention <decode>", 13, 5.0, 20.0), Span("stream", 7, 31.0, 60.0)]
    draw(spans, tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "stream: 59 µs" in text and "attention &lt;decode&gt;: 15 µs" in text and "3 launches in 0.06 ms" in text


def test_libraries_are_planned_when_arguments_are_made() -> None:
    """A plan that fails, fails its own row; a library that is not there has none."""
    planned = []

    def plan(args: Args) -> Callable[[], object]:
        planned.append(args["x"])
        return lambda: args["x"] + 1

    def fails(args: Args) -> Callable[[], object]:
        raise AssertionError("no head of 3")

    peers = {"a": (("absent_", "torch"), plan), "b": (("torch",), fails), "c": (("absent_",), plan)}
    make, calls = beside(lambda: {"x": 1 + len(planned)}, "cuda", peers)
    first, second = make(), make()
    assert planned == [1, 2] and [calls["a"](args) for args in (first, second)] == [2, 3]
    assert calls.keys() == {"a", "b"} and not beside(make, "cpu", peers)[1]
    with pytest.raises(RuntimeError, match="AssertionError no head of 3"):
        calls["b"](first)
