"""Text to token ids and back."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from hybridrt.errors import CheckpointError, RequestError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


# Normal form C and its kin make one character of at most so many: no canonical decomposition is longer (UAX 15).
_COMPOSED = 4


class Tokenizer(Protocol):
    @property
    def characters_per_token(self) -> int:
        """Characters of text that a token stands for at most."""
        ...

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

    @cached_property
    def characters_per_token(self) -> int:
        """The length of the longest token; where a normaliser may compose characters, of what it may have composed. A
        byte-level vocabulary spells bytes, of which a character has at least one."""
        backend = getattr(self.hf, "backend_tokenizer", None)
        plain = backend is not None and backend.normalizer is None
        return max(map(len, self.hf.get_vocab())) * (1 if plain else _COMPOSED)

    def encode(self, text: str) -> list[int]:
        return list(self.hf.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        # Cleaning up spaces would change text that has already been streamed.
        return self.hf.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def encode_prompt(tokenizer: Tokenizer, text: str, most_tokens: int) -> list[int]:
    """Token ids of a prompt. Text too long for `most_tokens` whatever its tokens are is refused before it costs more
    than its length; so is text of which a tokenizer would drop so much that it might fit (repeated spaces).

    Raises:
        RequestError: the text is too long, or no Unicode text.
    """
    width = tokenizer.characters_per_token
    if len(text) > most_tokens * width:
        raise RequestError(
            f"the prompt has {len(text)} characters; it may have at most {most_tokens} tokens (max_model_len less one "
            f"for the output), and none stands for more than {width} characters: shorten it or raise max_model_len"
        )
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(
            f"the prompt's character {e.start} is U+{ord(text[e.start]):04X}, half of a surrogate pair: no text by "
            "itself; decode the prompt from its bytes anew, or remove it"
        ) from e
    return tokenizer.encode(text)


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
