"""How many greedy texts change where the same sums are added in another order: with the prefix cache, in a batch, with
drafts. In float32 none should; in bfloat16 two likely tokens may change places.

python -m benchmarks.text_changes [MODEL] --dtype bfloat16
"""

import argparse
from typing import Any

from hybridrt import LLM, SamplingParams, SpeculativeConfig

HEADS = ("def read_lines(path):", "import os\n\n\nclass Stack:", "class Queue(object):\n    def", "# Sorts a list\n")
ENDS = ("", "\n    return", "\n    for line in", "\n    with open(", '\n    """', " pass\n\n\ndef main(")
PROMPTS = [head + end for head in HEADS for end in ENDS]


PARAMS = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)


def texts(model: str, batch: int, **options: Any) -> list[list[int]]:
    """The tokens of each answer, `batch` prompts at a time."""
    with LLM(model, max_model_len=512, max_running_requests=max(batch, 2), **options) as llm:
        outputs = [o for i in range(0, len(PROMPTS), batch) for o in llm.generate(PROMPTS[i : i + batch], PARAMS)]
    return [output.token_ids for output in outputs]


def second_turns(model: str, firsts: list[list[int]], **options: Any) -> list[list[int]]:
    """The answers to a prompt, its answer and a line more: with the cache they begin where the first answer ended."""
    found = []
    with LLM(model, max_model_len=512, max_running_requests=2, **options) as llm:
        assert llm.tokenizer is not None, "prompts are text"
        for prompt, first in zip(PROMPTS, firsts, strict=True):
            llm.generate(prompt, PARAMS)
            turn = [*llm.tokenizer.encode(prompt), *first, *llm.tokenizer.encode_bare("\n\n\ndef next(")]
            found.append(llm.generate([turn], PARAMS)[0].token_ids)
    return found


def changed(model: str, **options: Any) -> dict[str, int]:
    """By what is compared with each text alone, without cache and drafts: how many texts differ."""
    plain = {**options, "prefix_cache": False}
    want = texts(model, 1, **plain)
    pairs = {
        "prefix cache, second turns": (
            second_turns(model, want, **plain), second_turns(model, want, **options, prefix_cache=True)
        ),
        f"batches of {len(PROMPTS)}": (want, texts(model, len(PROMPTS), **plain)),
        "drafts (prompt lookup)": (want, texts(model, 1, speculative=SpeculativeConfig("ngram"), **plain)),
    }  # fmt: skip
    return {name: sum(a != b for a, b in zip(*both, strict=True)) for name, both in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    for name, count in changed(args.model, dtype=args.dtype, device=args.device).items():
        print(f"{name}: {count} of {len(PROMPTS)} texts change")


if __name__ == "__main__":
    main()
