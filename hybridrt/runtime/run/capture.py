"""Which steps of a runner become graphs, and their capture."""

import logging
from functools import partial
from typing import TYPE_CHECKING

from hybridrt.runtime.load.build import keeps_prefixes, step_widths
from hybridrt.runtime.replay.graph_runner import GraphRunner, Recorder, make_recorder
from hybridrt.runtime.replay.prompt_graphs import PromptGraphs
from hybridrt.runtime.step.batch import enter_tables

if TYPE_CHECKING:
    from hybridrt.runtime.run.step_runner import StepRunner

logger = logging.getLogger(__name__)


def capture_graphs(runner: "StepRunner", progress: bool = False) -> None:
    """Records steps with prompts, then decode and verify steps of every width that occurs, then those of the drafter.
    One pool of memory serves the model's graphs: no two of them run at a time, and each leaves its results in buffers
    outside of the pool."""
    asked, rows = runner.config.cuda_graph_max_bs, runner.memory_plan.num_rows
    if asked is not None and asked > rows:
        logger.warning("graphs end at batch %d, not at cuda_graph_max_bs=%d: no more requests have state", rows, asked)
    recorder = make_recorder(runner.device)
    runner.prompt_graphs = _capture_prompts(runner, progress, recorder)
    for tokens in step_widths(runner.config):
        graphs = GraphRunner(
            model=runner.model,
            backend=runner.backend,
            req_to_token_pool=runner.pools.req_to_token,
            last_tokens=runner.last_tokens,
            max_bs=asked or rows,
            tokens=tokens,
            tree=runner.trees and tokens > 1,
            keep_hidden=runner.drafter is not None,
            recorder=recorder,
        )
        graphs.capture(progress)
        runner.graphs[tokens] = graphs
    if runner.drafter is not None:
        runner.drafter.capture(asked or rows, progress)
    taken = sum(graphs.captured_bytes for graphs in runner.graphs.values())
    taken += runner.prompt_graphs.captured_bytes if runner.prompt_graphs else 0
    logger.info("graphs of up to %d rows take %.2f GiB", min(asked or rows, rows), taken / 2**30)


def _capture_prompts(runner: "StepRunner", progress: bool, recorder: Recorder) -> PromptGraphs | None:
    """None if the configuration does not want them, or the backend cannot."""
    config = runner.config
    if not config.cuda_graph_prompts:
        return None
    if not runner.backend.captures_prompts:
        logger.info("steps with prompts run without graphs: their backends need lengths on the host")
        return None
    graphs = PromptGraphs(
        model=runner.model,
        backend=runner.backend,
        req_to_token_pool=runner.pools.req_to_token,
        last_tokens=runner.last_tokens,
        max_bs=config.cuda_graph_max_bs or runner.memory_plan.num_rows,
        max_tokens=config.chunked_prefill_size,
        saves=keeps_prefixes(config, runner.model_config) and bool(runner.backend.chunk_sizes),
        enter_tables=partial(enter_tables, runner.pools, runner.sampling_table),
        recorder=recorder,
    )
    graphs.capture(progress)
    return graphs
