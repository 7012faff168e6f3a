"""Single prefill steps over pools that just hold them: to measure a model before its pools exist."""

from collections.abc import Sequence

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan, PageGroup, UnitCosts
from hybridrt.mem_cache.pools.page_groups import in_every_group
from hybridrt.runtime.load.kept_state import page_demands
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.step.plan import Admission, ExtendRow, PageWrite, StepPlan, int32s


def probe(config: EngineConfig, target: RunTarget) -> tuple[MemoryPlan, StepPlan]:
    """The largest prefill step, and its pools."""
    limit = target.model_config.max_position_embeddings
    length = min(config.chunked_prefill_size, config.max_model_len or limit, limit)
    return prompts_step(config, target, -(-config.chunked_prefill_size // length), [0] * length)


def prompts_step(config: EngineConfig, target: RunTarget, rows: int, ids: Sequence[int]) -> tuple[MemoryPlan, StepPlan]:
    """A prefill step of `rows` prompts with the same tokens, without shared pages, and a plan of
    pools that just hold it."""
    demands, pages = page_demands(config, target), -(-len(ids) // config.page_size)
    groups = tuple(PageGroup(demand, rows * pages, 0) for demand in demands)
    plan = MemoryPlan(rows, rows, groups, config.page_size, len(ids), UnitCosts(slot=0, row=0, pages=()), 0)
    params = SamplingParams(temperature=0.0)
    return plan, StepPlan(
        admissions=[Admission.from_prompt(r, r, ids, params, 0) for r in range(1, rows + 1)],
        page_writes=[
            PageWrite(r, 0, in_every_group(int32s(range(1 + (r - 1) * pages, 1 + r * pages)), len(groups)))
            for r in range(1, rows + 1)
            if groups
        ],
        extend=[ExtendRow(r, 0, ids, 0, True) for r in range(1, rows + 1)],
    )
