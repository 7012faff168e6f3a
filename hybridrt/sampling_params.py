"""How one request's tokens are chosen and when it ends."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrt.errors import RequestError


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise RequestError(text)


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request; every field is checked when the object is made.

    Args:
        max_tokens: tokens to generate at most (>= 1); None means as many as `max_model_len` leaves room for.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: nucleus mass in (0, 1]; 1 turns it off.
        top_k: candidates kept; -1 or 0 turns it off.
        min_p: candidates below `min_p * max(p)` are dropped; 0 turns it off.
        repetition_penalty: > 0; logits of tokens in the prompt or the output are divided (if positive) or
            multiplied (if negative) by it (Keskar et al. 2019, CTRL).
        presence_penalty, frequency_penalty: subtracted once, respectively per occurrence, for tokens of the output.
        stop: strings that end the request; the text is cut before the first of them.
        stop_token_ids: token ids that end the request, beside the model's own end-of-sequence ids.
        ignore_eos: go on after end-of-sequence ids (`stop_token_ids` still end the request).
        seed: makes the request's draws reproducible whatever runs beside it; None derives one from the engine's seed.
        logprobs: return the log-probability of each token and of this many most likely alternatives; None returns none.
        n: independent samples of the same prompt.

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
    stop: Sequence[str] = field(default_factory=tuple)
    stop_token_ids: Sequence[int] = field(default_factory=tuple)
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            _require(value is None or isinstance(value, Iterable), f"{name} is {value!r}; it must be a sequence")
            object.__setattr__(self, name, tuple(value or ()))
        self._check_lengths()
        self._check_distribution()
        _require(all(isinstance(s, str) and s for s in self.stop), "stop must be non-empty strings")
        _require(all(_is_int(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids must be integers >= 0")

    def _check_lengths(self) -> None:
        m, lp, n, seed = self.max_tokens, self.logprobs, self.n, self.seed
        _require(m is None or (_is_int(m) and m >= 1), f"max_tokens is {m!r}; it must be an integer >= 1 or None")
        _require(lp is None or (_is_int(lp) and 0 <= lp <= 64), f"logprobs is {lp!r}; it must be 0 to 64 or None")
        _require(_is_int(n) and 1 <= n <= 1024, f"n is {n!r}; it must be an integer from 1 to 1024")
        _require(seed is None or (_is_int(seed) and 0 <= seed < 2**63), f"seed is {seed!r}; it must be 0 to 2**63 - 1")

    def _check_distribution(self) -> None:
        t, p, k, mp = self.temperature, self.top_p, self.top_k, self.min_p
        _require(_is_number(t) and t >= 0, f"temperature is {t!r}; it must be a finite number >= 0 (0 is greedy)")
        _require(_is_number(p) and 0 < p <= 1, f"top_p is {p!r}; it must be in (0, 1]")
        _require(_is_int(k) and k >= -1, f"top_k is {k!r}; it must be an integer >= 1, or -1 for off")
        _require(_is_number(mp) and 0 <= mp <= 1, f"min_p is {mp!r}; it must be in [0, 1]")
        r = self.repetition_penalty
        _require(_is_number(r) and r > 0, f"repetition_penalty is {r!r}; it must be a finite number > 0")
        for name in ("presence_penalty", "frequency_penalty"):
            v = getattr(self, name)
            _require(_is_number(v) and -2 <= v <= 2, f"{name} is {v!r}; it must be in [-2, 2]")

    @property
    def greedy(self) -> bool:
        """True if every token is the arg-max of the (penalised) logits."""
        return self.temperature == 0

    @property
    def uses_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
