"""Captures the graphs of a runner: decode and verify steps, then steps with short prompts."""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.kernels.sampling.sampling import greedy
from hybridrt.kernels.state.row_tables import enter_tokens
from hybridrt.runtime.load.draft_needs import DeviceDrafter, DraftTarget
from hybridrt.runtime.load.graph_costs import step_widths, wants_prompt_graphs
from hybridrt.runtime.load.kept_state import keeps_prefixes
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.replay.graph_runner import Draw, GraphRunner, Recorder, make_recorder
from hybridrt.runtime.replay.prompt_graphs import PromptGraphs
from hybridrt.runtime.step.pack import enter_tables
from hybridrt.runtime.step.sampling_table import SamplingTable

logger = logging.getLogger(__name__)


class GraphParts(DraftTarget, Protocol):
    """What graphs are recorded over: attributes of `StepRunner`."""

    target: RunTarget
    backend: AttentionBackend
    sampling_table: SamplingTable
    drafter: DeviceDrafter | None
    forks: bool


@dataclass(frozen=True)
class Graphs:
    """Decode and verify graphs by tokens of a row, and graphs of steps with prompts, None without."""

    decode: dict[int, GraphRunner]
    prompts: PromptGraphs | None

    @property
    def captured_bytes(self) -> int:
        """Bytes on the device."""
        decode = sum(graphs.captured_bytes for graphs in self.decode.values())
        return decode + (self.prompts.captured_bytes if self.prompts else 0)


def capture_graphs(parts: GraphParts, progress: bool = False) -> Graphs:
    """Records steps with prompts, then decode and verify steps of every width, then the drafter's
    own.

    One memory pool serves the model's graphs: no two of them run at a time, and each leaves its
    results in buffers outside of the pool.
    """
    asked, rows = parts.config.cuda_graph_max_bs, parts.memory_plan.num_rows
    if asked is not None and asked > rows:
        logger.warning("graphs end at batch %d, not at cuda_graph_max_bs=%d: no more requests have state", rows, asked)
    recorder = make_recorder(parts.device)
    prompts = _capture_prompts(parts, progress, recorder)
    made = Graphs({n: _capture_decode(parts, n, progress, recorder) for n in step_widths(parts.config)}, prompts)
    if parts.drafter is not None:
        parts.drafter.capture(asked or rows, progress)
    taken = made.captured_bytes
    taken += sum(graphs.captured_bytes for tokens, graphs in parts.graphs.items() if tokens not in made.decode)
    logger.info("graphs of up to %d rows take %.2f GiB", min(asked or rows, rows), taken / 2**30)
    return made


def _capture_decode(parts: GraphParts, tokens_per_row: int, progress: bool, recorder: Recorder) -> GraphRunner:
    graphs = GraphRunner(
        model=parts.model,
        backend=parts.backend,
        req_to_token_pool=parts.pools.req_to_token,
        last_tokens=parts.last_tokens,
        max_bs=parts.config.cuda_graph_max_bs or parts.memory_plan.num_rows,
        tokens_per_row=tokens_per_row,
        forks=parts.forks,
        keep_hidden=parts.drafter is not None,
        recorder=recorder,
        draw=_draw_likeliest(parts) if tokens_per_row == 1 else None,
    )
    graphs.capture(progress)
    return graphs


def _draw_likeliest(parts: GraphParts) -> Draw:
    """Greedy sampling without rules, penalties and masks. It holds nothing but `last_tokens`."""
    last_tokens, likeliest = parts.last_tokens, greedy.for_device(parts.device)
    enter = enter_tokens.for_device(parts.device)

    def draw(rows: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        likeliest(logits, None, tokens)
        enter(rows, tokens, last_tokens)

    return draw


def _capture_prompts(parts: GraphParts, progress: bool, recorder: Recorder) -> PromptGraphs | None:
    """None if the memory plan has no room for them (`wants_prompt_graphs`), or the backend cannot be captured."""
    config = parts.config
    if parts.drafter is not None or not wants_prompt_graphs(config, parts.target):
        return None
    if not parts.backend.captures_prompts:
        logger.info("steps with prompts run without graphs: a backend reads their lengths or slots on the host")
        return None
    graphs = PromptGraphs(
        model=parts.model,
        backend=parts.backend,
        req_to_token_pool=parts.pools.req_to_token,
        last_tokens=parts.last_tokens,
        max_bs=config.cuda_graph_max_bs or parts.memory_plan.num_rows,
        max_tokens=config.chunked_prefill_size,
        saves=keeps_prefixes(config, parts.model_config) and bool(parts.backend.chunk_sizes),
        enter_tables=partial(enter_tables, parts.pools, parts.sampling_table),
        recorder=recorder,
    )
    graphs.capture(progress)
    return graphs
