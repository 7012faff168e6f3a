"""Text as tokens come: split characters, stop strings, and what may be shown before the end is known."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from hybridrt.base.errors import CheckpointError
from hybridrt.engine.text.stop_strings import StopStrings
from hybridrt.engine.text.tokenizer import Detokenizer, HFTokenizer, load_tokenizer
from hybridrt.runtime.load.model_path import ASSETS
from tests.support.engine_harness import ByteTokenizer

REPLACED = "\N{REPLACEMENT CHARACTER}"
TEXT = "a ba\N{GREEK SMALL LETTER PI} \N{EURO SIGN}\N{GRINNING FACE}b"


class WordTokenizer:
    """Ids are words, joined by spaces, as sentencepiece does: the first word of what is decoded has no space."""

    characters_per_token = 4
    words = ("the", "cat", "sat", "", "<s>")

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(self.words[t] for t in token_ids if self.words[t] and self.words[t] != "<s>")


def feed(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    """Text shown after each token."""
    shown = [""]
    for token in tokens:
        detokenizer.advance([token])
        shown.append(shown[-1] + detokenizer.take_text(final=False))
    return shown[1:]


def without_end(text: str) -> str:
    """Without an unfinished character, of which each byte may be one U+FFFD."""
    bare = text.rstrip(REPLACED)
    return bare + REPLACED * (len(text) - len(bare) - 3)


def take_until_stopped(detokenizer: Detokenizer, tokens: Sequence[int]) -> tuple[int, str]:
    """Feeds tokens up to the one that completes a stop string; returns how many, and all text."""
    shown = ""
    for i, token in enumerate(tokens):
        if detokenizer.advance([token]):
            return i + 1, shown + detokenizer.take_text(final=True)
        shown += detokenizer.take_text(final=False)
    return len(tokens), shown + detokenizer.take_text(final=True)


@given(st.text("ab\N{EURO SIGN}", max_size=12), st.integers(0, 20), st.text("ab\N{EURO SIGN}", min_size=1, max_size=3))
def test_a_stop_string_is_foreseen(text: str, read: int, string: str) -> None:
    """And nothing is read of what may come."""
    tokens = list(text.encode())
    detokenizer = Detokenizer(ByteTokenizer(), [], StopStrings([string]))
    if not any(detokenizer.advance([token]) for token in tokens[:read]):
        assert detokenizer.would_stop(tokens[read:]) == (string in text)
        assert take_until_stopped(detokenizer, tokens[read:])[1] == text.split(string)[0]


@given(st.text(alphabet=sorted(set(TEXT)), max_size=20), st.binary(max_size=4))
def test_split_characters_never_show_as_replacements(text: str, prompt: bytes) -> None:
    detokenizer = Detokenizer(ByteTokenizer(), list(prompt + b"."))
    shown = feed(detokenizer, list(text.encode()))
    for before, after in pairwise(shown):
        assert after.startswith(before)
    assert all("\N{REPLACEMENT CHARACTER}" not in s and text.startswith(s) for s in shown)
    assert not detokenizer.finish([])
    assert "".join(shown[-1:]) + detokenizer.take_text(final=True) == text


def test_what_is_complete_shows_at_once() -> None:
    assert feed(Detokenizer(ByteTokenizer(), [65]), list("né!".encode())) == ["n", "n", "né", "né!"]


@given(st.binary(max_size=24))
def test_streamed_text_equals_the_text_decoded_at_once(data: bytes) -> None:
    streamed, at_once = Detokenizer(ByteTokenizer(), [65]), Detokenizer(ByteTokenizer(), [65])
    shown = "".join(feed(streamed, list(data))[-1:])
    streamed.finish([]), at_once.finish(data)
    text = without_end(data.decode(errors="replace"))
    assert shown + streamed.take_text(final=True) == at_once.take_text(final=True) == text


def test_bytes_that_are_no_character_appear_once_the_text_continues() -> None:
    assert feed(Detokenizer(ByteTokenizer(), [65]), [0xFF, 66])[-1] == "\N{REPLACEMENT CHARACTER}B"


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [65])
    assert feed(detokenizer, list("x\N{EURO SIGN}".encode())[:-1])[-1] == "x"
    detokenizer.finish([])
    assert detokenizer.take_text(final=True) == ""


def test_output_reads_as_the_prompts_continuation() -> None:
    detokenizer = Detokenizer(WordTokenizer(), [0, 1])
    assert feed(detokenizer, [2, 0]) == [" sat", " sat the"]


def test_tokens_without_text_do_not_lose_the_space_after_them() -> None:
    assert feed(Detokenizer(WordTokenizer(), [0]), [1, 4, 3, 2])[-1] == " cat sat"


def test_a_stop_string_across_tokens_cuts_before_its_first_match() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [65], stop=StopStrings(["END", "Nothing"]))
    assert take_until_stopped(detokenizer, b"so it ENENDs") == (11, "so it EN")
    assert not detokenizer.finish([]) and detokenizer.take_text(final=True) == ""


def test_the_first_of_several_stop_strings_wins() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [65], stop=StopStrings(["cd", "bcd"]))
    assert detokenizer.finish(b"abcd") and detokenizer.take_text(final=True) == "a"


def test_a_possible_stop_string_is_held_back_until_it_is_none() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [65], stop=StopStrings(["END", "DO"]))
    assert feed(detokenizer, b"E.ENxEN") == ["", "E.", "E.", "E.", "E.ENx", "E.ENx", "E.ENx"]
    detokenizer.finish([])
    assert detokenizer.take_text(final=True) == "EN", "the end of the text releases it"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stopping_agrees_with_a_search_of_the_whole_text(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [65], stop=StopStrings(stops))
    count, shown = take_until_stopped(detokenizer, text.encode())
    seen = text[:count]
    cuts = [seen.index(s) for s in stops if s in seen]
    assert shown == (seen[: min(cuts)] if cuts else text)
    assert not any(s in seen[:-1] for s in stops), "it stops at the token that completes a stop string"


def test_a_stop_string_hidden_behind_an_unfinished_character_is_found_at_the_end() -> None:
    class Pairs(ByteTokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return b"".join([b"END\xe2", b"A"][t] for t in token_ids).decode(errors="replace")

    detokenizer = Detokenizer(Pairs(), [1], stop=StopStrings(["END"]))
    assert not detokenizer.advance([0])
    assert detokenizer.finish([]) and detokenizer.take_text(final=True) == ""


def byte_level() -> Any:
    """A token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return raw


def metaspace() -> Any:
    """As sentencepiece with byte fallback: words with their space, bytes; the first space is dropped."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581a", "\u2581cat", "\u2581", "s", "\u20ac"]
    raw = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    space = decoders.Replace("\u2581", " ")
    raw.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return raw


@cache
def tokenizer_of(name: str) -> HFTokenizer:
    if name == "embedded":
        embedded = load_tokenizer(ASSETS / "embedded")
        assert embedded is not None
        return embedded
    raw = {"byte_level": byte_level, "metaspace": metaspace}[name]()
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>"))


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "embedded"])
@settings(deadline=None)
@given(st.data())
def test_streamed_text_is_that_of_the_tokenizer(name: str, data: st.DataObject) -> None:
    """Prompts that end within a character, bytes that are none, special tokens, spaces at the seam."""
    tokenizer = tokenizer_of(name)
    token = st.one_of(st.integers(0, len(tokenizer.hf) - 1), st.sampled_from(tokenizer.encode("\u20ac a")))
    prompt, output = data.draw(st.lists(token, max_size=6)), data.draw(st.lists(token, max_size=16))
    streamed, at_once = Detokenizer(tokenizer, prompt), Detokenizer(tokenizer, prompt)
    shown = "".join(feed(streamed, output)[-1:])
    streamed.finish([]), at_once.finish(output)
    whole = without_end(tokenizer.hf.decode([*prompt, *output], skip_special_tokens=True))
    text = whole[len(tokenizer.decode(prompt)) :]
    assert at_once.take_text(final=True) == text
    # Byte fallback reads a run of bytes anew with each: what it took for characters may have been shown before.
    if "\N{REPLACEMENT CHARACTER}" not in tokenizer.decode([*prompt, *output]) or name == "byte_level":
        assert shown + streamed.take_text(final=True) == text


def test_special_tokens_in_a_row_are_not_decoded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("embedded")
    lengths = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: (lengths.append(len(ids)), decode(ids))[1])
    end = tokenizer.hf.eos_token_id
    tokens = [*tokenizer.encode("a"), *[end] * 50, *tokenizer.encode(" b")]
    assert feed(Detokenizer(tokenizer, [end]), tokens)[-1] == "a b"
    assert max(lengths) < 20


class Pieces(ByteTokenizer):
    """Tokens of several bytes: beginnings and ends of characters, bytes that are none, U+FFFD itself, nothing."""

    pieces = (b"", b"a", b"END\xe2", b"\xe2\x82", b"\x82\xac", b"\xac", b"\xff", b"\xff\xf0\x9f", b"\x98", b"\x80",
              "\N{REPLACEMENT CHARACTER}".encode(), "\N{EURO SIGN}".encode(), b"\xf0\x9f\x98")  # fmt: skip

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.pieces[t] for t in token_ids).decode(errors="replace")


def pieces_of(token: st.SearchStrategy[int], most: int) -> st.SearchStrategy[list[int]]:
    """Also long runs of one token."""
    runs = st.tuples(token, st.integers(1, 9)).map(lambda run: [run[0]] * run[1])
    return st.lists(runs, max_size=most).map(lambda parts: [token for part in parts for token in part])


@settings(deadline=None)
@given(st.data())
def test_text_does_not_depend_on_how_many_tokens_come_at_a_time(data: st.DataObject) -> None:
    """An answer that was cut is resumed with all of its tokens at once: its reader has the text that came before."""
    token = st.integers(0, len(Pieces.pieces) - 1)
    prompt, output = data.draw(st.lists(token, max_size=6)), data.draw(pieces_of(token, 8))
    streamed, steps, at_once = (Detokenizer(Pieces(), prompt) for _ in range(3))
    each = [0, *map(len, feed(streamed, output))]
    shown, start = "", 0
    while start < len(output):
        end = start + data.draw(st.integers(1, 6))
        steps.advance(output[start:end])
        shown, start = shown + steps.take_text(final=False), min(end, len(output))
        assert len(shown) == each[start]
    streamed.finish([]), steps.finish([]), at_once.finish(output)
    whole = without_end(Pieces().decode([*prompt[-6:], *output]))[len(Pieces().decode(prompt[-6:])) :]
    assert at_once.take_text(final=True) == shown + steps.take_text(final=True) == whole
    assert "".join(feed(Detokenizer(Pieces(), prompt), output)[-1:]) + streamed.take_text(final=True) == whole


@pytest.mark.parametrize("output", [[6], [3], [7], [2, 3, 7], [12], [10], [3, 0, 0, 0, 0, 0, 0]], ids=str)
def test_bytes_that_are_no_character_are_given_out_and_not_decoded_again_and_again(
    output: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`allowed_token_ids` may ask for thousands of them. Each step decoded all that had come, for all rows."""
    lengths, decode = list[int](), Pieces.decode
    monkeypatch.setattr(Pieces, "decode", lambda self, ids, **_: (lengths.append(len(ids)), decode(self, ids))[1])
    detokenizer = Detokenizer(Pieces(), [1])
    shown = feed(detokenizer, output * 100)
    assert max(lengths) < 24 and sum(lengths) < 100 * 100 * len(output)
    whole = decode(Pieces(), output * 100)  # type: ignore[arg-type]
    assert whole.startswith(shown[-1]) and len(whole) - len(shown[-1]) <= 3


def test_byte_fallback_gives_out_what_is_no_character() -> None:
    tokenizer = tokenizer_of("metaspace")
    byte = tokenizer.hf.convert_tokens_to_ids("<0xFF>")
    a = tokenizer.hf.convert_tokens_to_ids("\u2581a")
    assert [len(text) for text in feed(Detokenizer(tokenizer, [a]), [byte] * 40)] == [0, 0, *range(0, 38)]
    assert feed(Detokenizer(tokenizer, [a]), [*[byte] * 40, a])[-1] == REPLACED * 40 + " a"


@pytest.mark.parametrize("text", ["\u65e5\u672c", "\u65e5x\u672c"])
def test_characters_of_byte_fallback_that_come_in_one_piece_show_no_replacement(text: str) -> None:
    """Byte fallback reads a run of bytes as a whole: none of them is a character until all are."""
    tokenizer = tokenizer_of("metaspace")
    names = [f"<0x{byte:02X}>" for byte in text.encode()]
    tokens = [tokenizer.hf.convert_tokens_to_ids(name) for name in names]
    for at in range(len(tokens) + 1):
        detokenizer = Detokenizer(tokenizer, [])
        detokenizer.advance(tokens[:at])
        shown = detokenizer.take_text(final=False)
        detokenizer.advance(tokens[at:])
        assert shown == tokens_before(text, at) and shown + detokenizer.take_text(final=False) == text


def tokens_before(text: str, count: int) -> str:
    return text.encode()[:count].decode(errors="ignore")


def test_load_tokenizer(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert load_tokenizer(tmp_path) is None
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, HFTokenizer)
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT.encode()) and tokenizer.decode([*ids, tokenizer.hf.eos_token_id]) == TEXT
    detokenizer = Detokenizer(tokenizer, ids)
    shown = feed(detokenizer, ids)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(shown) and shown[-1] == TEXT
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_config_whose_class_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers raises this for classes of images if torchvision is no match for torch."""
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "radio"}')

    def fail(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("Could not import module 'RadioConfig'")

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    assert isinstance(load_tokenizer(tmp_path), HFTokenizer)
