"""Counts the Python calls of one short greedy prompt on the embedded model.

    python scripts/trace_step.py [--top N]

A reader who steps through the prompt enters every function that is counted here: four token ids,
four greedy tokens, on a CPU. `--top` also lists the functions and files that are called most.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from hybridrt import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = tuple(f"{ROOT / name}/" for name in ("hybridrt", "models", "mem_cache"))
PROMPT = [1, 2, 3, 4]


@dataclass
class Trace:
    """Calls into this project's files, in their order.

    Attributes:
        calls: by code object. A generator counts each time that it goes on.
        switches: calls into another file than the call before.
    """

    calls: Counter[CodeType] = field(default_factory=Counter)
    switches: int = 0
    last: str = ""

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function of `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(FOLDERS):
            return
        self.calls[code] += 1
        if code.co_filename != self.last:
            self.switches, self.last = self.switches + 1, code.co_filename

    @property
    def files(self) -> Counter[str]:
        """Calls by file."""
        found: Counter[str] = Counter()
        for code, count in self.calls.items():
            found[code.co_filename] += count
        return found


@cache
def function_lines(file: Path) -> dict[int, int]:
    """Lines of each function of a file, its decorators and docstring included, by its first line."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[first] = (node.end_lineno or first) - first + 1
    return found


def called_lengths(trace: Trace) -> Iterator[int]:
    """Lines of each function that was called. A lambda or a generator expression is part of one."""
    for code in trace.calls:
        lines = function_lines(Path(code.co_filename))
        if code.co_firstlineno in lines and not code.co_name.startswith("<"):
            yield lines[code.co_firstlineno]


def package_lengths() -> Iterator[int]:
    """Lines of every function of the project."""
    for folder in FOLDERS:
        for file in sorted(Path(folder).rglob("*.py")):
            yield from function_lines(file).values()


def percentile(values: Iterator[int], share: float = 0.9) -> int:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))]


def trace_prompt(tokens: int = 4) -> Trace:
    """The second run of the prompt: the first one plans and records what stays."""
    llm = LLM("embedded", device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.generate(PROMPT, params)
    trace = Trace()
    sys.setprofile(trace.record)
    try:
        llm.generate(PROMPT, params)
    finally:
        sys.setprofile(None)
    llm.close()
    return trace


def figures(trace: Trace) -> dict[str, int]:
    """What the house is held to, by name."""
    return {
        "calls": trace.calls.total(),
        "files": len(trace.files),
        "switches": trace.switches,
        "lines of the functions called, p90": percentile(called_lengths(trace)),
        "lines of all functions, p90": percentile(package_lengths()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--top", type=int, default=0, help="functions and files to list, by their calls")
    top = parser.parse_args().top
    trace = trace_prompt()
    for name, value in figures(trace).items():
        print(f"{value:6} {name}")
    for code, count in trace.calls.most_common(top):
        print(f"{count:6} {Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}")
    for file, count in trace.files.most_common(top):
        print(f"{count:6} {Path(file).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
