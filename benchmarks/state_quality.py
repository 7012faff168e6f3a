"""What the dtype of recurrent states costs: perplexity of held-out text, and drift over many steps.

Perplexity: the embedded model reads text that it was not trained on, in chunks of 16 tokens, so that each state is
stored as often as replay folds it.

Drift: layers of a Gated Delta Net, Kimi Delta Attention and Mamba-2 take 8,000 tokens of random inputs. Outputs are
compared with those of the same recurrence in float64. The kernels' references compute them: folds every 16 tokens of
replay, and for comparison a bfloat16 state that each step writes. Heads forget from 1e-4 to 0.4 of their state a token.

    python -m benchmarks.state_quality --tokens 204800 --out benchmarks/results/state-quality.json
    python -m benchmarks.state_quality --drift-steps 8000
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import environment
from benchmarks.train_embedded import read_sources
from hybridrt import LLM, SamplingParams
from hybridrt.kernels.core.records import DeltaInputs, SSMInputs, SSMWeights, StateCodes, StateRing, StateSlots
from hybridrt.kernels.delta_rule.decode_ring import gdn_replay
from hybridrt.kernels.delta_rule.delta_rule import recurrent_gated_delta_rule
from hybridrt.kernels.mamba.mamba2_replay import mamba2_replay
from hybridrt.kernels.mamba.selective_state_update import selective_state_update
from hybridrt.kernels.state.state_codes import LARGEST, element_keys, head_bytes, split_heads_of_codes
from hybridrt.kernels.state.state_ring import advance_ring, fold_ring
from hybridrt.runtime.step.plan import Admission, ExtendRow, PageWrite, StepPlan

MODEL = Path(__file__).parents[1] / "hybridrt" / "assets" / "embedded"
STATES: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"mamba_ssm_dtype": "int8"},
    "fp8": {"mamba_ssm_dtype": "fp8"},
    "bfloat16": {"mamba_ssm_dtype": "bfloat16"},
    "bfloat16, stochastic": {"mamba_ssm_dtype": "bfloat16", "mamba_ssm_rounding": "stochastic"},
}
WINDOW, CHUNK, ROWS, PAGE = 4000, 16, 16, 16


def perplexities(tokens: int, root: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    windows: list[list[int]] = []
    for name, options in STATES.items():
        start = time.perf_counter()
        with LLM(str(MODEL), device="cpu", state_mode="replay", chunked_prefill_size=CHUNK * ROWS, prefix_cache=False,
                 page_size=PAGE, max_running_requests=ROWS, max_model_len=WINDOW, **options) as llm:  # fmt: skip
            windows = windows or held_out(llm, tokens, root)
            batches = [windows[i : i + ROWS] for i in range(0, len(windows), ROWS)]
            total = sum(summed_loss(llm, batch) for batch in batches)
        count = len(windows) * (WINDOW - 1)
        base = found.get("float32", {}).get("loss", total / count)
        found[name] = {
            "loss": total / count, "tokens": count, "perplexity": math.exp(total / count),
            "relative": math.expm1(total / count - base), "seconds": time.perf_counter() - start,
        }  # fmt: skip
        print(name, {key: round(value, 6) for key, value in found[name].items()}, flush=True)
    return found


def held_out(llm: LLM, tokens: int, root: Path) -> list[list[int]]:
    """Windows of held-out text, of at least so many tokens in all."""
    stream = [t for text in read_sources(root, None)[1] for t in llm.tokenizer.encode(text)]
    windows = [stream[i : i + WINDOW] for i in range(0, len(stream) - WINDOW, WINDOW)]
    count = -(-tokens // WINDOW)
    if count > len(windows):
        raise SystemExit(f"--tokens is {tokens}; the held-out text has {len(windows) * WINDOW}")
    return windows[:count]


def summed_loss(llm: LLM, windows: list[list[int]]) -> float:
    """Of all tokens but the first of each window. All windows advance by a chunk in each step."""
    params, pages = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), WINDOW // PAGE
    admissions = [Admission.from_prompt(row, row, window, params, 0) for row, window in enumerate(windows, 1)]
    writes = [PageWrite(row, 0, np.arange(pages, dtype=np.int32)[:, None] + (row - 1) * pages + 1)
              for row in range(1, len(windows) + 1)]  # fmt: skip
    total = 0.0
    for start in range(0, WINDOW, CHUNK):
        end = start + CHUNK
        extend = [
            ExtendRow(row, start, window[start:end], 0, False, window[end] if end < WINDOW else 0)
            for row, window in enumerate(windows, 1)
        ]
        plan = StepPlan(admissions, writes, extend=extend) if start == 0 else StepPlan(extend=extend)
        scores = llm.engine.executor.launch(plan).result().prompt_logprobs
        for row in range(1, len(windows) + 1):
            own = scores[row].own
            total -= float(own[: CHUNK - (end == WINDOW)].sum())
    return total


# -- drift

HEADS, VALUES, KEYS, WIDTH = 6, 64, 128, 16
RATES = torch.tensor([1e-4, 1e-3, 5e-3, 2e-2, 1e-1, 4e-1])  # forgotten a token, by head


class Layer:
    """States of one request in slot 1, with a ring, or written in each step (`dtype` of floats, no ring)."""

    def __init__(self, kind: str, dtype: torch.dtype, replay: bool, stochastic: bool) -> None:
        self.kind, self.replay, self.slots = kind, replay, torch.ones(1, dtype=torch.int32)
        self.codes: StateCodes | None = None
        self.states = torch.zeros(2, HEADS, VALUES, KEYS, dtype=torch.uint8 if dtype in LARGEST else dtype)
        lengths = torch.zeros(2, dtype=torch.int32)
        if stochastic:
            self.codes = StateCodes(lengths, element_keys(0, 0, HEADS))
        if dtype in LARGEST:
            stored = torch.zeros(2, HEADS, head_bytes(VALUES, KEYS), dtype=torch.uint8)
            self.states, scales = split_heads_of_codes(stored, VALUES, KEYS, dtype)
            self.codes = StateCodes(lengths, element_keys(0, 0, HEADS), scales)
        gates = (KEYS,) if kind == "kda" else ()
        self.ring = (
            torch.zeros(2, HEADS, WIDTH, VALUES),
            torch.zeros(2, HEADS, WIDTH, KEYS),
            torch.zeros(2, HEADS, WIDTH, *gates),
        )
        self.start, self.length = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    def step(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
        """[HEADS, VALUES] of one token. gate: log decays [HEADS] or [HEADS, KEYS]; in Mamba-2 time steps."""
        state = StateSlots(self.states, self.slots, self.slots, codes=self.codes)
        ring = StateRing(*self.ring, self.slots, self.start[1:], self.length[1:])
        q, k, v, gate, beta = (t[None, None] for t in (q, k, v, gate, beta))
        if self.kind == "mamba2":
            inputs, weights = SSMInputs(v, gate.expm1().log(), k, q), SSMWeights(-RATES)
            if self.replay:
                out = mamba2_replay(inputs, weights, state, ring)
            else:
                out = selective_state_update.reference(inputs, weights, state)
        else:
            tokens = DeltaInputs(q, k, v, gate, beta)
            out = (
                gdn_replay(tokens, state, ring) if self.replay else recurrent_gated_delta_rule.reference(tokens, state)
            )
        if self.replay:
            self.fold()
        return out[0, 0]

    def fold(self) -> None:
        lengths = None if self.codes is None else self.codes.state_lengths
        folds = advance_ring.reference(
            self.start, self.length, self.slots, self.slots, self.slots, width=WIDTH, widest=1, state_lengths=lengths
        )
        codes = self.codes
        if codes is not None:
            scales = None if codes.state_scales is None else codes.state_scales[None]
            codes = StateCodes(codes.state_lengths, codes.element_keys[None], scales)
        A = -RATES[None] if self.kind == "mamba2" else None
        fold_ring.reference(self.states[None], *(part[None] for part in self.ring), A, folds, codes)


class Twin:
    """The recurrence in float64."""

    def __init__(self, kind: str) -> None:
        self.kind, self.state = kind, torch.zeros(HEADS, VALUES, KEYS, dtype=torch.float64)

    def step(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
        q, k, v, gate, beta = (t.double() for t in (q, k, v, gate, beta))
        if self.kind == "mamba2":
            decay, weight = (-RATES.double() * gate).exp()[:, None, None], gate[:, None]
            self.state = self.state * decay + (weight * v)[:, :, None] * k[:, None]
            return (self.state @ q[:, :, None])[..., 0]
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
        self.state = self.state * (gate.exp()[:, None] if gate.ndim == 2 else gate.exp()[:, None, None])
        value = beta[:, None] * (v - (self.state @ k[:, :, None])[..., 0])
        self.state = self.state + value[:, :, None] * k[:, None]
        return (self.state @ q[:, :, None])[..., 0] * KEYS**-0.5


def drift(kind: str, steps: int, seed: int = 0) -> dict[str, list[float]]:
    """By way of storing: relative error of the outputs of the last half of the steps, by head."""
    generator = torch.Generator().manual_seed(seed)
    layers = {
        "bfloat16, written in each step": Layer(kind, torch.bfloat16, False, False),
        "bfloat16": Layer(kind, torch.bfloat16, True, False),
        "bfloat16, stochastic": Layer(kind, torch.bfloat16, True, True),
        "int8": Layer(kind, torch.int8, True, True),
        "fp8": Layer(kind, torch.float8_e4m3fn, True, True),
    }
    twin, errors, size = Twin(kind), {name: torch.zeros(HEADS).double() for name in layers}, torch.zeros(HEADS).double()
    outliers, offset = (torch.randn(KEYS, generator=generator) for _ in range(2))
    for step in range(steps):
        inputs = token(kind, outliers.mul(0.7).exp(), 0.5 * offset, generator)
        exact = twin.step(*inputs)
        late = step >= steps // 2
        size += exact.square().sum(1) * late
        for name, layer in layers.items():
            errors[name] += (layer.step(*inputs).double() - exact).square().sum(1) * late
    return {name: (error / size).sqrt().tolist() for name, error in errors.items()}


def token(kind: str, outliers: Tensor, offset: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Queries, keys, values, gates and beta: some channels of keys are large, and most of their means are not zero."""
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    silu = torch.nn.functional.silu
    q, k = (silu((normal(HEADS, KEYS) + offset) * outliers) for _ in range(2))
    v, beta = silu(normal(HEADS, VALUES)), torch.sigmoid(normal(HEADS))
    if kind == "mamba2":
        return q, k, v, (0.5 * normal(HEADS)).exp(), beta
    gate = (HEADS, KEYS) if kind == "kda" else (HEADS,)
    rates = RATES.view(-1, *[1] * (len(gate) - 1))
    return q, k, v, -rates * (0.5 * normal(*gate)).exp(), beta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=0, help="of held-out text")
    parser.add_argument(
        "--source", type=Path, default=Path(sysconfig.get_path("stdlib")), help="CPython 3.11.7's library"
    )
    parser.add_argument("--drift-steps", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=["gdn", "kda", "mamba2"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"environment": environment()}
    if args.tokens:
        found["perplexity"] = perplexities(args.tokens, args.source)
    for kind in args.kinds if args.drift_steps else ():
        found[f"drift {kind}"] = drift(kind, args.drift_steps)
        for name, errors in found[f"drift {kind}"].items():
            print(f"{kind:8}{name:32}", *(f"{error:.5f}" for error in errors), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
