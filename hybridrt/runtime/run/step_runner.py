"""Runs steps: turns a StepPlan into tokens, over a model, its pools and its backend."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from hybridrt.base.errors import ConfigError, EngineError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.core.packed import int32_array
from hybridrt.kernels.core.records import TokenInputs
from hybridrt.kernels.core.slots import DEBUG
from hybridrt.kernels.state.row_tables import enter_tokens
from hybridrt.mem_cache.pools.state_moves import When
from hybridrt.runtime.load.draft_needs import DeviceDrafter, DraftRow, draft_needs
from hybridrt.runtime.load.runtime import Runtime
from hybridrt.runtime.load.start_kernels import StartAhead
from hybridrt.runtime.replay.cpu_steps import CPUDecode, Recordings
from hybridrt.runtime.replay.graph_runner import GraphRunner, split_page_writes
from hybridrt.runtime.replay.prompt_graphs import PromptGraphs
from hybridrt.runtime.run.capture import capture_graphs
from hybridrt.runtime.run.host_copies import HostCopies
from hybridrt.runtime.run.launched_step import EnterTokens, ForwardPart, LaunchedStep, MaskedLines
from hybridrt.runtime.run.lock_step import EAGER, NO_STEP, LockStep
from hybridrt.runtime.run.prefix_copy import PrefixPlaces, Tensors, read_prefix, write_prefix
from hybridrt.runtime.run.span_encoder import SpanEncoder
from hybridrt.runtime.run.state_arena import StateArena
from hybridrt.runtime.sampling.sampler import PromptRequirements, RowRequirements, SampledLines, Sampler
from hybridrt.runtime.step.pack import (
    StagingRing,
    StepArrays,
    enter_tables,
    fill_decode,
    make_batch,
    pack_step,
    pack_tables,
    spec_info_of,
)
from hybridrt.runtime.step.pack_padded import Bucket, StateSaves
from hybridrt.runtime.step.plan import NO_INTEGERS, NO_ROWS, PageWrite, StepHandle, StepPlan
from hybridrt.runtime.step.recurrent_arrays import set_recurrent
from hybridrt.runtime.step.sampling_table import SamplingTable


class StepRunner:
    """Launches steps over a Runtime, of which the parts are attributes here too. `capture` makes
    graphs.

    Attributes:
        row_requirements: which parts of sampling the requests of all rows use.
        staging: copies integers of the host to the device.
        last_tokens: [R + 1] int32, the next input of every row: sampled here, read by the next
            step, never waited for by the host.
        graphs: graphs of decode and verify steps, by tokens of a row.
        prompt_graphs: graphs of short prefill and mixed steps; None without.
        chunk_saves: how a chunk of a prompt saves states.
        arena: images of states for other workers; None without EngineConfig.transfer_bytes.
        host: the prefix cache's tier in main memory; None without one.
        encoder: makes embeddings of images; None for a model that takes text only.
        forks: drafts may fork (`SpeculativeConfig.forks`).
        recordings: recorded decode steps of one row on a CPU.
        lock_step: of replicas that share experts; None: steps of this one wait for no other.
        drafter: the device part of a drafter; None without one.
    """

    ahead: StartAhead | None = None  # compiles kernels before runners like this one start

    def __init__(self, runtime: Runtime) -> None:
        self.config, self.target, self.model = runtime.config, runtime.target, runtime.model
        self.memory_plan, self.pools, self.backend = runtime.plan, runtime.pools, runtime.backend
        self.model_config, self.device = runtime.target.model_config, runtime.target.device
        self.forks = self.config.speculative is not None and self.config.speculative.forks
        self._num_verify_tokens = self.config.num_verify_tokens
        self.graphs: dict[int, GraphRunner] = {}
        self.prompt_graphs: PromptGraphs | None = None
        self.sampling_table = SamplingTable(self.memory_plan.num_rows, self.model_config.vocab_size, self.device)
        self.sampler = Sampler(self.sampling_table)
        self.last_tokens = torch.zeros(self.memory_plan.num_rows + 1, dtype=torch.int32, device=self.device)
        self.staging = StagingRing(self.device)
        self.enter_tokens: EnterTokens = enter_tokens.for_device(self.device)
        self._inference = torch.inference_mode()  # one for all launches: making it takes as long as entering it
        self.row_requirements = RowRequirements(self.memory_plan.num_rows)
        self._prompt_requirements = PromptRequirements()
        self._last_masked: LaunchedStep | None = None  # only if it needed masks
        self.arena: StateArena | None = None
        self.host: HostCopies | None = None
        self.encoder: SpanEncoder | None = None
        self._mrope_deltas = np.zeros(self.memory_plan.num_rows + 1, np.int32)  # as on the device
        self.drafter: DeviceDrafter | None = draft_needs(self.config).device_drafter(self)
        self._chunk_sizes, self.chunk_saves = self.backend.chunk_sizes, StateSaves.of(self.backend.saves_at_chunks)
        # With HYBRIDRT_DEBUG=1 backends check all numbers, which only eager steps do.
        kept = self.device.type == "cpu" and not DEBUG and self.drafter is None
        self._cpu_decode = CPUDecode(self.backend, self.pools.req_to_token, self.last_tokens) if kept else None
        replicas = self.target.tp.replicas
        self.lock_step = None if replicas is None else LockStep(self.model, replicas)
        # A recording would repeat neither sums over ranks nor exchanges of tokens with other replicas.
        alone = self.config.tp_size == 1 and self.lock_step is None
        self.recordings = Recordings(self.model, self.config.cuda_graph and alone)

    def capture(self, progress: bool = False) -> None:
        """Records steps as graphs (hybridrt.runtime.run.capture)."""
        with nullcontext() if self.lock_step is None else self.lock_step.capturing():
            captured = capture_graphs(self, progress)
        self.graphs |= captured.decode
        self.prompt_graphs = captured.prompts

    def drop_graphs(self) -> None:
        self.graphs.clear()
        self.prompt_graphs = None

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launches a plan: moves states, packs, prepares, computes, and samples if no row is
        constrained. Returns at once (see Executor.launch in hybridrt/runtime/step/plan.py).

        Raises:
            ConfigError: the plan is not for this runner. Nothing has changed.
        """
        if self._last_masked is not None:
            self.check_sampled()
        self._check(plan)
        if plan.admissions:
            self.row_requirements.note_admissions(plan.admissions)
            self._prompt_requirements.note_admissions(plan.admissions)
        tokens_per_row = self._num_verify_tokens if len(plan.decode.drafts) else 1
        step = LaunchedStep(MaskedLines.from_plan(plan, tokens_per_row) if plan.constrained else None)
        try:
            with self._inference:
                if plan.admissions and self.pools.req_to_token.mrope_deltas is not None:
                    self._enter_mrope_deltas(plan, self.pools.req_to_token.mrope_deltas)
                if self.encoder is not None:
                    self.encoder.advance(plan)
                if plan.moves or plan.cleared or self.host is not None:
                    self._move_states(plan)
                if self.lock_step is not None and (len(plan.decode.rows) or plan.extend):
                    self._run_together(plan, tokens_per_row, step, self.lock_step)
                else:
                    self._run_model(plan, tokens_per_row, step)
        except BaseException:
            self.backend.drop_step()  # never committed; later steps would raise
            raise
        self._last_masked = step if step.needs_masks else None
        return step

    def join(self) -> bool:
        """Takes part in a round of replicas that share experts, without a step. Returns whether another
        replica has one. RankError if one is lost."""
        assert self.lock_step is not None, "only replicas that share experts join others"
        with self._inference, self.lock_step.round(NO_STEP) as agreed:
            if agreed == EAGER:
                self.lock_step.join()
            elif agreed != NO_STEP:
                self.graphs[1].replay(NO_ROWS, least=agreed)
        return agreed != NO_STEP

    def check_sampled(self) -> None:
        """EngineError if the last step still needs masks. Changes nothing."""
        if self._last_masked is not None and self._last_masked.needs_masks:
            raise EngineError(
                "the step launched last has not sampled: give its handle the masks (sample) or give it up (drop) first"
            )

    def drop_last(self) -> None:
        """Gives up the step launched last if it needs masks."""
        if self._last_masked is not None:
            self._last_masked.drop()

    def copied(self, ticket: int) -> bool:
        """Whether a host copy of a launched plan has ended, on this rank."""
        return self.host is None or self.host.copied(ticket)

    def encoded(self, ticket: int) -> bool:
        """Whether the embeddings of an encoder task of a launched plan can be read."""
        return self.encoder is None or self.encoder.encoded(ticket)

    def draft(self, rows: Sequence[DraftRow], steps: int, topk: int = 1) -> StepHandle:
        """Launches drafts (see DeviceDrafter.draft). ConfigError without a device drafter."""
        if self.drafter is None:
            raise ConfigError("this runner has no device drafter: build it with EngineConfig(speculative=...)")
        return self.drafter.draft(rows, steps, topk)

    def read_prefix(self, prefix: PrefixPlaces) -> dict[str, torch.Tensor]:
        """`prefix_copy.read_prefix` of this runner's pools. All ranks call it."""
        return read_prefix(self.pools, self.target.tp, prefix)

    def write_prefix(self, prefix: PrefixPlaces, data: Tensors | None = None) -> None:
        """`prefix_copy.write_prefix` to this runner's pools. All ranks call it."""
        write_prefix(self.pools, self.target.tp, prefix, data)

    def _move_states(self, plan: StepPlan) -> None:
        pool = self.pools.req_to_token.mamba_pool
        if pool is not None and (first := [move for move in plan.moves if move.when is When.FIRST]):
            pool.move(first, self.staging.upload)
        if self.host is not None:
            self.host.launch(plan.host_copies)
            self.host.wait(plan.after_copies)
        if plan.cleared:
            self.pools.shared.clear(plan.cleared)  # type: ignore[union-attr]  # pages and states share memory
        if pool is not None and (later := [move for move in plan.moves if move.when is When.BEFORE_ROWS]):
            pool.move(later, self.staging.upload)

    def _enter_mrope_deltas(self, plan: StepPlan, deltas: torch.Tensor) -> None:
        """Uploads those that differ from the device's. A request without images has 0, so few do."""
        changed = [(a.row, a.mrope_delta) for a in plan.admissions if a.mrope_delta != self._mrope_deltas[a.row]]
        if changed:
            rows, values = int32_array(changed).T
            self._mrope_deltas[rows] = values
            on_device = self.staging.upload((rows, values))
            deltas.index_copy_(0, on_device[0].long(), on_device[1])

    def _run_model(self, plan: StepPlan, tokens_per_row: int, step: LaunchedStep) -> None:
        if self.prompt_graphs is not None and (bucket := self._prompt_bucket(plan, tokens_per_row)) is not None:
            self._replay_prompts(plan, bucket, step)
        elif self.graphs and (found := self._graph_of(plan, tokens_per_row)) is not None:
            self._replay_decode(plan, *found, step)
        else:
            plain = tokens_per_row == 1 and len(plan.decode.rows) and not (plan.extend or plan.imports or plan.exports)
            if plain and self._cpu_decode is not None:
                self._run_cpu_decode(plan, self._cpu_decode, step)
            else:
                self._run_eager(plan, tokens_per_row, step)

    def _run_together(self, plan: StepPlan, tokens_per_row: int, step: LaunchedStep, lock_step: LockStep) -> None:
        """Runs a step in a round of replicas that share experts: in a graph if all of them have one for
        their step (decode steps without drafts), else eagerly."""
        found = None
        if self.graphs and not plan.extend and self.config.speculative is None:
            found = self._graph_of(plan, tokens_per_row)
        with lock_step.round(EAGER if found is None else found[0].bucket(len(plan.decode.rows)) or EAGER) as agreed:
            if found is not None and agreed != EAGER:
                self._replay_decode(plan, *found, step, agreed)
            else:
                self._run_eager(plan, tokens_per_row, step)

    def _run_eager(self, plan: StepPlan, tokens_per_row: int, step: LaunchedStep) -> None:
        n = len(plan.decode.rows)
        scored, pooled, places = self._prompt_requirements.wanted_by_rows(plan.extend, n * tokens_per_row)
        on_host = pack_step(
            plan,
            tokens_per_row,
            groups=self.pools.req_to_token.num_groups,
            forks=self.forks,
            spans=self.encoder is not None,
            following=self.drafter is not None,
            chunk_sizes=self._chunk_sizes,
            at_chunks=self.backend.saves_at_chunks,
            scored=places,
        )
        arrays: StepArrays[torch.Tensor] = self.staging.upload(on_host)
        if arrays.tables is not None:
            enter_tables(self.pools, self.sampling_table, arrays.tables)
        for arrival in plan.imports:
            self.arena.import_state(arrival)  # type: ignore[union-attr]  # launch has checked
        if not n and not plan.extend:
            return
        batch = self._make_batch(plan, on_host, arrays, tokens_per_row)
        self.backend.prepare(batch)
        hidden = self.model(batch)
        if n and tokens_per_row == 1:
            self.backend.commit(batch)
        for departure in plan.exports:
            self.arena.export_state(departure)  # type: ignore[union-attr]
        kept = hidden if arrays.prompts is None else hidden.index_select(0, arrays.prompts.sample_at)
        logits = self.model.logits(kept) if len(kept) else kept
        known = on_host.sample_rows, on_host.output_indices
        lines = SampledLines(arrays.sample_rows, arrays.output_indices, known, logits)
        step.add_part(self, ForwardPart(lines, batch, arrays, hidden, scored, pooled))

    def _run_cpu_decode(self, plan: StepPlan, steps: CPUDecode, step: LaunchedStep) -> None:
        if plan.admissions or plan.page_writes or plan.page_copies:
            self._enter_tables(plan)
        batch, indices = steps.prepare(plan.decode)
        logits = self.recordings.run(steps.recorded_slot(plan.decode), batch)
        self.backend.commit(batch)
        on_host = plan.decode.rows, plan.decode.output_indices
        step.add_part(self, ForwardPart(SampledLines(batch.req_pool_indices, indices, on_host, logits)))

    def _prompt_bucket(self, plan: StepPlan, tokens_per_row: int) -> Bucket | None:
        # Prompt graphs verify no drafts and keep no hidden states.
        if self.prompt_graphs is None or not plan.extend or tokens_per_row > 1:
            return None
        scored, pooled, _ = self._prompt_requirements.wanted_by_rows(plan.extend, 0)
        return None if scored or pooled else self.prompt_graphs.bucket(plan)

    def _replay_prompts(self, plan: StepPlan, bucket: Bucket, step: LaunchedStep) -> None:
        if not bucket.enters(plan):
            self._enter_tables(plan)
            plan = replace(plan, admissions=[], page_writes=[], page_copies=[])
        assert self.prompt_graphs is not None
        step.add_part(self, ForwardPart(self.prompt_graphs.replay(plan, bucket)))

    def _graph_of(self, plan: StepPlan, tokens_per_row: int) -> tuple[GraphRunner, np.ndarray, list[PageWrite]] | None:
        """The graph of the decode rows, their new pages, and the other page writes. None: no graph
        fits."""
        decode, graphs = plan.decode, self.graphs.get(tokens_per_row)
        n = len(decode.rows)
        if graphs is None or not n or graphs.bucket(n) is None:
            return None
        if plan.extend and plan.constrained and tokens_per_row > 1:
            return None  # drafts are committed before chunks are launched
        if not plan.page_writes:
            return graphs, NO_INTEGERS, plan.page_writes
        split = split_page_writes(decode, plan.page_writes, self.memory_plan)
        return None if split is None else (graphs, *split)

    def _replay_decode(
        self, plan: StepPlan, graphs: GraphRunner, new_pages: np.ndarray, rest: list[PageWrite], step: LaunchedStep,
        least: int = 0,
    ) -> None:  # fmt: skip
        """Prompt chunks run afterwards, with the page writes `rest`. `least` as in `GraphRunner.replay`."""
        decode = plan.decode
        graphs.replay(decode, new_pages, least)
        views, on_host = graphs.views_of(len(decode.rows)), (decode.rows, decode.output_indices)
        lines = SampledLines(views.batch.req_pool_indices, views.output_indices, on_host, views.logits)
        drawing = graphs if graphs.draws else None
        step.add_part(self, ForwardPart(lines, views.batch, graphs.buffers.arrays, views.hidden, graphs=drawing))
        if plan.extend:
            # While the chunks are short, a graph and then their step take less time than one eager mixed step.
            self._run_model(replace(plan, page_writes=rest, decode=NO_ROWS), 1, step)

    def _check(self, plan: StepPlan) -> None:
        embedded = plan.extend and self.encoder is None and any([row.embeddings is not None for row in plan.extend])
        if self.encoder is None and (plan.encode or embedded):
            raise ConfigError("a step with images, on a runner without an encoder: build it with images=True")
        if (plan.imports or plan.exports) and self.arena is None:
            raise ConfigError("states cannot come or go without an arena: set transfer_bytes")
        num_drafts = int(plan.decode.num_drafts.max()) if len(plan.decode.drafts) else 0
        width = self._num_verify_tokens
        if num_drafts >= width:
            raise ConfigError(f"{num_drafts} drafts in a row; this runner verifies {width - 1}: raise num_draft_tokens")
        if not self.forks and plan.decode.predecessors is not None:
            raise ConfigError("drafts that fork, on a runner made for topk=1: use SpeculativeConfig(topk=2) or more")

    def _enter_tables(self, plan: StepPlan) -> None:
        if (changes := pack_tables(plan)) is not None:
            enter_tables(self.pools, self.sampling_table, self.staging.upload(changes))

    def _make_batch(
        self, plan: StepPlan, on_host: StepArrays[np.ndarray], arrays: StepArrays[torch.Tensor], tokens_per_row: int
    ) -> ForwardBatch:
        n, table, prompts = len(plan.decode.rows), self.pools.req_to_token, arrays.prompts
        decoded, chunks, spec = None, None, spec_info_of(arrays.drafts, tokens_per_row) if n else None
        if n:
            mrope = table.mrope_deltas is not None
            decoded = TokenInputs.allocate(n * tokens_per_row, self.device, table.num_groups, mrope=mrope)
            fill_decode(decoded, arrays, n, spec, self.last_tokens, table)
        if prompts is None:
            starts = torch.arange(0, n * tokens_per_row + 1, tokens_per_row, dtype=torch.int32, device=self.device)
        else:
            starts, kv_places = prompts.query_start_loc, table.token_slots(prompts.rows, prompts.positions)
            turning = prompts.positions if decoded is not None and prompts.mrope is None else prompts.mrope
            chunks = TokenInputs(prompts.input_ids, prompts.positions, kv_places, turning)
        inputs = decoded.then(chunks) if decoded and chunks else decoded or chunks
        assert inputs is not None, "a step has rows"
        batch = make_batch(
            self.backend,
            arrays.rows,
            arrays.seq_lens,
            starts,
            inputs,
            n,
            spec,
            seq_lens_cpu=on_host.seq_lens.tolist(),
            query_lens_cpu=[tokens_per_row] * n + [len(r.tokens) for r in plan.extend],
        )
        if prompts is not None and prompts.embedded is not None:
            batch.embeddings = self.encoder.embeddings(prompts.embedded)  # type: ignore[union-attr]  # launch has checked
        if prompts is not None and on_host.prompts is not None:
            set_recurrent(batch, on_host.prompts.recurrent, prompts.recurrent, self._chunk_sizes)
        return batch
