"""How one request's tokens are chosen and when it ends."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Real
from typing import Any

from hybridrt.errors import RequestError, is_text, shown

MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 64
MAX_SAMPLES = 1024
MAX_SALT_CHARACTERS = 256
MIN_TEMPERATURE = 1e-5  # below it hybridrt.kernels.sampling takes the best token: logits over less may overflow
MAX_REPETITION = 100.0  # more, or less than its reciprocal, and penalised logits may leave float32's range
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234663852886e38


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{name} is {shown(value)}; it must be {allowed}", name)


def is_number(value: object, kind: type) -> bool:
    """True for numbers of `kind`, Integral or Real, of Python and numpy. A bool is none, nor is a numpy duration,
    although it claims to be both."""
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    return getattr(getattr(value, "dtype", None), "kind", "") != "m"


def _integer(name: str, value: Any, low: int, high: int, allowed: str) -> int:
    """`value`, a Python or numpy integer in [low, high], as a Python integer."""
    _require(is_number(value, Integral) and low <= value <= high, name, value, allowed)
    return int(value)


def _number(name: str, value: Any, low: float, high: float, allowed: str) -> float:
    """`value`, a Python or numpy number in [low, high], as a float. NaN is in no range."""
    _require(is_number(value, Real) and low <= value <= high, name, value, allowed)
    return float(value)


def _entries(name: str, value: Any, max_entries: int) -> tuple[Any, ...]:
    """What a list (or another collection) holds; None holds nothing. It is read no further than the limit."""
    if value is None:
        return ()
    collection = isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping))
    # A numpy or torch scalar says that it can be iterated over, too.
    _require(collection and getattr(value, "ndim", 1) == 1, name, value, "a sequence")
    entries = tuple(islice(value, max_entries + 1))
    if len(entries) > max_entries:
        raise RequestError(f"{name} has more than {max_entries} entries; pass at most {max_entries}", name)
    return entries


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request; every field is checked when the object is made.

    numpy numbers are taken and kept as Python's. What depends on a model's vocabulary (`stop_token_ids`, `logprobs`) is
    checked again where a request meets the model (`Engine.prepare`).

    Args:
        max_tokens: tokens to generate at most, 1 to 2**31 - 1; None means as many as `max_model_len` leaves room for.
        temperature: 0 is greedy, and so is everything below MIN_TEMPERATURE (1e-5); otherwise logits are divided by it.
            At most float32's largest number.
        top_p: nucleus mass in (0, 1]; 1 turns it off.
        top_k: candidates kept, up to 2**31 - 1; -1 or 0 turns it off, and so does the size of the vocabulary or more.
        min_p: candidates below `min_p * max(p)` are dropped; 0 turns it off.
        repetition_penalty: 0.01 to 100; logits of tokens in the prompt or the output are divided (if positive) or
            multiplied (if negative) by it (Keskar et al. 2019, CTRL).
        presence_penalty, frequency_penalty: subtracted once, respectively per occurrence, for tokens of the output.
        stop: strings that end the request, up to MAX_STOP_STRINGS (32) of up to MAX_STOP_CHARACTERS (256) characters
            each; the text is cut before the first of them. One string may be passed as it is.
        stop_token_ids: token ids that end the request, beside the model's own end-of-sequence ids; up to
            MAX_STOP_TOKEN_IDS (1024).
        ignore_eos: go on after end-of-sequence ids (`stop_token_ids` still end the request).
        seed: 0 to 2**63 - 1, makes the request's draws reproducible whatever runs beside it; None derives one from the
            engine's seed.
        logprobs: return the log-probability of each token and of this many most likely alternatives, up to 64; None
            returns none.
        n: independent samples of the same prompt, up to 1024.
        include_stop_str_in_output: the text goes on to the end of the stop string, or of the stopping token.
        skip_special_tokens: special tokens leave nothing in the text.
        truncate_prompt_tokens: of a longer prompt only the last so many tokens are used, 1 to 2**31 - 1; -1: as many as
            leave room for one output token. None refuses a prompt that is too long.
        priority: requests of a lower number are started first, and are the last to give their memory back; first come,
            first served among equals.
        cache_salt: the prefix cache shares nothing between requests of different salts; a string of 1 to
            MAX_SALT_CHARACTERS (256) characters. None shares with all requests that have none.

    Raises:
        RequestError: a field is out of range; the text names the field, the value and the allowed range.
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

    def __post_init__(self) -> None:
        for name, value in (self._lengths() | self._distribution() | self._stops()).items():
            object.__setattr__(self, name, value)

    def _lengths(self) -> dict[str, Any]:
        optional = {
            "max_tokens": (1, _INT32_MAX, "an integer from 1 to 2**31 - 1, or None"),
            "logprobs": (0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or None"),
            "seed": (0, 2**63 - 1, "an integer from 0 to 2**63 - 1, or None"),
            "truncate_prompt_tokens": (-1, _INT32_MAX, "an integer from 1 to 2**31 - 1, -1, or None"),
        }
        _require(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", 0, optional["truncate_prompt_tokens"][2])
        given = {name: getattr(self, name) for name in optional}
        checked = {name: _integer(name, v, *optional[name]) for name, v in given.items() if v is not None}
        checked["n"] = _integer("n", self.n, 1, MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}")
        checked["priority"] = _integer("priority", self.priority, -_INT32_MAX, _INT32_MAX, "an integer of 32 bits")
        return checked

    def _distribution(self) -> dict[str, Any]:
        largest, least = MAX_REPETITION, 1 / MAX_REPETITION
        ranges = {
            "temperature": (0, _FLOAT32_MAX, "a finite float32 >= 0 (0 is greedy)"),
            "top_p": (math.ulp(0), 1, "in (0, 1]"),
            "min_p": (0, 1, "in [0, 1]"),
            "repetition_penalty": (least, largest, f"a number from {least:g} to {largest:g} (1 is off)"),
            "presence_penalty": (-2, 2, "in [-2, 2]"),
            "frequency_penalty": (-2, 2, "in [-2, 2]"),
        }
        checked = {name: _number(name, getattr(self, name), *allowed) for name, allowed in ranges.items()}
        top_k = _integer("top_k", self.top_k, -1, _INT32_MAX, "an integer from 1 to 2**31 - 1, or -1 for off")
        return checked | {"top_k": top_k}

    def _stops(self) -> dict[str, Any]:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else _entries("stop", self.stop, MAX_STOP_STRINGS)
        for s in stop:
            ok = isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS
            _require(ok, "stop", s, f"strings of 1 to {MAX_STOP_CHARACTERS} characters")
            _require(is_text(s), "stop", s, "text: it holds a lone surrogate, which no output can hold")
        ids = _entries("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        ids = tuple(_integer("stop_token_ids", t, 0, _INT32_MAX, "integers >= 0 from the vocabulary") for t in ids)
        salt = self.cache_salt
        ok = salt is None or (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_CHARACTERS and is_text(salt))
        _require(ok, "cache_salt", salt, f"a string of 1 to {MAX_SALT_CHARACTERS} characters, or None")
        return {"stop": stop, "stop_token_ids": ids}

    @property
    def greedy(self) -> bool:
        """True if every token is the arg-max of the (penalised) logits."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def uses_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
