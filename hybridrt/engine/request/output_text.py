"""The text of a sample's tokens, also of those that another run has given."""

from collections.abc import Iterator, Sequence

from hybridrt.engine.request.intake import PreparedPrompt
from hybridrt.engine.text.tokenizer import Detokenizer, Tokenizer

_CHARACTER_TOKENS = 8  # more than one character has


def new_detokenizer(tokenizer: Tokenizer | None, prepared: PreparedPrompt) -> Detokenizer | None:
    if tokenizer is None:
        return None
    include, skip = prepared.params.include_stop_str_in_output, prepared.params.skip_special_tokens
    return Detokenizer(tokenizer, prepared.tokens, prepared.stop, include_stop=include, skip_special_tokens=skip)


def resumed_text(tokenizer: Tokenizer | None, prepared: PreparedPrompt) -> str:
    """The text that came with the `resume_token_ids` of a request; "" without a tokenizer."""
    detokenizer = new_detokenizer(tokenizer, prepared)
    if detokenizer is None:
        return ""
    for part in in_parts(prepared.params.resume_token_ids):
        detokenizer.advance(part, may_stop=False)
    return detokenizer.take_text(False)


def in_parts(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    """The last tokens one by one: if they end within a character, the text before it has come."""
    first = max(len(tokens) - _CHARACTER_TOKENS, 0)
    yield tokens[:first]
    for place in range(first, len(tokens)):
        yield tokens[place : place + 1]
