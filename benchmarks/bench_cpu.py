"""hybridrt compared with transformers' generate on a CPU, float32, the same weights, in one run.

    python -m benchmarks.bench_cpu

Prefill is the time of one generated token for 8 prompts of 512 tokens; a decode step is the slope between two
generation lengths. The two sides take turns, and each figure is the median of its turns. All cores serve both. With
`--threads 1` it is the CPU time of the process, and the smallest of the turns: other work on the machine then changes
the ratios least. The share of matrix products is that of a profiled prefill.

The targets are set against transformers 5.23. Versions before 5.18 sum broadcast products in their chunked scan, which
takes eight times as long for a prompt.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import save
from hybridrt import LLM, SamplingParams
from hybridrt.runtime.load.model_path import resolve_model_path

SHAPE = Path(__file__).parent / "configs" / "falcon-h1-0.5b"
PREFILL = (8, 512)
DECODE_PROMPT = 32
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mkldnn_linear")
Prompts = list[list[int]]


@dataclass(frozen=True)
class Row:
    """What one measurement took in milliseconds, and how many times faster hybridrt is than it should be at least."""

    what: str
    hybridrt_ms: float
    transformers_ms: float
    target: float

    @property
    def ratio(self) -> float:
        return self.transformers_ms / self.hybridrt_ms


class Hybridrt:
    """Greedy generation of exactly so many tokens."""

    def __init__(self, path: Path) -> None:
        self.llm = LLM(
            str(path),
            device="cpu",
            dtype="float32",
            max_model_len=1024,
            max_running_requests=PREFILL[0],
            prefix_cache=False,
        )

    def __call__(self, prompts: Prompts, tokens: int) -> Prompts:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return [output.token_ids for output in self.llm.generate(prompts, params)]


class Transformers:
    """The same with AutoModelForCausalLM; prompts of a batch are equally long."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.generation_config = GenerationConfig(pad_token_id=0)  # no end of sequence

    @torch.inference_mode()
    def __call__(self, prompts: Prompts, tokens: int) -> Prompts:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        generated: Prompts = out[:, ids.shape[1] :].tolist()
        return generated


def write_shape(layers: int, path: Path) -> None:
    """A checkpoint of the 0.5B shape with `layers` layers and transformers' own random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(SHAPE)
    config.num_hidden_layers, config.dtype = layers, "float32"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)


def prompts(batch: int, length: int, vocab: int) -> Prompts:
    generator = torch.Generator().manual_seed(batch * length)
    rows: Prompts = torch.randint(3, vocab, (batch, length), generator=generator).tolist()
    return rows


def seconds(run: Callable[[], Any]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def share_of_products(run: Callable[[], Any]) -> float:
    """Matrix products of linear layers and scans, of all time in operations."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    return sum(times.get(f"aten::{name}", 0.0) for name in PRODUCTS) / sum(times.values())


def measure(what: str, sides: tuple[Any, Any], one: Callable[[Any], float], repeats: int, target: float) -> Row:
    """Takes turns; `one` measures a side once, in seconds."""
    times = [[one(side) for side in sides] for _ in range(repeats)]
    typical = min if torch.get_num_threads() == 1 else statistics.median
    ours, theirs = (typical(column) * 1e3 for column in zip(*times, strict=True))
    row = Row(what, ours, theirs, target)
    verdict = "ok" if row.ratio >= target else "MISSED"
    print(f"{what:38} {ours:10.2f} {theirs:13.2f} {row.ratio:7.2f}x {target:6.1f}x  {verdict}", flush=True)
    return row


def decode_step(batch: Prompts, lengths: tuple[int, int]) -> Callable[[Any], float]:
    """Seconds a step, as the slope between two generation lengths."""
    short, long = lengths

    def one(side: Any) -> float:
        elapsed = [seconds(lambda n=n: side(batch, n)) for n in (short, long)]  # type: ignore[misc]
        return (elapsed[1] - elapsed[0]) / (long - short)

    return one


def bench_shape(layers: int, repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        write_shape(layers, Path(directory))
        sides = Hybridrt(Path(directory)), Transformers(Path(directory))
    vocab = sides[0].llm.model_config.vocab_size
    warm_up(sides, vocab)
    batch = prompts(*PREFILL, vocab)
    rows = [measure("prefill of 8 x 512 tokens", sides, lambda s: seconds(lambda: s(batch, 1)), repeats, 2.0)]
    print(f"share of matrix products: {share_of_products(lambda: sides[0](batch, 1)):.0%} (target 70%)", flush=True)
    for size, target in ((1, 1.0), (8, 1.2)):
        one = decode_step(prompts(size, DECODE_PROMPT, vocab), (4, 36))
        rows.append(measure(f"decode step, batch {size}", sides, one, repeats, target))
    return rows


def bench_embedded(path: Path, repeats: int) -> list[Row]:
    sides = Hybridrt(path), Transformers(path)
    vocab = sides[0].llm.model_config.vocab_size
    warm_up(sides, vocab)
    one = decode_step(prompts(1, DECODE_PROMPT, vocab), (16, 144))
    return [measure("decode step of the embedded model", sides, one, repeats, 2.0)]


def warm_up(sides: tuple[Hybridrt, Transformers], vocab: int) -> None:
    """Runs both once, and says whether they agree."""
    batch = prompts(2, 16, vocab)
    ours, theirs = (side(batch, 8) for side in sides)
    same = sum(a == b for o, t in zip(ours, theirs, strict=True) for a, b in zip(o, t, strict=True))
    print(f"tokens that agree: {same} of 16", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="layers of the 0.5B shape (default 8)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each decode measurement (default 3)")
    parser.add_argument("--embedded", default="embedded", help="checkpoint measured as the embedded model")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of both sides (default all cores)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    versions = f"torch {torch.__version__}, transformers {version('transformers')}"
    print(f"{arguments.threads} threads, {versions}, float32")
    print(f"{'milliseconds':38} {'hybridrt':>10} {'transformers':>13} {'ratio':>8} {'target':>7}")
    rows = bench_embedded(resolve_model_path(arguments.embedded), arguments.repeats)
    rows += bench_shape(arguments.layers, arguments.repeats)
    print(save("bench_cpu", [{**asdict(row), "ratio": row.ratio} for row in rows]))


if __name__ == "__main__":
    main()
