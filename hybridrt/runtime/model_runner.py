"""Runs steps: owns the model, its pools and its backend, and turns a StepPlan into tokens."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.attention.registry import create_backend
from hybridrt.config import EngineConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.errors import ConfigError, MemoryBudgetError
from hybridrt.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.draft_tree import tree_mask, tree_positions
from hybridrt.mem_cache.memory_plan import MemoryPlan, UnitCosts
from hybridrt.runtime.build import (
    build_model,
    build_pools,
    device_budget,
    empty_model,
    host_budget,
    kv_layer_ids,
    load_target,
    make_plan,
    step_widths,
    weight_bytes,
)
from hybridrt.runtime.drafting import DeviceDrafter, draft_method
from hybridrt.runtime.fit import plan_ahead
from hybridrt.runtime.graph_runner import DecodeInputs, GraphRunner
from hybridrt.runtime.launched_step import JoinedSteps, LaunchedStep, requested_logprobs
from hybridrt.runtime.sampler import Accepted, Filters, Sampler, SamplingTable, Verification
from hybridrt.runtime.state_arena import StateArena
from hybridrt.runtime.step import Admission, ExtendRow, PageWrite, StepHandle, StepPlan
from hybridrt.runtime.step_inputs import Sections, StagingRing, pack_step, padded, tree_nodes
from hybridrt.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class ModelRunner:
    """The executor of a real model.

    Args:
        config: what to run.
        tp: this process's tensor-parallel rank.
        budget_bytes: what the pools may take; None follows EngineConfig.memory_fraction (CUDA) or the free memory.
        plan: what the pools hold, for those who know; None makes a plan from the budget.
        progress: show a bar while loading.

    Raises:
        MemoryBudgetError: weights, pools or graphs do not fit the device; says which number to change.

    Attributes:
        model_path, model_config: where the checkpoint lies and what it says.
        plan: rows, slots and pages that a scheduler may hand out.
        backend, pools: for those who drive the model themselves.
        arena: images of states that come from or go to other workers; None without EngineConfig.transfer_bytes.
        drafter: the part of a drafter that runs beside the model; None without one.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tp: TPGroup | None = None,
        budget_bytes: int | None = None,
        plan: MemoryPlan | None = None,
        progress: bool = False,
    ) -> None:
        tp = tp or TPGroup()
        if tp.size != config.tp_size:
            raise ConfigError(f"tp_size is {config.tp_size}, but this process belongs to a group of {tp.size}")
        self.config = config
        self._trees = config.speculative is not None and config.speculative.topk > 1
        self.arena: StateArena | None = None
        self.graphs: dict[int, GraphRunner] = {}  # by tokens of a row; captured once the final pools stand
        self.model_path, self.target = load_target(config, tp)
        self.model_config, self.device = self.target.model_config, self.target.device
        if plan is None:
            weights = weight_bytes(empty_model(config, self.target, torch.device("meta")))
            plan_ahead(config, self.target, weights, budget_bytes)  # raises what can be known before loading
        with _out_of_memory_as("loading weights", "run it on a larger device, or end what else runs on this one"):
            self.model = build_model(config, self.target, self.model_path, progress)
        with _out_of_memory_as("allocating pools", "lower memory_fraction or chunked_prefill_size"):
            self._allocate(plan or self._make_plan(budget_bytes))
            if config.transfer_bytes:
                self.arena = StateArena(self.target, self.pools, self.backend, config.transfer_bytes)
        if self.device.type == "cuda" and config.cuda_graph:
            with _out_of_memory_as("capturing graphs", "lower memory_fraction or cuda_graph_max_bs"):
                self.capture(progress)

    def _make_plan(self, budget_bytes: int | None) -> MemoryPlan:
        peak, tp = 0, self.target.tp
        if budget_bytes is None and self.device.type == "cuda":
            peak = self._measure_activations()
            budget_bytes = device_budget(self.device, self.config.memory_fraction) - peak
        # One scheduler hands out the rows and pages of all ranks: the poorest decides how many.
        budget_bytes = tp.minimum(host_budget(tp) if budget_bytes is None else budget_bytes)
        weights = weight_bytes(self.model)
        return make_plan(self.config, self.target, budget_bytes=budget_bytes, weights=weights, activations=peak)

    def _allocate(self, plan: MemoryPlan) -> None:
        """Pools, backend and tables of a plan."""
        self.plan = plan
        self.pools = build_pools(self.config, self.target, plan)
        self.backend = create_backend(
            self.config,
            self.model_config,
            layers=self.model.mixers(),
            kv_pool=self.pools.kv,
            req_to_token_pool=self.pools.req_to_token,
            device=self.device,
            composite=self.model.composite,
        )
        self.sampling_table = SamplingTable(plan.num_rows, self.model_config.vocab_size, self.device)
        self.sampler = Sampler(self.sampling_table)
        # The next input of every row: sampled here, read by the next step, never waited for by the host.
        self.last_tokens = torch.zeros(plan.num_rows + 1, dtype=torch.int32, device=self.device)
        self._staging = StagingRing(self.device)
        self._params: dict[int, SamplingParams] = {}
        self.drafter: DeviceDrafter | None = draft_method(self.config).device_drafter(self)

    def _measure_activations(self) -> int:
        """Bytes that the largest prefill step takes beside weights and pools: one is run over small pools."""
        config, limit = self.config, self.model_config.max_position_embeddings
        length = min(config.chunked_prefill_size, config.max_model_len or limit, limit)
        rows = -(-config.chunked_prefill_size // length)
        pages = -(-length // config.page_size) if kv_layer_ids(config, self.target) else 0
        costs = UnitCosts(slot=0, row=0, page=0)
        self._allocate(MemoryPlan(rows, rows, rows * pages, config.page_size, length, costs, 0))
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.launch(_probe_step(rows, length, pages)).result()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del self.pools, self.backend, self.sampling_table, self.sampler, self.drafter
        torch.cuda.empty_cache()
        return peak

    def capture(self, progress: bool = False) -> None:
        """Records steps as graphs, of every width that occurs."""
        asked, rows = self.config.cuda_graph_max_bs, self.plan.num_rows
        if asked is not None and asked > rows:
            logger.warning(
                "graphs end at batch %d, not at cuda_graph_max_bs=%d: no more requests have state", rows, asked
            )
        self.graphs.update({tokens: self._capture(tokens, progress) for tokens in step_widths(self.config)})
        if self.drafter is not None:
            self.drafter.capture(asked or rows, progress)
        taken = sum(graphs.captured_bytes for graphs in self.graphs.values())
        logger.info("graphs of up to %d rows take %.2f GiB", min(asked or rows, rows), taken / 2**30)

    def _capture(self, tokens: int, progress: bool) -> GraphRunner:
        """Graphs of decode steps (tokens 1) or verify steps."""
        graphs = GraphRunner(
            model=self.model,
            backend=self.backend,
            req_to_token_pool=self.pools.req_to_token,
            last_tokens=self.last_tokens,
            max_bs=self.config.cuda_graph_max_bs or self.plan.num_rows,
            spec_info=SpecInfo(tokens) if tokens > 1 else None,
            tree=self._trees and tokens > 1,
            keep_hidden=self.drafter is not None,
        )
        graphs.capture(progress)
        return graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Queues one step on the device and returns at once; see hybridrt.runtime.step.Executor."""
        self._check_drafts(plan)
        if (plan.imports or plan.exports) and self.arena is None:
            raise ConfigError("states cannot come or go without an arena: set transfer_bytes")
        self._params.update((a.row, a.params) for a in plan.admissions)
        tokens = self._tokens_per_row(plan)
        graphs = self.graphs.get(tokens)
        fits = plan.decode and graphs and graphs.bucket(len(plan.decode))
        inputs = self._graph_inputs(plan, tokens) if fits else None
        with _given_up_on_failure(self.backend):
            if inputs is None or graphs is None:
                return self._launch_eager(plan, tokens)
            decoded = self._launch_graph(graphs, inputs)
            if not plan.extend:
                return decoded
            # Below the size where one GEMM for all pays, the graph and then the chunks beat one eager mixed step.
            writes = [w for w in plan.page_writes if w.row not in set(inputs.rows)]
            rest = StepPlan(plan.admissions, writes, [], plan.extend, plan.imports, plan.exports)
            return JoinedSteps(decoded, self._launch_eager(rest, 1))

    def _launch_graph(self, graphs: GraphRunner, inputs: DecodeInputs) -> LaunchedStep:
        logits, n, buffers = graphs.replay(inputs), len(inputs.rows), graphs.buffers
        rows, indices = buffers.rows[:n], buffers.output_indices[:n]
        accepted = None
        if buffers.drafts is None:
            launched = self._sample(inputs.rows, rows, indices, logits)
        else:
            positions = buffers.positions.view(-1, graphs.tokens)[:n]
            tree = (buffers.parents[:n], buffers.tree_mask[:n]) if buffers.tree else ()
            drafts = (buffers.drafts[:n], buffers.num_drafts[:n])
            verification = Verification(rows, indices, positions, *drafts, self.last_tokens, *tree)
            launched, accepted = self._verify(inputs.rows, verification, logits)
        if self.drafter is not None:
            self.drafter.follow(graphs.batch(n), buffers.hidden[: len(logits)], self.last_tokens, accepted, None)
        return launched

    def _graph_inputs(self, plan: StepPlan, tokens: int) -> DecodeInputs | None:
        """The decode rows of a plan as a graph takes them, or None where the step must run eagerly."""
        trees, pages = self._trees and tokens > 1, dict.fromkeys((r.row for r in plan.decode), -1)
        last_page = {r.row: (r.computed + len(r.drafts)) // self.plan.page_size for r in plan.decode}
        for write in plan.page_writes:
            if write.row not in pages:
                continue
            if len(write.pages) != 1 or write.first_page != last_page[write.row]:
                return None
            pages[write.row] = write.pages[0]
        return DecodeInputs(
            rows=list(pages),
            seq_lens=[r.computed + tokens for r in plan.decode],
            output_indices=[r.output_index for r in plan.decode],
            new_pages=list(pages.values()),
            num_drafts=[len(r.drafts) for r in plan.decode],
            drafts=[t for r in plan.decode for t in padded(r.drafts, tokens - 1)],
            **(tree_nodes(plan.decode, tokens) if trees else {}),  # type: ignore[arg-type]  # arrays are sequences
        )

    def _launch_eager(self, plan: StepPlan, tokens: int) -> StepHandle:
        sections = self._staging.upload(pack_step(plan, tokens, self._trees and tokens > 1, self.drafter is not None))
        self._bookkeep(sections)
        for arrival in plan.imports:
            self.arena.import_state(arrival)  # type: ignore[union-attr]  # launch has checked
        batch = self._batch(plan, sections, tokens)
        self.backend.init_forward_metadata(batch)
        hidden = self.model(batch)
        if plan.decode and tokens == 1:
            self.backend.commit_decode()
        for departure in plan.exports:
            self.arena.export_state(departure)  # type: ignore[union-attr]
        launched, accepted = self._draw(plan, sections, batch, hidden)
        if self.drafter is not None:
            self.drafter.follow(batch, hidden, self.last_tokens, accepted, sections)
        return launched

    def _draw(
        self, plan: StepPlan, sections: Sections, batch: ForwardBatch, hidden: torch.Tensor
    ) -> tuple[StepHandle, Accepted | None]:
        """Tokens of the rows that gain some, and what a verify step keeps."""
        if not plan.sampled:
            return LaunchedStep(None), None
        logits = self.model.logits(hidden.index_select(0, sections["sample_at"]))
        rows, indices = sections["sample_rows"], sections["output_indices"]
        if batch.tokens_per_row == 1:
            return self._sample([r.row for r in plan.sampled], rows, indices, logits), None
        n, split, spec = len(plan.decode), batch.num_decode_tokens, batch.spec_info
        assert spec is not None
        verification = Verification(
            rows[:n], indices[:n], batch.positions[:split].view(n, -1), sections["drafts"].view(n, -1),
            sections["num_drafts"], self.last_tokens, spec.parents, spec.tree_mask,
        )  # fmt: skip
        verified, accepted = self._verify([r.row for r in plan.decode], verification, logits[:split])
        last = [r.row for r in plan.extend if r.sample]
        return JoinedSteps(verified, self._sample(last, rows[n:], indices[n:], logits[split:])), accepted

    def _check_drafts(self, plan: StepPlan) -> None:
        most, width = max((len(r.drafts) for r in plan.decode), default=0), self.config.num_verify_tokens
        if most >= width:
            raise ConfigError(f"{most} drafts in a row; this runner verifies {width - 1}: raise num_draft_tokens")
        if not self._trees and any(r.parents is not None for r in plan.decode):
            raise ConfigError("a draft tree on a runner made for chains: use SpeculativeConfig(topk=2) or more")

    def _tokens_per_row(self, plan: StepPlan) -> int:
        """T of the step's decode rows (`step_widths` has them all); where none has drafts, a plain step serves."""
        return self.config.num_verify_tokens if any(r.drafts for r in plan.decode) else 1

    def _bookkeep(self, sections: Sections) -> None:
        """Mirrors the host's allocation: pages, slots, zeroed state, sampling constants."""
        table = self.pools.req_to_token
        if sections["admit_rows"].numel():
            rows = sections["admit_rows"].long()
            table.admit(rows, sections["admit_slots"].long())
            self.sampling_table.admit(rows, sections)
        if sections["pages"].numel():
            table.write_pages(*(sections[name].long() for name in ("page_rows", "page_indices", "pages")))

    def _batch(self, plan: StepPlan, sections: Sections, tokens: int) -> ForwardBatch:
        num_decode, rows = len(plan.decode), sections["rows"]
        segments = (ForwardMode.TARGET_VERIFY if tokens > 1 else ForwardMode.DECODE, ForwardMode.MIXED)
        mode = segments[bool(plan.extend)] if plan.decode else ForwardMode.EXTEND
        ids = sections["extend_ids"]
        if num_decode:
            ids = torch.cat((self._decode_ids(sections, num_decode, tokens), ids))
        places = positions = sections["positions"]
        spec = self._spec_info(sections, tokens) if tokens > 1 and num_decode else None
        if spec is not None and spec.tree_mask is not None:
            split = num_decode * tokens
            positions = torch.cat((tree_positions(places[:split], spec.tree_mask), places[split:]))
        new = [tokens] * num_decode + [len(r.tokens) for r in plan.extend]
        computed = [r.computed for r in plan.rows]
        return ForwardBatch(
            forward_mode=mode,
            input_ids=ids,
            positions=positions,
            req_pool_indices=rows,
            seq_lens=sections["seq_lens"],
            query_start_loc=sections["query_start_loc"],
            out_cache_loc=self.pools.req_to_token.token_slots(sections["token_rows"], places),
            num_real=rows.shape[0],
            num_decode_rows=num_decode,
            attn_backend=self.backend,
            seq_lens_cpu=[c + n for c, n in zip(computed, new)],
            query_lens_cpu=new,
            spec_info=spec,
        )

    def _decode_ids(self, sections: Sections, rows: int, tokens: int) -> torch.Tensor:
        """[rows * tokens] int32 inputs of the decode rows, as `decode_inputs` gives them to a graph."""
        roots = self.last_tokens[sections["rows"][:rows], None].clamp(min=0)
        real = torch.arange(tokens - 1, device=self.device) < sections["num_drafts"][:, None]
        drafts = torch.where(real, sections["drafts"].view(rows, -1), roots)
        return torch.cat((roots, drafts), 1).view(-1)

    def _spec_info(self, sections: Sections, tokens: int) -> SpecInfo:
        if not self._trees:
            return SpecInfo(tokens, num_drafts=sections["num_drafts"])
        parents, ancestors = (sections[name].view(-1, tokens) for name in ("parents", "ancestors"))
        return SpecInfo(tokens, parents, tree_mask(ancestors), sections["num_drafts"])

    def _sample(
        self, request_rows: Sequence[int], rows: torch.Tensor, output_indices: torch.Tensor, logits: torch.Tensor
    ) -> LaunchedStep:
        if not request_rows:
            return LaunchedStep(None)
        params = [self._params[row] for row in request_rows]
        tokens = self.sampler(logits, rows, output_indices, Filters.of(params))
        self.last_tokens[rows] = tokens.int()
        return LaunchedStep(tokens[:, None], None, *requested_logprobs(logits, tokens, [p.logprobs for p in params]))

    def _verify(
        self, request_rows: Sequence[int], step: Verification, logits: torch.Tensor
    ) -> tuple[LaunchedStep, Accepted]:
        """Acceptance, then the commit of the state that it keeps."""
        params = [self._params[row] for row in request_rows]
        kept = self.sampler.verify(logits, step, Filters.of(params))
        self.backend.commit_decode(kept.counts, kept.path)
        logprobs = requested_logprobs(logits, kept.tokens, [p.logprobs for p in params], kept.path)
        return LaunchedStep(kept.tokens, kept.counts, *logprobs), kept


@contextmanager
def _given_up_on_failure(backend: AttentionBackend) -> Iterator[None]:
    """A step that fails inside is never committed; those after it are none the worse."""
    try:
        yield
    except BaseException:
        backend.drop_step()
        raise


@contextmanager
def _out_of_memory_as(doing: str, advice: str) -> Iterator[None]:
    """Running out of device memory inside becomes a MemoryBudgetError that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise MemoryBudgetError(f"the device ran out of memory while {doing}: {advice} ({e})") from e


def _probe_step(rows: int, length: int, pages: int) -> StepPlan:
    """A prefill of `rows` prompts of `length` tokens, each with its own pages."""
    params = SamplingParams(temperature=0.0)
    ids = [0] * length
    return StepPlan(
        admissions=[Admission(r, r, ids, length, params, 0) for r in range(1, rows + 1)],
        page_writes=[PageWrite(r, 0, range(1 + (r - 1) * pages, 1 + r * pages)) for r in range(1, rows + 1)],
        extend=[ExtendRow(r, 0, ids, 0, True) for r in range(1, rows + 1)],
    )
