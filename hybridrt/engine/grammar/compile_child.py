"""Child process that compiles grammars and measures their cost before the parent compiles them.

A script that imports llguidance and nothing of hybridrt. It forks a process for each job on
standard input, which the system ends at its limit of time or memory. A frame is four bytes of
length, then a line of numbers, a line break, and text.
"""

import os
import random
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Limits of one mask: at the defaults, a malicious expression delays all rows by 400 ms.
# verbose_errors would quote the grammar.
LIMITS = {"step_lexer_fuel": 50_000, "step_max_items": 10_000, "max_lexer_states": 50_000, "verbose_errors": False}
# llguidance compiles by recursion: a chain of 3000 overflows a usual stack. A grammar has room for
# some 20,000 levels of 8 KB. Untouched pages need no memory.
STACK_BYTES = 2**29
MAX_BYTES = 2**29  # bytes of memory, beyond the process's at its start
# CPU time: a grammar with a slower mask or token is refused. llguidance reads a token without
# letting go of the interpreter, so no other thread runs meanwhile.
MASK_SECONDS, TOKEN_SECONDS = 0.03, 0.01
TIME, BUSY, MEMORY = "time", "busy", "memory"  # why it ended: CPU time, wall time, or else
NICE = 5  # the server goes first
_WALKS, _STEPS = 3, 12
_POLL_MS = 20
_ANSWER_BYTES = 4000  # a pipe accepts 4096 as a whole


def build(tokenizer: "LLTokenizer", grammar: str) -> "LLMatcher":
    """A matcher that has computed a first mask, or has an error. Needs a large stack."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def in_thread(run: Callable[[], None]) -> threading.Thread:
    """Calls `run` in a thread with a large stack. RuntimeError if there is no memory for that."""
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="hybridrt-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


_starting = threading.Lock()  # the stack size is the process's


def main() -> None:
    from llguidance import LLTokenizer

    os.nice(NICE)
    vocab, *eos = map(int, sys.argv[1:])
    tokenizer = LLTokenizer(_read()[1], n_vocab=vocab, eos_token=eos)
    _write(0, "", b"")
    poll, running = select.poll(), dict[int, int]()
    poll.register(0, select.POLLIN)
    while True:
        if poll.poll(_POLL_MS if running else None):
            head, text = _read()
            number, cpu, wall = head.split()
            pid = os.fork()
            if not pid:
                _child(tokenizer, int(number), float(cpu), float(wall), text)
            running[pid] = int(number)
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            job = running.pop(ended[0])
            if ended[1]:
                code = -os.waitstatus_to_exitcode(ended[1])
                why = {signal.SIGPROF: TIME, signal.SIGALRM: BUSY}.get(code, MEMORY)  # type: ignore[call-overload]
                _write(job, "!", why.encode())


def _child(tokenizer: "LLTokenizer", number: int, cpu: float, wall: float, text: str) -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm") as pages:
            size = int(pages.read().split()[0]) * resource.getpagesize()
        limit = size + STACK_BYTES + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, wall)
    done = list[bool]()

    def run() -> None:
        began = time.thread_time()
        try:
            matcher = build(tokenizer, text)
            seconds = time.thread_time() - began
            error = matcher.get_error() if matcher.is_error() else _unfit(matcher, eos)
            _write(number, "-" if error else f"+{seconds:.6f}", error.encode(errors="replace"))
        except BaseException as e:  # llguidance's failed assertion
            _write(number, "-", f"{type(e).__name__}: {e}".encode(errors="replace"))
        done.append(True)

    eos = set(tokenizer.eos_tokens)
    in_thread(run).join()
    os._exit(0 if done else 1)


def _unfit(root: "LLMatcher", eos: set[int]) -> str:
    """Tries a few outputs; returns "" if their masks and tokens are fast, and none fails at once."""
    rng = random.Random(0)
    for _ in range(_WALKS):
        matcher = root.deep_copy()
        for step in range(_STEPS):
            began = time.thread_time()
            mask = matcher.compute_bitmask()
            masked = time.thread_time()
            token = _token(mask, rng)
            going = not matcher.is_error() and token not in eos and matcher.consume_token(token)
            if matcher.is_error():
                if step == 0:
                    reason = matcher.get_error().partition("\n")[0]
                    return f"the first token of an output is too much for llguidance ({reason}); make it simpler"
                break  # fails only its request
            for what, seconds, most in (
                ("a mask of", masked - began, MASK_SECONDS),
                ("reading a token of", time.thread_time() - masked, TOKEN_SECONDS),
            ):
                if seconds > most:
                    return f"{what} it takes {1000 * seconds:.0f} ms of CPU time, more than {1000 * most:g}"
            if not going or matcher.is_stopped():
                break
    return ""


def _token(mask: bytes, rng: random.Random) -> int:
    start = rng.randrange(len(mask))
    turned = mask[start:] + mask[:start]
    skipped = len(turned) - len(turned.lstrip(b"\0"))
    byte = turned[skipped % len(mask)]
    return (start + skipped) % len(mask) * 8 + (byte & -byte).bit_length() - 1


def _read() -> tuple[str, str]:
    head, _, text = _exactly(int.from_bytes(_exactly(4), "little")).partition(b"\n")
    return head.decode(), text.decode()


def _exactly(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = os.read(0, min(count - len(data), 1 << 20))
        if not piece:
            os.killpg(0, signal.SIGKILL)
        data += piece
    return bytes(data)


def _write(number: int, status: str, text: bytes) -> None:
    data = f"{number} {status}\n".encode() + text[:_ANSWER_BYTES]
    os.write(1, len(data).to_bytes(4, "little") + data)


if __name__ == "__main__":
    main()
