"""A quantised checkpoint next to transformers, which runs a copy with decoded matrices."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrt.runtime.load.quantise import write_quantised
from hybridrt.verify.decoded_copy import write_decoded
from hybridrt.verify.files import check_config
from hybridrt.verify.outputs import check_transformers
from hybridrt.verify.results import FAILED, PASSED, Result
from hybridrt.verify.subject import Subject
from tests.models.test_quantised_checkpoints import CASES
from tests.support.checkpoints import CheckpointStore, write
from tests.support.mxfp4 import write_mxfp4
from tests.support.newer_checkpoints import qwen35


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    make = qwen35(hidden_size=128, intermediate_size=128, num_hidden_layers=2, full_attention_interval=2)
    write(make, folder / "plain")
    write_quantised(str(folder / "plain"), folder / "int4", "int4", ())
    return folder / "int4"


def test_a_decoded_copy_is_plain(quantised: Path, tmp_path: Path) -> None:
    count = write_decoded(quantised, tmp_path)
    tensors, plain = load_file(tmp_path / "model.safetensors"), load_file(quantised.parent / "plain/model.safetensors")
    assert tensors.keys() == plain.keys() and count > 5
    assert all(t.dtype == torch.float32 and t.shape == plain[key].shape for key, t in tensors.items())
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    key = next(key for key in plain if key.endswith("mlp.up_proj.weight"))
    assert 0 < float((tensors[key] - plain[key]).norm() / plain[key].norm()) < 0.2


@pytest.mark.parametrize("name", ["granite in fp8", "gpt-oss in MXFP4"])
def test_stacks_of_experts_are_decoded(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """They have the names and sides of the plain checkpoint."""
    stacked = CASES["granite stacks"]
    paths = write_mxfp4(tmp_path) if "MXFP4" in name else stacked.write(checkpoints, tmp_path)
    (tmp_path / "decoded").mkdir()
    write_decoded(paths[0], tmp_path / "decoded")
    found, plain = (load_file(path / "model.safetensors") for path in (tmp_path / "decoded", paths[1]))
    assert sum("experts" in key or "block_sparse_moe" in key for key in plain) >= 4
    torch.testing.assert_close(found, {key: t.float() for key, t in plain.items()})


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_it_is_compared_with_transformers(quantised: Path, damaged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another decoding than ours is found."""
    subject, result = Subject(str(quantised), device="cpu", quick=True), Result("transformers")
    check_config(subject, Result("config"))
    if damaged:

        def wrong(path: Path, out: Path) -> int:
            count = write_decoded(path, out)
            tensors = load_file(out / "model.safetensors")
            key = next(key for key in tensors if key.endswith("mlp.up_proj.weight"))
            save_file(tensors | {key: tensors[key].flip(0).contiguous()}, out / "model.safetensors", {"format": "pt"})
            return count

        monkeypatch.setattr("hybridrt.verify.outputs.write_decoded", wrong)
    check_transformers(subject, result)
    assert result.status == (FAILED if damaged else PASSED), result.findings
    assert "quantised matrices were decoded to float32" in result.notes[0]
