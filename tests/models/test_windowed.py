"""What is special in gpt-oss and Lara 4 Mini, apart from the tests that all families share."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrt.base.errors import BackendError, CheckpointError
from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.moe import SoftmaxRouter
from hybridrt.layers.weights import Build
from tests.models.test_loader import load
from tests.models.test_models_parity import requests, rewrite
from tests.support.checkpoints import CheckpointStore
from tests.support.session import Session, check_sample


def test_each_sink_counts(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Of a layer with a window and of one without."""
    checkpoint = checkpoints["gpt_oss-plain"]
    path = rewrite(checkpoint.path, tmp_path / "model")
    whole = load_file(path / "model.safetensors")
    check_sample(checkpoint, Session(path).run(requests(9, steps=4))[0], "as they are")
    for layer in (0, 1):
        for head in range(4):
            tensors = {key: t.clone() for key, t in whole.items()}
            tensors[f"model.layers.{layer}.self_attn.sinks"][head] += 3
            save_file(tensors, path / "model.safetensors")
            with pytest.raises(AssertionError, match="logits differ"):
                check_sample(checkpoint, Session(path).run(requests(9, steps=4))[0], f"{layer}, {head}")


def test_a_tensor_with_too_few_experts_is_named(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = rewrite(checkpoints["gpt_oss-plain"].path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    key = "model.layers.1.mlp.experts.gate_up_proj_bias"
    save_file(tensors | {key: tensors[key][:-1].contiguous()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{key}.* holds 3 experts, config.json says 4"):
        load(path)


def test_experts_in_mxfp4_are_refused_without_a_field_too(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = rewrite(checkpoints["gpt_oss-plain"].path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    key = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = {f"{key}_blocks": tensors.pop(key).byte(), f"{key}_scales": torch.zeros(4, dtype=torch.uint8)}
    save_file(tensors | blocks, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2 that nothing consumes: .*gate_up_proj_blocks"):
        load(path)


def test_sinks_need_a_backend_that_has_them(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrt.attention.paged.TorchNativeAttnBackend.serves_sinks", False)
    with pytest.raises(BackendError, match="no kernels for attention sinks"):
        Session(checkpoints["gpt_oss-plain"].path)


def test_exact_logits_of_a_router_are_not_rounded() -> None:
    build = Build(TPGroup(), torch.bfloat16, torch.device("cpu"))
    routers = [
        SoftmaxRouter("r", 64, 4, top_k=1, renormalize=True, shared_experts=1, exact=exact, build=build)
        for exact in (True, False)
    ]
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    found = []
    for router in routers:
        router.weight.data[:4] = torch.tensor([[4.0], [4.0], [4.0], [4.0]]).repeat(1, 64)
        router.weight.data[2, 0] = 4.03125  # the sum is 256.03; bfloat16 has 256 and 258
        found.append(router._logits(x)[0, :4])
    assert int(found[0].argmax()) == 2 and found[0].dtype == torch.float32
    assert len(found[1].unique()) == 1
