"""The handle of a launched step: samples, verifies drafts, and copies the results to the host.

A grammar's bitmask depends on tokens that the host reads while the device computes the step. So a
step with constrained rows samples when `sample` gets its masks; others within the launch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.device import PAST, DeviceEvent, pinned_empty, record_event
from hybridrt.base.errors import EngineError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.sampling.sampling import token_logprobs
from hybridrt.models.base import CausalLM
from hybridrt.runtime.load.draft_needs import DeviceDrafter
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.sampling.sampler import (
    LINES,
    Accepted,
    Pooled,
    RowRequirements,
    SampledLines,
    Sampler,
    Verification,
    Wanted,
    takes_likeliest,
)
from hybridrt.runtime.step.pack import StagingRing, StepArrays
from hybridrt.runtime.step.plan import StepPlan, StepResult, TokenLogprobs, int32s
from hybridrt.runtime.step.token_scores import TokenScores

EnterTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # kernels.state.row_tables.enter_tokens


class SamplingRunner(Protocol):
    """What a launched step sees of its runner: attributes of `StepRunner`."""

    model: CausalLM
    backend: AttentionBackend
    sampler: Sampler
    row_requirements: RowRequirements
    last_tokens: torch.Tensor
    staging: StagingRing
    enter_tokens: EnterTokens
    drafter: DeviceDrafter | None


class ForwardPart(NamedTuple):
    """What one forward pass leaves to sample from.

    Attributes:
        lines: logits of the decode rows, then of the prompts that end.
        batch, arrays, hidden: the step, its packed arrays and the hidden states [T, hidden]. None
            where no drafts are verified, no drafter follows and no prompt is scored or pooled.
        pooled: prompts whose hidden states are summed.
        scored: prompts that get log-probabilities; their places and tokens are in `arrays`.
        graphs: those that replayed it, if they also draw.
    """

    lines: SampledLines
    batch: ForwardBatch | None = None
    arrays: StepArrays[torch.Tensor] | None = None
    hidden: torch.Tensor | None = None
    scored: Sequence[Wanted] = ()
    pooled: Sequence[Pooled] = ()
    graphs: GraphRunner | None = None


class _Drawn(NamedTuple):
    """The tokens of some rows on their way to the host.

    Attributes:
        tokens: [n, T]; accepted: [n], how many of a row's tokens count, None for all.
        logprobs: log-probability of each token and of those that its row has named [n * T, 1 + m],
            then ids and log-probabilities of the likeliest [n * T, k]; or empty.
        wanted: how many alternatives each row gets, None for no log-probabilities; empty if no row
            gets any.
        named: the tokens that each row has named; empty if no row has.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor | None = None
    logprobs: Sequence[torch.Tensor] = ()
    wanted: Sequence[int | None] = ()
    named: Sequence[Sequence[int]] = ()


class MaskedLines(NamedTuple):
    """The lines of logits that have masks: `lines` [m] int32 of `total`, in the masks' order."""

    lines: np.ndarray
    total: int

    @classmethod
    def from_plan(cls, plan: StepPlan, tokens_per_row: int) -> "MaskedLines":
        """The lines of a plan's rows. Of a decode row's `tokens_per_row` lines, those of its input and its
        drafts have masks; a sampling extend row has one."""
        n, drafts = len(plan.decode), plan.decode.num_drafts.tolist()
        lines = list[int]()
        for i in plan.constrained:
            first = i * tokens_per_row if i < n else n * tokens_per_row + i - n
            lines += range(first, first + 1 + (drafts[i] if i < n else 0))
        return cls(int32s(lines), n * tokens_per_row + sum(row.sample for row in plan.extend))


class LaunchedStep:
    """A launched step. Its results are copied to pinned memory right after it, so that reading them
    does not wait for the next step.

    Args:
        masked: the lines that wait for masks; None for a step that samples within its launch.

    Attributes:
        needs_masks: the next launch comes after `sample` or `drop`.
    """

    def __init__(self, masked: MaskedLines | None = None) -> None:
        self.needs_masks, self._masked = masked is not None, masked
        self._runner: SamplingRunner | None = None
        self._waiting: list[ForwardPart] = []
        self._drawn: list[_Drawn] = []
        self._scored: Sequence[Wanted] = ()
        self._scores: list[Sequence[torch.Tensor]] = []
        self._pooled: dict[int, torch.Tensor] = {}
        self._event: DeviceEvent = PAST
        self._problem = "" if masked is None else "give it its masks first"

    @classmethod
    def from_tokens(cls, tokens: torch.Tensor) -> "LaunchedStep":
        """A step that gives these tokens, [n, T]."""
        step, drawn = cls(), _Drawn(tokens)
        step._drawn.append(step._copy_drawn(drawn) if tokens.is_cuda else drawn)
        return step

    def add_part(self, runner: SamplingRunner, part: ForwardPart) -> None:
        """Samples from a part, now or when the masks come. Parts come in the order of the step's
        rows."""
        if self.needs_masks:
            self._runner = runner
            self._waiting.append(part)
        else:
            self._sample_part(runner, part, None)

    def check_masks(self, masks: np.ndarray) -> None:
        """EngineError if `sample` would refuse these masks. Changes nothing."""
        if not self.needs_masks or self._masked is None:
            raise EngineError("masks for a step that waits for none: it has sampled, or was dropped")
        vocab = max(part.lines.logits.shape[-1] for part in self._waiting)
        wanted = len(self._masked.lines), -(-vocab // 32)
        if masks.shape != wanted or masks.dtype != np.int32:
            raise EngineError(
                f"masks of {masks.dtype} {masks.shape} for a step with {wanted[0]} constrained lines: give int32 masks "
                f"{wanted}"
            )

    @torch.inference_mode()
    def sample(self, masks: np.ndarray) -> None:
        """Samples a step with constrained rows (see StepHandle.sample)."""
        self.check_masks(masks)
        runner, masked, waiting = self._runner, self._masked, self._waiting
        assert runner is not None and masked is not None
        self._end_waiting("its sampling failed")
        try:
            bitmask, start = _upload(masks, masked, runner.staging), 0
            for part in waiting:
                end = start + len(part.lines.logits)
                self._sample_part(runner, part, bitmask[start:end])
                start = end
        except BaseException:
            runner.backend.drop_step()
            raise
        self._problem = ""

    def drop(self) -> None:
        """Gives up a step that needs masks (see StepHandle.drop)."""
        if self.needs_masks:
            if self._runner is not None:
                self._runner.backend.drop_step()  # never committed; later steps would raise
            self._end_waiting("it was dropped without its masks")

    def _end_waiting(self, problem: str) -> None:
        """Releases the runner, which may hold this step."""
        self.needs_masks, self._problem = False, problem
        self._runner, self._masked, self._waiting = None, None, []

    def ready(self) -> bool:
        """Whether `result` returns at once. Also True before the step has its masks, when `result`
        raises."""
        return self._event.query()

    def result(self) -> StepResult:
        """Waits for the step's tokens (see StepHandle.result). EngineError if the step has not
        sampled."""
        if self._problem:
            raise EngineError(f"the step has not sampled: {self._problem}")
        if self._event is not PAST:
            self._event.synchronize()
        result = StepResult([], [])
        for drawn in self._drawn:
            _read_drawn(drawn, result)
        if self._scored:
            result.prompt_logprobs = _read_scores(self._scored, self._scores)
        if self._pooled:
            result.pooled = {row: total.numpy().copy() for row, total in self._pooled.items()}
        return result

    def _sample_part(self, runner: SamplingRunner, part: ForwardPart, bitmask: torch.Tensor | None) -> None:
        batch, accepted = part.batch, None
        lines: SampledLines | None = part.lines
        if batch is not None and batch.spec_info is not None:
            split = batch.num_decode_tokens
            of_drafts, bitmask = (None, None) if bitmask is None else (bitmask[:split], bitmask[split:])
            decode, lines = _split_lines(part.lines, batch.num_decode_rows, split)
            accepted = self._verify(runner, part, decode, of_drafts)
        if lines is not None and lines.on_host[0].size:
            parts, wanted = runner.row_requirements.required_by_rows(*lines.on_host)
            if part.graphs is not None and bitmask is None and takes_likeliest(parts):
                tokens = part.graphs.draw(len(lines.rows))
            else:
                tokens = runner.sampler(lines.logits, lines.rows, lines.output_indices, parts, bitmask)
                runner.enter_tokens(lines.rows, tokens, runner.last_tokens)
            drawn = _Drawn(tokens.unsqueeze(1), None, (), wanted)
            if wanted:
                drawn = _with_logprobs(runner, lines, drawn)
            self._drawn.append(self._copy_drawn(drawn) if tokens.is_cuda else drawn)
        if runner.drafter is not None:
            assert batch is not None and part.arrays is not None and part.hidden is not None
            runner.drafter.follow(batch, part.hidden, accepted, part.arrays.prompts)
        if part.scored:
            self._score_prompts(runner, part)
        if part.pooled:
            self._pool(runner, part)

    def _verify(
        self, runner: SamplingRunner, part: ForwardPart, lines: SampledLines, bitmask: torch.Tensor | None
    ) -> Accepted:
        """The decode rows [n] have n * T lines of logits."""
        n, batch, arrays = len(lines.rows), part.batch, part.arrays
        assert batch is not None and batch.spec_info is not None and arrays is not None and arrays.drafts is not None
        spec, drafts = batch.spec_info, arrays.drafts
        step = Verification(
            lines.rows, lines.output_indices, batch.positions[: batch.num_decode_tokens].view(n, -1),
            drafts.tokens[:n], drafts.counts[:n], runner.last_tokens, *spec.relations(n),
        )  # fmt: skip
        parts, wanted = runner.row_requirements.required_by_rows(*lines.on_host)
        kept = runner.sampler.verify(lines.logits, step, parts, bitmask)
        runner.backend.commit(batch, kept.counts, kept.path)
        drawn = _Drawn(kept.tokens, kept.counts, (), wanted)
        if wanted:
            drawn = _with_logprobs(runner, lines, drawn, kept.path)
        self._drawn.append(self._copy_drawn(drawn) if kept.tokens.is_cuda else drawn)
        return kept

    def _copy_drawn(self, drawn: _Drawn) -> _Drawn:
        tokens, accepted = _to_host(drawn.tokens), None if drawn.accepted is None else _to_host(drawn.accepted)
        logprobs = [_to_host(t) for t in drawn.logprobs]
        self._event = record_event(drawn.tokens.device, self._event)
        return drawn._replace(tokens=tokens, accepted=accepted, logprobs=logprobs)

    def _pool(self, runner: SamplingRunner, part: ForwardPart) -> None:
        assert part.hidden is not None
        sums = {each.row: each.sum(part.hidden) / runner.model.norm_scale for each in part.pooled}
        self._pooled |= {row: _to_host(total) for row, total in sums.items()}
        self._event = record_event(part.hidden.device, self._event)

    def _score_prompts(self, runner: SamplingRunner, part: ForwardPart) -> None:
        hidden, arrays, top = part.hidden, part.arrays, max(w.top for w in part.scored)
        assert hidden is not None and arrays is not None and arrays.scored is not None
        # One after the other, as the memory plan counts.
        for at, following in zip(arrays.scored.places.split(LINES), arrays.scored.tokens.split(LINES)):
            logits = runner.model.logits(hidden.index_select(0, at))
            self._scores.append([_to_host(t) for t in token_logprobs(logits, following.long().unsqueeze(1), top)])
        self._scored = part.scored
        self._event = record_event(hidden.device, self._event)


def _upload(masks: np.ndarray, masked: MaskedLines, staging: StagingRing) -> torch.Tensor:
    """One copy. A line without a mask allows all tokens."""
    if len(masked.lines) == masked.total:
        whole: torch.Tensor = staging.upload((masks,))[0]
        return whole
    lines, words = staging.upload((masked.lines, masks))
    bitmask = torch.full((masked.total, masks.shape[1]), -1, dtype=torch.int32, device=staging.device)
    return bitmask.index_copy_(0, lines.long(), words)


def _split_lines(lines: SampledLines, n: int, split: int) -> tuple[SampledLines, SampledLines | None]:
    if len(lines.rows) == n:
        return lines, None
    rows, indices = lines.on_host
    decode = SampledLines(lines.rows[:n], lines.output_indices[:n], (rows[:n], indices[:n]), lines.logits[:split])
    others = SampledLines(lines.rows[n:], lines.output_indices[n:], (rows[n:], indices[n:]), lines.logits[split:])
    return decode, others


def _with_logprobs(
    runner: SamplingRunner, lines: SampledLines, drawn: _Drawn, path: torch.Tensor | None = None
) -> _Drawn:
    """Adds the log-probabilities that the lines ask for. path: see `Accepted.path`."""
    logits, tokens = lines.logits, drawn.tokens.reshape(-1, 1)
    if path is not None:
        logits = logits.view(*path.shape, -1).take_along_dim(path.unsqueeze(-1), 1).flatten(0, 1)
    named = runner.row_requirements.scored_ids(lines.on_host[0])
    if named:
        ids = np.zeros((len(named), max(map(len, named))), np.int32)
        for row, each in zip(ids, named):
            row[: len(each)] = each
        (uploaded,) = runner.staging.upload((ids,))
        width = drawn.tokens.shape[1]
        repeated = uploaded.long().repeat_interleave(width, 0, output_size=len(named) * width)
        tokens = torch.cat((tokens, repeated), 1)
    top = max(n for n in drawn.wanted if n is not None)
    return drawn._replace(logprobs=token_logprobs(logits, tokens, top), named=named)


def _read_drawn(drawn: _Drawn, result: StepResult) -> None:
    rows = drawn.tokens.tolist()
    if drawn.accepted is not None:
        rows = [row[:count] for row, count in zip(rows, drawn.accepted.tolist())]
    result.tokens += rows
    if not drawn.logprobs:
        result.logprobs += [None] * len(rows)
        return
    (own, top_ids, top), width = (t.tolist() for t in drawn.logprobs), drawn.tokens.shape[1]

    def entries(row: int, n: int) -> list[TokenLogprobs]:
        named, lines = drawn.named[row] if drawn.named else (), enumerate(rows[row], row * width)
        return [
            {token: own[i][0], **dict(zip(named, own[i][1:])), **dict(zip(top_ids[i][:n], top[i][:n]))}
            for i, token in lines
        ]

    result.logprobs += [None if n is None else entries(i, n) for i, n in enumerate(drawn.wanted)]


def _read_scores(scored: Sequence[Wanted], found: Sequence[Sequence[torch.Tensor]]) -> dict[int, TokenScores]:
    (own, ids, best), end = (torch.cat(parts).numpy() for parts in zip(*found)), 0
    own = own[:, 0]
    scores = {}
    for each in scored:
        at, end = slice(end, end + len(each.tokens)), end + len(each.tokens)
        # Copies: a request keeps these longer than the pinned memory.
        top_ids, top_best = ids[at, : each.top].astype(np.int32), best[at, : each.top].copy()
        scores[each.row] = TokenScores(np.array(each.tokens, np.int32), own[at].copy(), top_ids, top_best)
    return scores


def _to_host(t: torch.Tensor) -> torch.Tensor:
    """The copy is in pinned memory. It is complete once the stream has come so far."""
    if not t.is_cuda:
        return t
    return pinned_empty(t.shape, t.dtype).copy_(t, non_blocking=True)
