"""Compiles structured outputs for a model's tokens, each once, within limits of time and memory."""

import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hybridrt.base.errors import QueueFullError, RequestError, is_failure
from hybridrt.base.structured_outputs import StructuredOutputs
from hybridrt.engine.grammar.compile_child import NICE, build, in_thread
from hybridrt.engine.grammar.compile_limit import FULL, REST, CompileLimit
from hybridrt.engine.grammar.compile_process import CompileProcess, Verdict
from hybridrt.engine.grammar.grammar_text import MAX_REMAINDERS, NO_FORCING, grammar_text, remainders
from hybridrt.engine.grammar.matcher import Grammar, Matcher, shortened
from hybridrt.engine.grammar.thinking import ThinkingState
from hybridrt.engine.text.tokenizer import HFTokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

COMPILE_SECONDS = 10.0
QUICK_CPU_SECONDS, MEDIUM_CPU_SECONDS, LARGE_CPU_SECONDS = 0.05, 0.25, 2.0
QUICK, MEDIUM, LARGE = 4, 1, 1  # that compile at a time
MEDIUM_CHARACTERS, LARGE_CHARACTERS = 2**12, 2**15  # longer ones are not tried as small, or medium
WAITING = 32
KEPT = 64  # grammars, failed ones included
SHARED = 8  # grammars with further roots: lexers of up to 100 MB
GROWING = 4
GROW_SECONDS = 0.1  # they save only a millisecond a step
_FIELD = "structured_outputs"
_NO_TOKEN = "NoExtensionBias"
_INSTALL = "structured_outputs need llguidance: pip install '.[structured]'"
_TEXT_TOKENS = '%llguidance {"allow_invalid_utf8": true}\nstart: /(?s-u:[^\\xFF]+)/'  # no text has the byte 0xFF


class _Job(Future["Grammar | str"]):
    """A compilation. `quick_over` is set once it has ended, or has used the time of a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.quick_over = threading.Event()
        self.add_done_callback(lambda _: self.quick_over.set())


class GrammarCompiler:
    """Makes matchers of structured outputs. Any thread may call `matcher`.

    A grammar is first compiled in another process with limits (compile_process.py). A short one
    gets QUICK_CPU_SECONDS at once. If it needs more, it waits among the medium ones, then among the
    large ones; each kind has a share of one core. A grammar of several samples is compiled again in
    the background, up to once for each thread that computes masks (`Grammar.roots`).

    Args:
        tokenizer: None: requests are refused.
        vocab_size: tokens of the model. Tokens beyond the tokenizer's are never allowed.
        eos_token_ids: allowed where an output may end.
        seconds: most time that a request waits for each turn, and for the process.
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
        self._compiled: OrderedDict[StructuredOutputs, _Job] = OrderedDict()
        self._shared = deque[Grammar]()
        self._growing = 0
        self._lock = threading.Lock()  # guards `_compiled`, `_shared` and `_growing`
        self._loading = threading.Lock()
        self._quick, self._medium, self._large = (
            CompileLimit(QUICK),
            CompileLimit(MEDIUM, REST),
            CompileLimit(LARGE, REST),
        )
        self._waiting = threading.Semaphore(WAITING)

    @property
    def words(self) -> int:
        """int32 words of a bitmask."""
        return -(-self.vocab_size // 32)

    @cached_property
    def executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor(self.threads)

    def matcher(self, outputs: StructuredOutputs, samples: int = 1) -> Matcher:
        """A new matcher, before the first token. `samples`: that will have copies of it.

        Raises:
            RequestError: the model has no tokenizer or no end of sequence, llguidance is not
                installed, or the grammar is invalid, not satisfiable, too large, or takes too long.
            QueueFullError: too many other grammars are being compiled, or the process has ended.
        """
        form = _without_thinking(outputs)
        with self._lock:
            known = form in self._compiled
        found = self.grammar(form)
        if samples > 1 or known:
            self._grow(found)
        tags = outputs.thinking
        return Matcher(found, thinking=None if tags is None else ThinkingState.start(tags, self._text))

    def grammar(self, outputs: StructuredOutputs) -> Grammar:
        self._loaded()
        outputs = _without_thinking(outputs)
        with self._lock:
            job = self._compiled.get(outputs)
            mine = job is None
            if job is None:
                job = self._compiled[outputs] = _Job()
                self._forget()
            self._compiled.move_to_end(outputs)
        if mine:
            self._make(outputs, job)
        found = self._result(job)
        if isinstance(found, str):
            raise RequestError(f"{_FIELD}: this {outputs.kind} cannot be used: {found}", _FIELD)
        return found

    def close(self) -> None:
        """Ends compiling. Compiled grammars can still be used."""
        with self._loading:
            if "_process" in self.__dict__:
                self._process.close()

    def _forget(self) -> None:
        """Drops the oldest, but none that requests wait for."""
        surplus = len(self._compiled) - KEPT
        for outputs in [known for known, job in self._compiled.items() if job.done()][: max(surplus, 0)]:
            del self._compiled[outputs]

    def _result(self, job: _Job) -> "Grammar | str":
        job.quick_over.wait()
        if job.done():
            return job.result()
        with self._wait():
            try:
                return job.result(2 * self.seconds)
            except TimeoutError:
                raise QueueFullError(FULL) from None

    def _make(self, outputs: StructuredOutputs, job: _Job) -> None:
        """Keeps no result that says nothing about the grammar."""
        try:
            job.set_result(self._compile(outputs, job))
        except BaseException as e:
            with self._lock:
                if self._compiled.get(outputs) is job:
                    del self._compiled[outputs]
            job.set_exception(e)
            raise

    def _compile(self, outputs: StructuredOutputs, job: _Job) -> "Grammar | str":
        text = grammar_text(outputs)
        if remainders(text) > MAX_REMAINDERS:
            return f'its "multipleOf" have a least common multiple of more than {MAX_REMAINDERS}; take simpler ones'
        if len(text) <= MEDIUM_CHARACTERS:
            found = self._compile_within(text, self._quick, QUICK_CPU_SECONDS)
            if found is not None:
                return found
        job.quick_over.set()
        with self._wait():
            if len(text) <= LARGE_CHARACTERS:
                found = self._compile_within(text, self._medium, MEDIUM_CPU_SECONDS)
                if found is not None:
                    return found
            found = self._compile_within(text, self._large, LARGE_CPU_SECONDS)
            late = f"compiling it takes more than {LARGE_CPU_SECONDS:g} seconds of CPU time; make it simpler"
            return late if found is None else found

    def _compile_within(self, text: str, limit: CompileLimit, cpu_seconds: float) -> "Grammar | str | None":
        """Returns the reason if it cannot be used. None: it needs more CPU time."""
        with limit.enter(self.seconds):
            verdict = self._process.compile(text, cpu_seconds, self.seconds)
            return None if verdict.late else self._judged(text, verdict)

    @contextmanager
    def _wait(self) -> Iterator[None]:
        if not self._waiting.acquire(blocking=False):
            raise QueueFullError(FULL)
        try:
            yield
        finally:
            self._waiting.release()

    def _judged(self, text: str, verdict: Verdict) -> "Grammar | str":
        if verdict.error:
            return _explained(verdict.error)
        done = Future["LLMatcher"]()
        tokenizer, cheap = self._loaded(), verdict.seconds < GROW_SECONDS

        def run() -> None:
            try:
                if sys.platform == "linux" and not cheap:  # other threads go first
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
                done.set_result(build(tokenizer, text))
            except BaseException as e:  # llguidance's failed assertion
                done.set_exception(RequestError(f"{_FIELD}: {type(e).__name__}: {shortened(str(e))}", _FIELD))

        try:
            in_thread(run)
        except RuntimeError as e:  # no memory for a stack
            raise QueueFullError(f"no thread to compile a grammar ({e}): try again later") from e
        root = done.result()
        if root.is_error():
            return _explained(root.get_error())
        return Grammar(root, self._eos, text, cheap, _takes_back(root, self._eos))

    def _grow(self, grammar: Grammar) -> None:
        """Does nothing if it has them or the threads are busy."""
        with self._lock:
            if not grammar.cheap or grammar in self._shared or self.threads == 1 or self._growing >= GROWING:
                return
            self._growing += 1
            if len(self._shared) == SHARED:
                dropped = self._shared.popleft()
                dropped.roots = dropped.roots[:1]
            self._shared.append(grammar)
        tokenizer = self._loaded()

        def run() -> None:
            try:
                end = time.monotonic() + GROW_SECONDS
                while len(grammar.roots) < self.threads and time.monotonic() < end:
                    root = build(tokenizer, grammar.text)
                    with self._lock:
                        if root.is_error() or grammar not in self._shared:
                            return
                        grammar.roots += (root,)
            finally:
                with self._lock:
                    self._growing -= 1

        try:
            in_thread(run)
        except RuntimeError:  # one root is enough
            with self._lock:
                self._growing -= 1

    def _loaded(self) -> "LLTokenizer":
        with self._loading:  # cached_property would load twice
            return self._llguidance

    @cached_property
    def _text(self) -> np.ndarray:
        """Returns int32 words: all tokens that are text, or pieces of characters."""
        return np.frombuffer(build(self._loaded(), _TEXT_TOKENS).compute_bitmask(), np.int32)

    @cached_property
    def _llguidance(self) -> "LLTokenizer":
        if not isinstance(self._tokenizer, HFTokenizer):
            raise RequestError(f"{_FIELD} need a tokenizer and this model has none", _FIELD)
        if not self._eos:
            raise RequestError(
                f"{_FIELD} need an end-of-sequence token, and the model's configuration names none", _FIELD
            )
        try:
            from llguidance import LLTokenizer
        except ImportError as e:
            raise RequestError(_INSTALL, _FIELD) from e
        try:
            backend = copy(self._tokenizer.hf.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            text = backend.to_str()
            found = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=sorted(self._eos))
        except BaseException as e:
            if not is_failure(e):
                raise
            raise RequestError(
                f"{_FIELD} do not work with this model's tokenizer ({type(e).__name__}: {shortened(str(e))}): it must "
                f"have a tokenizer.json whose tokens are in the model's vocabulary of {self.vocab_size}",
                _FIELD,
            ) from e
        self._process = CompileProcess(text, self.vocab_size, sorted(self._eos))
        return found


def _without_thinking(outputs: StructuredOutputs) -> StructuredOutputs:
    return outputs if outputs.thinking is None else replace(outputs, thinking=None)


def _explained(error: str) -> str:
    if error.startswith(_NO_TOKEN):
        return "Unsatisfiable: no text of finite length fits"
    text = "\n".join(line for line in error.rstrip().split("\n") if NO_FORCING.strip() not in line)
    return text if len(text) <= 600 else f"{text[:600]}..."


def _takes_back(root: "LLMatcher", eos: frozenset[int]) -> bool:
    """False if a rule has max_tokens or stop."""
    tried = root.deep_copy()
    bits = np.unpackbits(np.frombuffer(tried.compute_bitmask(), np.uint8), bitorder="little")
    token = next((int(token) for token in np.flatnonzero(bits) if int(token) not in eos), None)
    return token is None or (bool(tried.consume_token(token)) and bool(tried.rollback(1)))


def _num_threads() -> int:
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(max(cpus * 4 // 5, 1), 16)
