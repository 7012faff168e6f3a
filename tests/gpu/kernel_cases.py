"""Which calls of the operations the tests on a GPU make, by model; how they are made and repeated."""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import gdn_of, kda_of, mamba1_of, mamba2_of
from hybridrt.base.model_config import ModelConfig
from hybridrt.kernels.core.providers import select
from hybridrt.kinds.registry import state_shape
from hybridrt.models.config.read_config import read_model_config
from tests.gpu import rig
from tests.support import kernel_cases as kernels
from tests.support import more_kernel_cases as others
from tests.support.flat import flat
from tests.support.kernel_cases import Case, DecodeRows, Prompts

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
MODELS = ("falcon-h1-7b", "nemotron-h-8b", "qwen3-next-12l")
# Recurrent layers are all that these have of their own.
MAMBA1, SHORT_CONV, LIGHTNING = "falcon-mamba-7b", "lfm2-8b-a1b-like", "minimax-text-01-like"
KIMI = "kimi-linear-48b-12l"
FEW = (300, 1, 15, 64, 30)  # tokens of prompts
Cases = Callable[[str], Iterator[tuple[str, Callable[[], Case]]]]


def model_config(name: str) -> ModelConfig:
    return read_model_config(CONFIGS / name)


def call(case: Case, provider: str, args: dict[str, Any]) -> dict[str, Tensor]:
    """What a call returns and what it leaves in the pools, by name."""
    result = flat(select(case.op, rig.DEVICE, provider), **args)
    outputs = result if isinstance(result, tuple) else (result,)
    found = {f"output {i}": out for i, out in enumerate(outputs) if out is not None}
    return found | {name: _without_codes(args[name]) for name in case.pools}


def _without_codes(tensor: Tensor) -> Tensor:
    """Few operations take float8."""
    return tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor


def copied(case: Case) -> dict[str, Any]:
    """Arguments with memory of their own where the call may write; views stay strided."""

    def copy(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )

    return case.args | {name: copy(case.args[name]) for name in (*case.pools, *case.consumed)}


def in_float32(case: Case) -> dict[str, Any]:
    """`copied`, with float32 for 16-bit numbers."""

    def widen(value: Any) -> Any:
        sixteen = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if sixteen else value

    return {name: widen(value) for name, value in copied(case).items()}


def on_device(cases: Cases) -> Cases:
    """Cases whose tensors are made on the tests' device."""

    def make(case: Callable[[], Case]) -> Case:
        with torch.device(rig.DEVICE):
            return case()

    @wraps(cases)
    def placed(name: str) -> Iterator[tuple[str, Callable[[], Case]]]:
        return ((what, partial(make, case)) for what, case in cases(name))

    return placed


@on_device
def recurrent_cases(name: str) -> Iterator[tuple[str, Callable[[], Case]]]:
    """(operation and details, how to make it) of every operation of a model's recurrent layers."""
    config = model_config(name)
    shapes = [state_shape(linear) for linear in config.linear.values()]
    modes = [("classic", 1), ("replay", 1), ("replay", 4), ("intermediate", 4)]
    trees = [*modes, ("tree", 4)]

    def rows(tokens: int) -> DecodeRows:
        return DecodeRows(shapes[0], tokens)

    for shape in (shape for shape in shapes if shape.conv_dim):
        yield "causal_conv1d_varlen", lambda shape=shape: kernels.causal_conv1d_varlen(Prompts(shape, 64))
        for n in (1, 4):
            yield f"causal_conv1d_update {n}", lambda s=shape, n=n: kernels.causal_conv1d_update(DecodeRows(s, n))
    if "short_conv" in config.linear:
        for n in (1, 4):
            yield f"short_conv_update {n}", lambda n=n: kernels.short_conv_update(rows(n))
    if "mamba1" in config.linear:
        for mode, n, tree in (("classic", 1, False), ("intermediate", 4, False), ("intermediate", 4, True)):
            what = f"mamba1_update {mode} {n}{' tree' * tree}"
            yield what, lambda mode=mode, n=n, tree=tree: kernels.mamba1_update(config, rows(n), mode, tree)
        chunk = mamba1_of(config).chunk_size
        yield "selective_scan", lambda: kernels.selective_scan(config, Prompts(shapes[0], chunk))
    if "mamba2" in config.linear:
        for mode, n in trees:
            yield f"mamba2_decode {mode} {n}", lambda mode=mode, n=n: kernels.mamba2_decode(config, rows(n), mode)
            if mode not in ("replay", "tree"):
                make = lambda mode=mode, n=n: kernels.selective_state_update(config, rows(n), mode)  # noqa: E731
                yield f"selective_state_update {mode} {n}", make
        for count in (2, 34):  # programs prepare more channels each from 32 rows on
            many = {"batch": count, "padding": 1, "num_slots": 40, "num_rows": 40}
            what = f"mamba2_decode replay of {count} rows"
            yield what, lambda more=many: kernels.mamba2_decode(config, DecodeRows(shapes[0], 1, **more), "replay")
        yield "fold_ring", lambda: kernels.fold(rows(1), kernels.time_step_gate, kernels.mamba2_heads(config)["A"])
        chunk = mamba2_of(config).chunk_size
        yield "mamba2_chunk_scan", lambda: kernels.mamba2_chunk_scan(config, Prompts(shapes[0], chunk))
        yield (
            "mamba2_chunk_scan few tokens",
            lambda: kernels.mamba2_chunk_scan(config, Prompts(shapes[0], chunk, lengths=FEW)),
        )
    if "lightning" in config.linear:
        for mode, n in modes:
            yield f"mamba2_decode {mode} {n}", lambda mode=mode, n=n: kernels.lightning_decode(rows(n), mode)
        heads = shapes[0].temporal[0]
        yield "fold_ring", lambda: kernels.fold(rows(1), torch.ones_like, kernels.lightning_heads(heads)["A"])
        yield "mamba2_chunk_scan", lambda: kernels.lightning_chunk_scan(Prompts(shapes[0], 128))
        yield "mamba2_chunk_scan few tokens", lambda: kernels.lightning_chunk_scan(Prompts(shapes[0], 128, lengths=FEW))
    if "kda" in config.linear:
        for mode, n in trees:
            yield f"gdn_decode {mode} {n}", lambda mode=mode, n=n: kernels.kda_decode(rows(n), mode)
            if mode not in ("replay", "tree"):
                what = f"recurrent_gated_delta_rule {mode} {n}"
                yield what, lambda mode=mode, n=n: kernels.kda_recurrent(rows(n), mode)
        yield "fold_ring", lambda: kernels.fold(rows(1), kernels.log_decay_gate, None)
        for bound in (None, -5.0):
            what = f"chunk_gated_delta_rule {'' if bound is None else 'bounded'}"
            chunk = kda_of(config).chunk_size
            yield what, lambda bound=bound, chunk=chunk: kernels.chunk_kda(Prompts(shapes[0], chunk), bound)
    if "gdn" in config.linear:
        for mode, n in trees:
            yield f"gdn_decode {mode} {n}", lambda mode=mode, n=n: kernels.gdn_decode(rows(n), mode)
            if mode not in ("replay", "tree"):
                what = f"recurrent_gated_delta_rule {mode} {n}"
                yield what, lambda mode=mode, n=n: kernels.gdn_recurrent(rows(n), mode)
            if mode == "replay":
                yield f"gdn_decode after a conv {n}", lambda n=n: kernels.gdn_after_conv(rows(n))
        one = {"batch": 1, "padding": 0}, {"batch": 2, "padding": 1, "state_dtype": torch.bfloat16}
        for few in one:  # in one launch
            what = f"gdn_decode replay of {few['batch']} rows"
            yield what, lambda few=few: kernels.gdn_decode(DecodeRows(shapes[0], 1, **few), "replay")
        yield "fold_ring", lambda: kernels.fold(rows(1), kernels.log_decay_gate, None)
        chunk = gdn_of(config).chunk_size
        yield "chunk_gated_delta_rule", lambda: kernels.chunk_gated_delta_rule(Prompts(shapes[0], chunk))


@on_device
def other_cases(name: str) -> Iterator[tuple[str, Callable[[], Case]]]:
    """(operation and details, how to make it) of every other operation of a model."""
    config = model_config(name)
    attention, hidden = config.attention, config.hidden_size
    for tokens in (1, 4):
        yield f"attention_decode {tokens}", partial(others.attention_decode, attention, tokens)
        yield f"attention_decode {tokens}, 32 rows", partial(others.attention_decode, attention, tokens, 4)
        yield f"attention_decode {tokens} full", partial(others.attention_decode, attention, tokens, 18)
    for window in (None, 500):
        details = "" if window is None else f" window {window}"
        yield f"attention_extend{details}", partial(others.attention_extend, attention, [300, 1, 130, 133], window)
        yield (
            f"attention_extend long{details}",
            partial(others.attention_extend, attention, [3000, 1, 700, 1500], window),
        )
    yield "write_kv", partial(others.write_kv, attention)
    yield from _coded_cases(config)
    if attention.rope is not None:
        yield "qk_norm_rotary", partial(others.rotary, "qk_norm_rotary", config)
        yield "rotary_write_kv", partial(others.rotary, "rotary_write_kv", config)
    for tokens in (3, 200):
        yield f"rms_norm {tokens}", partial(others.norm, "rms_norm", hidden, tokens)
        yield f"add_rms_norm {tokens}", partial(others.norm, "add_rms_norm", hidden, tokens)
    yield "sample", partial(others.draws, config, False)
    yield "sample filtered", partial(others.draws, config, True)
    yield "greedy", partial(others.greedy, config)
    yield "apply_token_rules", partial(others.token_rules, config)
    if config.architecture.startswith("Falcon"):
        for op in ("silu_and_mul", "clamped_silu_and_mul"):
            yield op, partial(others.elementwise, op, 2 * config.hf.intermediate_size, 40)
        yield "skinny_linear silu", partial(others.skinny_linear, config, 1, "silu_and_mul", True)
        yield "skinny_linear 8", partial(others.skinny_linear, config, 8, None, False)
        yield "skinny_linear 32, some rows shared", partial(others.skinny_linear, config, 32, None, False, 8728)
        for tokens in (50, 100):
            yield f"skinny_linear {tokens}", partial(others.skinny_linear, config, tokens, "silu_and_mul", False)
    if config.architecture.startswith("Nemotron"):
        yield "relu2", partial(others.elementwise, "relu2", config.hf.intermediate_size, 40)
        yield "gated_rms_norm", partial(others.gated_rms_norm, 8192, 1024, False)
        yield "skinny_linear relu2", partial(others.skinny_linear, config, 3, "relu2", True)
        yield "router_sigmoid_grouped", partial(others.router_sigmoid_grouped, 4, 2, 0)
        yield "router_sigmoid_grouped of one group", partial(others.router_sigmoid_grouped, 1, 1, 1)
        for tokens in (1, 40):
            yield f"router_product {tokens}", partial(others.router_product, hidden, tokens)
    if config.architecture.startswith("Qwen"):
        for tokens in (70, 601):  # a program for each group of a token, or for four tokens
            yield f"gated_rms_norm {tokens}", partial(others.gated_rms_norm, 4096, 128, True, tokens)
        yield "sigmoid_mul", partial(others.elementwise, "sigmoid_mul", 4096, 40)
        yield "sigmoid_mul by head", partial(others.elementwise, "sigmoid_mul", 4096, 40, gates=32)
        yield "router_softmax", partial(others.router_softmax, config)
        hf = config.hf
        for tokens in (8, 400):
            sizes = hf.moe_intermediate_size, hf.num_experts, hf.num_experts_per_tok
            yield f"fused_experts {tokens}", partial(others.fused_experts, tokens, hidden, *sizes)
            plain = partial(others.fused_experts, tokens, hidden, *sizes)
            yield f"fused_experts {tokens} with biases", partial(others.biased_experts, plain)
        sinks = others.with_sinks
        for times in (1, 18):
            yield (
                f"attention_decode with sinks {times}",
                partial(sinks, partial(others.attention_decode, attention, 1, times)),
            )
        long = partial(others.attention_extend, attention, [3000, 1, 700, 1500], 500)
        yield "attention_extend with sinks", partial(sinks, long)
        # One token of Kimi-Linear, whose shared expert is the ninth, and of LFM2: rows of other lengths.
        yield "fused_experts 1, 2304 to 1024", partial(others.fused_experts, 1, 2304, 1024, 40, 9, 0)
        yield "fused_experts 1, 2048 to 1792", partial(others.fused_experts, 1, 2048, 1792, 32, 4, 0)


def _coded_cases(config: ModelConfig) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Over caches of e4m3 codes."""
    attention, codes = config.attention, others.with_codes
    for tokens, times in ((1, 1), (1, 4), (1, 18), (4, 1), (4, 18)):
        decode = partial(others.attention_decode, attention, tokens, times)
        yield f"attention_decode codes {tokens}, {8 * times} rows", partial(codes, decode)
    for new in ([300, 1, 130, 133], [3000, 1, 700, 1500]):
        for window in (None, 500):
            extend = partial(others.attention_extend, attention, new, window)
            yield f"attention_extend codes {new[0]} window {window}", partial(codes, extend)
    yield "write_kv codes", partial(codes, partial(others.write_kv, attention))
    if attention.rope is not None:
        yield "rotary_write_kv codes", partial(codes, partial(others.rotary, "rotary_write_kv", config))


@on_device
def latent_cases(name: str) -> Iterator[tuple[str, Callable[[], Case]]]:
    """(operation and details, how to make it) of a model's latent attention."""
    attention = model_config(name).attention
    for tokens in (1, 4):
        yield f"attention_decode latent {tokens}", partial(others.attention_decode, attention, tokens)
        yield f"attention_decode latent {tokens} full", partial(others.attention_decode, attention, tokens, 18)
        for times in (1, 18):
            decode = partial(others.attention_decode, attention, tokens, times)
            yield f"attention_decode latent codes {tokens}, {8 * times} rows", partial(others.with_codes, decode)
    for what, new in (("few", [3, 1, 13, 8]), ("", [300, 1, 130, 133]), ("long", [3000, 1, 700, 1500])):
        extend = partial(others.latent_extend, attention, new)
        yield f"latent_extend {what}", extend
        yield f"latent_extend codes {what}", partial(others.with_codes, extend)
    for op in ("into_latent", "from_latent"):
        yield op, partial(others.latent_product, attention, op)
    for rotated in (False, True):
        write = partial(others.write_latent, attention, rotated)
        yield f"write_latent {'rotated' * rotated}", write
        yield f"write_latent codes {'rotated' * rotated}", partial(others.with_codes, write)
