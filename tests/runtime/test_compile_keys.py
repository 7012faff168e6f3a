"""Kernels that are compiled ahead are found by launches: the keys of Triton's cache agree across processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridrt.runtime.precompile.compile_ahead import ENVIRONMENT
from tests.support.checkpoints import nemotron, qwen
from tests.support.tiny import write_tiny

ROOT = Path(__file__).parents[2]


def ask(what: str, model: Path, cache: Path) -> Any:
    env = {**os.environ, **ENVIRONMENT, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.support.compile_keys", what, str(model)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_launches_find_what_was_compiled(tmp_path: Path) -> None:
    """And two layers of each sort launch all kernels that the whole model launches."""
    model, cache = write_tiny(tmp_path / "model", nemotron("MM*-MME-M"), tokenizer=False), tmp_path / "cache"
    made = ask("kernels", model, cache)
    assert (
        set(made["compiled"]) == {"_rms_norm_kernel", "_few_tokens_states_kernel"}
        and made["all"] > 40
        and made["others"] == 0
    )
    assert {file.suffix for file in cache.glob("*/*.*")} == {".source", ".cubin", ".json"}
    assert ask("launches", model, cache) == {"hit": made["compiled"], "missed": [], "late": []}


@pytest.mark.slow
def test_keys_are_computed_before_launches(tmp_path: Path) -> None:
    """Also those of files that an operation reaches through another file."""
    model = write_tiny(tmp_path / "model", qwen(), tokenizer=False)
    assert ask("launches", model, tmp_path / "cache")["late"] == []


@pytest.mark.soak
def test_kernels_of_a_quantised_model(tmp_path: Path) -> None:
    """Its layers are those that a start has once weights are loaded: stored for kernels."""
    config = json.loads((ROOT / "benchmarks/configs/qwen3.5-35b-a3b-like/config.json").read_text())
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config |= {"num_hidden_layers": 4, "quantization_config": fp8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = ask("names", tmp_path, tmp_path / "cache")
    assert {"_quantize_kernel", "_fp8_linear_kernel", "_quant_grouped_kernel"} <= set(names)


@pytest.mark.soak
def test_kernels_of_images() -> None:
    """The tower's, and those of positions on three axes."""
    folder = ROOT / "benchmarks/configs/qwen3.5-9b-vl-like"
    assert ask("images", folder, ROOT) == ["_rotary_kernel"] * 3
