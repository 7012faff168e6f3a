"""How the tokens of a request are chosen, and when it ends."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from numbers import Integral, Real
from typing import Any

from hybridrt.base.errors import RequestError, is_text, shown
from hybridrt.base.errors_foreign import SAMPLING, knows_fields
from hybridrt.base.structured_outputs import StructuredOutputs

POOLINGS = ("last", "mean")  # the prompt's last hidden state, or the mean of all
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 64
MAX_LOGPROB_TOKEN_IDS = 128
MAX_SAMPLES = 1024
MAX_SALT_CHARACTERS = 256
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_RESUMED = 2**21
MIN_TEMPERATURE = 1e-5  # logits may overflow beyond it, or its reciprocal
MAX_REPETITION = 100.0
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234663852886e38


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{name} is {shown(value)}; it must be {allowed}", name)


def is_number(value: object, kind: type) -> bool:
    """True for Python and numpy numbers of `kind`, Integral or Real. bool and numpy durations, which are
    instances of these classes too, do not count."""
    if type(value) is int or (type(value) is float and kind is Real):
        return True  # a check for an abstract class is slow, and a request needs a dozen
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    return getattr(getattr(value, "dtype", None), "kind", "") != "m"


def _plain(value: Any, kind: type) -> int | float:
    """The value as a Python number, which compares with any range without overflow; NaN, which is
    in no range, for anything else."""
    if not is_number(value, kind):
        return math.nan
    try:
        return int(value) if kind is Integral else float(value)
    except OverflowError:
        return math.inf


def _entries(name: str, value: Any, max_entries: int) -> tuple[Any, ...]:
    if value is None:
        return ()
    if type(value) not in (tuple, list):
        collection = isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping))
        _require(collection and getattr(value, "ndim", 1) == 1, name, value, "a sequence")
    entries = tuple(islice(value, max_entries + 1))
    if len(entries) > max_entries:
        raise RequestError(f"{name} has more than {max_entries} entries; pass at most {max_entries}", name)
    return entries


def _token_ids(name: str, value: Any, max_entries: int) -> tuple[int, ...]:
    ids = _entries(name, value, max_entries)
    for t in ids:
        ok = is_number(t, Integral) and 0 <= t <= _INT32_MAX
        _require(ok, name, t, "integers >= 0 from the vocabulary")
    return tuple(map(int, ids))


# For each field that is a number: Integral or Real, the least and the largest value, and how an error states them.
_NUMBERS: dict[str, tuple[type, float, float, str]] = {
    "max_tokens": (Integral, 1, _INT32_MAX, "an integer from 1 to 2**31 - 1, or None"),
    "temperature": (Real, 0, _FLOAT32_MAX, "a finite float32 >= 0 (0 is greedy)"),
    "top_p": (Real, math.ulp(0), 1, "in (0, 1]"),
    "top_k": (Integral, -1, _INT32_MAX, "an integer from 1 to 2**31 - 1, or -1 for off"),
    "min_p": (Real, 0, 1, "in [0, 1]"),
    "repetition_penalty": (Real, 1 / MAX_REPETITION, MAX_REPETITION, "a number from 0.01 to 100 (1 is off)"),
    "presence_penalty": (Real, -2, 2, "in [-2, 2]"),
    "frequency_penalty": (Real, -2, 2, "in [-2, 2]"),
    "seed": (Integral, 0, 2**63 - 1, "an integer from 0 to 2**63 - 1, or None"),
    "logprobs": (Integral, 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or None"),
    "prompt_logprobs": (Integral, 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or None"),
    "n": (Integral, 1, MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}"),
    "truncate_prompt_tokens": (Integral, -1, _INT32_MAX, "an integer from 1 to 2**31 - 1, -1, or None"),
    "priority": (Integral, -_INT32_MAX, _INT32_MAX, "an integer of 32 bits"),
    "min_tokens": (Integral, 0, _INT32_MAX, "an integer from 0 to max_tokens"),
}


@knows_fields(SAMPLING)
@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request; every field is checked when the object is made.

    numpy numbers are converted to Python's. What depends on a model's vocabulary (token ids,
    `bad_words`, number of log-probabilities) is checked again by `Engine.prepare`.

    Logits are changed in vLLM's order: `allowed_token_ids`, `bad_words`, `min_tokens`,
    `logit_bias`, penalties, temperature, filters. Log-probabilities are those of the model, before
    all of this.

    Args:
        max_tokens: most tokens to generate, 1 to 2**31 - 1; None: as many as `max_model_len`
            allows.
        temperature: logits are divided by it. Below MIN_TEMPERATURE (1e-5), 0 included, decoding is
            greedy. At most float32's largest number.
        top_p: nucleus mass in (0, 1]; 1 turns it off (Holtzman et al. 2020, arXiv:1904.09751).
        top_k: candidates kept, up to 2**31 - 1; -1, 0, and values from the size of the vocabulary
            on turn it off.
        min_p: candidates below `min_p * max(p)` are dropped; 0 turns it off (Nguyen et al. 2024,
            arXiv:2407.01082).
        repetition_penalty: 0.01 to 100; logits of tokens in the prompt or the output are divided
            (if positive) or multiplied (if negative) by it (Keskar et al. 2019, CTRL).
        presence_penalty, frequency_penalty: -2 to 2, subtracted once, respectively per occurrence,
            for tokens of the output.
        stop: strings that end the request, up to MAX_STOP_STRINGS (32) of up to MAX_STOP_CHARACTERS
            (256) characters each; the text is cut before the first of them. A single string needs
            no list.
        stop_token_ids: token ids that end the request, in addition to the model's end-of-sequence
            ids; up to MAX_STOP_TOKEN_IDS (1024).
        ignore_eos: continue after end-of-sequence ids (`stop_token_ids` still end the request).
        seed: 0 to 2**63 - 1: the request draws the same tokens whatever other requests run. None
            derives a seed from the engine's.
        logprobs: return the log-probability of each token and of this many likeliest alternatives,
            up to 64; None returns none.
        n: independent samples of the same prompt, up to 1024.
        include_stop_str_in_output: the text includes the stop string, or the stopping token.
        skip_special_tokens: special tokens leave nothing in the text.
        truncate_prompt_tokens: use only the last so many tokens of a longer prompt, 1 to 2**31 - 1;
            -1: as many as leave room for one output token. None refuses a prompt that is too long.
            Text is tokenised whole before it is cut: more than 2**20 characters are refused, unless
            the model has room for as many.
        priority: requests of a lower number are started first, and are the last to give their
            memory back; first come, first served among equals. 30 seconds of waiting outweigh a
            difference of one.
        cache_salt: the prefix cache shares nothing between requests of different salts; a string of
            1 to MAX_SALT_CHARACTERS (256) characters. None shares with all requests that have none.
        min_tokens: before so many output tokens no end-of-sequence id and none of `stop_token_ids`
            is drawn, and no stop string ends the request; 0 to `max_tokens`.
        logit_bias: token id -> -100 to 100, added to the token's logit; up to MAX_BIASES (1024)
            tokens. An id may be a string of digits, as in JSON.
        allowed_token_ids: no other token is drawn; at least one id. None allows all.
        bad_words: text that the output must not contain, up to MAX_BAD_WORDS (128) strings of up to
            MAX_BAD_WORD_CHARACTERS (256) characters: a word's last token is not drawn after its
            others, with and without a space before the word.
        prompt_logprobs: return the log-probability of each prompt token but the first, and of this
            many likeliest alternatives, up to 64; None returns none. Such a request computes its
            whole prompt.
        logprob_token_ids: with `logprobs`, the alternatives are these tokens instead of the likeliest
            ones; 1 to MAX_LOGPROB_TOKEN_IDS (128) ids. None: the likeliest ones.
        structured_outputs: the form of the output; None: any. The output ends when it is complete
            and nothing can follow, also before `min_tokens`. `ignore_eos` contradicts it and is
            refused.
        resume_token_ids: first tokens of an answer that was cut, fewer than `max_tokens`. The output
            is the rest; limits, penalties and seeds count these tokens. Needs `n=1`, and neither
            `prompt_logprobs` nor `pooling`.
        pooling: the prompt's hidden states instead of an output: "last" or "mean", as in `LLM.embed`,
            which sets it. None: none.

    Raises:
        RequestError: a field is out of range; the text names the field, the value and the allowed
            range.
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    resume_token_ids: Sequence[int] = ()
    pooling: str | None = None

    def __post_init__(self) -> None:
        checked = self._stops() | self._rules()
        for name, (kind, low, high, allowed) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not getattr(SamplingParams, name) and (value is not None or name != "max_tokens"):
                number = _plain(value, kind)
                ok = low <= number <= high and (number != 0 or name != "truncate_prompt_tokens")
                _require(ok, name, value, allowed)
                checked[name] = number
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        _require(self.pooling in (None, *POOLINGS), "pooling", self.pooling, f"one of {', '.join(POOLINGS)}, or None")
        longest = _INT32_MAX if self.max_tokens is None else self.max_tokens
        _require(self.min_tokens <= longest, "min_tokens", self.min_tokens, f"at most max_tokens, {longest}")
        name, given = "resume_token_ids", self.resume_token_ids
        _require(not given or self.n == 1, "n", self.n, f"1 with {name}")
        alone = self.prompt_logprobs is None and self.pooling is None
        _require(not given or alone, name, given, "empty with prompt_logprobs or pooling")
        _require(len(given) < longest, "max_tokens", longest, f"above {len(given)}, the number of {name}")
        structured = self.structured_outputs
        if structured is not None:
            name = "structured_outputs"
            _require(isinstance(structured, StructuredOutputs), name, structured, "a hybridrt.StructuredOutputs")
            _require(not self.ignore_eos, "ignore_eos", True, f"False with {name}, whose end is the output's end")

    def _stops(self) -> dict[str, Any]:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else _entries("stop", self.stop, MAX_STOP_STRINGS)
        for s in stop:
            ok = isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS
            _require(ok, "stop", s, f"strings of 1 to {MAX_STOP_CHARACTERS} characters")
            _require(is_text(s), "stop", s, "text: it holds a lone surrogate, which no output can hold")
        ids = _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        salt = self.cache_salt
        ok = salt is None or (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_CHARACTERS and is_text(salt))
        _require(ok, "cache_salt", salt, f"a string of 1 to {MAX_SALT_CHARACTERS} characters, or None")
        resumed = _token_ids("resume_token_ids", self.resume_token_ids, MAX_RESUMED)
        return {"stop": stop, "stop_token_ids": ids, "resume_token_ids": resumed}

    def _rules(self) -> dict[str, Any]:
        words = _entries("bad_words", self.bad_words, MAX_BAD_WORDS)
        for word in words:
            ok = isinstance(word, str) and bool(word.strip()) and len(word) <= MAX_BAD_WORD_CHARACTERS
            _require(ok, "bad_words", word, f"strings of 1 to {MAX_BAD_WORD_CHARACTERS} characters, not only spaces")
            _require(is_text(word), "bad_words", word, "text: it holds a lone surrogate, which no output can hold")
        allowed, name = self.allowed_token_ids, "allowed_token_ids"
        if allowed is not None:
            allowed = _token_ids(name, allowed, MAX_ALLOWED_TOKEN_IDS)
            _require(bool(allowed), name, allowed, "at least one token id, or None to allow all")
        return {"bad_words": words, "allowed_token_ids": allowed, "logit_bias": self._biases()} | self._scored_ids()

    def _scored_ids(self) -> dict[str, Any]:
        name = "logprob_token_ids"
        if self.logprob_token_ids is None:
            return {}
        ids = _token_ids(name, self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        _require(bool(ids), name, ids, "at least one token id, or None for the likeliest tokens")
        _require(self.logprobs is not None, "logprobs", None, f"set, such as to 0, where {name} names tokens")
        return {name: ids}

    def _biases(self) -> dict[int, float] | None:
        given, name = self.logit_bias, "logit_bias"
        if given is None:
            return None
        _require(isinstance(given, Mapping), name, given, "a mapping from token ids to biases")
        if len(given) > MAX_BIASES:
            raise RequestError(f"logit_bias has {len(given)} entries; pass at most {MAX_BIASES}", name)
        ids = [int(t) if isinstance(t, str) and t.isascii() and t.isdigit() and len(t) <= 10 else t for t in given]
        for bias in given.values():
            ok = is_number(bias, Real) and -MAX_BIAS <= bias <= MAX_BIAS
            _require(ok, name, bias, f"from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        return dict(zip(_token_ids(name, ids, MAX_BIASES), map(float, given.values())))

    @cached_property
    def greedy(self) -> bool:
        """The likeliest token is taken, and none is drawn."""
        return self.temperature < MIN_TEMPERATURE

    @cached_property
    def alternatives(self) -> int | None:
        """How many other tokens' log-probabilities a token of the output has; None: not even its own."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    @cached_property
    def uses_penalties(self) -> bool:
        """A logit depends on the tokens of the prompt or the output so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def uses_rules(self) -> bool:
        """Some logits are changed, or tokens forbidden, without a form of the whole output."""
        return self.min_tokens > 0 or bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None
