"""Runs steps: owns the model, its pools and its backend, and turns a StepPlan into tokens."""

from collections.abc import Sequence

import torch

from hybridrt.attention.hybrid_linear import HybridLinearAttnBackend
from hybridrt.attention.registry import create_backend
from hybridrt.config import EngineConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.errors import ConfigError
from hybridrt.forward_batch import ForwardBatch, ForwardMode
from hybridrt.kernels.sampling import token_logprobs
from hybridrt.runtime.build import build_model, build_pools, load_target, make_plan, weight_bytes
from hybridrt.runtime.sampler import Filters, Sampler, SamplingTable
from hybridrt.runtime.step import StepHandle, StepPlan, StepResult, TokenLogprobs
from hybridrt.runtime.step_inputs import Sections, StepBuffer, pack_step
from hybridrt.sampling_params import SamplingParams


class ModelRunner:
    """The executor of a real model.

    Args:
        config: what to run.
        tp: this process's tensor-parallel rank.
        budget_bytes: what the pools may take; None follows EngineConfig.memory_fraction (CUDA) or the free memory.
        progress: show a bar while loading.

    Attributes:
        model_path, model_config: where the checkpoint lies and what it says.
        plan: rows, slots and pages that a scheduler may hand out.
        backend, pools: for those who drive the model themselves.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tp: TPGroup | None = None,
        budget_bytes: int | None = None,
        progress: bool = False,
    ) -> None:
        if config.speculative is not None:
            raise ConfigError("speculative decoding is not implemented in this version; pass speculative=None")
        tp = tp or TPGroup()
        if tp.size != config.tp_size:
            raise ConfigError(f"tp_size is {config.tp_size}, but this process belongs to a group of {tp.size}")
        self.config = config
        self.model_path, self.target = load_target(config, tp)
        self.model_config, self.device = self.target.model_config, self.target.device
        self.model = build_model(config, self.target, self.model_path, progress)
        self.plan = make_plan(config, self.target, budget_bytes=budget_bytes, weights=weight_bytes(self.model))
        self.pools = build_pools(config, self.target, self.plan)
        self.backend = create_backend(
            config,
            self.model_config,
            layers=self.model.mixers(),
            kv_pool=self.pools.kv,
            req_to_token_pool=self.pools.req_to_token,
            device=self.device,
        )
        self.sampling_table = SamplingTable(self.plan.num_rows, self.model_config.vocab_size, self.device)
        self.sampler = Sampler(self.sampling_table)
        # The next input of every row: sampled here, read by the next step, never waited for by the host.
        self.last_tokens = torch.zeros(self.plan.num_rows + 1, dtype=torch.int32, device=self.device)
        self._buffer = StepBuffer(self.device)
        self._params: dict[int, SamplingParams] = {}

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Queues one step on the device and returns at once; see hybridrt.runtime.step.Executor."""
        self._params.update((a.row, a.params) for a in plan.admissions)
        sections = self._buffer.upload(pack_step(plan))
        self._bookkeep(sections)
        hidden = self._forward(plan, sections)
        if not sections["sample_at"].numel():
            return LaunchedStep(None)
        logits = self.model.logits(hidden.index_select(0, sections["sample_at"]))
        return self._sample(plan, sections, logits)

    def _bookkeep(self, sections: Sections) -> None:
        """Mirrors the host's allocation: pages, slots, zeroed state, sampling constants."""
        table = self.pools.req_to_token
        if sections["admit_rows"].numel():
            rows = sections["admit_rows"].long()
            table.admit(rows, sections["admit_slots"].long())
            self.sampling_table.admit(rows, sections)
        if sections["pages"].numel():
            table.write_pages(*(sections[name].long() for name in ("page_rows", "page_indices", "pages")))

    def _forward(self, plan: StepPlan, sections: Sections) -> torch.Tensor:
        batch = self._batch(plan, sections)
        self.backend.init_forward_metadata(batch)
        hidden: torch.Tensor = self.model(batch)
        if plan.decode and isinstance(self.backend, HybridLinearAttnBackend):
            self.backend.commit_decode()
        return hidden

    def _batch(self, plan: StepPlan, sections: Sections) -> ForwardBatch:
        num_decode, rows = len(plan.decode), sections["rows"]
        mode = ForwardMode.DECODE if not plan.extend else ForwardMode.MIXED if plan.decode else ForwardMode.EXTEND
        ids = sections["extend_ids"]
        if num_decode:
            ids = torch.cat((self.last_tokens[rows[:num_decode]], ids))
        new = [1] * num_decode + [len(r.tokens) for r in plan.extend]
        computed = [r.computed for r in (*plan.decode, *plan.extend)]
        return ForwardBatch(
            forward_mode=mode,
            input_ids=ids,
            positions=sections["positions"],
            req_pool_indices=rows,
            seq_lens=sections["seq_lens"],
            query_start_loc=sections["query_start_loc"],
            out_cache_loc=self.pools.req_to_token.token_slots(sections["token_rows"], sections["positions"]),
            num_real=rows.shape[0],
            num_decode_rows=num_decode,
            attn_backend=self.backend,
            seq_lens_cpu=[c + n for c, n in zip(computed, new)],
            query_lens_cpu=new,
        )

    def _sample(self, plan: StepPlan, sections: Sections, logits: torch.Tensor) -> "LaunchedStep":
        sampled = [*plan.decode, *(r for r in plan.extend if r.sample)]
        params = [self._params[r.row] for r in sampled]
        rows = sections["sample_rows"]
        tokens = self.sampler(logits, rows, sections["output_indices"], Filters.of(params))
        self.last_tokens[rows] = tokens.int()
        wanted = [p.logprobs for p in params]
        top_n = max((n for n in wanted if n is not None), default=None)
        logprobs = () if top_n is None else token_logprobs(logits, tokens, top_n)
        return LaunchedStep(tokens, logprobs, wanted)


class LaunchedStep:
    """A step on its way. Its results are copied to pinned memory behind it, so that reading them waits for this step
    alone and not for the one launched after it."""

    def __init__(
        self,
        tokens: torch.Tensor | None,
        logprobs: tuple[torch.Tensor, ...] = (),
        wanted: Sequence[int | None] = (),
    ) -> None:
        self._tokens = None if tokens is None else _to_host(tokens)
        self._logprobs = tuple(_to_host(t) for t in logprobs)
        self._wanted = wanted
        self._event: torch.cuda.Event | None = None
        if tokens is not None and tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        ids = [[t] for t in self._tokens.tolist()] if self._tokens is not None else []
        if not self._logprobs:
            return StepResult(ids, [None] * len(ids))
        own, top_ids, top = (t.tolist() for t in self._logprobs)
        rows = [
            None if n is None else [TokenLogprobs(own[i], dict(zip(top_ids[i][:n], top[i][:n])))]
            for i, n in enumerate(self._wanted)
        ]
        return StepResult(ids, rows)


def _to_host(t: torch.Tensor) -> torch.Tensor:
    if not t.is_cuda:
        return t
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
