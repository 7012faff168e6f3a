"""Thousands of decode steps in a row: how far logits drift when the recurrent state is kept in fewer bits."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.runtime.step.plan import DecodeRow, DecodeRows
from tests.gpu.rig import PRODUCTION, Rows
from tests.support.checkpoints import Checkpoint, falcon, nemotron, qwen, write

pytestmark = PRODUCTION
STEPS = int(os.environ.get("HYBRIDRT_DRIFT_STEPS", "8000"))
LONG = {"max_position_embeddings": 2**14}
# Without experts: rounding that changes which of them run is no drift.
MODELS = {
    "falcon": falcon(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2, **LONG),
    "nemotron": nemotron("M*-M-*M", **LONG),
    "qwen": qwen(num_experts=0, mlp_only_layers=[0, 1, 2, 3], **LONG),
}
# Mean error over a tenth of the steps, as a share of the logits' spread. Rounding to the nearest of 8 bits loses what a
# slow decay takes from a state in one token, so bfloat16 drifts most where it rounds after every token (classic): the
# plain-torch path by as much as the kernels. In replay mode a state is rounded once in about 16 tokens.
BOUNDS = {
    ("float32", "classic"): 1e-5, ("float32", "replay"): 1e-5, ("float16", "classic"): 1e-2,
    ("float16", "replay"): 1e-3, ("bfloat16", "classic"): 1e-1, ("bfloat16", "replay"): 1e-2,
}  # fmt: skip


@torch.inference_mode()
def forced_logits(path: Path, tokens: list[int], **config: Any) -> Tensor:
    """Logits [n, vocab] after each of `tokens`, fed one by one in decode steps after a prompt of one token."""
    rows = Rows(path, [1], spare=0, max_model_len=len(tokens) + 8, page_size=16, **config)
    runner, teacher = rows.runner, torch.tensor(tokens, dtype=torch.int32, device=rows.runner.device)
    logits = torch.empty(len(tokens), runner.model_config.vocab_size, device=runner.device)
    for i in range(len(tokens)):
        runner.last_tokens[1] = teacher[i]
        logits[i] = runner.graphs[1].replay(DecodeRows.from_rows([DecodeRow(1, i + 1, 0)]))[0]
    return logits.cpu()


def drift(logits: Tensor, reference: Tensor) -> tuple[float, float]:
    """Mean error over the first and over the last tenth of the steps, as a share of the reference's spread."""
    spread = (reference.max(1).values - reference.min(1).values)[:, None]
    error = ((logits - reference).abs() / spread).mean(1)
    tenth = len(error) // 10
    return error[:tenth].mean().item(), error[-tenth:].mean().item()


@pytest.mark.parametrize("model", MODELS)
def test_drift_over_thousands_of_steps(
    model: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """float32 against transformers in one forward over everything; fewer bits against float32."""
    checkpoint = Checkpoint(tmp_path, write(MODELS[model], tmp_path))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 131, (STEPS,), generator=generator).tolist()
    prompt = Rows(tmp_path, [1], spare=0, max_model_len=16).prompts[1]  # every Rows draws the same one
    oracle = checkpoint.logits([*prompt, tokens[0]], [*tokens[1:], 0])
    found = {}
    for dtype, mode in BOUNDS:
        logits = forced_logits(tmp_path, tokens, state_mode=mode, mamba_ssm_dtype=dtype)
        assert logits.isfinite().all()
        found[dtype, mode] = drift(logits, oracle)
    for (dtype, mode), (first, last) in found.items():
        record_property(f"{dtype} {mode}", f"first tenth {first:.1e}, last tenth {last:.1e}")
    for kind, errors in found.items():
        assert max(errors) < BOUNDS[kind], (kind, errors)
