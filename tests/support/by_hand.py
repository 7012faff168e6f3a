"""A model, its pools and its backend driven step by step, without engine or runner, for tests of the backends."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.collectives.groups import TPGroup
from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.models.base import CausalLM
from hybridrt.recurrent.backends import create_backend
from hybridrt.runtime.load.build_model import build_model
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.load.runtime import build_pools
from tests.support.session import spoil


@dataclass(frozen=True)
class Row:
    """`tokens` of request row `row` go after its first `computed` ones."""

    row: int
    computed: int
    tokens: Sequence[int]


@lru_cache(maxsize=32)
def loaded(config: EngineConfig) -> CausalLM:
    """The model, which nothing changes once it is loaded: drivers of equal configurations share it."""
    path, target = load_target(config, TPGroup())
    return build_model(config, target, path, False)


class ByHand:
    """Rows own slots and pages in a shuffled order, so that a row taken for a slot or a page shows.

    Args:
        tokens: T, most tokens of a verify step; 1 without speculation.
        mode: the pool's state mode: "classic", "replay" or "intermediate".
    """

    def __init__(
        self, path: Path, *, tokens: int = 1, mode: str = "classic", rows: int = 5, max_len: int = 96, topk: int = 1,
        garbage: bool = True, **changes: Any,
    ) -> None:  # fmt: skip
        self.tokens = tokens
        speculative = SpeculativeConfig(num_draft_tokens=tokens - 1, state_mode=mode, topk=topk) if tokens > 1 else None
        self.config = EngineConfig(
            str(path), device="cpu", dtype="float32", max_model_len=max_len, max_running_requests=rows + 1, page_size=4,
            state_mode="auto" if speculative else mode, speculative=speculative, **changes,
        )  # fmt: skip
        _, self.target = load_target(self.config, TPGroup())
        self.model = loaded(self.config)
        plan = make_plan(self.config, self.target, budget_bytes=2**32)
        count = -(-(plan.max_model_len + tokens - 1) // 4)  # of a row: also pages that its windows have passed
        groups = [replace(group, num_pages=(rows + 1) * count) for group in plan.groups]
        self.plan = replace(plan, groups=tuple(groups))
        self.pools = build_pools(self.config, self.target, self.plan)
        self.backend: Any = create_backend(
            self.config, self.target.model_config, layers=self.model.mixers(), kv_pool=self.pools.kv,
            req_to_token_pool=self.pools.req_to_token, composite=self.model.composite,
        )  # fmt: skip
        if garbage:
            spoil(self.pools)
        generator = torch.Generator().manual_seed(5)
        self._slots = torch.randperm(rows, generator=generator) + 1
        pages = [torch.randperm(group.num_pages, generator=generator) + 1 for group in groups]
        none = torch.empty(rows + 1, 0, 1, dtype=torch.int64)
        self._pages = torch.stack(pages, 1).view(rows + 1, count, -1) if pages else none
        self._spare_slot = rows + 1
        self.last_batch: Any = None  # that ran last, which is what `commit` commits

    @property
    def mamba(self) -> MambaPool:
        pool = self.pools.req_to_token.mamba_pool
        assert pool is not None
        return pool

    @property
    def _recurs(self) -> bool:
        return self.pools.req_to_token.mamba_pool is not None

    def slot(self, row: int) -> int:
        return int(self._slots[row - 1])

    def admit(self, *rows: int) -> None:
        """Gives rows their slots, cleared, and all their pages."""
        index = torch.tensor(rows)
        self.pools.req_to_token.admit_rows(index, self._slots[index - 1])
        pages = self._pages[index - 1]
        count = pages.shape[1]
        which = torch.arange(count).repeat(len(rows))
        self.pools.req_to_token.write_pages(index.repeat_interleave(count), which, pages.flatten(0, 1))

    def batch(
        self, decode: Sequence[Row] = (), extend: Sequence[Row] = (), *, padding: int = 0, spec: SpecInfo | None = None,
        mode: ForwardMode | None = None,
    ) -> ForwardBatch:  # fmt: skip
        """Decode rows of equal length (more than one token: a verify step), then extend rows, then padding rows."""
        width = len(decode[0].tokens) if decode else 1
        filler = [Row(0, 0, [0] * width)] * padding
        rows = [*decode, *extend, *filler]
        lens = [len(r.tokens) for r in rows]
        positions = [p for r in rows for p in range(r.computed, r.computed + len(r.tokens))]
        token_rows = torch.tensor([r.row for r in rows], dtype=torch.int32).repeat_interleave(
            torch.tensor(lens, dtype=torch.int64)
        )
        spec = spec or (SpecInfo(width) if width > 1 else None)
        if mode is None:
            plain = ForwardMode.TARGET_VERIFY if spec else ForwardMode.DECODE
            mode = ForwardMode.MIXED if decode and extend else ForwardMode.EXTEND if extend else plain
        where = torch.tensor(positions, dtype=torch.int32)
        return ForwardBatch(
            forward_mode=mode,
            input_ids=torch.tensor([t for r in rows for t in r.tokens], dtype=torch.int32),
            positions=where,
            req_pool_indices=torch.tensor([r.row for r in rows], dtype=torch.int32),
            seq_lens=torch.tensor([r.computed + len(r.tokens) for r in rows], dtype=torch.int32),
            query_start_loc=torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32),
            out_cache_loc=self.pools.req_to_token.token_slots(token_rows, where),
            num_real=len(decode) + len(extend),
            num_decode_rows=len(rows) if not extend else len(decode),
            attn_backend=self.backend,
            seq_lens_cpu=[r.computed + len(r.tokens) for r in rows],
            query_lens_cpu=lens,
            spec_info=spec,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits of every token of the batch; commits nothing."""
        self.backend.prepare(batch)
        self.last_batch = batch
        return self.model.logits(self.model(batch)).clone()

    def decode(self, *rows: Row, extend: Sequence[Row] = (), padding: int = 0) -> Tensor:
        """A plain decode step, committed, with or without extend rows after it."""
        logits = self.forward(self.batch(rows, extend, padding=padding))
        self.backend.commit(self.last_batch)
        return logits

    def extend(self, *rows: Row, padding: int = 0) -> Tensor:
        return self.forward(self.batch((), rows, padding=padding))

    def verify(
        self, rows: Sequence[Row], accepted: Sequence[int], *, padding: int = 0, extend: Sequence[Row] = ()
    ) -> Tensor:
        """A verify step that keeps `accepted` inputs of each row."""
        logits = self.forward(self.batch(rows, extend, padding=padding))
        self.commit([*accepted, *[0] * padding])
        return logits

    def commit(self, accepted: Sequence[int] | None = None) -> None:
        """Of the step that ran last; without `accepted`, of a plain decode step."""
        with torch.inference_mode():
            kept = None if accepted is None else torch.tensor(accepted, dtype=torch.int32)
            self.backend.commit(self.last_batch, kept)

    @torch.inference_mode()
    def state(self, row: int, length: int) -> dict[str, Tensor]:
        """All that row `row` carries after `length` tokens: recurrent state, conv window and KV, by layer."""
        slot = torch.tensor([self.slot(row)], dtype=torch.int32)
        found: dict[str, Tensor] = {}
        if not self._recurs:
            return self.kv(row, length)
        if self.mamba.spec.mode == "replay":
            index, spare = torch.tensor([[row], [self._spare_slot]], dtype=torch.int32)
            self.mamba.snapshot(index, spare)
        for layer_id in self.mamba.layer_ids:
            source = self._spare_slot if self.mamba.spec.mode == "replay" else self.slot(row)
            found[f"state of layer {layer_id}"] = self.mamba.layer_cache(layer_id).temporal[source].clone()
            window = self.mamba.conv_window(layer_id, slot, torch.tensor([length], dtype=torch.int32))
            found[f"conv of layer {layer_id}"] = window[0].clone()
        return found | self.kv(row, length)

    @torch.inference_mode()
    def kv(self, row: int, length: int) -> dict[str, Tensor]:
        """Keys and values of a row's first `length` tokens."""
        where = self.pools.req_to_token.tables[row, :, :length].long()
        named = zip(self._kv(), self.pools.kv.tensor_groups)
        return {name: pool.flatten(1, 2)[:, where[group]].clone() for (name, pool), group in named}

    def _kv(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the KV pool: keys and values of the first group, of the second, ..."""
        for i, tensor in enumerate(self.pools.kv.tensors):
            yield f"{('keys', 'values')[i % 2]}{i // 2 or ''}", tensor

    def kv_group(self, name: str) -> int:
        """The page group of a KV tensor of `snapshot`."""
        return self.pools.kv.tensor_groups[[known for known, _ in self._kv()].index(name)]

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of all pool tensors by name: [layer, entry, ...], or [entry] for cursors."""
        found = dict(self._kv())
        for layer_id in self.mamba.layer_ids if self._recurs else ():
            for name, tensor in vars(self.mamba.layer_cache(layer_id)).items():
                if isinstance(tensor, Tensor) and name != "states":  # which are part of "temporal"
                    found[f"{name} {layer_id}"] = tensor[None]
        if self._recurs:
            found |= {"start": self.mamba.ring_start[None], "length": self.mamba.ring_length[None]}
        return {name: tensor.clone() for name, tensor in found.items()}

    def touched(self, before: dict[str, Tensor]) -> dict[str, set[int]]:
        """Entries (slots, rows, pages) whose bytes are not what they were, scratch entry 0 apart."""
        changes: dict[str, set[int]] = {}
        for name, now in self.snapshot().items():
            a, b = (_entry_bytes(t) for t in (before[name], now))
            changes[name] = set((a != b).any(1).nonzero().flatten().tolist()) - {0}
        return changes


def _entry_bytes(t: Tensor) -> Tensor:
    """[layer, entry, ...] to [entry, bytes]."""
    lines = t.transpose(0, 1).reshape(t.shape[1], -1)
    return lines.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).view(t.shape[1], -1)


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Largest error of each tensor over its largest value."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = ((got[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1.0)).item() if tensor.numel() else 0.0
        assert error <= tolerance, f"{name}: {error:.1e}"


Oracle = Callable[[Sequence[int]], Tensor]
