"""What a history branch costs: swa_ssm in its four modes, decode steps and prefill, in one run.

    python -m benchmarks.bench_history                                                             # CPU or GPU
    python -m benchmarks.bench_history --hidden 1024 --layers 4 --batches 1,8 --prefill 1x2048     # smaller

"disabled" is attention over the window alone; "prefix_sum" adds running sums; "enabled" adds the Mamba-1 branch;
"benchmark" computes that and adds zeros. Weights are random. A decode step is timed as in bench_offline.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_offline import decode_ms, prefill_tokens_per_s
from benchmarks.common import environment, save
from hybridrt import LLM, SamplingParams
from hybridrt.models.hybrid_attention import HISTORY_MODES
from hybridrt.models.swa_ssm import SwaSsmConfig


def model_config(args: argparse.Namespace, mode: str) -> SwaSsmConfig:
    heads = max(args.hidden // 128, 2)
    return SwaSsmConfig(
        vocab_size=32000, hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1), intermediate_size=3 * args.hidden, sliding_window=args.window,
        history_mode=mode, max_position_embeddings=65536,
    )  # fmt: skip


def measure(args: argparse.Namespace, mode: str, path: Path) -> list[dict[str, Any]]:
    """A row for every batch size and prefill shape."""
    model_config(args, mode).save(path, dtype="bfloat16")
    rows: list[dict[str, Any]] = []
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    most = max(args.batches)
    config = {"load_format": "dummy", "max_running_requests": most, "max_model_len": 8192, "prefix_cache": False}
    with LLM(str(path), device=args.device, **config) as llm:
        for batch in args.batches:
            decode_ms(llm, batch, args.context, params)  # compiles
            times = [decode_ms(llm, batch, args.context, params) for _ in range(args.repeats)]
            rows.append({"mode": mode, "what": f"decode, batch {batch}", "ms": statistics.median(times)})
        for count, length in args.prefill:
            prefill_tokens_per_s(llm, count, length)
            rates = [prefill_tokens_per_s(llm, count, length) for _ in range(args.repeats)]
            ms = count * length / statistics.median(rates) * 1e3
            rows.append({"mode": mode, "what": f"prefill, {count} x {length}", "ms": ms})
        pages = sum(group.demand.least(8192) for group in llm.plan.groups)
        rows.append({"mode": mode, "what": "KV pages of a request of 8192 tokens", "pages": pages})
    return rows


def _shape(text: str) -> tuple[int, int]:
    count, length = text.split("x")
    return int(count), int(length)


def parse_args() -> argparse.Namespace:
    """The command line."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda" if cuda else "cpu", help="(%(default)s)")
    add("--hidden", type=int, default=2048 if cuda else 256, help="(%(default)s)")
    add("--layers", type=int, default=8 if cuda else 4, help="(%(default)s)")
    add("--window", type=int, default=1024 if cuda else 128, help="(%(default)s)")
    add("--context", type=int, default=2048 if cuda else 512, help="tokens around which decode steps are timed")
    add("--batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 32, 128] if cuda else [1, 8])
    add("--prefill", type=lambda t: [_shape(p) for p in t.split(",")], default=[(1, 8000)] if cuda else [(1, 1024)])
    add("--repeats", type=int, default=3, help="median of so many (%(default)s)")
    add("--name", default=None, help="of the result file; history-cuda or history-cpu")
    return parser.parse_args()


def main() -> None:
    """Prints a line a measurement; writes benchmarks/results/<name>.json."""
    args, rows = parse_args(), list[dict[str, Any]]()
    print(environment())
    for mode in HISTORY_MODES:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(args, mode, Path(folder))
        for row in rows[-len(args.batches) - len(args.prefill) - 1 :]:
            value = f"{row['ms']:9.3f} ms" if "ms" in row else f"{row['pages']:9d}"
            print(f"{row['mode']:12s} {row['what']:40s} {value}", flush=True)
    shape = {k: v for k, v in vars(args).items() if k in ("hidden", "layers", "window", "context", "repeats")}
    print(save(args.name or f"history-{torch.device(args.device).type}", {"shape": shape, "measured": rows}))


if __name__ == "__main__":
    main()
