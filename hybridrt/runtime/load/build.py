"""From a model's name to a running model: path, weights, memory plan, pools."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.device import resolve_device
from hybridrt.base.dtypes import check_schemes
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, MemoryBudgetError, reason, shown
from hybridrt.base.model_config import AttentionSpec, ModelConfig
from hybridrt.base.quantization import PLAIN, QuantConfig, Scheme
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.core.providers import check_overrides
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.attention import attention_spec
from hybridrt.layers.linear import finish
from hybridrt.layers.weights import Build
from hybridrt.mem_cache.pools.host_plan import STAGED_BYTES, HostPlan, plan_host
from hybridrt.mem_cache.pools.kv_pool import ONES, KVPool, LayerScales, cell_bytes, layer_groups, page_bytes
from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.mem_cache.pools.mamba_pool_spec import MambaPoolSpec
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan, UnitCosts, plan_memory, share_memory
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.mem_cache.pools.slab_memory import SlabMemory
from hybridrt.models.base import CausalLM
from hybridrt.models.config.quant_online import OnlineRules
from hybridrt.models.config.read_config import read_model_config, refuse_gguf
from hybridrt.models.loading.loader import fill_dummy, has_own_head, load_weights
from hybridrt.models.loading.prepared_weights import load_or_map
from hybridrt.models.loading.stored_modules import (
    narrow_table,
    scheme_table,
    with_plain_dtypes,
    with_stored_modules,
)
from hybridrt.models.registry import model_class
from hybridrt.recurrent.backends import check_backends, check_names, create_backend, prompt_graph_bytes
from hybridrt.runtime.load.draft_needs import draft_needs
from hybridrt.runtime.load.host_memory import return_freed_memory
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.sampling.sampler import prompt_logprob_bytes
from hybridrt.runtime.step.pack_padded import DECODE_ROWS, PROMPT_ROWS
from hybridrt.runtime.step.sampling_table import SamplingTable

DEFAULT_ROWS = {"cpu": 16, "cuda": 256}
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
OTHER_FORMS = ["original/*", "metal/*"]  # of the same weights, in gpt-oss's repositories
EMBEDDED = ("embedded", "embedded_draft")
ASSETS = Path(__file__).parents[2] / "assets"


@dataclass(frozen=True)
class Runtime:
    """A model in memory, ready to run steps.

    Attributes:
        plan: rows, slots and pages that a scheduler may lend.
    """

    config: EngineConfig
    target: RunTarget
    model: CausalLM
    plan: MemoryPlan
    pools: Pools
    backend: AttentionBackend

    @classmethod
    def allocate(
        cls, config: EngineConfig, target: RunTarget, model: CausalLM, plan: MemoryPlan, kv_scales: LayerScales = ONES
    ) -> "Runtime":
        """The model's pools as planned, and a backend over them. `kv_scales`: of a KV cache of
        codes."""
        pools = build_pools(config, target, plan, kv_scales)
        backend = create_backend(
            config,
            target.model_config,
            layers=model.mixers(),
            kv_pool=pools.kv,
            req_to_token_pool=pools.req_to_token,
            composite=model.composite,
        )
        return cls(config, target, model, plan, pools, backend)


def resolve_model_path(name: str) -> Path:
    """The directory of a model.

    Args:
        name: a checkpoint directory, a hub name (org/model), which is downloaded to the hub's
            cache, or "embedded" or "embedded_draft" for the package's small models (./embedded is a
            directory).

    Raises:
        ConfigError: it is none of them, or cannot be downloaded.
        UnsupportedModelError: it is a GGUF file, or a repository of such files.
    """
    path = find_checkpoint(name)
    if path.is_dir():
        return path
    if name in EMBEDDED:
        raise ConfigError(f"this installation lacks its {name} model ({path}); pass a checkpoint directory")
    raise ConfigError(
        f"{_legible(name)} is no directory; pass a checkpoint directory, a hub name such as org/model, or embedded, "
        "which is the built-in model"
    )


def check_places(config: EngineConfig) -> None:
    """What can be said without a model. BackendError, DeviceError: the configuration names a backend or a device that
    there is not."""
    check_names(config)
    resolve_device(config.device)


def checkpoint_path(config: EngineConfig) -> Path:
    """The directory of a configuration's model. Raises as `check_places` before it is looked for, then as
    `resolve_model_path`."""
    check_places(config)
    return resolve_model_path(config.model)


def find_checkpoint(name: str) -> Path:
    """The directory of a checkpoint. Downloads a hub name (org/model); "embedded" and
    "embedded_draft" are the package's small models. Any other name is returned as a path, which
    may not be a directory.

    Raises:
        ConfigError: no path can have such a name, it cannot be read, or the hub name cannot be
            downloaded.
        UnsupportedModelError: it is a GGUF file, or a repository of such files.
    """
    if name in EMBEDDED:
        return ASSETS / name
    try:
        path = Path(name).expanduser()
        if not path.is_dir():
            refuse_gguf(name)
        if path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
            return path
    except (OSError, RuntimeError) as e:  # too long, unreadable, or of an unknown user
        raise ConfigError(
            f"{_legible(name)} is no checkpoint directory ({reason(e)}); pass one, or a hub name such as org/model"
        ) from e
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=OTHER_FORMS))
    except Exception as e:  # the hub client's own errors, those of requests, and OS errors
        raise ConfigError(f"{_legible(name)} is no directory here, and the hub does not give it: {reason(e)}") from e


def _legible(name: str) -> str:
    return name if name.isprintable() and 0 < len(name) <= 200 else shown(name)


def empty_model(config: EngineConfig, target: RunTarget, device: torch.device) -> CausalLM:
    """The model with unset weights. On the "meta" device it needs no memory and can be measured."""
    quant = target.model_config.quant
    build = Build(
        target.tp, target.dtype, device, quantised=quant is not None, expert_parallel=config.expert_parallel,
        kv_codes=target.kv_codes,
    )  # fmt: skip
    if quant is None:
        return _built(config, target, build)
    # A plain model's map says which module of the checkpoint each part comes from.
    plain = plain_model(config, target)
    table = scheme_table(*plain, quant)
    check_schemes(table, target.device, target.gpu)
    if target.device.type == "cpu":
        table = narrow_table(*plain, quant, target.dtype) | table
    return _built(config, target, replace(build, scheme=lambda part: table.get(part, PLAIN)))


def plain_model(config: EngineConfig, target: RunTarget) -> tuple[CausalLM, Collection[str]]:
    """The model as a plain checkpoint fills it, on one rank and the "meta" device; and the parts of its
    linear layers, "layer.segment", of experts those of each layer's first one."""
    asked: dict[str, Scheme] = {}
    build = Build(
        TPGroup(), target.dtype, torch.device("meta"), lambda part: asked.setdefault(part, PLAIN), quantised=True
    )
    return _built(config, target, build), asked.keys()


def _built(config: EngineConfig, target: RunTarget, build: Build) -> CausalLM:
    mc = target.model_config
    # Padding drafts have positions past the last one of a request.
    max_len = min(config.max_model_len or mc.max_position_embeddings, mc.max_position_embeddings)
    max_len += config.num_verify_tokens - 1
    model_cls: Callable[..., CausalLM] = model_class(mc.architecture)
    model = model_cls(mc, build, max_len)
    draft_needs(config).attach(model)
    return model


def build_model(config: EngineConfig, target: RunTarget, path: Path, progress: bool) -> CausalLM:
    """The model, loaded or filled with seeded random weights, in inference mode.

    Raises:
        BackendError, ProviderNotInstalledError: a backend that the configuration names cannot serve the model. No
            weights were read.
    """
    mc = target.model_config
    check_backends(config, mc, target.device, kv_layers(config, target))
    if mc.tie_word_embeddings and config.load_format != "dummy" and has_own_head(path):
        target = replace(target, model_config=replace(mc, tie_word_embeddings=False))
    with torch.no_grad():
        model = empty_model(config, target, target.device)
        if config.load_format == "dummy":
            fill_dummy(model, config.seed)
            finish(model)
        else:
            decided = (target.dtype, target.tp.rank, target.tp.size, config.expert_parallel)
            load_or_map(model, path, decided, partial(load_weights, model, path, progress))
    return_freed_memory()
    return model.eval()


def pool_spec(config: EngineConfig, target: RunTarget) -> MambaPoolSpec:
    """The state that the model's recurrent layers keep."""
    mc, spec = target.model_config, config.speculative
    groups = {state_shape(c, target.tp.size): mc.linear_layer_ids(kind) for kind, c in mc.linear.items()}
    groups = {shape: ids for shape, ids in groups.items() if ids}
    forks = spec is not None and spec.forks
    return MambaPoolSpec(
        groups, target.dtype, target.state_dtype, config.num_verify_tokens, target.state_mode, forks,
        config.rounds_stochastically, target.tp.rank,
    )  # fmt: skip


def kv_layers(config: EngineConfig, target: RunTarget) -> dict[AttentionSpec, list[int]]:
    """Layers with keys and values by their spec: the model's attention layers, then its drafter's."""
    mc = target.model_config
    layers: dict[AttentionSpec, list[int]] = {}
    for layer_id in mc.full_attention_layer_ids + draft_needs(config).kv_layers(mc):
        spec = attention_spec(mc.attention_of(layer_id), target.tp, target.dtype, target.kv_codes)
        layers.setdefault(spec, []).append(layer_id)
    return layers


def page_demands(config: EngineConfig, target: RunTarget) -> list[PageDemand]:
    """How many pages of each page group a request holds."""
    mc = target.model_config
    # Without recurrent layers, a prefix is usable at whole pages alone: one more page makes its last one usable.
    back = config.page_size - 1 if config.prefix_cache and not recurs(mc) else 0
    sizes = config.chunked_prefill_size, config.num_verify_tokens
    windows = [group.window for group in layer_groups(kv_layers(config, target))]
    return [PageDemand(config.page_size, window, *sizes, 0 if window is None else back) for window in windows]


def recurs(model_config: ModelConfig) -> bool:
    """Whether a model has recurrent layers."""
    return any(map(model_config.linear_layer_ids, model_config.linear))


def keeps_prefixes(config: EngineConfig, model_config: ModelConfig) -> bool:
    """Whether requests leave prefixes for others. None do if no layer keeps anything."""
    attends = bool(model_config.full_attention_layer_ids or model_config.mtp_attention_layer_ids)
    return config.prefix_cache and (recurs(model_config) or attends)


def make_plan(
    config: EngineConfig, target: RunTarget, *, budget_bytes: int, weights: int = 0, activations: int = 0,
    cache_slots: int | None = None, share: bool = False,
) -> MemoryPlan:  # fmt: skip
    """The memory plan for pools of `budget_bytes`.

    Args:
        share: page groups and states share memory. Then CacheCoordinator alone lends them.
        cache_slots: state slots for cached prefixes; None takes a share if the prefix cache is on.
    """
    mc, host = target.model_config, _plan_host(config, target)
    cache_slots = config.cache_slots if cache_slots is None and config.prefix_cache else cache_slots
    plan = partial(
        plan_memory,
        budget_bytes=budget_bytes,
        demands=page_demands(config, target),
        page_size=config.page_size,
        max_running_requests=config.max_running_requests,
        default_rows=DEFAULT_ROWS[target.device.type],
        max_model_len=config.max_model_len,
        model_limit=mc.max_position_embeddings,
        cache_slots=cache_slots or 0,
        share_slots=cache_slots is None and keeps_prefixes(config, mc),
        keeps_prefixes=keeps_prefixes(config, mc),
        weight_bytes=weights,
        activation_bytes=activations,
    )
    shared = _in_slabs(config, target, _fit(config, target, partial(plan, one_memory=True), host)) if share else None
    return shared or _fit(config, target, plan, host)


def _fit(config: EngineConfig, target: RunTarget, plan: Callable[..., MemoryPlan], host: HostPlan) -> MemoryPlan:
    """The plan that charges graphs and page tables for requests as long as fit, if no option says how long they are.

    Args:
        plan: of given costs.
    """

    def of_length(length: int) -> MemoryPlan:
        """With room for requests of up to `length` tokens in graphs, page tables and a draft model."""
        found = plan(costs=unit_costs(config, target, length))
        return replace(found, max_model_len=min(found.max_model_len, length))

    length = config.max_model_len or plan(costs=unit_costs(config, target, 1)).max_model_len
    while True:
        try:
            found = of_length(length)
            break
        except MemoryBudgetError:
            if config.max_model_len is not None or length == 1:
                raise
            length //= 2
    return replace(found, host=host, costs=unit_costs(config, target, found.max_model_len))


def _plan_host(config: EngineConfig, target: RunTarget) -> HostPlan:
    """The prefix cache's part in main memory. ConfigError, MemoryBudgetError: the option cannot be used."""
    image, page = pool_spec(config, target).image_bytes(), page_bytes(kv_layers(config, target), config.page_size)
    host = plan_host(config.host_cache_bytes // target.tp.size, page, image)
    if config.host_cache_bytes and not keeps_prefixes(config, target.model_config):
        raise ConfigError("host_cache_bytes has no use here: this model keeps no prefixes there (docs/prefix-cache.md)")
    if config.host_cache_bytes and not host:
        raise MemoryBudgetError(
            f"host_cache_bytes is {config.host_cache_bytes}; a KV page and a state take "
            f"{2 * max(sum(page), image) * target.tp.size} bytes: raise it"
        )
    return host


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


def _in_slabs(config: EngineConfig, target: RunTarget, plan: MemoryPlan) -> MemoryPlan | None:
    cells, slot = cell_bytes(kv_layers(config, target), config.page_size), pool_spec(config, target).packed_slot_bytes()
    return share_memory(plan, cells, own_pages(config, plan), slot)


def own_pages(config: EngineConfig, plan: MemoryPlan) -> int:
    """The drafter's pages of each page group."""
    return (plan.num_rows + 1) * draft_needs(config).row_pages(config)


def row_bytes(config: EngineConfig, target: RunTarget, max_len: int) -> int:
    """Bytes of a running request without slot and pages: rings, page table, sampling, drafter."""
    groups = max(len(page_demands(config, target)), 1)
    table = HybridReqToTokenPool.row_bytes(_table_length(config, target, max_len), config.page_size, groups)
    sampling = SamplingTable.row_bytes(target.model_config.vocab_size)
    method = draft_needs(config)
    drafter = method.row_bytes(config, target, max_len) + method.row_pages(config) * set_bytes(config, target)
    return pool_spec(config, target).row_bytes() + table + sampling + 4 + drafter


def set_bytes(config: EngineConfig, target: RunTarget) -> int:
    """Bytes of a KV page of each page group, together."""
    return sum(page_bytes(kv_layers(config, target), config.page_size))


def _table_length(config: EngineConfig, target: RunTarget, max_len: int) -> int:
    """Tokens of a row in the table, with the drafts of a last verify step; 0 without attention layers."""
    return max_len + config.num_verify_tokens - 1 if kv_layers(config, target) else 0


def graph_bytes(config: EngineConfig, target: RunTarget, max_len: int) -> int:
    """The graphs' largest static buffers: logits, and those of attention for a request of `max_len` tokens."""
    rows, mc, of_attention = graph_rows(config, target), target.model_config, 0
    tokens = rows * sum(step_widths(config))
    if rows and wants_prompt_graphs(config, target):
        tokens += min(DECODE_ROWS[-1], rows) + PROMPT_ROWS
        specs, longest = kv_layers(config, target), _table_length(config, target, max_len)
        of_attention = prompt_graph_bytes(config, target.device, specs, longest)
    return tokens * mc.vocab_size * target.dtype.itemsize + of_attention


def wants_prompt_graphs(config: EngineConfig, target: RunTarget) -> bool:
    """Whether steps with prompts get graphs, if the backends can be captured. A drafter on the device needs hidden
    states, which these graphs do not keep; and tokens for other replicas' experts have other numbers in each prompt."""
    return config.cuda_graph_prompts and not draft_needs(config).on_device and target.tp.replicas is None


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


def graph_rows(config: EngineConfig, target: RunTarget) -> int:
    """Rows of the largest graph that a run may capture; 0 without graphs."""
    if target.device.type != "cuda" or not config.cuda_graph:
        return 0
    return config.cuda_graph_max_bs or config.max_running_requests or DEFAULT_ROWS["cuda"]


def step_widths(config: EngineConfig) -> list[int]:
    """T of every kind of step, the widest first: with drafts, and without."""
    widest = config.num_verify_tokens
    return [1] if widest == 1 else [widest, 1]


def build_pools(config: EngineConfig, target: RunTarget, plan: MemoryPlan, kv_scales: LayerScales = ONES) -> Pools:
    """Allocates everything that the plan counts."""
    device, spec = target.device, pool_spec(config, target)
    shared = None if plan.slabs is None else SlabMemory(plan.slabs, device)
    sizes = {"num_slots": plan.num_slots, "num_rows": plan.num_rows}
    mamba = MambaPool(spec, **sizes, device=device, memory=shared) if spec.groups else None
    kv = KVPool(
        kv_layers(config, target), num_pages=[group.num_pages for group in plan.groups], page_size=plan.page_size,
        device=device, own_pages=own_pages(config, plan), memory=shared, scales=kv_scales,
    )  # fmt: skip
    table = HybridReqToTokenPool(
        num_rows=plan.num_rows, max_context=_table_length(config, target, plan.max_model_len), page_size=plan.page_size,
        mamba_pool=mamba, device=device, num_groups=max(len(plan.groups), 1), mrope=target.model_config.mrope,
    )  # fmt: skip
    return Pools(kv, table, shared)


def load_target(config: EngineConfig, tp: TPGroup) -> tuple[Path, RunTarget]:
    """The model's path and how this process, rank `tp`, runs it. Reads no weights.

    Raises:
        ConfigError: the model or an option cannot be used, or `tp` and the configuration differ in
            the number of ranks.
        DeviceError: there is no such device.
        BackendError, ProviderNotInstalledError: HYBRIDRT_PROVIDERS names a provider that cannot
            serve its operation, or the configuration a backend that there is not.
    """
    if tp.size != config.tp_size:
        raise ConfigError(f"tp_size is {config.tp_size}, but this process belongs to a group of {tp.size}")
    path = checkpoint_path(config)
    model_config = read_model_config(path)
    if not config.images:
        model_config = replace(model_config, vision=None)
    if config.quantization is not None:
        quant = online(config.quantization, model_config, path)
        quant = quant if config.load_format == "dummy" else with_plain_dtypes(quant, path)
        model_config = replace(model_config, quant=quant)
    elif model_config.quant is not None and config.load_format != "dummy":
        model_config = replace(model_config, quant=with_stored_modules(model_config.quant, path))
    target = RunTarget.resolve(config, model_config, tp)
    check_overrides(target.device.type)
    return path, target


def online(name: str, model_config: ModelConfig, path: Path) -> QuantConfig:
    """A plain checkpoint that is quantised while it is loaded. ConfigError: it is quantised."""
    if model_config.quant is not None:
        raise ConfigError(
            f"quantization is {name!r}, but {path} is quantised already (by {model_config.quant.rules.name}): leave "
            "quantization out, or pass the checkpoint that it was made from"
        )
    return QuantConfig(OnlineRules(name), online=True)


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers on this rank."""
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
