"""Prompts for checks of outputs: texts, and random tokens."""

import random

from hybridrt.verify.subject import Subject

TEXTS = (
    "def read_lines(path):\n    ",
    "The capital of France is Paris, and the capital of Italy is",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
)
_FIRST_ID = 3  # ids below are often special
_LENGTHS, _QUICK = (1, 17, 45), (17,)


def prompts_of(subject: Subject) -> list[list[int]]:
    """Texts, if there is a tokenizer, and random tokens. Equal for each run of a checkpoint."""
    config, found = subject.config, list[list[int]]()
    assert config is not None, "it was read"
    if subject.tokenizer is not None:
        texts = TEXTS[:1] if subject.quick else TEXTS
        found = [ids for ids in map(subject.tokenizer.encode, texts) if ids and max(ids) < config.vocab_size]
    draw = random.Random(0)
    for length in _QUICK if subject.quick else _LENGTHS:
        found.append(random_tokens(subject, length, draw))
    return found


def random_tokens(subject: Subject, length: int, draw: random.Random) -> list[int]:
    """Ids of text: none that ends an answer or is the place of an image."""
    config = subject.config
    assert config is not None, "it was read"
    size = config.vocab_size
    if subject.tokenizer is not None:
        size = min(size, len(subject.tokenizer.hf.get_vocab()))
    special = {*config.eos_token_ids, *config.image_tokens}
    usable = [token for token in range(min(_FIRST_ID, size - 1), size) if token not in special]
    return draw.choices(usable, k=length)
