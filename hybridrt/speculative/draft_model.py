"""A smaller model as drafter, with its own pools.

A running request has a row, a state slot and a backup slot. A proposal computes the tokens that
were accepted since the last one, copies the state to the backup and decodes on; the next proposal
starts from the backup, so rejected drafts change no state. KV rolls back by position.

A row keeps its tokens when its request ends, for the next request that begins with them. If no row
fits a request that the target has cached, the draft model reads only the last cached tokens, from
an empty state: its drafts may be worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hybridrt.base.dtypes import DTYPES
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError
from hybridrt.collectives.groups import TPGroup
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan, PageGroup
from hybridrt.mem_cache.pools.page_groups import PageDemand, in_every_group
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey
from hybridrt.mem_cache.prefix_tree.texts import in_common
from hybridrt.runtime.load.build_model import empty_model, weight_bytes
from hybridrt.runtime.load.draft_needs import DraftTarget, Everywhere
from hybridrt.runtime.load.graph_costs import graph_bytes
from hybridrt.runtime.load.kept_state import page_demands, pool_spec, set_bytes
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.pool_costs import row_bytes
from hybridrt.runtime.load.start_kernels import StartAhead
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.pack import StagingRing
from hybridrt.runtime.step.pack_padded import PROMPT_ROWS
from hybridrt.runtime.step.plan import (
    Admission,
    DecodeRow,
    DecodeRows,
    ExtendRow,
    PageWrite,
    StepHandle,
    StepPlan,
)
from hybridrt.runtime.step.sampling_table import SamplingTable
from hybridrt.speculative.draft import Draft, with_others
from hybridrt.speculative.drafter import Drafter, DraftRequest, num_tokens, tokens_between
from hybridrt.speculative.method import DraftMethod

LATE_TOKENS = 512  # last tokens of a cached prompt without a row


@dataclass
class _Tenant:
    """A request in the draft model's pools.

    Attributes:
        row: in all tables; it has slots and pages of its own.
        start: token of the request's text at which the row begins.
        computed: tokens of the text that are in the row's state.
        admitted: the row has the request's sampling parameters.
    """

    request: DraftRequest
    row: int
    start: int = 0
    computed: int = 0
    admitted: bool = False
    chain: list[int] = field(default_factory=list)  # tokens of the current proposal
    others: list[list[int]] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Tokens in the row."""
        return self.computed - self.start


@dataclass
class _FreeRow:
    """A row of the draft model's pools that no request has. It keeps the state of its last request after
    `tokens` [n] int32 of `key`, and the KV from token `start` on."""

    row: int
    key: CacheKey = DEFAULT_KEY
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    start: int = 0


_Launched = tuple[StepHandle, list[_Tenant]]  # a step, and the tenants that it draws for


class DraftModelDrafter(Drafter):
    """Runs the draft model for a proposal: one step per token or, with topk > 1, per topk tokens.

    With topk > 1 the model's own choice is the next input. All steps are launched before the first
    is read. The draft model runs whole on rank 0.

    Args:
        config: configuration of the target; device, lengths and page size are taken from it.
        plan: the target's memory plan; the draft model has as many rows.
        vocab_size: the target's, which must be the draft model's too.
        ahead: that of ModelRunner.
    """

    def __init__(
        self, config: EngineConfig, plan: MemoryPlan, vocab_size: int, ahead: StartAhead | None = None
    ) -> None:
        assert config.speculative is not None
        own = replace(draft_config(config), max_running_requests=plan.num_rows)
        groups = len(page_demands(own, load_target(own, TPGroup())[1]))
        self._topk, own_plan = config.speculative.topk, draft_plan(plan, config.speculative.num_draft_tokens, groups)
        self.runner = ModelRunner(own, plan=own_plan, ahead=ahead)
        attends = bool(self.runner.model_config.full_attention_layer_ids)
        self._pages = own_plan.num_pages // plan.num_rows if attends else 0  # pages of a row, in each page group
        self._groups = self.runner.pools.req_to_token.num_groups
        if self.runner.model_config.vocab_size != vocab_size:
            raise ConfigError(
                f"the draft model's vocabulary has {self.runner.model_config.vocab_size} tokens and the target's "
                f"{vocab_size}; a draft model must share the target's tokenizer"
            )
        self._chunk = config.chunked_prefill_size
        self._recurrent = self.runner.pools.req_to_token.mamba_pool is not None
        self._free = [_FreeRow(row) for row in range(1, plan.num_rows + 1)]  # ordered by last use
        self._backup_offset = plan.num_rows
        self._tenants: dict[int, _Tenant] = {}
        self._pending = StepPlan()  # admissions of the next launch
        self._staging = StagingRing(self.runner.device)

    def begin_request(self, request: DraftRequest) -> None:
        key, ids = request.cache_key, np.array([*request.prompt, *request.output], np.int32)
        usable = [self._usable(free, ids, key) for free in self._free]
        best = max(range(len(usable)), key=lambda i: (usable[i], -i))
        free = self._free.pop(best)
        # The target's cache has only `computed` tokens.
        late = max(request.computed - LATE_TOKENS, 0)
        start, computed = (free.start, usable[best]) if usable[best] > late else (late, late)
        self._tenants[request.arrival] = _Tenant(request, free.row, start, computed)

    def _usable(self, free: _FreeRow, ids: np.ndarray, key: CacheKey) -> int:
        """Counts tokens that need no computing; the last one always does. A recurrent state can
        only be used at its own position.
        """
        held, n = len(free.tokens), min(len(free.tokens), len(ids) - 1)
        if free.key != key or not n or (self._recurrent and (n < held or free.tokens[-1] != ids[n - 1])):
            return 0
        same = in_common(free.tokens, ids[:n])
        return 0 if same <= free.start or (self._recurrent and same < held) else same

    def end_request(self, request: DraftRequest) -> None:
        tenant = self._tenants.pop(request.arrival, None)
        if tenant is not None:
            text = np.array(tokens_between(request, 0, tenant.computed), np.int32)
            whole, key = tenant.held and len(text) == tenant.computed, request.cache_key
            self._free.append(_FreeRow(tenant.row, key, text, tenant.start) if whole else _FreeRow(tenant.row))

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        if not requests:
            return []
        tenants = [self._tenants[request.arrival] for request in requests]
        # A request without a new token (drafts found no page) gets the same drafts again.
        lagging = [(t, -(-n // self._topk)) for t, n in zip(tenants, max_drafts) if t.computed < num_tokens(t.request)]
        launched = self._start([tenant for tenant, _ in lagging])
        for step in range(1, max((steps for _, steps in lagging), default=0)):
            going = [tenant for tenant, steps in lagging if steps > step]
            rows = (DecodeRow(t.row, t.held + step - 1, len(t.request.output) + step) for t in going)
            plan = StepPlan(decode=DecodeRows.from_rows(rows))
            launched.append((self.runner.launch(plan), going))
        for handle, drawing in launched:
            self._read(handle, drawing)
        return [with_others(tenant.chain, tenant.others, n) for tenant, n in zip(tenants, max_drafts)]

    def _read(self, step: StepHandle, tenants: Sequence[_Tenant]) -> None:
        """Appends a token to each tenant's chain, and other likely tokens."""
        result = step.result()
        for tenant, (token,), logprobs in zip(tenants, result.tokens, result.logprobs, strict=True):
            likely = [t for t in logprobs[0] if t != token] if logprobs else []
            tenant.chain.append(max(token, 0))  # -1: the logits are not finite
            tenant.others.append(likely[: self._topk - 1])

    def _start(self, tenants: Sequence[_Tenant]) -> list[_Launched]:
        """Moves the states to the known tokens, and draws the first drafts."""
        fresh = [tenant for tenant in tenants if not tenant.admitted]
        for tenant in fresh:
            row, pages, tenant.admitted = tenant.row, self._pages, True
            own = np.arange(1 + (row - 1) * pages, 1 + row * pages, dtype=np.int32)
            self._pending.admissions.append(self._admission(tenant))
            self._pending.page_writes.append(PageWrite(row, 0, in_every_group(own, self._groups)))
        if any(tenant.held for tenant in fresh):  # restored once their slots are zeroed
            plan, self._pending = self._pending, StepPlan()
            self.runner.launch(plan)
        params = [t.request.params for t in tenants]
        self._recount([t for t, p in zip(tenants, params) if t.held and (p.uses_penalties or p.bad_words)])
        self._copy_state(tenants, to_backup=False)
        launched = self._catch_up(tenants)
        self._copy_state(tenants, to_backup=True)
        return launched

    def _admission(self, tenant: _Tenant) -> Admission:
        request, row = tenant.request, tenant.row
        logprobs = self._topk if self._topk > 1 else None
        params = replace(request.params, logprobs=logprobs, prompt_logprobs=None, pooling=None)
        return Admission.from_prompt(row, row, request.prompt, params, request.seed, request.rules, request.output)

    def _recount(self, tenants: Sequence[_Tenant]) -> None:
        """Counts accepted output for penalties and bad words, not failed drafts."""
        if not tenants:
            return
        arrays = self._staging.upload(SamplingTable.pack([self._admission(tenant) for tenant in tenants]))
        rows = torch.tensor([tenant.row for tenant in tenants], dtype=torch.int64, device=self.runner.device)
        self.runner.sampling_table.enter_rows(rows, arrays)

    def _catch_up(self, tenants: Sequence[_Tenant]) -> list[_Launched]:
        """Uses chunks of few rows; a row's last chunk gives its first draft."""
        launched = list[_Launched]()
        for tenant in tenants:
            tenant.chain, tenant.others = [], []
        # A step with more rows than a graph has takes ten times as long.
        most = PROMPT_ROWS if self.runner.prompt_graphs else len(tenants)
        while waiting := [t for t in tenants if t.computed < num_tokens(t.request)]:
            plan, self._pending, budget = self._pending, StepPlan(), self._chunk
            sampling = []
            for tenant in waiting[:most]:
                request = tenant.request
                chunk = tokens_between(request, tenant.computed, tenant.computed + budget)
                if not chunk:
                    break
                last = tenant.computed + len(chunk) == num_tokens(request)
                plan.extend.append(ExtendRow(tenant.row, tenant.held, chunk, len(request.output), last))
                sampling += [tenant] * last
                tenant.computed += len(chunk)
                budget -= len(chunk)
            launched.append((self.runner.launch(plan), sampling))
        return launched

    def _copy_state(self, tenants: Sequence[_Tenant], to_backup: bool) -> None:
        pool = self.runner.pools.req_to_token.mamba_pool
        tenants = [t for t in tenants if t.held]
        if pool is None or not tenants:
            return
        rows = torch.tensor([t.row for t in tenants], dtype=torch.int64, device=self.runner.device)
        if to_backup:
            pool.snapshot(rows, rows + self._backup_offset)
        else:
            pool.restore(rows + self._backup_offset, rows)


def draft_plan(plan: MemoryPlan, slack: int, num_groups: int) -> MemoryPlan:
    """The draft model's pools: as many rows, twice the slots, and in each page group pages for every
    row at its longest."""
    pages = -(-(plan.max_model_len + slack) // plan.page_size)
    groups = tuple(PageGroup(PageDemand(plan.page_size), plan.num_rows * pages, 0) for _ in range(num_groups))
    length = plan.max_model_len + slack
    return replace(plan, num_slots=2 * plan.num_rows, groups=groups, max_model_len=length, slabs=None)


def draft_config(config: EngineConfig) -> EngineConfig:
    """How the draft model runs: on the same device, on one rank, in state mode "classic", with a KV
    cache of plain numbers and no states in 8 bits, and as its checkpoint is stored."""
    assert config.speculative is not None and config.speculative.draft_model is not None
    return replace(
        config, model=config.speculative.draft_model, speculative=None, max_model_len=None, state_mode="classic",
        mamba_ssm_dtype=config.mamba_ssm_dtype if config.mamba_ssm_dtype in DTYPES else "float32",
        mamba_ssm_rounding="auto",
        attention_backend="auto", prefill_attention_backend=None, linear_attn_backend="auto", transfer_bytes=0,
        tp_size=1, dp_size=1, expert_parallel=False, prefix_cache=False, host_cache_bytes=0, quantization=None,
        kv_cache_dtype="auto", kv_scales="auto",
    )  # fmt: skip


class DraftModelMethod(DraftMethod):
    """A second model, whole on rank 0. Every rank charges it, so that all plan alike."""

    takes_model = True

    def row_bytes(self, config: EngineConfig, target: RunTarget, max_len: int) -> int:
        """Two state slots, and KV of the longest request with all of its drafts."""
        draft = draft_config(config)
        _, own = load_target(draft, TPGroup())
        longest = max_len + config.num_verify_tokens - 1
        pages = -(-longest // config.page_size) * set_bytes(draft, own)
        return 2 * pool_spec(draft, own).slot_bytes() + row_bytes(draft, own, longest) + pages

    def fixed_bytes(self, config: EngineConfig, target: RunTarget) -> int:
        """Weights, and graphs for the longest request with all of its drafts."""
        assert config.speculative is not None
        draft = draft_config(config)
        _, own = load_target(draft, TPGroup())
        longest = config.max_model_len or target.model_config.max_position_embeddings
        graphs = graph_bytes(draft, own, longest + config.speculative.num_draft_tokens)
        return weight_bytes(empty_model(draft, own, torch.device("meta"))) + graphs

    def drafter(self, runner: DraftTarget, everywhere: Everywhere) -> Drafter:
        return DraftModelDrafter(runner.config, runner.memory_plan, runner.model_config.vocab_size, runner.ahead)


METHOD = DraftModelMethod()
