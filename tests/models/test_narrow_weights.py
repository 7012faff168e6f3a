"""What a quantised model keeps plain: on a CPU in the dtype of the files, widened where it is used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrt.base.engine_config import EngineConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.models.base import CausalLM
from hybridrt.models.loading.stored_modules import narrow_table
from hybridrt.runtime.load.build_model import build_model, empty_model, plain_model
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.quantise import write_quantised
from tests.support.online import write_plain, write_twin
from tests.support.session import Session

PROMPTS = [([5, 9, 17, 3, 40, 8], 4), ([2, 3], 4)]
TABLES = ["embed.weight", "head.weight"]
GATES = [f"stack.parts.{i}.in_proj.weight_1" for i in (0, 2, 4)]  # next to codes in one merged weight


def written(name: str, dtype: torch.dtype, folder: Path) -> tuple[Path, Path]:
    """A checkpoint in a narrow dtype, and the same numbers as float32 ones."""
    wide, narrow = write_plain(name, folder / "wide"), write_plain(name, folder / "narrow")
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(wide / "model.safetensors").items()}
    save_file(tensors, narrow / "model.safetensors")
    save_file({key: tensor.float() for key, tensor in tensors.items()}, wide / "model.safetensors")
    return narrow, wide


def load(path: Path, tp: TPGroup | None = None, **options: Any) -> CausalLM:
    tp = tp or TPGroup()
    config = EngineConfig(str(path), device="cpu", **{"dtype": "float32", "tp_size": tp.size, **options})
    file, target = load_target(config, tp)
    return build_model(config, target, file, progress=False)


def dtypes(model: CausalLM) -> dict[str, torch.dtype]:
    """Of plain matrices and vectors, and of codes."""
    return {name: param.dtype for name, param in model.named_parameters() if "scales" not in name}


@pytest.mark.parametrize(
    ("name", "dtype", "copied"),
    [
        ("falcon", torch.bfloat16, True),
        ("qwen", torch.float16, False),
        pytest.param("qwen", torch.bfloat16, True, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_the_widened_model(name: str, dtype: torch.dtype, copied: bool, tmp_path: Path) -> None:
    narrow, wide = written(name, dtype, tmp_path)
    twin = write_twin(name, "int4", wide, tmp_path / "twin")
    options = {} if copied else {"quantization": "int4"}
    path = write_quantised(str(narrow), tmp_path / "copy", "int4", ()).path if copied else narrow
    sessions = Session(path, **options), Session(twin)
    ours, theirs = ([sample.logits for sample in session.run(PROMPTS, chunk=4)] for session in sessions)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    found = dtypes(sessions[0].runner.model)
    assert {key for key, each in found.items() if each == dtype} == {*TABLES, *(GATES if name == "qwen" else ())}


def test_matrices_that_loading_multiplies_are_not_rounded_again(tmp_path: Path) -> None:
    """Falcon-H1's multipliers."""
    narrow, _ = written("falcon", torch.bfloat16, tmp_path)
    found = dtypes(
        load(write_quantised(str(narrow), tmp_path / "copy", "int4", ("re:.*layers.0.feed_forward.*",)).path)
    )
    kept = {key for key, dtype in found.items() if dtype == torch.bfloat16}
    assert kept == {*TABLES, "stack.parts.1.up.weight_1"}
    assert found["stack.parts.1.up.weight_0"] == found["stack.parts.1.down.weight"] == torch.float32


def test_experts_have_the_model_s_dtype(tmp_path: Path) -> None:
    """One method has both matrices of an expert, and either may be in codes."""
    narrow, _ = written("qwen", torch.bfloat16, tmp_path)
    config = EngineConfig(str(narrow), device="cpu", dtype="float32", quantization="int4")
    _, target = load_target(config, TPGroup())
    names = ("lm_head", "model.layers.0.mlp.experts.0.down_proj", "model.layers.0.linear_attn.out_proj")
    quant = replace(target.model_config.quant, plain=dict.fromkeys(names, torch.bfloat16))
    found = narrow_table(*plain_model(config, target), quant, torch.float32)
    assert "head.rows" in found and len(found) == 2 and not any("experts" in part for part in found)


def test_ranks_have_their_rows(tmp_path: Path) -> None:
    narrow, _ = written("falcon", torch.bfloat16, tmp_path)
    whole, *ranks = (
        load(narrow, tp, quantization="int4").get_parameter("embed.weight")
        for tp in (TPGroup(), TPGroup(0, 2), TPGroup(1, 2))
    )
    assert whole.dtype == ranks[0].dtype == torch.bfloat16
    assert torch.equal(torch.cat(ranks)[: len(whole)], whole)


@pytest.mark.parametrize(
    ("options", "device", "kept"),
    [
        ({"dtype": "float32", "quantization": "fp8"}, "cpu", torch.bfloat16),
        ({"dtype": "float16", "quantization": "fp8"}, "cpu", torch.float16),
        ({"dtype": "float32", "quantization": "fp8"}, "cuda", torch.float32),
        ({"dtype": "float32", "quantization": "fp8", "load_format": "dummy"}, "cpu", torch.float32),
        ({"dtype": "float32"}, "cpu", torch.float32),
    ],
)
def test_where_a_table_is_narrow(
    options: dict[str, Any], device: str, kept: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a GPU read the model's dtype, and plain models have what was asked for."""
    narrow, _ = written("falcon", torch.bfloat16, tmp_path)
    config = EngineConfig(str(narrow), device="cpu", **options)
    _, target = load_target(config, TPGroup())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = empty_model(config, replace(target, device=torch.device(device)), torch.device("meta"))
    assert {dtypes(model)[name] for name in TABLES} == {kept}
