"""Room of prompt graphs for copies of keys and values: its size, who gets it, and steps for which it is too small."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridrt.attention import triton
from hybridrt.attention.graph_copies import MOST_BYTES, copied, copy_numbers, longest_context
from hybridrt.attention.prefill_decode import PrefillDecodeAttnBackend
from hybridrt.attention.triton import TritonAttnBackend
from hybridrt.base.draft_methods import BUILT_IN, load_method
from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import MemoryBudgetError
from hybridrt.base.forward_batch import GraphView
from hybridrt.base.model_config import AttentionSpec
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.attention.graph_copies import BLOCK_N, DIM, copied_tokens
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.recurrent.backends import BACKENDS, backend_class, resolve_attention_name
from hybridrt.runtime.load import graph_costs
from hybridrt.runtime.load.draft_needs import DraftNeeds
from hybridrt.runtime.load.fit import as_on_gpu
from hybridrt.runtime.load.graph_costs import graph_bytes, wants_prompt_graphs
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.load.pool_costs import fixed_bytes

FALCON = AttentionSpec(12, 2, DIM, DIM, None, DIM**-0.5, torch.bfloat16)
WINDOW, WIDE = replace(FALCON, sliding_window=500), replace(FALCON, head_dim=256, v_head_dim=256)
CONFIG = Path(__file__).parents[2] / "benchmarks/configs/falcon-h1-7b"


def backend(*specs: AttentionSpec, pages: int = 9, context: int = 64) -> TritonAttnBackend:
    pool = KVPool({spec: [i] for i, spec in enumerate(specs)}, num_pages=pages, page_size=16, device="cpu")
    groups = len(pool.windows)
    table = HybridReqToTokenPool(
        num_rows=3, max_context=context, page_size=16, mamba_pool=None, device=torch.device("cpu"), num_groups=groups
    )  # fmt: skip
    return TritonAttnBackend(kv_pool=pool, req_to_token_pool=table)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of the kernel fit the device."""
    monkeypatch.setattr(triton, "copies_in_graphs", lambda device: True)


def test_layers_with_copies() -> None:
    codes = replace(FALCON, dtype=torch.float8_e4m3fn, query_dtype=torch.bfloat16)
    assert copied(FALCON) and copied(codes)
    others = WINDOW, WIDE, replace(FALCON, dtype=torch.float32), replace(FALCON, variant="mla", head_dim=576)
    assert not any(map(copied, others)) and copy_numbers(others, 1000) == 0


@pytest.mark.parametrize("context", [1, 64, 65, 200_000])
def test_the_longest_request_fits_whatever_the_rows(context: int) -> None:
    """Each row has whole tiles."""
    wide = replace(FALCON, num_kv_heads=8, num_heads=8)
    numbers = copy_numbers((FALCON, wide), context)
    longest = longest_context((FALCON, wide), numbers)
    assert longest >= context
    rows = [longest - 8 * (BLOCK_N + 1), *[BLOCK_N + 1] * 8]
    assert sum(-(-n // BLOCK_N) * BLOCK_N for n in rows) <= copied_tokens(numbers, 8) <= copied_tokens(numbers, 2)


def test_copies_take_a_part_of_the_memory_alone() -> None:
    numbers = copy_numbers((FALCON,), 10**7)
    assert 2 * numbers == MOST_BYTES and longest_context((FALCON,), numbers) < 10**7


@pytest.mark.usefixtures("large")
def test_graphs_of_prompts_get_room_for_what_the_pool_holds() -> None:
    found, view = backend(FALCON, WINDOW), GraphView(4, 1, prompts=True)
    found.allocate_graph(view)
    buffer = view.buffers[found]
    assert buffer.dtype == torch.bfloat16 and len(buffer) == copy_numbers((FALCON,), 64)
    assert view.most_context == longest_context((FALCON,), len(buffer))
    few = backend(FALCON, pages=2)
    few.allocate_graph(view)
    assert len(view.buffers[few]) == copy_numbers((FALCON,), 32)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("specs", "prompts"), [((FALCON,), False), ((WIDE,), True), ((WINDOW,), True), ((), True)])
def test_others_get_none(specs: tuple[AttentionSpec, ...], prompts: bool) -> None:
    view = GraphView(4, 1, prompts=prompts)
    found = backend(*specs) if specs else backend(WIDE)
    found.allocate_graph(view)
    assert found not in view.buffers and view.most_context is None


def test_a_device_whose_programs_the_tiles_do_not_fit_gets_none() -> None:
    found, view = backend(FALCON), GraphView(4, 1, prompts=True)
    found.allocate_graph(view)
    assert found not in view.buffers


@pytest.mark.usefixtures("large")
def test_the_backend_of_prompts_gets_it() -> None:
    pair = PrefillDecodeAttnBackend(backend(FALCON), backend(FALCON))
    view = GraphView(4, 1, prompts=True)
    pair.allocate_graph(view)
    assert pair.prefill_backend in view.buffers


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(str(CONFIG), device="cpu", load_format="dummy")


def copies(config: EngineConfig, max_len: int = 262_144) -> int:
    """Bytes that the plan has for copies, of a GPU."""
    target = as_on_gpu(config, load_target(config, TPGroup())[1], "h200")
    alone = graph_bytes(replace(config, cuda_graph_prompts=False), target, max_len)
    logits = (256 + 8) * target.model_config.vocab_size * target.dtype.itemsize
    return max(graph_bytes(config, target, max_len) - alone - logits, 0)


def test_the_plan_has_them(config: EngineConfig) -> None:
    """269 MB of Falcon-H1-7B's 262,144 tokens, in graphs of prompts alone."""
    assert copies(config) == 2 * copy_numbers((FALCON,), 262_144)
    assert copies(config, 1000) == 2 * copy_numbers((FALCON,), 1000)


def test_the_plan_has_none_where_none_are_made(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert copies(replace(config, attention_backend="torch")) == 0
    assert copies(replace(config, attention_backend="fa3", prefill_attention_backend="triton")) == 0
    assert copies(replace(config, attention_backend="torch", prefill_attention_backend="triton")) == copies(config) > 0
    assert copies(replace(config, attention_backend="triton", prefill_attention_backend="fa3")) == copies(config)
    monkeypatch.setattr("hybridrt.runtime.load.graph_costs.wants_prompt_graphs", lambda *_: False)
    assert copies(config) == 0


def test_no_backend_that_auto_chooses_for_prefill_alone_captures_prompts() -> None:
    """`prompt_graph_bytes` does not ask which one that is."""
    device = torch.device("cuda")
    decode = resolve_attention_name("auto", device)
    chosen = [name for name in BACKENDS.built_in if device.type in backend_class(name).auto_prefill]
    assert not any(backend_class(name).captures_prompts for name in chosen[: chosen.index(decode)])


def test_replicas_that_share_experts_have_no_graphs_of_prompts(config: EngineConfig) -> None:
    target = load_target(config, TPGroup())[1]
    assert wants_prompt_graphs(config, target)
    assert not wants_prompt_graphs(config, replace(target, tp=TPGroup(replicas=TPGroup(size=2))))


def test_drafters_on_the_device_have_no_graphs_of_prompts(config: EngineConfig) -> None:
    target = load_target(config, TPGroup())[1]
    assert wants_prompt_graphs(replace(config, speculative=SpeculativeConfig("ngram", 3)), target)
    assert not wants_prompt_graphs(replace(config, speculative=SpeculativeConfig("mtp", 3)), target)
    for name in BUILT_IN:
        method = load_method(name)
        assert isinstance(method, DraftNeeds)
        assert method.on_device == (type(method).device_drafter is not DraftNeeds.device_drafter)


def test_a_small_budget_has_room_for_copies_of_what_fits(config: EngineConfig) -> None:
    """Not for those of 262,144 tokens, which would take more than a quarter of it."""
    config = replace(config, max_running_requests=1)
    target = as_on_gpu(config, load_target(config, TPGroup())[1], "h200")
    without = make_plan(replace(config, cuda_graph_prompts=False), target, budget_bytes=10**9)
    plan = make_plan(config, target, budget_bytes=10**9)
    assert 0.9 * without.max_model_len < plan.max_model_len < without.max_model_len < 262_144
    assert plan.costs.fixed - without.costs.fixed >= copies(config, plan.max_model_len)
    assert plan.pool_bytes <= 10**9


def test_a_small_budget_has_room_for_a_draft_model_of_requests_that_fit(config: EngineConfig) -> None:
    """Its pages of a request of 262,144 tokens would take twice as much."""
    method = SpeculativeConfig("draft", 4, draft_model=str(CONFIG.parent / "falcon-h1-0.5b"))
    config = replace(config, max_running_requests=1, speculative=method)
    target = as_on_gpu(config, load_target(config, TPGroup())[1], "h200")
    plan = make_plan(config, target, budget_bytes=5 * 10**9)
    assert 4000 < plan.max_model_len < 262_144 and plan.pool_bytes <= 5 * 10**9


def test_copies_of_requests_that_barely_fit_make_them_shorter(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose copies take as much as its pages."""
    target = as_on_gpu(config, load_target(config, TPGroup())[1], "h200")
    monkeypatch.setattr(graph_costs, "prompt_graph_bytes", lambda config, device, specs, context: 200_000 * context)
    least = fixed_bytes(config, target, 1)
    plan = make_plan(config, target, budget_bytes=least + 5 * 10**8)
    assert plan.costs.fixed == fixed_bytes(config, target, plan.max_model_len)
    assert plan.max_model_len > 100 and plan.pool_bytes <= plan.budget_bytes
    with pytest.raises(MemoryBudgetError, match="raise the budget"):
        make_plan(replace(config, max_model_len=8000), target, budget_bytes=least + 10**9)
