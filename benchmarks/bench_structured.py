"""What structured outputs cost: a batch without a grammar, with a JSON schema in each row, and in half of the rows.

    python -m benchmarks.bench_structured --model tiiuae/Falcon-H1-7B-Base --name structured

The three cases take turns in one process, and each figure is the median of its turns. Every row writes exactly so many
tokens: the schema is a list without an end. `masks_in_time` is the share of steps whose masks were on their way before
the forward pass had ended: an event behind the forward pass must not have come when the sampling is launched.
`sampling_ms` is the host's median time from the end of the step before, or from the launch of the forward pass if that
was later, until the sampling is launched: it fills the masks and copies them (on a CPU it also samples).
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.common import environment, save, settle
from hybridrt import LLM, SamplingParams, StructuredOutputs

WORD = {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"}
ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "name": WORD,
        "kind": {"enum": ["person", "place", "thing"]},
        "tags": {"type": "array", "items": WORD, "maxItems": 4},
        "note": {"type": "string"},
    },
    "required": ["id", "name", "kind", "tags", "note"],
    "additionalProperties": False,
}
FORM = StructuredOutputs(json={"type": "array", "items": ITEM, "minItems": 10_000})
CASES = {"none": 0.0, "half": 0.5, "all": 1.0}  # share of rows with the schema


@dataclass(frozen=True)
class Row:
    """A case: `ratio` is its tokens/s over those of the case without a grammar."""

    case: str
    batch: int
    tokens_per_s: float
    ratio: float
    masks_in_time: float | None
    sampling_ms: float | None


class Masks:
    """Notes of each constrained step whether its forward pass still ran when its masks were given."""

    def __init__(self, llm: LLM) -> None:
        self.in_time, self.seconds = list[bool](), list[float]()
        self._executor: Any = llm.engine.executor
        self._engine: Any = llm.engine
        self._cuda = llm.device.type == "cuda"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it is open, launches are followed by an event."""
        launch, sample, consume = self._executor.launch, self._executor.sample, self._engine._consume
        event, began = None, time.perf_counter()

        def launched(plan: Any) -> Any:
            nonlocal event, began
            handle, began = launch(plan), time.perf_counter()
            if plan.constrained and self._cuda:
                event = torch.cuda.Event()
                event.record()
            return handle

        def consumed() -> None:
            nonlocal began
            consume()
            began = time.perf_counter()

        def sampled(masks: Any) -> None:
            sample(masks)
            self.seconds.append(time.perf_counter() - began)
            if event is not None:
                self.in_time.append(not event.query())

        self._executor.launch, self._executor.sample, self._engine._consume = launched, sampled, consumed
        try:
            yield
        finally:
            del self._executor.launch, self._executor.sample, self._engine._consume


def seconds_of(llm: LLM, batch: int, share: float, prompt: int, output: int) -> float:
    """Decode time of a batch: the difference between two lengths of output."""
    prompts = [[(7 * i + j) % 1000 + 5 for j in range(prompt)] for i in range(batch)]
    took = []
    for tokens in (output // 8, output):
        free = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.8, seed=1)
        bound = replace(free, ignore_eos=False, structured_outputs=FORM)
        params = [bound if i < share * batch else free for i in range(batch)]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        took.append(time.perf_counter() - began)
        assert all(len(o.token_ids) == tokens for o in outputs), "every row writes as many tokens"
    return took[1] - took[0]


def measure(llm: LLM, batch: int, prompt: int, output: int, turns: int) -> list[Row]:
    masks = {case: Masks(llm) for case in CASES}
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for turn in range(turns + 1):  # the first one warms up
        for case, share in CASES.items():
            with masks[case].watched():
                took = seconds_of(llm, batch, share, prompt, output)
            if turn:
                times[case].append(took)
            else:
                masks[case] = Masks(llm)
    tokens = batch * (output - output // 8)
    rate = {case: tokens / statistics.median(took) for case, took in times.items()}
    rows = []
    for case, noted in masks.items():
        in_time = sum(noted.in_time) / len(noted.in_time) if noted.in_time else None
        ms = 1e3 * statistics.median(noted.seconds) if noted.seconds else None
        rows.append(Row(case, batch, rate[case], rate[case] / rate["none"], in_time, ms))
        print(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batches", type=lambda t: [int(n) for n in t.split(",")], default=[32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    args = parser.parse_args()
    print(environment())
    options = {"max_model_len": args.prompt + args.output + 8, "max_running_requests": max(args.batches)}
    rows = []
    with LLM(args.model, device=args.device, load_format=args.load_format, prefix_cache=False, **options) as llm:
        settle()
        for batch in args.batches:
            rows += measure(llm, batch, args.prompt, args.output, args.turns)
    if args.name:
        print(save(args.name, [asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
