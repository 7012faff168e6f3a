"""Compiles structured outputs for a model's tokens: in threads, within a time limit, each of them once."""

import json
import math
import os
import re
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hybridrt.engine.grammar import Grammar, Matcher, shortened
from hybridrt.engine.tokenizer import HFTokenizer, Tokenizer
from hybridrt.errors import QueueFullError, RequestError, is_failure
from hybridrt.structured_outputs import WHITESPACE, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

COMPILE_SECONDS = 10.0
COMPILING = 4  # requests that wait for their grammars at a time
RUNNING = 8  # threads that compile at a time, those included whose requests have given up: each may take 1 GB
KEPT = 64  # grammars, also those that failed
SHARED = 8  # grammars with more than one root at a time: each root has a lexer, which may take 100 MB
GROW_SECONDS = 0.1  # a grammar gets no more roots after that, nor if one takes longer: they save a millisecond a step
# llguidance's limits of one mask: an expression made to be slow delays all rows by 400 ms at the defaults, by 100 ms
# with these. verbose_errors would quote the grammar.
_LIMITS = {"step_lexer_fuel": 100_000, "max_lexer_states": 50_000, "verbose_errors": False}
# llguidance compiles rules and references by recursion: a chain of 3000 overflows a usual stack, and the process dies.
# A level takes up to 8 KB, and the text of a grammar has room for some 20,000. Untouched pages take no memory.
_STACK_BYTES = 2**29
# llguidance tries the remainders of "multipleOf" one by one, under none of its limits: ten million take a minute and
# gigabytes. Powers of ten cost nothing. Parts of a schema that are combined have the least common multiple.
MAX_REMAINDERS = 100_000
_MOST_DIGITS = 40  # llguidance itself refuses more
_KEY_AND_NUMBER = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*(-?[0-9][0-9.]*)')
_starting = threading.Lock()  # the size of stacks is the process's, so it is set for one start at a time
_FIELD = "structured_outputs"
_NO_TOKEN = "NoExtensionBias"  # what llguidance says where no token may come
_INSTALL = 'structured_outputs need llguidance: pip install "hybridrt[structured]"'


class GrammarCompiler:
    """Makes matchers of structured outputs. Any thread may call `matcher`.

    llguidance compiles without Python's lock and has limits of its own, which end it within a second or so. A request
    waits `seconds` at most; the thread that compiles may run a little longer. A grammar that several samples follow is
    compiled again, up to once for each thread that computes masks (`Grammar.roots`), without anything waiting for it.

    Args:
        tokenizer: None: the model has none, so requests are refused.
        vocab_size: of the model. Tokens beyond the tokenizer's are never allowed.
        eos_token_ids: allowed where an output may end.
        threads: that compute masks; None: four of five CPUs, 16 at most.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seconds: float = COMPILE_SECONDS,
        threads: int | None = None,
    ) -> None:
        self.seconds, self.vocab_size = seconds, vocab_size
        self.threads = _num_threads() if threads is None else threads
        self._tokenizer, self._eos = tokenizer, frozenset(eos_token_ids)
        self._compiled: OrderedDict[StructuredOutputs, Future[Grammar | str]] = OrderedDict()
        self._shared = deque[Grammar]()
        self._running = 0
        self._lock = threading.Lock()  # guards `_compiled` and `_running`
        self._loading = threading.Lock()
        self._places = threading.BoundedSemaphore(COMPILING)

    @property
    def words(self) -> int:
        """int32 words of a bitmask."""
        return -(-self.vocab_size // 32)

    @cached_property
    def executor(self) -> "LLExecutor":
        """The threads that compute masks."""
        from llguidance import LLExecutor

        return LLExecutor(self.threads)

    def matcher(self, outputs: StructuredOutputs, samples: int = 1) -> Matcher:
        """A new matcher, before the first token.

        Args:
            samples: that will have copies of it.

        Raises:
            RequestError: the model has no tokenizer or no end of sequence, llguidance is not installed, or the
                grammar is invalid, not satisfiable, too large, or takes too long.
            QueueFullError: too many other grammars are being compiled, or there is no memory for another thread.
        """
        with self._lock:
            known = outputs in self._compiled
        found = self.grammar(outputs)
        if samples > 1 or known:
            self._grow(found, outputs, self._loaded())
        return Matcher(found)

    def grammar(self, outputs: StructuredOutputs) -> Grammar:
        """The compiled grammar, from which `matcher` starts. Raises the same."""
        tokenizer = self._loaded()
        with self._lock:
            job = self._compiled.get(outputs)
            if job is not None:
                self._compiled.move_to_end(outputs)
        found = self._wait(outputs, tokenizer) if job is None or not job.done() else job.result()
        if isinstance(found, str):
            raise RequestError(f"{_FIELD}: this {outputs.kind} cannot be used: {found}", _FIELD)
        return found

    def _wait(self, outputs: StructuredOutputs, tokenizer: "LLTokenizer") -> Grammar | str:
        """Starts to compile, unless another request has; waits for the result."""
        if not self._places.acquire(timeout=self.seconds):
            raise QueueFullError("too many grammars are being compiled: try again later")
        try:
            return self._job(outputs, tokenizer).result(self.seconds)
        except TimeoutError:
            return f"compiling it takes more than {self.seconds:g} seconds; make it simpler"
        finally:
            self._places.release()

    def _job(self, outputs: StructuredOutputs, tokenizer: "LLTokenizer") -> "Future[Grammar | str]":
        with self._lock:
            job = self._compiled.get(outputs)
            if job is not None:
                return job
            if self._running >= RUNNING:
                raise QueueFullError("too many grammars are being compiled: try again later")
            self._running += 1
            job = self._compiled[outputs] = Future()
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)

        def run() -> None:
            began = time.monotonic()
            try:
                inner = self._compile(outputs, tokenizer)
                cheap = time.monotonic() - began < GROW_SECONDS
                found = inner if isinstance(inner, str) else Grammar(inner, self._eos, cheap)
            except BaseException as e:  # a failed assertion in llguidance is no Exception
                found = f"{type(e).__name__}: {shortened(str(e))}"
            with self._lock:
                self._running -= 1
            job.set_result(found)

        try:
            _start(run)
        except RuntimeError as e:  # not enough memory for the stack: a later request tries again
            with self._lock:
                self._compiled.pop(outputs, None)
                self._running -= 1
            job.set_exception(QueueFullError(f"no thread to compile a grammar ({e}): try again later"))
        return job

    def _grow(self, grammar: Grammar, outputs: StructuredOutputs, tokenizer: "LLTokenizer") -> None:
        """Starts to make the other roots of a grammar, unless it has them or the threads are needed elsewhere: then a
        later request does it."""
        with self._lock:
            if not grammar.cheap or grammar in self._shared or self.threads == 1 or self._running >= RUNNING // 2:
                return
            self._running += 1
            if len(self._shared) == SHARED:
                dropped = self._shared.popleft()
                dropped.roots = dropped.roots[:1]
            self._shared.append(grammar)

        def run() -> None:
            try:
                end = time.monotonic() + GROW_SECONDS
                while len(grammar.roots) < self.threads and time.monotonic() < end:
                    inner = self._compile(outputs, tokenizer)
                    with self._lock:
                        if isinstance(inner, str) or grammar not in self._shared:
                            return
                        grammar.roots += (inner,)
            finally:
                with self._lock:
                    self._running -= 1

        try:
            _start(run)
        except RuntimeError:  # not enough memory for the stack; the grammar works with one root
            with self._lock:
                self._running -= 1

    def _compile(self, outputs: StructuredOutputs, tokenizer: "LLTokenizer") -> "LLMatcher | str":
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.numpy import fill_next_token_bitmask

        grammar = _grammar(outputs)
        if _remainders(grammar) > MAX_REMAINDERS:
            return f'its "multipleOf" have a least common multiple of more than {MAX_REMAINDERS}; take simpler ones'
        inner = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        first = np.zeros((1, self.words), np.int32)
        if not inner.is_error():
            fill_next_token_bitmask(inner, first)
        if not inner.is_error():
            return inner
        error = shortened(inner.get_error())
        return "Unsatisfiable: no text of finite length fits" if error.startswith(_NO_TOKEN) else error

    def _loaded(self) -> "LLTokenizer":
        with self._loading:  # cached_property alone would load it twice
            return self._llguidance

    @cached_property
    def _llguidance(self) -> "LLTokenizer":
        if not isinstance(self._tokenizer, HFTokenizer):
            raise RequestError(f"{_FIELD} need a tokenizer and this model has none", _FIELD)
        if not self._eos:
            raise RequestError(
                f"{_FIELD} need an end-of-sequence token, and the model's configuration names none", _FIELD
            )
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as e:
            raise RequestError(_INSTALL, _FIELD) from e
        try:
            return from_tokenizer(self._tokenizer.hf, n_vocab=self.vocab_size, eos_token=sorted(self._eos))
        except BaseException as e:
            if not is_failure(e):
                raise
            raise RequestError(
                f"{_FIELD} do not work with this model's tokenizer ({type(e).__name__}: {shortened(str(e))}): it must "
                f"have a tokenizer.json whose tokens are in the model's vocabulary of {self.vocab_size}",
                _FIELD,
            ) from e


def _remainders(grammar: str) -> int:
    """The least common multiple of the digits of all "multipleOf" in a grammar's text, without zeros at the end;
    MAX_REMAINDERS + 1 if it is more."""
    found = 1
    for key, number in _KEY_AND_NUMBER.findall(grammar):
        digits = number.replace(".", "").replace("-", "").strip("0")
        if "multipleOf" not in (key, _unescaped(key)) or not digits or len(digits) > _MOST_DIGITS:
            continue
        found = math.lcm(found, int(digits))
        if found > MAX_REMAINDERS:
            return MAX_REMAINDERS + 1
    return found


def _unescaped(key: str) -> str:
    try:
        return str(json.loads(f'"{key}"'))
    except ValueError:
        return key


def _num_threads() -> int:
    """Four of five CPUs, 16 at most."""
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(max(cpus * 4 // 5, 1), 16)


def _start(run: Callable[[], None]) -> None:
    """Runs it in a thread with a large stack. Raises RuntimeError if there is no memory for that."""
    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="hybridrt-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)


def _grammar(outputs: StructuredOutputs) -> str:
    """Text of the grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if outputs.regex is not None:
        return LLMatcher.grammar_from_regex(outputs.regex)
    if outputs.choice is not None:
        # One terminal: as alternatives of a rule they would be as many items of the parser, which takes 2000.
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in outputs.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if outputs.grammar is not None:
        return LLMatcher.grammar_from_lark(outputs.grammar)
    schema = outputs.schema
    options = {} if "x-guidance" in schema else {"whitespace_pattern": WHITESPACE}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
