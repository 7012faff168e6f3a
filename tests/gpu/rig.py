"""Tiny models on a GPU, driven without waiting for it; what their pools hold, by name."""

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import (
    Admission,
    DecodeRow,
    DecodeRows,
    ExtendRow,
    PageWrite,
    StepHandle,
    StepPlan,
)
from tests.support.checkpoints import VOCAB
from tests.support.session import LARGE, LARGE_CODE, Sample, Session, in_slabs, spoil

DEVICE = "cuda"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PRODUCTION = [*GPU, pytest.mark.usefixtures("production")]
FAMILIES = ("falcon-norm_after_gate", "nemotron-experts", "qwen-plain")
STATE_MODES = ("classic", "replay")
# Falcon-Mamba has no attention layer, swa_ssm sliding windows, and none of the three a state ring.
MAMBA1 = ("falcon_mamba-plain", "jamba-plain", "swa_ssm-plain")
NEWER = (
    "qwen35-seeing_experts", "granite-plain", "bamba-plain", "olmo-plain", "minimax-plain", "mamba2-plain",
    "lara-plain",
)  # fmt: skip
SHORT_CONV = ("lfm2-biases_tied", "lfm2_moe-plain", "lfm3-plain")
LATENT = ("kimi-plain", "ling-plain", "ling25-plain")  # no state ring, or one that does not pay
DECODING = [
    *((name, mode) for name in (*FAMILIES, *NEWER, *SHORT_CONV) for mode in STATE_MODES),
    *((name, "classic") for name in (*MAMBA1, *LATENT)),
]
VERIFYING = [
    *((name, mode) for name in (*FAMILIES, *SHORT_CONV) for mode in ("intermediate", "replay")),
    *((name, "intermediate") for name in (*MAMBA1, *LATENT)),
]
SPARE = 8  # state slots of no row
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def sleep(cycles: int) -> None:
    """Queues a kernel that keeps the device busy: 2 million cycles are about a millisecond."""
    if DEVICE == "cuda" and cycles:
        torch.cuda._sleep(cycles)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever makes the host wait for the device raises."""
    if DEVICE != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class GpuSession(Session):
    """A Session that never waits for the device while it runs: logits stay there until the end.

    Args:
        max_sleep: the device sleeps up to this many cycles before every step.
    """

    def __init__(self, path: Path, *, max_sleep: int = 0, **config: Any) -> None:
        super().__init__(path, **{"device": DEVICE, **config})
        self._random, self._max_sleep = random.Random(1), max_sleep
        self._parts: list[Tensor] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        self._seeds.update((a.row, a.seed) for a in plan.admissions)
        self.plans.append(plan)
        self._parts.clear()
        self._watch_draws()
        sleep(self._random.randint(0, self._max_sleep))
        handle = (self.split or self.runner).launch(plan)
        sampled = list(zip(plan.decode.rows.tolist(), plan.decode.output_indices.tolist()))
        sampled += [(row.row, row.output_index) for row in plan.extend if row.sample]
        if sampled:
            keys = [(self._seeds[row], index) for row, index in sampled]
            self.logits.update(zip(keys, torch.cat(self._parts), strict=True))
        return handle

    def _keep(self, logits: Tensor, rows: Tensor, output_indices: Tensor) -> None:
        self._parts.append(logits)

    def run(self, *args: Any, **kwargs: Any) -> list[Sample]:
        samples = super().run(*args, **kwargs)
        for sample in samples:
            sample.logits = sample.logits.cpu()
        return samples


class Rows:
    """A ModelRunner, all of whose request rows run: row r has slot slots[r - 1] and its share of the pages, an array
    [n, G] of numbers. `spare` are slots of no row.

    Args:
        lengths: prompt tokens of rows 1, 2, ...
        config: of EngineConfig; max_model_len and dtype have defaults.
    """

    def __init__(self, path: Path, lengths: Sequence[int], spare: int = SPARE, **config: Any) -> None:
        defaults = {"device": DEVICE, "dtype": "float32", "max_model_len": 160, "page_size": 4}
        self.config = EngineConfig(str(path), **{**defaults, **config}, max_running_requests=len(lengths))
        self.runner = ModelRunner(self.config)
        spoil(self.runner.pools)
        self.random, places = random.Random(7), random.Random(8)
        self._lend(len(lengths), spare, places)
        self.prompts: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        for row, length in enumerate(lengths, 1):
            self.admit(row, length)

    def _lend(self, count: int, spare: int, places: random.Random) -> None:
        """Gives the rows slots and pages, in a random order, as the allocators of an engine would."""
        runner = self.runner
        lender, groups = CacheCoordinator.from_plan(runner.memory_plan, runner.copied), runner.pools.kv.windows
        each = runner.pools.req_to_token.max_context // self.config.page_size if groups else 0
        slots = [*range(1, count + 1)]
        if lender.slots.total:
            slots = sorted(handle.index for handle in lender.slots.alloc(min(count + spare, lender.slots.most_free)))
        while any(lender.pages.shortages([each * count] * len(groups))):
            each -= 1
        lent = [handles.indices for handles in lender.pages.alloc([each * count] * len(groups))]
        self.slots, self.spare = places.sample(slots[:count], count), slots[count:]
        for tensor, group in zip(runner.pools.kv.tensors, runner.pools.kv.tensor_groups):
            # Pages of slabs that have been states were cleared: hidden entries are finite.
            tensor[:, torch.from_numpy(lent[group]).long().to(tensor.device)] = (
                LARGE if tensor.is_floating_point() else LARGE_CODE
            )
        order = places.sample(range(each * count), each * count)
        pages = np.stack([numbers[order] for numbers in lent], 1) if lent else np.zeros((0, 1), np.int32)
        self.pages = {row: pages[(row - 1) * each : row * each] for row in range(1, count + 1)}

    def admit(self, row: int, length: int, params: SamplingParams = GREEDY) -> None:
        """A random prompt of `length` tokens for a row, computed in a step of its own."""
        prompt = self.prompts[row] = self.prompt(length)
        plan = StepPlan(
            admissions=[Admission.from_prompt(row, self.slots[row - 1], prompt, params, row)],
            page_writes=[self.page_write(row)],
            extend=[ExtendRow(row, 0, prompt, 0, True)],
        )
        self.runner.launch(plan).result()
        self.computed[row] = length

    def page_write(self, row: int) -> PageWrite:
        """All pages of a row."""
        return PageWrite(row, 0, self.pages[row])

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(3, VOCAB) for _ in range(length)]

    def decode_plan(self, *rows: int) -> StepPlan:
        """A decode step of rows, counted as computed."""
        plan = StepPlan(
            decode=DecodeRows.from_rows(DecodeRow(row, self.computed[row], self.computed[row]) for row in rows)
        )
        for row in rows:
            self.computed[row] += 1
        return plan

    def decode(self, *rows: int) -> None:
        self.runner.launch(self.decode_plan(*rows)).result()


def pool_tensors(pools: Pools) -> dict[str, Tensor]:
    """Every tensor that outlives a step and holds anything, [layer, entry, ...]; entry 0 is scratch. Memory that pages
    and states share is one of them, "slabs" [1, slabs, bytes]: see `Owned`."""
    table, mamba = pools.req_to_token, pools.req_to_token.mamba_pool
    found = {f"KV tensor {i}": tensor for i, tensor in enumerate(pools.kv.tensors)}
    found |= {"tokens": table.req_to_token[None], "slots": table.req_to_state_slot[None]}
    if mamba is not None:
        for layer_id in mamba.layer_ids:
            views = vars(mamba.layer_cache(layer_id)).items()
            found |= {f"{name} of layer {layer_id}": t[None] for name, t in views if isinstance(t, Tensor)}
        found |= {"ring start": mamba.ring_start[None], "ring length": mamba.ring_length[None]}
    found = {name: tensor for name, tensor in found.items() if tensor.numel() and not in_slabs(pools, tensor)}
    if pools.shared is not None:
        found["slabs"] = pools.shared._buffer.view(1, -1, pools.shared.plan.slab_bytes)
    return found


class Owned:
    """What pages and state slots have of the memory that they share.

    Args:
        pages: numbers of each page group.
        slots: numbers of state slots.
    """

    def __init__(self, pools: Pools, pages: Sequence[Collection[int]], slots: Collection[int]) -> None:
        tensors = zip(pools.kv.tensors, [pages[group] for group in pools.kv.tensor_groups])
        found = [(f"KV tensor {i}", tensor, [*numbers]) for i, (tensor, numbers) in enumerate(tensors)]
        mamba = pools.req_to_token.mamba_pool
        for layer_ids, stack in mamba.stacks if mamba is not None else ():
            layers = f"of layers {list(layer_ids)}"
            found += [(f"conv {layers}", stack.conv, [*slots]), (f"temporal {layers}", stack.temporal, [*slots])]
        self._parts = [part for part in found if part[1].numel() and in_slabs(pools, part[1])]

    def numbers(self, slabs: Tensor) -> dict[str, Tensor]:
        """[layer, entry, ...] copies of the owned numbers, by tensor. `slabs`: a snapshot of the memory."""
        return {name: _like(tensor, slabs)[:, entries] for name, tensor, entries in self._parts}

    def others_changed(self, before: Tensor, after: Tensor) -> int:
        """How many bytes differ that are not owned."""
        owned = torch.zeros_like(before)
        for _, tensor, entries in self._parts:
            _like(tensor, owned).view(INTEGERS[tensor.element_size()])[:, entries] = -1
        return int(((before != after) & (owned == 0)).sum())


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _like(tensor: Tensor, slabs: Tensor) -> Tensor:
    """The view of a snapshot that `tensor` is of the memory itself."""
    return slabs.view(-1).view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def entry_bytes(tensor: Tensor) -> Tensor:
    """[layer, entry, ...] to [entry, bytes]."""
    entries = tensor.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return entries.view(-1).view(torch.uint8).view(len(entries), -1)


def changed_entries(before: Tensor, after: Tensor) -> set[int]:
    """Entries whose bytes are not what they were."""
    return set((entry_bytes(before) != entry_bytes(after)).any(1).nonzero().flatten().tolist())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))
