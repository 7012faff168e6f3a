"""What drafters bring to the built-in model on code text: how many drafts stay, and tokens a second.

    python -m benchmarks.bench_drafters --batches 1,16

Prompts are the beginnings of this repository's own source files; greedy, so that all runs print the same tokens.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.common import environment, save
from hybridrt import LLM, SamplingParams, SpeculativeConfig

ROOT = Path(__file__).parents[1]
METHODS = ("none", "ngram", "draft")
COUNTERS = ("proposed", "accepted", "target_steps", "verify_steps")


def code_prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """The first `length` tokens of `count` source files."""
    files = sorted(file for folder in ("hybridrt", "models", "mem_cache") for file in (ROOT / folder).rglob("*.py"))
    assert llm.tokenizer is not None
    texts = (llm.tokenizer.encode(file.read_text()[: 8 * length]) for file in files)
    return [tokens[:length] for tokens in texts if len(tokens) >= length][:count]


def measure(method: str, drafts: int, batches: list[int], prompt: int, output: int, **config: Any) -> list[Any]:
    speculative = None
    if method != "none":
        draft_model = "embedded_draft" if method == "draft" else None
        speculative = SpeculativeConfig(method, num_draft_tokens=drafts, draft_model=draft_model)
    rows, length = max(batches), prompt + output
    config = {"max_running_requests": rows, "max_model_len": length, "prefix_cache": False, **config}
    llm = LLM("embedded", speculative=speculative, **config)
    params, found = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True), []
    for batch in batches:
        prompts = code_prompts(llm, batch, prompt)
        llm.generate(prompts, params)  # kernels compile
        before, start = llm.engine.counters(), time.perf_counter()
        llm.generate(prompts, params)
        seconds, after = time.perf_counter() - start, llm.engine.counters()
        gain = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
        found.append({
            "method": method, "drafts": drafts if speculative else 0, "batch": len(prompts),
            "tok/s": len(prompts) * output / seconds, **gain,
            "tokens a step": len(prompts) * output / gain["target_steps"],
        })  # fmt: skip
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=lambda t: [int(x) for x in t.split(",")], default=[1, 16])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=384, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--methods", type=lambda t: t.split(","), default=list(METHODS))
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    args = parser.parse_args()
    print(environment())
    rows = []
    for method in args.methods:
        rows += measure(method, args.drafts, args.batches, args.prompt, args.output, device=args.device)
    if args.name:
        print(save(args.name, rows))


if __name__ == "__main__":
    main()
