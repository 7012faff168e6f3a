"""gpt-oss as it is published, with experts in MXFP4: the same as a plain checkpoint of the same numbers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.cli.inspect import describe_model
from hybridrt.collectives.groups import TPGroup
from hybridrt.models.base import CausalLM
from hybridrt.runtime.load.build_model import build_model, weight_bytes
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.model_path import find_checkpoint
from tests.support.mxfp4 import edit_config, write_mxfp4
from tests.support.session import Session

Tensors = dict[str, Tensor]
UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_mxfp4(tmp_path_factory.mktemp("mxfp4"))


def load(path: Path, tp: TPGroup | None = None, **options: Any) -> CausalLM:
    tp = tp or TPGroup()
    config = EngineConfig(str(path), device="cpu", dtype="float32", tp_size=tp.size, **options)
    file, target = load_target(config, tp)
    return build_model(config, target, file, progress=False)


def test_logits_are_those_of_transformers(paths: tuple[Path, Path]) -> None:
    prompts = [([5, 9, 17, 3, 40, 8], 4), ([2, 3], 4)]
    session = Session(paths[0])
    assert weight_bytes(session.runner.model) < 0.6 * weight_bytes(Session(paths[1]).runner.model)
    theirs = tf.GptOssForCausalLM.from_pretrained(paths[1], dtype=torch.float32).eval()
    for sample in session.run(prompts, chunk=4):
        ids = torch.tensor([[*sample.prompt, *sample.tokens[:-1]]])
        with torch.no_grad():
            logits = theirs(ids, use_cache=False).logits[0, len(sample.prompt) - 1 :]
        torch.testing.assert_close(sample.logits, logits, rtol=1e-4, atol=1e-4)


def test_ranks_have_parts_of_the_matrices(paths: tuple[Path, Path]) -> None:
    whole, *ranks = (load(paths[0], tp) for tp in (TPGroup(), TPGroup(0, 2), TPGroup(1, 2)))
    for layer in ("layers.0", "layers.1"):
        stacks = [experts_of(model, layer) for model in (whole, *ranks)]
        for e in range(4):
            ups = [each.up.packed.dequantize(e=e).chunk(2) for each in stacks]
            downs = [each.down.packed.dequantize(e=e) for each in stacks]
            for i in (0, 1):  # gate and up
                torch.testing.assert_close(torch.cat((ups[1][i], ups[2][i])), ups[0][i], rtol=0, atol=0)
            torch.testing.assert_close(torch.cat(downs[1:], 1), downs[0], rtol=0, atol=0)


def experts_of(model: CausalLM, layer: str) -> Any:
    found = [part.experts for _, part in model.stack if hasattr(part, "experts")]
    return found[int(layer[-1])].method


def test_random_weights_and_inspection(paths: tuple[Path, Path]) -> None:
    """config.json alone says that experts are quantised, and nothing else."""
    model = load(paths[0], load_format="dummy")
    kinds = {str(p.dtype) for name, p in model.named_parameters() if "experts" not in name}
    assert kinds == {"torch.float32"}
    assert weight_bytes(model) == weight_bytes(load(paths[0]))
    report = describe_model(EngineConfig(str(paths[0]), device="cpu", dtype="float32"))
    assert report.quantization == "mxfp4" and report.schemes == {"fp4 by 32 inputs": 4}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(f"{UP}_scales"), f"{UP}.scales is missing"),
        (lambda t: t.pop(f"{UP}_blocks"), f"{UP}.scales belongs to a quantised matrix"),
        (lambda t: t.update({f"{UP}_scales": t[f"{UP}_scales"][:, :-1].contiguous()}), f"{UP}.scales has shape"),
        (lambda t: t.update({f"{UP}_blocks": t[f"{UP}_blocks"].flatten(-2)}), f"{UP}.blocks has shape"),
        (lambda t: t[f"{UP}_scales"].fill_(255), f"{UP}.scales contains NaN"),
        (lambda t: t.update({f"{UP}_blocks": t[f"{UP}_blocks"].int()}), f"{UP}.blocks holds int32"),
    ],
)
def test_damaged_tensors(change: Callable[[Tensors], Any], text: str, paths: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(paths[0], tmp_path / "model")
    tensors = load_file(paths[0] / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=text.replace(".", r"\.")):
        load(tmp_path / "model")


def test_a_list_of_numbers_is_refused(paths: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(paths[0], tmp_path / "model")
    edit_config(tmp_path / "model", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": [1]})
    with pytest.raises(ConfigError, match="modules_to_not_convert"):
        load(tmp_path / "model")


def test_other_forms_of_the_weights_are_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = ["config.json", "model-0.safetensors", "original/model.safetensors", "metal/model.bin"]

    def download(name: str, **patterns: Any) -> str:
        wanted[:] = filter_repo_objects(wanted, **patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_checkpoint("openai/gpt-oss-20b") == tmp_path and wanted == ["config.json", "model-0.safetensors"]
