"""Scales of a KV cache of codes: the checkpoint's, else measured before the pools are allocated.

They are fixed before the first request, so answers do not depend on which request came first, ranks
and workers have the same ones, and graphs hold them as numbers.
"""

import gc
import logging
import math
from dataclasses import replace
from pathlib import Path

import torch

from hybridrt.base.device import release_kept_memory
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError
from hybridrt.kernels.quant.formats import E4M3_MAX
from hybridrt.mem_cache.pools.kv_pool import ONES, KVPool, KVScales, LayerScales
from hybridrt.models.base import CausalLM
from hybridrt.models.loading.stored_kv_scales import has_kv_scales, stored_kv_scales
from hybridrt.recurrent.backends import resolve_attention_name
from hybridrt.runtime.load.kept_state import kv_layers
from hybridrt.runtime.load.runtime import Runtime
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.run.probe import prompts_step
from hybridrt.runtime.run.step_runner import StepRunner
from hybridrt.runtime.step.plan import StepPlan

TOKENS = 512  # of the prompt that is measured, if the model and `max_model_len` have so many
# Texts have larger numbers than the prompt. e4m3 loses nothing until numbers are 3,500 times smaller.
HEADROOM = 4.0
_GOLDEN = 0x9E3779B1  # 2^32 divided by the golden ratio: multiples are spread evenly
_LETTERS = ("k", "v")

log = logging.getLogger("hybridrt.load")


def find_kv_scales(config: EngineConfig, target: RunTarget, model: CausalLM, path: Path) -> LayerScales:
    """The scales of a loaded model's layers, the same on all ranks. All ranks call it.

    Raises:
        CheckpointError: a scale of the checkpoint cannot be used.
        ConfigError: keys or values of the measured prompt are not finite.
    """
    files = config.load_format != "dummy"
    if target.kv_codes is None:
        # The headers of plain files are not read again for a hint.
        quantised = target.model_config.quant is not None
        if files and quantised and target.tp.rank == 0 and has_kv_scales(model, path):
            log.info('the checkpoint has scales for kv_cache_dtype="fp8_e4m3"; keys and values keep %s', target.dtype)
        return ONES
    if config.kv_scales == "one":
        return ONES
    layers = [layer_id for ids in kv_layers(config, target).values() for layer_id in ids]
    found = stored_kv_scales(model, path) if files else {}
    stored = len(found)
    if any((layer_id, letter) not in found for layer_id in layers for letter in _LETTERS):
        found = _measured(config, target, model) | found
    log.info("KV scales: %d of the checkpoint, %d measured", stored, len(found) - stored)
    return {i: KVScales(*(found[i, letter] for letter in _LETTERS)) for i in layers}


def scale_for(largest: float) -> float:
    """The power of two for numbers up to `largest` times HEADROOM. So a product of the scale is exact,
    and another rounding of `largest` seldom changes it."""
    return 2.0 ** math.ceil(math.log2(HEADROOM * largest / E4M3_MAX)) if largest > 0 else 1.0


def prompt_ids(count: int, vocab_size: int) -> list[int]:
    """Token ids that are spread evenly over a vocabulary."""
    return [((i * _GOLDEN) % 2**32 * vocab_size) >> 32 for i in range(count)]


def measuring_step(config: EngineConfig, target: RunTarget, model: CausalLM) -> tuple[StepRunner, StepPlan]:
    """A step over plain pools that writes the keys and values of one prompt; a prediction head's
    too."""
    decode = resolve_attention_name(config.attention_backend, target.device)
    config = replace(config, attention_backend=decode, prefill_attention_backend=None)
    plain = replace(target, kv_codes=None)
    limit = target.model_config.max_position_embeddings
    # Whatever the chunk size is: workers with another one have the same scales.
    ids = prompt_ids(min(TOKENS, config.max_model_len or limit, limit), target.model_config.vocab_size)
    plan, step = prompts_step(config, plain, 1, ids)
    return StepRunner(Runtime.allocate(config, plain, model, plan)), step


def _measured(config: EngineConfig, target: RunTarget, model: CausalLM) -> dict[tuple[int, str], float]:
    runner, step = measuring_step(config, target, model)
    runner.launch(step).result()
    largest = _largest(runner.pools.kv, target)
    del runner
    gc.collect()  # as in _measure_activations
    release_kept_memory()
    return {place: scale_for(number) for place, number in largest.items()}


@torch.inference_mode()
def _largest(kv: KVPool, target: RunTarget) -> dict[tuple[int, str], float]:
    """The largest number of each layer's keys and values on any rank. Latent vectors count for both."""
    numbers = [tensor.abs().amax().float() for i in kv.specs for tensor in (kv.layer_tensors(i) * 2)[:2]]
    mine = torch.stack(numbers)
    found = target.tp.all_gather_last(mine).view(target.tp.size, -1).amax(0).tolist()
    places = [(layer_id, letter) for layer_id in kv.specs for letter in _LETTERS]
    for (layer_id, _), number in zip(places, found, strict=True):
        if not math.isfinite(number):
            raise ConfigError(
                f"layer {layer_id} gives {number} for {TOKENS} tokens, so its keys and values have no scale; pass "
                'kv_scales="one", or kv_cache_dtype="auto"'
            )
    return dict(zip(places, found, strict=True))
