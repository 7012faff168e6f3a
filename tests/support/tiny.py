"""Checkpoint directories without weights (load_format="dummy" fills them), with a byte-level tokenizer if wanted."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.checkpoints import Make, falcon

VOCAB = 300
LENGTH = 4096
CHAT_TEMPLATE = "<bos>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
SPECIAL = ["<pad>", "<bos>", "<eos>"]


def write_tiny(
    path: Path,
    make: Make | None = None,
    *,
    tokenizer: bool = True,
    chat_template: str | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """Writes config.json and what else is asked for; returns the directory."""
    config, cls = (make or falcon(vocab_size=VOCAB, max_position_embeddings=LENGTH))()
    config.architectures = [cls.__name__]
    config.save_pretrained(path)
    if tokenizer:
        _write_tokenizer(path, chat_template)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def _write_tokenizer(path: Path, chat_template: str | None) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(SPECIAL + letters)}, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    if chat_template:
        settings["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
