"""`hybridrt inspect`: layers of a model, their backends and their memory. Loads no weights."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridrt.base.errors import MemoryBudgetError
from hybridrt.base.gpus import GPUS
from hybridrt.cli.options import EMBEDDED, EngineOptions, JsonOption, ModelArgument, SpeculativeOptions

if TYPE_CHECKING:
    from hybridrt.base.engine_config import EngineConfig
    from hybridrt.base.model_config import LayerSpec, ModelConfig
    from hybridrt.kinds.base import StateShape
    from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
    from hybridrt.runtime.load.target import RunTarget


@dataclass(frozen=True)
class LayerReport:
    """A layer, its backend and its memory. Bytes are those of one tensor-parallel rank.

    Attributes:
        symbol: its letter in the picture of the stack.
        mixer, ffn: what it computes, with sizes.
        backends: names from the registry, softmax attention first.
        state_bytes: recurrent state of one request. kv_bytes_per_token: keys and values of one
            token.
    """

    symbol: str
    mixer: str
    ffn: str
    backends: str
    state_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class ModelReport:
    """A model under a configuration. Bytes are those of one tensor-parallel rank.

    Attributes:
        tower_bytes: the part of `weight_bytes` of a tower of images; None: no tower is loaded.
        quantization: quant_method of a quantised checkpoint, or the option.
        schemes: matrices by how they are stored; those that are plain are not counted.
        free_bytes: memory for weights and pools together; `budget` says where it comes from.
        plan: None if weights and pools need more than `free_bytes`; `plan_error` says why.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    state_dtype: str
    kv_dtype: str
    state_mode: str
    tp_size: int
    num_parameters: int
    weight_bytes: int
    weight_bytes_by_dtype: dict[str, int]
    tower_bytes: int | None
    quantization: str | None
    schemes: dict[str, int]
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerReport, ...]
    free_bytes: int
    budget: str
    plan: "MemoryPlan | None"
    plan_error: str | None
    state_bytes_per_request: int
    kv_bytes_per_token: int


def inspect(
    model: ModelArgument = EMBEDDED,
    as_json: JsonOption = False,
    cache: Annotated[
        str | None, typer.Option(metavar="DUMP", help="Draw the prefix cache of a file that LLM.dump_cache wrote.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Plan for this GPU, which need not be here: {', '.join(GPUS)}."),
    ] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="With --cache: write the drawing as SVG.")] = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    speculation: SpeculativeOptions = SpeculativeOptions(),  # noqa: B008
) -> None:
    """Show the layers of a model, their backends and their memory.

    Reads config.json alone, and of quantised checkpoints the names and shapes of tensors.
    """
    from hybridrt.base.engine_config import EngineConfig

    if cache is not None or svg is not None:
        return _draw_cache(cache, svg, as_json)
    report = describe_model(EngineConfig(model, **engine.given(), **speculation.given(model)), gpu)
    if as_json:
        typer.echo(json.dumps(_as_json(report), indent=2))
    else:
        _print(report)


def _draw_cache(cache: str | None, svg: str | None, as_json: bool) -> None:
    from hybridrt.base.errors import ConfigError
    from hybridrt.cli.cache_picture import as_svg, as_text
    from hybridrt.engine.cache.cache_dump import read_dump

    if cache is None:
        raise ConfigError("--svg goes with --cache DUMP")
    dump = read_dump(cache)
    if svg is not None:
        with open(svg, "w", encoding="utf-8") as file:
            file.write(as_svg(dump))
    typer.echo(json.dumps(asdict(dump), indent=2) if as_json else as_text(dump))


def describe_model(config: "EngineConfig", gpu: str | None = None) -> ModelReport:
    """Reads no weights.

    Args:
        gpu: a name of GPUS: the plan is one for it, without what a run measures there.

    Raises:
        ConfigError, BackendError, DeviceError: the model or an option cannot be used.
    """
    import torch

    from hybridrt.base.dtypes import dtype_name
    from hybridrt.collectives.groups import TPGroup
    from hybridrt.runtime.load.build_model import empty_model, weight_bytes
    from hybridrt.runtime.load.fit import as_on_gpu, budget_text, free_bytes, gpu_bytes
    from hybridrt.runtime.load.load_target import load_target

    total_bytes, config = (None, config) if gpu is None else (gpu_bytes(gpu, config), replace(config, device="cpu"))
    path, target = load_target(config, TPGroup(size=config.tp_size))
    target = target if gpu is None else as_on_gpu(config, target, gpu)
    model = empty_model(config, target, torch.device("meta"))
    mc, layers = target.model_config, tuple(_layers(config, target, is_here=gpu is None))
    plan, plan_error = _plan(config, target, weight_bytes(model), total_bytes)
    return ModelReport(
        model=str(path),
        architecture=mc.architecture,
        device=gpu or str(target.device),
        dtype=dtype_name(target.dtype),
        state_dtype=dtype_name(target.state_dtype),
        kv_dtype=dtype_name(target.kv_codes or target.dtype),
        state_mode=target.state_mode,
        tp_size=config.tp_size,
        num_parameters=_num_parameters(config, target),
        weight_bytes=weight_bytes(model),
        weight_bytes_by_dtype=_bytes_by_dtype(model),
        tower_bytes=None if model.tower is None else weight_bytes(model.tower),
        quantization=None if mc.quant is None else mc.quant.rules.name,
        schemes=_schemes(mc, model),
        vocab_size=mc.vocab_size,
        hidden_size=mc.hidden_size,
        layers=layers,
        free_bytes=free_bytes(config, target, total_bytes),
        budget=budget_text(config, target, total_bytes),
        plan=plan,
        plan_error=plan_error,
        state_bytes_per_request=sum(layer.state_bytes for layer in layers),
        kv_bytes_per_token=sum(layer.kv_bytes_per_token for layer in layers),
    )


def _plan(
    config: "EngineConfig", target: "RunTarget", weights: int, total_bytes: int | None
) -> tuple["MemoryPlan | None", str | None]:
    """A plan, or why there is none."""
    from hybridrt.runtime.load.fit import plan_ahead

    try:
        return plan_ahead(config, target, weights, total_bytes=total_bytes), None
    except MemoryBudgetError as e:
        return None, str(e)


def _num_parameters(config: "EngineConfig", target: "RunTarget") -> int:
    """Parameters of the plain model on all ranks. Bytes of a quantised one do not tell: a code may be half a
    byte, and has a scale."""
    import torch

    from hybridrt.collectives.groups import TPGroup
    from hybridrt.layers.linear import parameter_count
    from hybridrt.runtime.load.build_model import empty_model

    plain = replace(target, tp=TPGroup(), model_config=replace(target.model_config, quant=None))
    return parameter_count(empty_model(config, plain, torch.device("meta")))


def _bytes_by_dtype(model: Any) -> dict[str, int]:
    """The largest first."""
    found: Counter[str] = Counter()
    for tensor in {*model.parameters(), *model.buffers()}:
        found[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    return dict(found.most_common())


def _schemes(model_config: "ModelConfig", model: Any) -> dict[str, int]:
    from hybridrt.layers.quant.pieces import PackedPiece

    quant = model_config.quant
    if quant is None:
        return {}
    if quant.online:
        firsts = (pieces[0] for pieces in model.all_targets().values() if pieces)
        schemes = [piece.weight.scheme for piece in firsts if isinstance(piece, PackedPiece)]
    else:
        schemes = [module.scheme for module in (quant.modules or {}).values()]
    return dict(Counter(map(str, schemes)).most_common())


def _layers(config: "EngineConfig", target: "RunTarget", is_here: bool) -> Iterator[LayerReport]:
    """`is_here`: the device can be asked what it can do."""
    from hybridrt.kinds.registry import state_shape
    from hybridrt.runtime.load.kept_state import kv_layers, pool_spec

    mc, spec = target.model_config, pool_spec(config, target)
    attention = _attention_backends(config, target, is_here)
    shapes = {kind: state_shape(linear, target.tp.size) for kind, linear in mc.linear.items()}
    token_bytes = {i: spec.token_bytes for spec, ids in kv_layers(config, target).items() for i in ids}
    for i, layer in enumerate(mc.layers):
        state = spec.layer_bytes(shapes[layer.linear]) if layer.linear else 0
        backends = " + ".join([attention] * bool(layer.attention) + [layer.linear or ""] * bool(layer.linear))
        mixer, kv = _mixer(layer, i, target, shapes), token_bytes.get(i, 0)
        yield LayerReport(_symbol(layer), mixer, layer.ffn or "-", backends or "-", state, kv)


def _attention_backends(config: "EngineConfig", target: "RunTarget", is_here: bool) -> str:
    """Names the one that decodes, and after a slash another one that prefills, which depends on the device."""
    from hybridrt.recurrent.backends import load_attention_backend, resolve_attention_name, resolve_prefill_name
    from hybridrt.runtime.load.kept_state import kv_layers

    names = [resolve_attention_name(config.attention_backend, target.device)]
    if is_here or config.prefill_attention_backend is not None:
        names.append(resolve_prefill_name(config, target.device, kv_layers(config, target)))
    for name in names:
        load_attention_backend(name, target.device)
    return "/".join(dict.fromkeys(names))


def _symbol(layer: "LayerSpec") -> str:
    from hybridrt.kinds.registry import linear_kind

    if layer.linear:
        return "H" if layer.attention else linear_kind(layer.linear).letter
    return "*" if layer.attention else {"mlp": "-", "moe": "E"}[layer.ffn or "mlp"]


def _mixer(layer: "LayerSpec", layer_id: int, target: "RunTarget", shapes: "dict[str, StateShape]") -> str:
    from hybridrt.kinds.registry import linear_kind

    parts = []
    if layer.attention:
        attention = target.model_config.attention_of(layer_id)
        window = f", window {attention.sliding_window}" if attention.sliding_window else ""
        window += ", sinks" * attention.sinks
        heads = f"{attention.num_heads} heads, {attention.num_kv_heads} KV heads, head_dim {attention.head_dim}"
        if latent := attention.latent:
            heads = f"{attention.num_heads} heads, {latent.rank} + {latent.rope_dim} numbers a token"
        parts.append(f"{'latent ' * bool(latent)}attention ({heads}{window})")
    if layer.linear:
        shape = shapes[layer.linear]
        conv = [("channels", shape.conv_dim), ("taps", shape.conv_kernel)]
        state = list(zip(linear_kind(layer.linear).temporal_dims, shape.temporal)) or conv
        parts.append(f"{layer.linear} ({', '.join(f'{name} {size}' for name, size in state)})")
    return " + ".join(parts) or "-"


def _as_json(report: ModelReport) -> dict[str, Any]:
    written = asdict(report)
    written["layers"] = [{"layer": i, **layer} for i, layer in enumerate(written["layers"])]
    written["fits"] = report.plan is not None
    if report.plan is not None:
        written["plan"]["pool_bytes"] = report.plan.pool_bytes
        written["plan"]["cache_slots"] = report.plan.cache_slots
    return written


def _print(report: ModelReport) -> None:
    from hybridrt.cli.tables import bytes_text, console, count_text, print_table

    in_dtype = f" in {report.dtype}" if report.quantization is None else ""
    kv = "" if report.kv_dtype == report.dtype else f", keys and values in {report.kv_dtype}"
    out, ranks = console(), f" of each of {report.tp_size} ranks" if report.tp_size > 1 else ""
    out.print(f"{report.architecture}  {report.model}", style="bold", markup=False)
    if report.plan is None:
        out.print(f"Does not fit: {report.plan_error}", style="red", markup=False)
    else:
        out.print(
            f"Fits: {bytes_text(report.weight_bytes + report.plan.pool_bytes)} of {bytes_text(report.free_bytes)} that "
            f"{report.device} has for weights and pools"
        )
    out.print(report.budget, markup=False)
    out.print(
        f"{count_text(report.num_parameters)} parameters, {bytes_text(report.weight_bytes)}{in_dtype} on "
        f"{report.device}{ranks}; state in {report.state_dtype}, {report.state_mode} mode{kv}; vocabulary "
        f"{report.vocab_size}, hidden size {report.hidden_size}"
    )
    if report.tower_bytes is not None:
        out.print(f"{bytes_text(report.tower_bytes)} of these are the tower of images", markup=False)
    if report.quantization is not None:
        sizes = ", ".join(f"{name} {bytes_text(size)}" for name, size in report.weight_bytes_by_dtype.items())
        kinds = ", ".join(f"{count} {scheme}" for scheme, count in report.schemes.items())
        out.print(f"Quantised by {report.quantization}: {kinds or 'no file was read'}; {sizes}", markup=False)
    out.print(f"\n{''.join(layer.symbol for layer in report.layers)}\n", style="cyan", markup=False)
    columns = ("", "layers", "count", "token mixer", "feed-forward", "backend", "state/request", "KV/token")
    print_table(out, "Layers", columns, list(_rows(report)), right=("count", "state/request", "KV/token"))
    if report.plan is None:
        return
    out.print()
    lines = [(what, count, bytes_text(size)) for what, count, size in report.plan.table() if size]
    print_table(out, "Memory plan", ("what", "how many", "bytes"), lines, right=("bytes",))
    out.print(report.plan.summary())


def _rows(report: ModelReport) -> Iterator[tuple[str, ...]]:
    from hybridrt.cli.tables import bytes_text, ranges_text

    groups: dict[LayerReport, list[int]] = {}
    for i, layer in enumerate(report.layers):
        groups.setdefault(layer, []).append(i)
    for layer, ids in groups.items():
        sizes = bytes_text(layer.state_bytes), bytes_text(layer.kv_bytes_per_token)
        yield layer.symbol, ranges_text(ids), str(len(ids)), layer.mixer, layer.ffn, layer.backends, *sizes
    sums = bytes_text(report.state_bytes_per_request), bytes_text(report.kv_bytes_per_token)
    yield "", "all", str(len(report.layers)), "", "", "", *sums
