"""Text to token ids and back, and the text of an answer token by token."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

from hybridrt.base.config_json import read_object
from hybridrt.base.errors import (
    CheckpointError,
    ConfigError,
    PromptTooLongError,
    RequestError,
    is_failure,
    reason,
    shown,
)
from hybridrt.base.files import CONFIG_BYTES, TOKENIZER_BYTES, check_file
from hybridrt.engine.text.stop_strings import StopStrings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# No canonical decomposition is longer (UAX 15).
_COMPOSED = 4
# Tokenised whole if only the last tokens are used: a suffix alone may become other tokens.
_MAX_TRUNCATED = 2**20
# Characters a token in long text: three to five are usual. Tokens at a cut may differ.
_USUAL, _AT_CUT = 8, 1024


class Tokenizer(Protocol):
    """What an engine needs of a tokenizer: HFTokenizer, or a caller's own."""

    @property
    def characters_per_token(self) -> int:
        """The longest text of one token, in characters."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own prefix."""

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of text that has its special tokens already: nothing is put before it."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; U+FFFD replaces bytes that are no character (yet)."""


class HFTokenizer:
    """A Hugging Face tokenizer; `hf` is the object itself (chat templates, special tokens). Work on
    text or tokens through this class: transformers checks little of the files' contents before use,
    and a regular expression of theirs may fail on one text alone.

    Raises:
        CheckpointError: the tokenizer's files make a method fail.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf

    @cached_property
    def characters_per_token(self) -> int:
        """Length of the longest token, before a normaliser that composes characters. In a
        byte-level vocabulary each byte counts: a character has at least one.
        """
        backend = getattr(self.hf, "backend_tokenizer", None)
        plain = backend is not None and backend.normalizer is None
        try:
            return max(map(len, self.hf.get_vocab())) * (1 if plain else _COMPOSED)
        except BaseException as e:
            _raise(e)

    @cached_property
    def _plain(self) -> bool:
        """Whether the backend alone decodes, in a third of the time."""
        from transformers import PreTrainedTokenizerFast

        kind, fast = type(self.hf), PreTrainedTokenizerFast
        return issubclass(kind, fast) and (kind.decode, kind._decode) == (fast.decode, fast._decode)

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def encode_bare(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, **options: bool) -> list[int]:
        try:
            return list(self.hf.encode(text, **options))
        except BaseException as e:
            _raise(e)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        options = {"skip_special_tokens": skip_special_tokens}
        try:
            if self._plain:
                return self.hf.backend_tokenizer.decode(token_ids, **options)
            # Cleaning up spaces would change streamed text.
            return self.hf.decode(token_ids, clean_up_tokenization_spaces=False, **options)
        except BaseException as e:
            _raise(e)

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None for an unknown id."""
        try:
            return self.hf.convert_ids_to_tokens(token_id)
        except BaseException as e:
            _raise(e)


def _raise(error: BaseException) -> NoReturn:
    if not is_failure(error):
        raise error
    raise CheckpointError(
        f"the model's tokenizer fails ({type(error).__name__}: {reason(error)}); repair its files, or pass token ids "
        "instead"
    ) from error


def encode_prompt(
    tokenizer: Tokenizer, text: str, max_tokens: int, *, bare: bool = False, truncated: bool = False
) -> list[int]:
    """Token ids of a prompt. Refuses text that exceeds `max_tokens` whatever its tokens are, at the
    cost of its length only; also text of which a tokenizer would drop so much that it might fit
    (repeated spaces). Of other text that is too long only the beginning is tokenised.

    Args:
        bare: without special tokens, like `encode_bare`.
        truncated: the caller uses only the last tokens. Then the text may always have
            _MAX_TRUNCATED (2**20) characters.

    Raises:
        RequestError: the text is too long, or no Unicode text.
    """
    width = tokenizer.characters_per_token
    most = max(max_tokens * width, _MAX_TRUNCATED if truncated else 0)
    if len(text) > most:
        limit = (
            f"truncate_prompt_tokens takes up to {most} characters, because all of them are tokenised: send the end of "
            "the text alone"
            if truncated
            else f"it may have at most {max_tokens} tokens (this model's maximum context length is {max_tokens + 1} "
            f"tokens, one of them for the output), and none stands for more than {width} characters: shorten it or "
            "raise max_model_len"
        )
        raise PromptTooLongError(f"the prompt has {len(text)} characters; {limit}", "prompt")
    check_text(text)
    if not truncated:
        _check_beginning(tokenizer, text, max_tokens)
    return tokenizer.encode_bare(text) if bare else tokenizer.encode(text)


def _check_beginning(tokenizer: Tokenizer, text: str, max_tokens: int) -> None:
    """Raises early: tokenising megabytes would take seconds."""
    length = _USUAL * (max_tokens + _AT_CUT)
    if len(text) <= length:
        return
    tokens = len(tokenizer.encode_bare(text[:length])) - _AT_CUT
    if tokens > max_tokens:
        raise PromptTooLongError(
            f"the prompt has {len(text)} characters, and the first {length} of them have {tokens} tokens or more; it "
            f"may have at most {max_tokens} (this model's maximum context length is {max_tokens + 1} tokens, one of "
            "them for the output): shorten it or raise max_model_len",
            "prompt",
        )


def check_text(prompt: str) -> None:
    """Raises RequestError for a lone surrogate, which no tokenizer accepts."""
    try:
        prompt.encode()
    except UnicodeEncodeError as e:
        raise RequestError(
            f"the prompt's character {e.start} is U+{ord(prompt[e.start]):04X}, half of a surrogate pair or, on a "
            "command line, a byte that is no UTF-8: decode the prompt from its bytes anew, or remove it",
            "prompt",
        ) from e


def load_tokenizer(path: str | Path) -> HFTokenizer | None:
    """The tokenizer of a checkpoint directory, None if it has no tokenizer files. No code of the
    checkpoint is run.

    Raises:
        CheckpointError: the files are there but cannot be read, or only with code of the
            checkpoint.
        ConfigError: transformers, which chooses the tokenizer, refuses the model's config.json.
    """
    directory = Path(path)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # slow to import

    _check_kinds(directory)
    asks_for_code = _check_settings(directory)
    config = _read_config(directory)
    try:
        return HFTokenizer(AutoTokenizer.from_pretrained(str(directory), config=config, **_LOCAL))
    except BaseException as e:
        if not is_failure(e):
            raise
        if asks_for_code:
            raise CheckpointError(
                f"the tokenizer in {directory} asks for trust_remote_code=True: auto_map in its tokenizer_config.json "
                "names Python code of the checkpoint, and hybridrt never runs such code; convert the tokenizer to a "
                "tokenizer.json, or pass token ids instead of text"
            ) from e
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be loaded ({type(e).__name__}: {e}); fix its files, or remove "
            f"{', '.join(TOKENIZER_FILES)} to pass token ids instead of text"
        ) from e


def _read_config(directory: Path) -> Any:
    """Reads what AutoTokenizer reads: hybridrt does not check all fields. None without the file."""
    from transformers import AutoConfig, PreTrainedConfig

    if not (directory / "config.json").exists():
        return None
    try:
        try:
            return AutoConfig.from_pretrained(str(directory), **_LOCAL)
        # Unknown to transformers, or classes of images that import a torchvision that is no match for torch.
        except (ValueError, OSError, ImportError):
            return PreTrainedConfig.from_pretrained(str(directory), **_LOCAL)
    except BaseException as e:
        if not is_failure(e):
            raise
        raise ConfigError(
            f"{directory / 'config.json'}: transformers, which reads it to choose the tokenizer, refuses it "
            f"({reason(e)}); correct that field"
        ) from e


def _check_kinds(directory: Path) -> None:
    """Raises CheckpointError for large or endless files: transformers reads them whole."""
    for file in directory.iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt") and file.exists():
            try:
                check_file(file, CONFIG_BYTES if file.stem.endswith("config") else TOKENIZER_BYTES)
            except OSError as e:
                raise CheckpointError(f"{file} cannot be read: {e.strerror or e}; replace it by the file itself") from e


def _check_settings(directory: Path) -> bool:
    """True if the files ask for code of the checkpoint. transformers loads whatever class they
    name, and a model's class would run code: CheckpointError for all but tokenizers.
    """
    import transformers

    files = [directory / name for name in ("tokenizer_config.json", "config.json")]
    settings = [read_object(file, CheckpointError) for file in files if file.exists()]
    for file, name in ((f, s.get("tokenizer_class")) for f, s in zip(files, settings)):
        found = getattr(transformers, name, None) if isinstance(name, str) else name
        is_tokenizer = isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)
        if found is not None and not is_tokenizer:
            raise CheckpointError(f"{file}: tokenizer_class is {shown(name)}, which is no tokenizer of transformers")
    return any(s.get("auto_map") for s in settings)


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6  # that decide how the first output token reads
_UNFINISHED = 3  # most bytes, and so most tokens, of a character without its last byte


class Detokenizer:
    """Decodes a small window again with new tokens, because a token's text depends on its
    neighbours.

    tokenizers.decoders.DecodeStream is not usable, for three reasons. It raises if byte fallback reads
    a run of bytes anew, such as a newline and then a byte that is no character. It outputs the
    prompt's text if the prompt ends within a character. It drops held-back text at the end.

    The window's first `_read` tokens are text already, of `_known` characters. The rest of its text
    is new, and is given out, but for an end that may be an unfinished character: up to three U+FFFD,
    because byte fallback gives one for each byte. They are given out once others follow, and dropped
    at the end. So the text shown does not depend on how many tokens come at a time.

    Args:
        prompt: the prompt's token ids; output reads as their continuation.
        stop: strings that end the text; it is cut before the first of them. Samples of one request
            share the object.
        include_stop: cut after that string instead.
        skip_special_tokens: special tokens leave nothing in the text.

    Attributes:
        stopped_by: the stop string that has ended the text; None while there is none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: StopStrings | None = None,
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special_tokens
        self._stop, self._include_stop = stop, include_stop
        self._stop_state = 0
        self.stopped_by: str | None = None
        self._text = ""
        self._window = list(prompt[-_CONTEXT:])
        self._read = len(self._window)
        self._known = len(self._decode(self._window))

    def advance(self, tokens: Sequence[int], may_stop: bool = True) -> bool:
        """Reads tokens. True if a stop string has appeared and may; the text is then cut before it."""
        window = self._window
        window += tokens
        text = self._decode(window)
        known = self._known
        if len(text) <= known:
            # Decoding a row of special tokens each step would take quadratic time.
            del window[self._read : -_CONTEXT]
            return False
        if text.endswith(_INCOMPLETE):
            return self._extend(self._before_unfinished(text, tokens), may_stop)
        self._window = window = window[self._read :]
        self._read, self._known = len(window), len(self._decode(window))
        return self._extend(text[known:], may_stop)

    def _before_unfinished(self, text: str, tokens: Sequence[int]) -> str:
        """The new part of the window's text, which ends within a character or with bytes that are none."""
        window, known = self._window, self._known
        if not self._decode(tokens):  # special tokens: thousands may follow
            del window[len(window) - len(tokens) :]
            return ""
        with_text = 0
        for unread in range(1, len(window) - self._read + 1):
            with_text += bool(self._decode([window[-unread]]))
            if with_text > _UNFINISHED:
                return self._replaced(text)
            head = self._decode(window[:-unread])
            if not head.endswith(_INCOMPLETE):
                if len(head) > known:
                    self._window = window = window[self._read :]
                    self._read = len(window) - unread
                    self._known = len(self._decode(window[: self._read]))
                return head[known:]
        return ""

    def _replaced(self, text: str) -> str:
        """The new part of a text that ends with bytes that are no character: all but the last few. Of the
        window it keeps the tokens of these alone: thousands may follow.
        """
        known = self._known
        held = min(len(text) - len(text.rstrip(_INCOMPLETE)), _UNFINISHED, len(text) - known)
        kept = list[int]()
        for token in reversed(self._window):
            if self._decode([token]):
                kept.insert(0, token)
                if len(kept) >= _UNFINISHED and self._decode(kept).endswith(_INCOMPLETE * held):
                    break
        self._window, self._read = kept, 0
        self._known = max(len(self._decode(kept)) - held, 0)
        return text[known : len(text) - held]

    def would_stop(self, tokens: Sequence[int]) -> bool:
        """True if these tokens, coming next, would complete a stop string. Nothing is read."""
        if self._stop is None:
            return False
        text = _without_unfinished(self._decode([*self._window, *tokens]))
        return self._stop.scan(self._stop_state, text[self._known :])[1] > 0

    def finish(self, tokens: Sequence[int], may_stop: bool = True) -> bool:
        """Reads the last tokens, without a character whose last bytes never came. True as for
        `advance`.
        """
        text = _without_unfinished(self._decode([*self._window, *tokens]))
        return self._extend(text[self._known :], may_stop)

    def take_text(self, final: bool) -> str:
        """The text since the last call. Holds back a possible beginning of a stop string unless
        `final`.
        """
        held = self._stop.held(self._stop_state) if self._stop is not None and not final else 0
        end = len(self._text) - held
        text, self._text = self._text[:end], self._text[end:]
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special)

    def _extend(self, fresh: str, may_stop: bool) -> bool:
        self._text += fresh
        if self._stop is None:
            return False
        self._stop_state, past = self._stop.scan(self._stop_state, fresh)
        if past and may_stop:
            start = len(self._text) - past
            self.stopped_by = self._stop.string_at(self._text, start)
            self._text = self._text[: start + len(self.stopped_by) * self._include_stop]
        return past > 0 and may_stop


def _without_unfinished(text: str) -> str:
    finished = text.rstrip(_INCOMPLETE)
    return text[: max(len(finished), len(text) - _UNFINISHED)]
