"""What structured outputs cost: batches with a JSON schema in each row, in half of the rows and in none, and an engine
without the code for them.

    python -m benchmarks.bench_structured --model tiiuae/Falcon-H1-7B-Base --name structured

The cases take turns in one process, each turn in another order, and each figure is the median of its turns. Every row
writes exactly so many tokens: the schema is a list without an end. In the case "removed" no row has a schema and the
engine's hook for them is taken out: what is left is the few comparisons of a step that a build without structured
outputs would not make. At the end the three figures are printed next to their targets.

`masks_in_time` is the share of steps whose masks were on their way before the forward pass had ended: an event after
the forward pass must not have come when the sampling is launched; a CPU has none. `sampling_ms` is the host's time
(median, 99th percentile, maximum) from the end of the step before, or from the launch of the forward pass if that was
later, until the sampling is launched: it fills the masks and copies them (on a CPU it also samples).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
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
CASES = {"removed": 0.0, "none": 0.0, "half": 0.5, "all": 1.0}  # share of rows with the schema
MOST_LOSS, MOST_LOSS_WITHOUT, IN_TIME = 0.03, 0.02, 0.99  # targets


@dataclass(frozen=True)
class Row:
    """A case: `ratio` is its tokens/s over those of the case "none"; `in_turns` are tokens/s of each turn."""

    case: str
    batch: int
    tokens_per_s: float
    ratio: float
    in_turns: list[float]
    masks_in_time: float | None
    sampling_ms: list[float] | None


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
        launch, consume = self._executor.launch, self._engine._consume
        event, began = None, time.perf_counter()

        def launched(plan: Any) -> Any:
            nonlocal event, began
            handle, began = launch(plan), time.perf_counter()
            if plan.constrained and self._cuda:
                event = torch.cuda.Event()
                event.record()
            if plan.constrained:
                handle.sample = partial(sampled, handle.sample)
            return handle

        def consumed(*failure: Any) -> None:
            nonlocal began
            consume(*failure)
            began = time.perf_counter()

        def sampled(sample: Callable[[Any], None], masks: Any) -> None:
            sample(masks)
            self.seconds.append(time.perf_counter() - began)
            if event is not None:
                self.in_time.append(not event.query())

        self._executor.launch, self._engine._consume = launched, consumed
        try:
            yield
        finally:
            del self._executor.launch, self._engine._consume


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


@contextmanager
def removed(llm: LLM) -> Iterator[None]:
    """While it is open, the engine does not look for steps that wait for masks."""
    engine: Any = llm.engine
    engine._sample_last = lambda: None
    try:
        yield
    finally:
        del engine._sample_last


def measure(llm: LLM, batch: int, prompt: int, output: int, turns: int) -> list[Row]:
    masks = {case: Masks(llm) for case in CASES}
    times: dict[str, list[float]] = {case: [] for case in CASES}
    names = list(CASES)
    for turn in range(turns + 1):  # the first one warms up
        for case in names[turn % len(names) :] + names[: turn % len(names)]:
            with masks[case].watched(), removed(llm) if case == "removed" else nullcontext():
                took = seconds_of(llm, batch, CASES[case], prompt, output)
            if turn:
                times[case].append(took)
            else:
                masks[case] = Masks(llm)
    tokens = batch * (output - output // 8)
    rates = {case: [tokens / seconds for seconds in took] for case, took in times.items()}
    rate = {case: statistics.median(found) for case, found in rates.items()}
    rows = []
    for case, noted in masks.items():
        in_time = sum(noted.in_time) / len(noted.in_time) if noted.in_time else None
        ms = [round(1e3 * float(x), 3) for x in np.percentile(noted.seconds, (50, 99, 100))] if noted.seconds else None
        rows.append(Row(case, batch, rate[case], rate[case] / rate["none"], rates[case], in_time, ms))
        print(rows[-1])
    return rows


def verdicts(rows: list[Row]) -> list[str]:
    """The figures of one batch next to their targets, a line each."""
    found = {row.case: row for row in rows}
    every, without, in_time = found["all"].ratio, 1 / found["removed"].ratio, found["all"].masks_in_time
    lines = [
        _verdict("tokens/s with a schema in every row, over those without one", every, 1 - MOST_LOSS),
        _verdict("tokens/s without a schema, over those of an engine without the code", without, 1 - MOST_LOSS_WITHOUT),
    ]
    what = "steps whose masks were there before the forward pass had ended"
    return [*lines, f"{what}: a CPU cannot say" if in_time is None else _verdict(what, in_time, IN_TIME)]


def _verdict(what: str, value: float, least: float) -> str:
    return f"{what}: {value:.2%} (at least {least:.0%}: {'met' if value >= least else 'NOT MET'})"


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
            measured = measure(llm, batch, args.prompt, args.output, args.turns)
            print(f"batch {batch}:", *verdicts(measured), sep="\n  ")
            rows += measured
    if args.name:
        print(save(args.name, [asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
