"""A model's modules and weights: empty, plain, loaded, or filled at random."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybridrt.base.dtypes import check_schemes
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.quantization import PLAIN, Scheme
from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.linear import finish
from hybridrt.layers.weights import Build
from hybridrt.models.base import CausalLM
from hybridrt.models.loading.loader import fill_dummy, has_own_head, load_weights
from hybridrt.models.loading.prepared_weights import load_or_map
from hybridrt.models.loading.stored_modules import (
    narrow_table,
    scheme_table,
)
from hybridrt.models.registry import model_class
from hybridrt.recurrent.backends import check_backends
from hybridrt.runtime.load.draft_needs import draft_needs
from hybridrt.runtime.load.host_memory import return_freed_memory
from hybridrt.runtime.load.kept_state import kv_layers
from hybridrt.runtime.load.target import RunTarget


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


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers on this rank."""
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
