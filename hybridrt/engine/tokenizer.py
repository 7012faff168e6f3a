"""Text to token ids and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hybridrt.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with whatever the tokenizer puts before it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out; U+FFFD stands for bytes that are no character (yet)."""
        ...


class HFTokenizer:
    """A Hugging Face tokenizer; `hf` is the object itself (chat templates, special tokens)."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf

    def encode(self, text: str) -> list[int]:
        return list(self.hf.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        # Cleaning up spaces would change text that has already been streamed.
        return self.hf.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load_tokenizer(path: str | Path) -> HFTokenizer | None:
    """The tokenizer of a checkpoint directory, None if it has no tokenizer files.

    Raises:
        CheckpointError: the files are there but cannot be read.
    """
    directory = Path(path)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # slow to import, and useless where token ids go in and come out

    try:
        return HFTokenizer(AutoTokenizer.from_pretrained(str(directory), local_files_only=True))
    except Exception as e:
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be loaded ({type(e).__name__}: {e}); fix its files, or remove "
            f"{', '.join(TOKENIZER_FILES)} to pass token ids instead of text"
        ) from e
