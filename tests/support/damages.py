"""Copies of tiny checkpoints with one damage each, and a tokenizer that fits their vocabulary."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tests.support.sizes import VOCAB

TURNS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
# By what is wrong with it, and a part of the finding.
TEMPLATES = {
    "without a generation prompt": (
        TEMPLATE.partition("{% if add")[0], "the generation prompt is missing"
    ),
    "of another model": (TEMPLATE.replace("<|im_start|>", "<|start_header_id|>"), "<|start_header_id|>, which is no"),
    "without answers": (
        TEMPLATE.replace("message.content }}", "message.content if message.role != 'assistant' }}"),
        "the answer is lost",
    ),
    "without a system prompt": (
        TEMPLATE.replace("in messages %}", "in messages if message.role != 'system' %}"), "the system prompt is lost"
    ),
    "of another prompt": (
        TEMPLATE.replace("<|im_start|>assistant {%", "<|im_start|>bot {%"), "an answer begins after"
    ),
    "with roles that run into texts": (
        TEMPLATE.replace("role }} {{", "role }}{{").replace("assistant {%", "assistant{%"), "role user and the text"
    ),
    "with an error": (TEMPLATE + "{{ nothing.at.all }}", "chat template fails"),
}  # fmt: skip


def with_tokenizer(path: Path, template: str = TEMPLATE) -> None:
    """A token for each word of the checks, and for each letter."""
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz", "Q", " ", "7", "_"})
    words = {"<unk>": 0, "<s>": 1, "<|im_end|>": 2, "<|im_start|>": 3}
    words |= {letter: i for i, letter in enumerate(letters, len(words))}
    assert len(words) < VOCAB
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in TURNS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(template)


def copied(source: Path, to: Path) -> Path:
    """A copy with a tokenizer."""
    shutil.copytree(source, to)
    with_tokenizer(to)
    return to


def change_tensor(path: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[key] = change(tensors[key].clone()).contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def some_matrix(path: Path) -> str:
    """The key of a matrix of the last layer."""
    tensors = load_file(path / "model.safetensors")
    layers = [
        key for key, tensor in tensors.items() if ".layers." in key and tensor.dim() == 2 and tensor.numel() > 999
    ]
    return max(layers)


def change_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((path / "config.json").read_text())
    change(raw)
    (path / "config.json").write_text(json.dumps(raw))


def part(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A quarter of it replaced."""
    tensor.view(-1)[: tensor.numel() // 4] = value
    return tensor


TENSORS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "not a number": (lambda t: part(t, float("nan")), "not finite"),
    "zeros": (torch.zeros_like, "zeros alone"),
    "zeros in a part": (lambda t: part(t, 0.0), "zeros alone"),
    "a hundred times larger": (lambda t: 100 * t, "its numbers have size"),
    "random bytes": (
        lambda t: torch.randint(0, 256, (t.nbytes,), dtype=torch.uint8).view(t.dtype).view(t.shape), "not finite"
    ),
}  # fmt: skip
