"""Kernels of weights with multipliers are traced as a start from a checkpoint launches them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrt.base.device import KNOWN
from hybridrt.base.engine_config import EngineConfig
from hybridrt.layers.quant.methods import Fp8
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.precompile import compile_trace
from hybridrt.runtime.precompile.pretend_gpu import pretended

CONFIG = Path(__file__).parents[2] / "benchmarks/configs/falcon-h1-7b/config.json"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_multipliers_are_those_of_a_checkpoint(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get them as factors of rows, unless they are part of the scales. Random weights have none."""
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": 2, "quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # There are no weights to look at.
    without = lambda config, tp: load_target(replace(config, load_format="dummy"), tp)  # noqa: E731
    monkeypatch.setattr(compile_trace, "load_target", without)
    multiplied = gpu == "h200"  # by tensor cores: factors become part of the scales
    for load_format, has_factors in (("dummy", False), ("auto", not multiplied)):
        with pretended(KNOWN[gpu]):
            asked = EngineConfig(str(tmp_path), device="cuda", dtype="bfloat16", load_format=load_format)
            runner, _ = compile_trace._runners(asked)
        parts = [part for module in runner.model.modules() for part in vars(module).values()]
        found = [part for part in parts if isinstance(part, Fp8)]
        assert len(found) > 5 and all((part.product is not None) == multiplied for part in found)
        assert any(part.kernel is not None and part.kernel.factor is not None for part in found) == has_factors
