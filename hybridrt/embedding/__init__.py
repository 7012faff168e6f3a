"""The stable surface for engines that bring their own scheduler: load a model, plan its memory, run its steps.

    loaded = load(EngineConfig("org/model"))
    plan = plan_memory(loaded, budget_bytes=2**30)
    runtime = build(loaded, plan)

docs/embedding.md has the rules and examples.
"""

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.forward_batch import ForwardBatch, SpecInfo
from hybridrt.collectives.groups import TPGroup
from hybridrt.embedding.decode_graphs import DecodeGraphs
from hybridrt.embedding.loading import LoadedModel, build, load, plan_memory
from hybridrt.embedding.numbers import Array, Numbers, Places, Scratch
from hybridrt.embedding.ranks import join_ranks
from hybridrt.embedding.runtime import EmbeddedRuntime
from hybridrt.engine.text.tokenizer import load_tokenizer
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.runtime.load.model_path import resolve_model_path

__all__ = [
    "Array", "DecodeGraphs", "EmbeddedRuntime", "EngineConfig", "ForwardBatch", "LoadedModel", "MemoryPlan", "Numbers",
    "Places", "Scratch", "SpecInfo", "TPGroup", "build", "join_ranks", "load", "load_tokenizer", "plan_memory",
    "resolve_model_path",
]  # fmt: skip
