"""Bytes of the entries of the pools, and of all that is charged besides."""

from hybridrt.base.engine_config import EngineConfig
from hybridrt.mem_cache.pools.host_plan import STAGED_BYTES
from hybridrt.mem_cache.pools.kv_pool import page_bytes
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan, UnitCosts
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.runtime.load.draft_needs import draft_needs
from hybridrt.runtime.load.graph_costs import graph_bytes
from hybridrt.runtime.load.kept_state import kv_layers, page_demands, pool_spec, set_bytes, table_length
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.sampling.sampler import prompt_logprob_bytes
from hybridrt.runtime.step.sampling_table import SamplingTable


def unit_costs(config: EngineConfig, target: RunTarget, max_len: int) -> UnitCosts:
    """Bytes of the entries of the pools, with page tables and graphs for requests of `max_len` tokens."""
    return UnitCosts(
        slot=pool_spec(config, target).slot_bytes(),
        row=row_bytes(config, target, max_len),
        pages=page_bytes(kv_layers(config, target), config.page_size),
        fixed=fixed_bytes(config, target, max_len),
        transfer=config.transfer_bytes,
        encoder=encoder_bytes(config, target),
    )


def fixed_bytes(config: EngineConfig, target: RunTarget, max_len: int) -> int:
    """Bytes that do not depend on the numbers of rows, slots and pages."""
    scores = prompt_logprob_bytes(target.model_config.vocab_size, target.dtype.itemsize)
    drafts = draft_needs(config).fixed_bytes(config, target)
    return graph_bytes(config, target, max_len) + drafts + scores + staged_bytes(config, target)


def own_pages(config: EngineConfig, plan: MemoryPlan) -> int:
    """The drafter's pages of each page group."""
    return (plan.num_rows + 1) * draft_needs(config).row_pages(config)


def row_bytes(config: EngineConfig, target: RunTarget, max_len: int) -> int:
    """Bytes of a running request without slot and pages: rings, page table, sampling, drafter."""
    groups = max(len(page_demands(config, target)), 1)
    table = HybridReqToTokenPool.row_bytes(table_length(config, target, max_len), config.page_size, groups)
    sampling = SamplingTable.row_bytes(target.model_config.vocab_size)
    method = draft_needs(config)
    drafter = method.row_bytes(config, target, max_len) + method.row_pages(config) * set_bytes(config, target)
    return pool_spec(config, target).row_bytes() + table + sampling + 4 + drafter


def staged_bytes(config: EngineConfig, target: RunTarget) -> int:
    """Device memory for copies to and from the main-memory tier: staged pages, gathered pages, a
    state."""
    if not config.host_cache_bytes:
        return 0
    return 2 * max(STAGED_BYTES, set_bytes(config, target)) + 2 * pool_spec(config, target).image_bytes()


def encoder_bytes(config: EngineConfig, target: RunTarget) -> int:
    """Embeddings that are kept, and what the encoder needs for as many tokens at once."""
    spec, itemsize = target.model_config.vision, target.dtype.itemsize
    if spec is None:
        # Kept, and on their way in float32 and in the dtype.
        return config.encoder_cache_tokens * target.model_config.hidden_size * (4 + 2 * itemsize) * config.prompt_embeds
    # The patches as bytes, in float32 twice and in the dtype; then the stream, its norm, q, k and v rotated,
    # attention's output, and the MLP before and after its activation.
    numbers = 8 * spec.hidden_size + 2 * spec.intermediate_size + 2 * spec.projector_size // spec.merge**2
    patch = spec.patch_numbers * (9 + itemsize) + numbers * itemsize
    token = patch * spec.merge**2 + 3 * spec.out_size * itemsize
    return config.encoder_cache_tokens * token
