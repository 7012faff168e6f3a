"""What options that save bytes cost in quality, on the embedded model and on tasks of recall.

Perplexity: on files of CPython 3.11's library that the embedded model has not read (benchmarks/train_embedded.py).
Recall: the share of right answers of a small model of windows and history (benchmarks/recall_study.py), which is
trained first, at all distances together.

    python -m benchmarks.quality --source lib/python3.11 --out quality         # trains (minutes), measures
    python -m benchmarks.quality --source lib/python3.11 --out quality --rows fp8
"""

import argparse
import json
import time
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.common import environment
from benchmarks.recall_study import Task, evaluate, model_config, train
from benchmarks.train_embedded import read_sources
from hybridrt import LLM
from hybridrt.bench.perplexity import WINDOW, perplexity

DISTANCES = (1, 8, 15, 24, 48, 80)
HIDDEN = 128  # of the model of recall: matrices are large enough to be quantised


@dataclass(frozen=True)
class Row:
    """An option. limit: of the relative perplexity, less 1."""

    name: str
    limit: float
    options: dict[str, Any] = field(default_factory=dict)


PLAIN = Row("plain", 0.0)
ROWS = (
    Row("fp8", 0.005, {"quantization": "fp8"}),
    Row("int4", 0.04, {"quantization": "int4"}),
    Row("kv-fp8", 0.003, {"kv_cache_dtype": "fp8_e4m3"}),
)


def held_out_tokens(source: Path, count: int) -> list[int]:
    """`count` tokens of held-out files."""
    with LLM("embedded", device="cpu", max_model_len=64) as llm:
        assert llm.tokenizer is not None
        encode = llm.tokenizer.encode
        found = list(chain.from_iterable(encode(text) for text in read_sources(source, None)[1]))
    if len(found) < count:
        raise SystemExit(f"{source} holds out {len(found)} tokens, and {count} are wanted: use CPython 3.11's library")
    return found[:count]


def recall_model(args: argparse.Namespace) -> Path:
    """Trained once."""
    path: Path = args.out / "recall"
    if not (path / "model.safetensors").exists():
        task = Task()
        config = model_config(task, "enabled", HIDDEN)
        train(config, task, argparse.Namespace(steps=args.steps, batch=16, length=96, lr=3e-3, seed=0), path)
    return path


def measure(row: Row, tokens: list[int], recall: Path, args: argparse.Namespace) -> dict[str, float]:
    started = time.perf_counter()
    with LLM("embedded", device=args.device, prefix_cache=False, **row.options) as llm:
        found = {"perplexity": perplexity(llm, tokens)}
    shares = evaluate(recall, Task(), DISTANCES, args.device, args.prompts, **row.options)
    return found | {"recall": sum(shares.values()) / len(shares), "seconds": time.perf_counter() - started}


def table(found: dict[str, dict[str, float]]) -> str:
    """In Markdown."""
    plain = found[PLAIN.name]
    lines = ["| option | perplexity | relative | limit | recall |", "|---|---|---|---|---|"]
    for row in (PLAIN, *ROWS):
        if (numbers := found.get(row.name)) is not None:
            change = f"{numbers['perplexity'] / plain['perplexity'] - 1:+.2%}" if row is not PLAIN else ""
            limit = f"{row.limit:+.1%}" if row is not PLAIN else ""
            lines.append(f"| {row.name} | {numbers['perplexity']:.4f} | {change} | {limit} | {numbers['recall']:.3f} |")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--source", type=Path, required=True, help="the library of CPython 3.11: .../lib/python3.11")
    add("--out", type=Path, required=True, help="folder for the model of recall and quality.json")
    add("--rows", nargs="*", choices=[row.name for row in ROWS], help="options to measure (all)")
    add("--tokens", type=int, default=200 * WINDOW, help="held-out tokens (%(default)s)")
    add("--steps", type=int, default=600, help="of training (%(default)s)")
    add("--prompts", type=int, default=200, help="at each distance (%(default)s)")
    add("--device", default="cpu", help="(%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Measures the rows and prints them. Exits with 1 if one is beyond its limit."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    recall, tokens = recall_model(args), held_out_tokens(args.source, args.tokens)
    found: dict[str, dict[str, float]] = {}
    wanted = [row for row in ROWS if args.rows is None or row.name in args.rows]
    for row in (PLAIN, *wanted):
        found[row.name] = measure(row, tokens, recall, args)
        print(row.name, found[row.name], flush=True)
    log = {"environment": environment(), "tokens": len(tokens), "rows": found}
    (args.out / "quality.json").write_text(json.dumps(log, indent=1) + "\n")
    print(table(found))
    plain = found[PLAIN.name]["perplexity"]
    beyond = [row.name for row in wanted if found[row.name]["perplexity"] > plain * (1 + row.limit)]
    if beyond:
        raise SystemExit(f"beyond the limit: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
