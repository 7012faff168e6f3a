"""Quality of the built-in model for each option that may change numbers, with limits: minutes, and part of the tests.

Perplexity of files of this interpreter's library that the model was not trained on, and the share of pairs in
quality_tasks.jsonl in which the right continuation is likelier. Drafts and the prefix cache may not change a greedy
token in float32. benchmarks/quality.py measures more text, and recall.

    python -m benchmarks.quality_table
"""

import argparse
import json
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.train_embedded import read_sources
from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.bench.perplexity import perplexity

TASKS = Path(__file__).with_name("quality_tasks.jsonl")
TOKENS, FILES = 4096, 400
GREEDY = 32
PROMPTS = ("def read_lines(path):", "class Queue:\n    def __init__(self", "import os\n\n", "for name in sorted(")
BOUNDS = (5.0, 12.0)  # of the plain model's perplexity, on any Python's library


@dataclass(frozen=True)
class Row:
    """An option.

    Attributes:
        limit: of the relative perplexity, less 1. lost: tasks that it may lose.
    """

    name: str
    limit: float
    lost: int
    options: dict[str, Any] = field(default_factory=dict)


REPLAY = {"state_mode": "replay", "chunked_prefill_size": 16}  # states are stored each 16 tokens
ROWS = (
    Row("plain", 0.0, 0),
    Row("replay", 1e-5, 0, REPLAY),
    Row("bfloat16", 0.005, 1, {"dtype": "bfloat16"}),
    Row("fp8 weights", 0.005, 1, {"quantization": "fp8"}),
    Row("int4 weights", 0.05, 2, {"quantization": "int4"}),
    Row("fp8 KV", 0.003, 1, {"kv_cache_dtype": "fp8_e4m3"}),
    Row("bfloat16 states", 0.003, 1, {**REPLAY, "mamba_ssm_dtype": "bfloat16"}),
    Row("int8 states", 0.003, 1, {**REPLAY, "mamba_ssm_dtype": "int8"}),
    Row("fp8 states", 0.01, 1, {**REPLAY, "mamba_ssm_dtype": "fp8"}),
)
EXACT: dict[str, dict[str, Any]] = {
    "drafts (ngram)": {"speculative": SpeculativeConfig("ngram", num_draft_tokens=3)},
    "drafts (draft)": {"speculative": SpeculativeConfig("draft", num_draft_tokens=3, draft_model="embedded_draft")},
    "prefix cache": {"prefix_cache": True},
}


def engine(**options: Any) -> LLM:
    usual = {"device": "cpu", "max_model_len": 1152, "max_running_requests": 8, "prefix_cache": False}
    return LLM("embedded", **{**usual, **options})


def held_out(llm: LLM, source: Path) -> list[int]:
    assert llm.tokenizer is not None, "the built-in model has one"
    texts = read_sources(source, FILES)[1]
    return list(chain.from_iterable(map(llm.tokenizer.encode, texts)))[:TOKENS]


def tasks_right(llm: LLM) -> int:
    """Tasks whose right continuation is likelier than the wrong one, by the mean over its tokens."""
    assert llm.tokenizer is not None, "the built-in model has one"
    encode = llm.tokenizer.encode
    right = 0
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for line in TASKS.read_text().splitlines():
        task = json.loads(line)
        start = len(encode(task["prompt"]))
        texts = [encode(task["prompt"] + task[name]) for name in ("right", "wrong")]
        scores = [
            _mean_score(output.prompt_logprobs or [], tokens, start - 1)
            for tokens, output in zip(texts, llm.generate(texts, params))
        ]
        right += scores[0] > scores[1]
    return right


def _mean_score(entries: Sequence[dict[int, float] | None], tokens: Sequence[int], start: int) -> float:
    own = [entry[token] for entry, token in list(zip(entries, tokens))[start:] if entry is not None]
    return sum(own) / len(own)


def greedy(options: dict[str, Any]) -> list[list[int]]:
    """Two turns, the second of which begins with the first."""
    params = SamplingParams(max_tokens=GREEDY, temperature=0.0, ignore_eos=True)
    with engine(**options) as llm:
        assert llm.tokenizer is not None, "the built-in model has one"
        prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
        first = [output.token_ids for output in llm.generate(prompts, params)]
        again = llm.generate([[*p, *tokens, 12, 13] for p, tokens in zip(prompts, first)], params)
        return first + [output.token_ids for output in again]


def measure(
    source: Path, progress: Callable[[str], None] = lambda name: None, rows: Sequence[Row] = ROWS
) -> dict[str, dict[str, Any]]:
    """Figures by row, of `rows` and of EXACT."""
    found: dict[str, dict[str, Any]] = {}
    tokens: list[int] = []
    for row in rows:
        progress(row.name)
        with engine(**row.options) as llm:
            tokens = tokens or held_out(llm, source)
            found[row.name] = {"perplexity": perplexity(llm, tokens), "right": tasks_right(llm)}
    plain = greedy({})
    for name, options in EXACT.items():
        progress(name)
        found[name] = {"equal": sum(a == b for a, b in zip(plain, greedy(options), strict=True)), "of": len(plain)}
    return found


def regressions(found: dict[str, dict[str, Any]]) -> list[str]:
    """What is beyond its limit, of the rows that were measured."""
    plain, wrong = found[ROWS[0].name], []
    if not BOUNDS[0] < plain["perplexity"] < BOUNDS[1]:
        wrong.append(f"plain: perplexity {plain['perplexity']:.3f} is not within {BOUNDS}")
    for row in (row for row in ROWS[1:] if row.name in found):
        change = found[row.name]["perplexity"] / plain["perplexity"] - 1
        if change > row.limit:
            wrong.append(f"{row.name}: perplexity {change:+.3%}, at most {row.limit:+.3%}")
        if found[row.name]["right"] < plain["right"] - row.lost:
            wrong.append(f"{row.name}: {found[row.name]['right']} tasks right, plain {plain['right']}")
    wrong += [f"{name}: {found[name]['equal']} of {found[name]['of']} answers equal" for name in EXACT
              if found[name]["equal"] != found[name]["of"]]  # fmt: skip
    return wrong


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    plain = found[ROWS[0].name]["perplexity"]
    lines = ["| option | perplexity | relative | limit | tasks right |", "|---|---|---|---|---|"]
    for row in ROWS:
        numbers = found[row.name]
        change = f"{numbers['perplexity'] / plain - 1:+.3%}"
        lines.append(f"| {row.name} | {numbers['perplexity']:.4f} | {change} | {row.limit:+.3%} | {numbers['right']} |")
    lines += ["", "| option | greedy answers that are equal |", "|---|---|"]
    lines += [f"| {name} | {found[name]['equal']} of {found[name]['of']} |" for name in EXACT]
    return "\n".join(lines)


def main() -> None:
    """Prints the table. Exits with 1 if a row is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_path("stdlib")), help="(%(default)s)")
    found = measure(parser.parse_args().source, progress=lambda name: print(name, flush=True))
    print(table(found))
    if wrong := regressions(found):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
