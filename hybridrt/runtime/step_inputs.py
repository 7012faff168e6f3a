"""Packs a StepPlan into one host buffer, moved to the device in one copy, and cuts it into named views there."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from hybridrt.runtime.sampler import SamplingTable
from hybridrt.runtime.step import DecodeRow, StepPlan

Sections = dict[str, torch.Tensor]


def pack_step(
    plan: StepPlan, tokens_per_row: int = 1, tree: bool = False, following: bool = False
) -> dict[str, np.ndarray]:
    """All integers of a step as int32 sections (floats and int64 as their bits).

    rows, seq_lens, query_start_loc describe the batch; token_rows, positions its tokens (of a tree: the places of its
    nodes in the KV cache); extend_ids the prompt tokens; with `following`, following_ids those behind each of them
    (0 where it is sampled); where a chunk follows a cached prefix, read_slots of all chunks; drafts and num_drafts the
    proposed ones, [n, T - 1] padded; with `tree`, parents and ancestors of all nodes (`tree_nodes`); sample_at the
    tokens to sample from, sample_rows and output_indices the rows that do and the index of their first draw. The rest
    is bookkeeping: admissions (admit_rows, admit_slots and sampling constants) and page-table entries.
    """
    lens = [tokens_per_row] * len(plan.decode) + [len(r.tokens) for r in plan.extend]
    computed = np.array([r.computed for r in plan.rows], np.int32)
    rows = np.array([r.row for r in plan.rows], np.int32)
    ends = list(accumulate(lens, initial=0))
    sampling = [len(plan.decode) + i for i, row in enumerate(plan.extend) if row.sample]
    decode_tokens = ends[len(plan.decode)]
    offsets = np.tile(np.arange(tokens_per_row, dtype=np.int32), len(plan.decode))
    return {
        **SamplingTable.pack(plan.admissions),  # first: its int64 seeds need an even offset
        "rows": rows,
        "seq_lens": computed + np.array(lens, np.int32),
        "query_start_loc": np.array(ends, np.int32),
        "token_rows": _token_rows(plan, rows, lens, offsets),
        "positions": np.arange(ends[-1], dtype=np.int32) + np.repeat(computed - np.array(ends[:-1], np.int32), lens),
        "extend_ids": _flat([r.tokens for r in plan.extend]),
        **({"following_ids": _flat([[*r.tokens[1:], r.following] for r in plan.extend])} if following else {}),
        "drafts": _flat([padded(r.drafts, tokens_per_row - 1) for r in plan.decode]),
        "num_drafts": np.array([len(r.drafts) for r in plan.decode], np.int32),
        **(tree_nodes(plan.decode, tokens_per_row) if tree else {}),
        **_read_slots(plan),
        "sample_at": np.array([*range(decode_tokens), *(ends[i + 1] - 1 for i in sampling)], np.int32),
        "sample_rows": np.concatenate([rows[: len(plan.decode)], rows[sampling]]),
        "output_indices": np.array([r.output_index for r in plan.sampled], np.int32),
        **_bookkeeping(plan),
    }


def _read_slots(plan: StepPlan) -> dict[str, np.ndarray]:
    slots = [row.read_slot for row in plan.extend]
    return {"read_slots": np.array(slots, np.int32)} if any(slots) else {}


def tree_nodes(rows: Sequence[DecodeRow], width: int) -> dict[str, np.ndarray]:
    """`parents` (-1 for the root) and `ancestors` (as bits, the node's own among them) of each row's `width` nodes,
    [n * width] int32 each. Chains are trees too; padding nodes continue the row as a chain."""
    parents = np.tile(np.arange(-1, width - 1, dtype=np.int32), (len(rows), 1))
    ancestors = np.tile((2 << np.arange(width, dtype=np.int32)) - 1, (len(rows), 1)).astype(np.int32)
    for i, row in enumerate(rows):
        if row.parents is None:
            continue
        parents[i, 1 : 1 + len(row.parents)] = row.parents
        for node in range(1, width):
            ancestors[i, node] = ancestors[i, parents[i, node]] | 1 << node
    return {"parents": parents.reshape(-1), "ancestors": ancestors.reshape(-1)}


def _token_rows(plan: StepPlan, rows: np.ndarray, lens: Sequence[int], offsets: np.ndarray) -> np.ndarray:
    """Request row of each token; padding drafts get row 0, whose KV slots are scratch: the row has no page for them."""
    token_rows = np.repeat(rows, lens)
    drafts = np.repeat([len(r.drafts) for r in plan.decode], len(offsets) // max(len(plan.decode), 1))
    token_rows[: len(offsets)][offsets > drafts] = 0
    return token_rows


def _bookkeeping(plan: StepPlan) -> dict[str, np.ndarray]:
    return {
        "admit_rows": np.array([a.row for a in plan.admissions], np.int32),
        "admit_slots": np.array([a.slot for a in plan.admissions], np.int32),
        "page_rows": _flat([[w.row] * len(w.pages) for w in plan.page_writes]),
        "page_indices": _flat([np.arange(w.first_page, w.first_page + len(w.pages)) for w in plan.page_writes]),
        "pages": _flat([w.pages for w in plan.page_writes]),
    }


def padded(drafts: Sequence[int], width: int) -> list[int]:
    """Drafts of a row, filled up with token 0."""
    return [*drafts, *[0] * (width - len(drafts))]


def _flat(parts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(p, np.int32) for p in parts]) if parts else np.empty(0, np.int32)


class StagingRing:
    """Host-to-device copies that the host never waits for: pinned staging, a ring of three buffers, each reused after
    its copy's event. On a CPU the host buffer itself serves."""

    def __init__(self, device: torch.device, depth: int = 3) -> None:
        self.device = device
        self._pinned: list[torch.Tensor | None] = [None] * depth
        self._events: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def upload(self, sections: dict[str, np.ndarray]) -> Sections:
        """One copy for all sections, into fresh device memory. Each starts on 16 bytes: Triton compiles a kernel anew
        for every combination of aligned and unaligned arguments."""
        sizes = [array.size for array in sections.values()]
        starts = list(accumulate((size + -size % 4 for size in sizes), initial=0))
        flat = np.zeros(starts[-1], np.int32)
        for start, array in zip(starts, sections.values()):
            flat[start : start + array.size] = array
        if self.device.type == "cpu":
            on_device = torch.from_numpy(flat)
        else:
            on_device = torch.empty(flat.size, dtype=torch.int32, device=self.device)
            self.copy_into(on_device, flat)
        return {name: on_device[start : start + size] for name, start, size in zip(sections, starts, sizes)}

    def copy_into(self, destination: torch.Tensor, flat: np.ndarray) -> None:
        """Copies [n] int32 into a preallocated device tensor of the same size."""
        if self.device.type == "cpu":
            destination.copy_(torch.from_numpy(flat))
            return
        i = self._next
        self._next = (i + 1) % len(self._pinned)
        event, staging = self._events[i], self._pinned[i]
        if event is not None:
            event.synchronize()  # three copies back: done long ago unless the host runs far ahead
        if staging is None or staging.numel() < flat.size:
            staging = self._pinned[i] = torch.empty(max(flat.size, 4096) * 2, dtype=torch.int32, pin_memory=True)
        staging[: flat.size].numpy()[:] = flat
        destination.copy_(staging[: flat.size], non_blocking=True)
        event = self._events[i] = event or torch.cuda.Event()
        event.record()
