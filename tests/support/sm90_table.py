"""Prints a table of what every kernel needs on GPUs that we did not run on, for docs/start.md.

    python -m tests.support.sm90_table [GPU ...]

Compiles some 400 kernels for each GPU, in minutes of one core.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hybridrt.base.device import KNOWN, GPUFacts
from hybridrt.base.tried import COMPILED
from tests.support.sm90_process import Compiler

TABLES = ("others", "latent", "absorbed", "codes", "mamba2", "mamba1", "skinny_linear", "quant", "fp8", "states")
HEAD = ("GPU", "capability", "compiled", "do not compile", "most shared memory, of", "spill registers, most bytes")


def main(names: Sequence[str]) -> None:
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            compiler = Compiler(Path(folder, "errors"), name)
            try:
                usages = [usage for table in TABLES for usage in compiler(table)]
            finally:
                compiler.close()
        print(f"| {' | '.join(row(KNOWN[name], usages))} |", flush=True)


def row(gpu: GPUFacts, usages: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Cells of a GPU. Kernels are counted once for each case."""
    found, spills, failed = list(usages), Counter[str](), Counter[str]()
    for usage in found:
        if "error" in usage:
            failed[usage["kernel"]] += 1
        elif usage["stack"]:
            spills[usage["kernel"]] = max(spills[usage["kernel"]], usage["stack"])
    most = max(usage.get("shared", 0) for usage in found)
    capability = "sm_" + "".join(map(str, gpu.capability))
    return (
        gpu.name.removeprefix("NVIDIA "), capability, str(len(found) - failed.total()), _listed(failed, "0"),
        f"{most:,} of {gpu.shared_memory:,}", _listed(spills, "none"),
    )  # fmt: skip


def _listed(counts: Counter[str], none: str) -> str:
    return ", ".join(f"`{name}` {count}" for name, count in counts.most_common()) or none


if __name__ == "__main__":
    main(sys.argv[1:] or [name for name, gpu in KNOWN.items() if gpu.capability in COMPILED])
