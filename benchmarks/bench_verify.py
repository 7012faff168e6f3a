"""Verify steps of speculative decoding against plain decode steps, on the device.

    python -m benchmarks.bench_verify benchmarks/configs/falcon-h1-7b --drafts 2,4,7 --batches 1,32,128

Weights are seeded random numbers, and so are drafts; a script says how many stay: each with probability --acceptance
while those before it did. A step is the replay of a graph, acceptance and commit, and nothing waits for the device
between steps. The plain step is one of a runner without speculation, in the state mode that it picks by itself.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import environment, save
from benchmarks.profile_step import kernel_table
from hybridrt import EngineConfig, SpeculativeConfig
from hybridrt.base.dtypes import DTYPES
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.sampling.acceptance import accept_chain
from hybridrt.kernels.sampling.sampling import greedy
from hybridrt.mem_cache.pools.memory_plan import GIB, MemoryPlan
from hybridrt.models.base import CausalLM
from hybridrt.recurrent.backends import create_backend
from hybridrt.runtime.load.build_model import build_model
from hybridrt.runtime.load.kept_state import pool_spec
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.load.runtime import build_pools
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.step.plan import DecodeRows, int32s

WARM, STEPS = 4, 30  # a ring of 16 folds about every fifteenth step


class Rig:
    """Graphs of `sizes` rows over pools of their own. Row r has state slot r and an equal share of the KV pages."""

    def __init__(
        self, config: EngineConfig, target: RunTarget, model: CausalLM, plan: MemoryPlan, sizes: Sequence[int]
    ):
        pools, self.tokens, self.device = build_pools(config, target, plan), config.num_verify_tokens, target.device
        table = pools.req_to_token
        self.backend = create_backend(
            config, target.model_config, layers=model.mixers(), kv_pool=pools.kv, req_to_token_pool=table,
            composite=model.composite,
        )  # fmt: skip
        rows = torch.arange(1, plan.num_rows + 1, device=self.device)
        share = min([group.num_pages for group in plan.groups], default=0) // plan.num_rows
        pages = torch.arange(plan.num_rows * share, device=self.device)
        sets = (pages + 1)[:, None].repeat(1, table.num_groups)  # the same numbers in each page group
        table.admit_rows(rows, rows)
        table.write_pages(rows.repeat_interleave(share), pages % share, sets)
        # Each row has a token of its own: rows with the same one would pick the same experts.
        own = torch.arange(plan.num_rows + 1, dtype=torch.int32, device=self.device)
        self.graphs = GraphRunner(
            model=model, backend=self.backend, req_to_token_pool=table, last_tokens=own, max_bs=max(sizes),
            tokens_per_row=self.tokens,
        )  # fmt: skip
        self.graphs.capture(sizes=sizes)

    @torch.inference_mode()
    def step(self, computed: list[int], kept: list[int]) -> list[int]:
        """Launches a step of rows that have `computed` tokens and keep `kept` inputs each; how many they have then."""
        n, drafts = len(computed), self.tokens - 1
        logits = self.graphs.replay(
            DecodeRows(
                int32s(range(1, n + 1)), int32s(computed), int32s([0] * n), int32s([drafts] * n),
                int32s(5 + i % 100 for i in range(n * drafts)),
            )
        )  # fmt: skip
        drawn, buffers = greedy(logits), self.graphs.buffers.arrays
        if drafts:
            assert buffers.drafts is not None
            drafted = buffers.drafts.tokens[:n], buffers.drafts.counts[:n]
            accept_chain(drawn.view(n, -1), *drafted, buffers.rows[:n], self.graphs.last_tokens)
            counts = torch.tensor(kept, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            self.backend.commit(self.graphs.prepared, counts.to(self.device, non_blocking=True))
        return [c + k for c, k in zip(computed, kept)]


def script(steps: int, rows: int, drafts: int, acceptance: float) -> list[list[int]]:
    """Inputs that each row keeps in each step: the root, and drafts up to the first that fails."""
    draw = random.Random(steps * rows + drafts).random

    def kept() -> int:
        good = 0
        while good < drafts and draw() < acceptance:
            good += 1
        return 1 + good

    return [[kept() for _ in range(rows)] for _ in range(steps)]


def step_ms(rig: Rig, batch: int, context: int, acceptance: float) -> tuple[float, float]:
    """Milliseconds of a step of `batch` rows around `context` tokens, and the tokens that a row gains in it."""
    plan = script(WARM + STEPS, batch, rig.tokens - 1, acceptance)
    computed = [context - sum(row) // 2 for row in zip(*plan)]
    for kept in plan[:WARM]:
        computed = rig.step(computed, kept)
    _wait(rig.device)
    start = time.perf_counter()
    for kept in plan[WARM:]:
        computed = rig.step(computed, kept)
    _wait(rig.device)
    return (time.perf_counter() - start) / STEPS * 1e3, sum(map(sum, plan[WARM:])) / STEPS / batch


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def fitting(config: EngineConfig, target: RunTarget) -> tuple[EngineConfig, RunTarget, MemoryPlan]:
    """The plan, with the state in bfloat16 where float32 does not fit the device."""
    plan = make_plan(config, target, budget_bytes=2**60)
    free = torch.cuda.mem_get_info()[0] if target.device.type == "cuda" else 2**60
    if plan.pool_bytes + 3 * GIB < free or target.state_dtype == torch.bfloat16:
        return config, target, plan
    print(f"{plan.pool_bytes / GIB:.1f} GiB of pools with a float32 state, {free / GIB:.1f} GiB free: bfloat16")
    return fitting(replace(config, mamba_ssm_dtype="bfloat16"), replace(target, state_dtype=torch.bfloat16))


class Bench:
    """One model's weights, and pools and graphs for one kind of step after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.base = EngineConfig(
            args.model, device=args.device, load_format="dummy", mamba_ssm_dtype=args.state_dtype,
            max_running_requests=max(args.batches), max_model_len=args.ctx + (WARM + STEPS) * (max(args.drafts) + 1),
        )  # fmt: skip
        widest = self._config(max(args.drafts), "intermediate")  # its rotary table is long enough for all
        self.model = build_model(widest, load_target(widest, TPGroup())[1], Path(args.model), False)
        self.plain: dict[str, list[dict[str, Any]]] = {}

    def run(self) -> list[dict[str, Any]]:
        """A row for every mode, number of drafts and batch, those of plain steps first."""
        found = []
        for mode in self.args.modes:
            for drafts in self.args.drafts:
                config, target, plan = fitting(*self._resolve(self._config(drafts, mode)))
                plain = self._plain(config.mamba_ssm_dtype)
                rows = self._measure(config, target, plan)
                found += [row | {"plain steps": row["ms"] / p["ms"]} for row, p in zip(rows, plain)]
                for row in found[-len(rows) :]:
                    print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        return [row for rows in self.plain.values() for row in rows] + found

    def _plain(self, state_dtype: str) -> list[dict[str, Any]]:
        if state_dtype not in self.plain:
            config, target = self._resolve(replace(self.base, mamba_ssm_dtype=state_dtype))
            self.plain[state_dtype] = self._measure(config, target, make_plan(config, target, budget_bytes=2**60))
            print(self.plain[state_dtype], flush=True)
        return self.plain[state_dtype]

    def _measure(self, config: EngineConfig, target: RunTarget, plan: MemoryPlan) -> list[dict[str, Any]]:
        args, found = self.args, []
        rig = Rig(config, target, self.model, plan, args.batches)
        for batch in args.batches:
            times = [step_ms(rig, batch, args.ctx, args.acceptance) for _ in range(args.repeats)]
            found.append({
                "mode": target.state_mode, "state": config.mamba_ssm_dtype, "drafts": rig.tokens - 1, "batch": batch,
                "ms": statistics.median(t for t, _ in times), "tokens a step": times[0][1],
                "GiB of rows": (plan.num_rows + 1) * pool_spec(config, target).row_bytes() / GIB,
                "GiB of pools": plan.pool_bytes / GIB,
            })  # fmt: skip
        if args.profile:
            print_profile(rig, max(args.batches), args.ctx)
        del rig
        gc.collect()
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def _config(self, drafts: int, mode: str) -> EngineConfig:
        return replace(self.base, speculative=SpeculativeConfig(num_draft_tokens=drafts, state_mode=mode))

    @staticmethod
    def _resolve(config: EngineConfig) -> tuple[EngineConfig, RunTarget]:
        return config, load_target(config, TPGroup())[1]


def print_profile(rig: Rig, batch: int, context: int, steps: int = 6) -> None:
    """The most expensive kernels of a step that keeps the whole run of half the rows."""
    kept = [1 + i % rig.tokens for i in range(batch)]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        for _ in range(steps):
            rig.step([context] * batch, kept)
        _wait(rig.device)
    for name, launches, us in kernel_table(prof, steps)[:14]:
        print(f"{us:10.1f} us {launches:7.1f}  {name[:90]}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with a config.json; weights are random")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafts", type=numbers, default=[2, 4, 7])
    parser.add_argument("--batches", type=numbers, default=[1, 32, 128])
    parser.add_argument("--modes", type=lambda t: t.split(","), default=["replay", "intermediate"])
    parser.add_argument("--acceptance", type=float, default=0.7, help="chance of a draft to stay, if those before did")
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of context around which steps are measured")
    parser.add_argument("--state-dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a step")
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    print(environment())
    rows = Bench(args).run()
    if args.name:
        print(save(args.name, rows))


if __name__ == "__main__":
    main()
