"""Decode steps and prompts of quantised models as ratios to bfloat16, all on one GPU in one call.

    python -m benchmarks.quant_ratios --seconds 200

Each line is a run of `bench_offline` in a process of its own: random weights, states in bfloat16 unless the line says
otherwise, about 1,024 tokens of context. The first line of a model is in bfloat16, and the others are divided by it.
Lines that would begin after `--seconds` are left out, and named.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.common import environment

CONFIGS = Path(__file__).parent / "configs"
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
}  # fmt: skip
CODES = ("--state-dtype", "int8", "--kv-cache-dtype", "fp8_e4m3")
PROMPT = ("--prefill", "1x8192")
MEASURED = re.compile(r"(decode batch|prefill) (\S+) +([\d.]+) (ms|tok/s)")


class Line(NamedTuple):
    """`quant`: the quantization_config; None for bfloat16. `aims`: ratios of milliseconds, by rows."""

    model: str
    name: str
    quant: dict[str, Any] | None
    rows: tuple[int, ...]
    options: tuple[str, ...] = ()
    aims: Mapping[str, float] = MappingProxyType({})


LINES = (
    Line("falcon-h1-7b", "bfloat16", None, (1, 32, 128, 256), PROMPT),
    Line("falcon-h1-7b", "fp8, int8 states, e4m3 KV", FP8, (1, 32, 128, 256), CODES,
         {"1": 0.61, "32": 0.60, "128": 0.58, "256": 0.55}),
    Line("falcon-h1-7b", "fp8", FP8, (1, 32, 128, 256), PROMPT,
         {"1": 0.61, "32": 0.67, "128": 0.82, "256": 0.85, "1x8192": 1.45}),
    Line("falcon-h1-7b", "int4", INT4, (1, 32, 128, 256), PROMPT, {"1": 0.44}),
    Line("qwen3.5-9b-like", "bfloat16, float32 states", None, (1, 32, 128), ("--state-dtype", "float32")),
    Line("qwen3.5-9b-like", "fp8, float32 states", FP8, (1, 32, 128), ("--state-dtype", "float32"),
         {"1": 0.61, "32": 0.64, "128": 0.69}),
)  # fmt: skip


def checkpoint(line: Line, folder: Path) -> Path:
    """A directory with config.json alone."""
    fields = json.loads((CONFIGS / line.model / "config.json").read_text())
    if line.quant is not None:
        fields["quantization_config"] = line.quant
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def measured(output: str) -> dict[str, float]:
    """Milliseconds by rows, and tokens a second by shape of the prompts."""
    return {found[2]: float(found[3]) for found in MEASURED.finditer(output)}


def ratios(found: dict[str, float], base: dict[str, float], aims: Mapping[str, float]) -> list[str]:
    """A text for each figure: the ratio to bfloat16, of times or of rates, next to its aim."""
    texts = list[str]()
    for what, value in found.items():
        ratio = f" = {value / base[what]:.3f}" if base.get(what) else ""
        aim = f" (aim {aims[what]})" if what in aims else ""
        texts.append(f"{what}: {value:g}{ratio}{aim}")
    return texts


def run(line: Line, folder: Path, repeats: int) -> dict[str, float]:
    """CalledProcessError if the benchmark fails."""
    command = [
        sys.executable, "-m", "benchmarks.bench_offline", str(checkpoint(line, folder)), "--repeats", str(repeats),
        "--batches", ",".join(map(str, line.rows)), *line.options,
    ]  # fmt: skip
    return measured(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200.0, help="after which no line begins")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", default="", help="lines whose model and name contain it; their bfloat16 runs too")
    args = parser.parse_args(arguments)
    print(environment(), flush=True)
    start, bases = time.monotonic(), dict[str, dict[str, float]]()
    wanted = {line.model for line in LINES if args.only in f"{line.model} {line.name}"}
    with tempfile.TemporaryDirectory() as folder:
        for index, line in enumerate(LINES):
            title = f"{line.model} {line.name}"
            if line.model not in wanted or (line.quant is not None and args.only not in title):
                continue
            if time.monotonic() - start > args.seconds:
                print(f"{title}: left out after {args.seconds:g} s", flush=True)
                continue
            found = run(line, Path(folder) / str(index), args.repeats)
            base = bases.setdefault(line.model, found)
            print(f"{title}\n    " + "\n    ".join(ratios(found, base, line.aims)), flush=True)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
