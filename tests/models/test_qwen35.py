"""Qwen3.5's wrappers: what of them is skipped, how experts may be stored, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrt import LLM, SamplingParams
from hybridrt.base.errors import CheckpointError, ConfigError, RequestError
from hybridrt.models.config.read_config import read_model_config
from tests.models.test_loader import load, skipped
from tests.models.test_models_parity import requests, rewrite
from tests.support.checkpoints import CheckpointStore
from tests.support.session import Session, check_sample
from tests.support.sizes import VOCAB

SEEING = ("qwen35-seeing_tied", "qwen35-seeing_experts")


@pytest.mark.parametrize("name", SEEING)
def test_the_vision_tower_is_skipped_and_listed(name: str, checkpoints: CheckpointStore) -> None:
    path = checkpoints[name].path
    keys = load_file(path / "model.safetensors").keys()
    assert set(skipped(path)) == {key for key in keys if key.startswith("model.visual.")} != set()


@pytest.mark.parametrize("name", ["qwen35-experts", "qwen35-seeing_experts", "qwen-plain"])
def test_experts_in_one_tensor(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """[E, gate above up, hidden] and [E, hidden, intermediate], as larger checkpoints store them."""
    checkpoint = checkpoints[name]
    path = rewrite(checkpoint.path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    stacks = sorted({key.split(".0.gate_proj")[0] for key in tensors if ".experts.0.gate_proj" in key})
    count = sum(key.startswith(f"{stacks[0]}.") for key in tensors) // 3
    for stack in stacks:
        parts = [[tensors.pop(f"{stack}.{e}.{m}_proj.weight") for e in range(count)] for m in ("gate", "up", "down")]
        gate, up, down = (torch.stack(part) for part in parts)
        tensors |= {f"{stack}.gate_up_proj": torch.cat((gate, up), 1), f"{stack}.down_proj": down}
    save_file(tensors, path / "model.safetensors")
    check_sample(checkpoint, Session(path).run(requests(9, steps=6))[0], name)
    assert not [key for key in skipped(path) if not key.startswith("model.visual.")]
    wrong = tensors | {f"{stacks[0]}.down_proj": tensors[f"{stacks[0]}.down_proj"][:-1].contiguous()}
    save_file(wrong, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"holds {count - 1} experts, config.json says {count}"):
        load(path)


def test_prompts_with_images_are_refused(checkpoints: CheckpointStore) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    with LLM(str(checkpoints["qwen35-seeing_tied"].path), device="cpu", max_model_len=64) as llm:
        for token, field in ((VOCAB - 1, "image_token_id"), (VOCAB - 2, "video_token_id")):
            with pytest.raises(RequestError, match=rf"token {token} \({field}\), which stands for an image"):
                llm.generate([[5, token, 6]], params)
        with pytest.raises(RequestError, match=r"multi_modal_data.*a prompt is"):
            llm.generate([{"prompt": "x", "multi_modal_data": {"image": object()}}], params)  # type: ignore[list-item]
        assert len(llm.generate([[5, 6]], params)[0].token_ids) == 2


def test_the_text_part_is_read_like_the_model_of_text_alone(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = checkpoints["qwen35-seeing_tied"].path
    config = read_model_config(path)
    assert config.tie_word_embeddings and config.attention.rope is not None
    assert config.image_tokens == {VOCAB - 1: "image_token_id", VOCAB - 2: "video_token_id"}
    fields = json.loads((path / "config.json").read_text())
    text = fields["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(text))
    alone = read_model_config(tmp_path)
    assert (alone.layers, alone.attention, alone.linear) == (config.layers, config.attention, config.linear)


def test_only_a_head_that_shares_the_embedding_is_one(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = checkpoints["qwen35-plain"].path
    for i, (more, count) in enumerate(((False, 1), (True, 0))):
        fields = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": more}
        assert len(read_model_config(rewrite(path, tmp_path / str(i), **fields)).mtp_layers) == count


def test_an_adapter_is_refused(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = rewrite(checkpoints["qwen35-plain"].path, tmp_path / "model")
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config\.json.*LoRA"):
        read_model_config(path)
