"""Runs a model's prediction head: over the tokens of every step, and ahead of them for drafts.

Position p of the head gets the hidden state of token p and the embedding of token p + 1, and
predicts token p + 2. So the head runs over a step's inputs after the next tokens are drawn
(DRAFT_EXTEND). Each draft is computed from the head's last hidden state and the token drawn from
it. Its keys and values are further layers of the model's KV pool, in the same pages.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, NamedTuple

import numpy as np
import torch

from hybridrt.base.forward_batch import Embeddings, ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.core.packed import A, int32_array
from hybridrt.kernels.core.records import TokenInputs
from hybridrt.models.base import CausalLM
from hybridrt.recurrent.backends import create_backend
from hybridrt.runtime.load.draft_needs import DraftRow, DraftTarget
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.run.launched_step import LaunchedStep
from hybridrt.runtime.sampling.sampler import Accepted, used_parts
from hybridrt.runtime.step.pack import PageEntries, PromptArrays, StagingRing, make_batch
from hybridrt.runtime.step.plan import DecodeRow, DecodeRows, StepHandle

AHEAD = 0  # no step has so many tokens


class DraftedRows(NamedTuple, Generic[A]):
    """Rows of a proposal, [n] each, as DraftRow. `pages`: entries beyond the lent pages, None for
    none."""

    rows: A
    computed: A
    output_indices: A
    pages: PageEntries[A] | None


class HeadStep:
    """The head as a graph records it: one token a row, from and to `hidden` [R + 1, hidden]."""

    def __init__(self, model: CausalLM, num_rows: int) -> None:
        self.model, self.config, self.dtype, self.device = model, model.config, model.dtype, model.device
        self.hidden = torch.zeros(num_rows + 1, model.config.hidden_size, dtype=model.dtype, device=model.device)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        rows = batch.req_pool_indices
        hidden = self.model.predict(self.hidden[rows], batch)
        self.hidden[rows] = hidden
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)

    def logits_into(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        self.model.logits_into(out, hidden)


class HeadRunner:
    """Runs the prediction head of a runner's model, as its DeviceDrafter.

    Args:
        runner: its pools exist. Its sampler draws drafts as the model would, with the same random
            numbers.
        own_pages: pages of each row, after those that the runner's pool lends: for drafts past the
            lent pages.

    Attributes:
        hidden: [R + 1, hidden], the head's last hidden state of each row; gives its first draft.
    """

    def __init__(self, runner: DraftTarget, own_pages: int) -> None:
        self.model, self.table, self.sampler = runner.model, runner.pools.req_to_token, runner.sampler
        self.backend = create_backend(
            runner.config, runner.model_config, layers={}, kv_pool=runner.pools.kv, req_to_token_pool=self.table,
        )  # fmt: skip
        self.ahead = HeadStep(self.model, runner.memory_plan.num_rows)
        self.hidden = torch.zeros_like(self.ahead.hidden)
        self.tokens = torch.zeros(runner.memory_plan.num_rows + 1, dtype=torch.int32, device=runner.device)
        self._own_pages, self._pages = np.stack(runner.pools.kv.own, 1), own_pages
        self._staging, self._last_tokens = StagingRing(runner.device), runner.last_tokens
        self._graphs = runner.graphs  # graphs by tokens of a row; the head's own steps get the number AHEAD among them

    def capture(self, max_bs: int, progress: bool = False) -> None:
        """Records the steps that draft ahead as graphs."""
        self._graphs[AHEAD] = GraphRunner(
            model=self.ahead, backend=self.backend, req_to_token_pool=self.table, last_tokens=self.tokens,
            max_bs=max_bs,
        )  # fmt: skip
        self._graphs[AHEAD].capture(progress)

    @torch.inference_mode()
    def follow(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        accepted: Accepted | None,
        prompts: PromptArrays[torch.Tensor] | None,
    ) -> None:
        """Predicts a token for each row that has sampled, from the model's hidden states (see
        `DeviceDrafter.follow` in hybridrt/runtime/load/draft_needs.py)."""
        n, split = batch.num_decode_rows, batch.num_decode_tokens
        rows, ids = batch.req_pool_indices[:n], self._last_tokens[batch.req_pool_indices[:n]]
        ends = torch.arange(n, device=rows.device)
        if accepted is not None:
            ids, ends = accepted.tokens.flatten().int(), accepted.ends()
            if accepted.path is not None:
                batch, hidden = _along_path(batch, hidden, accepted.path)
        if prompts is not None:
            following, at = prompts.following_ids, prompts.sample_at[split:]
            assert following is not None, "a runner with a drafter packs them"
            following[at - split] = self._last_tokens[prompts.sample_rows[n:]]
            ids, ends, rows = torch.cat((ids, following)), torch.cat((ends, at)), prompts.sample_rows
        # -1: the logits are not finite.
        ids = ids.clamp(min=0)
        embeddings = _of_next_tokens(batch, batch.embeddings, self.model.embed(ids)) if batch.embeddings else None
        step = replace(
            batch, forward_mode=ForwardMode.DRAFT_EXTEND, input_ids=ids, attn_backend=self.backend,
            embeddings=embeddings,
        )  # fmt: skip
        self.backend.prepare(step)
        self.hidden[rows] = self.model.predict(hidden, step).index_select(0, ends)

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow], steps: int, topk: int = 1) -> StepHandle:
        """Launches `steps` drafts of each row. The handle has [rows, steps * (1 + topk)] tokens: for
        every step the draft, then the likeliest tokens (see `DeviceDrafter.draft` in
        hybridrt/runtime/load/draft_needs.py)."""
        packed = _pack(rows, steps, self.table.page_size, self._own_pages, self._pages)
        step_rows: DraftedRows[torch.Tensor] = self._staging.upload(packed)
        if (entries := step_rows.pages) is not None:
            self.table.write_pages(entries.rows, entries.indices, entries.pages)
        index, parts = step_rows.rows, used_parts(r.params for r in rows)
        self.ahead.hidden[index] = self.hidden[index]
        logits = self.model.logits(self.hidden[index])
        drafts = torch.empty(len(rows), 0, dtype=torch.int64, device=logits.device)
        places = []
        for step in range(steps):
            if step:
                logits = self._advance(rows, step_rows, step)
            drawn = self.sampler.draft(logits, index, step_rows.output_indices + step, parts, drafts)
            self.tokens[index] = drawn.int()
            drafts = torch.cat((drafts, drawn[:, None]), 1)
            places += [drawn[:, None], logits.topk(topk).indices]
        return LaunchedStep.from_tokens(torch.cat(places, 1))

    def _advance(self, rows: Sequence[DraftRow], step_rows: DraftedRows[torch.Tensor], step: int) -> torch.Tensor:
        """`step` counts from 1. Returns [n, vocab] logits after the last drafts."""
        n, graphs = len(rows), self._graphs.get(AHEAD)
        if graphs is not None and graphs.bucket(n):
            return graphs.replay(DecodeRows.from_rows(DecodeRow(r.row, r.computed + step - 1, 0) for r in rows))
        index, positions = step_rows.rows, step_rows.computed + (step - 1)
        ids = self.tokens[index].clamp(min=0)
        deltas = self.table.mrope_deltas
        turning = None if deltas is None else positions + deltas[index]
        inputs = TokenInputs(ids, positions, self.table.token_slots(index, positions), turning)
        starts = torch.arange(n + 1, dtype=torch.int32, device=index.device)
        batch = make_batch(
            self.backend, index, positions + 1, starts, inputs, n, None,
            seq_lens_cpu=[r.computed + step for r in rows], query_lens_cpu=[1] * n,
        )  # fmt: skip
        self.backend.prepare(batch)
        return self.ahead.logits(self.ahead(batch))


def _of_next_tokens(batch: ForwardBatch, given: Embeddings, table: torch.Tensor) -> Embeddings:
    """Embeddings of the tokens after a step's. Those in the same row that the step took from an
    encoder are the same here, and all others are `table` [T, hidden].
    """
    sources = torch.full((len(table) + 1,), -1, dtype=torch.int64, device=table.device)
    sources[given.places.long()] = torch.arange(len(given.rows), device=table.device)
    sources[batch.query_start_loc.long()] = -1  # a row's first token follows none of the step
    after = sources[1:]
    rows = torch.where((after >= 0)[:, None], given.rows.index_select(0, after.clamp(min=0)), table)
    return Embeddings(rows, torch.arange(len(table), dtype=torch.int32, device=table.device))


def _along_path(batch: ForwardBatch, hidden: torch.Tensor, path: torch.Tensor) -> tuple[ForwardBatch, torch.Tensor]:
    """A verified step whose inputs are the accepted ones, in order, as their KV is now."""
    (n, width), split = path.shape, batch.num_decode_tokens
    order = torch.arange(width, dtype=torch.int32, device=path.device)
    places = (batch.seq_lens[:n, None] - width + order).flatten().to(batch.positions.dtype)
    kept = hidden[:split].view(n, width, -1).take_along_dim(path[:, :, None], 1).flatten(0, 1)
    num_drafts, turning = batch.spec_info.num_drafts if batch.spec_info else None, batch.mrope_positions
    if turning is not None:  # all inputs of a row are as far from their positions
        moved = places + turning[..., :split] - batch.positions[:split]
        turning = torch.cat((moved, turning[..., split:]), -1)
    kept_batch = replace(
        batch,
        positions=torch.cat((places, batch.positions[split:])),
        mrope_positions=turning,
        spec_info=SpecInfo(width, num_drafts=num_drafts),
    )
    return kept_batch, torch.cat((kept, hidden[split:]))


def _pack(
    rows: Sequence[DraftRow], steps: int, page_size: int, own_pages: np.ndarray, own: int
) -> DraftedRows[np.ndarray]:
    """Integers of a proposal. Drafts beyond a row's lent pages go to the row's `own` pages, among
    `own_pages` [rows * own, G] of all rows."""
    beyond = [
        (r.row, r.end_page + i, r.row * own + i)
        for r in rows
        for i in range(max((r.computed + steps - 2) // page_size + 1 - r.end_page, 0) if steps > 1 else 0)
    ]
    pages = None
    if beyond:
        lines, indices, places = int32_array(beyond).T
        pages = PageEntries(lines, indices, own_pages[places])
    return DraftedRows(
        int32_array([r.row for r in rows]),
        int32_array([r.computed for r in rows]),
        int32_array([r.output_index for r in rows]),
        pages,
    )
