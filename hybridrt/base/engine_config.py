"""How a model runs: EngineConfig and SpeculativeConfig, the options of a run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridrt.base.config_json import FLAG, TEXT, FieldType, check_fields, either, integer, number, one_of
from hybridrt.base.draft_methods import load_method
from hybridrt.base.dtypes import DTYPES, KV_CODES, STATE_DTYPES
from hybridrt.base.errors import ConfigError
from hybridrt.base.errors_foreign import ENGINE, VALUES, knows_fields
from hybridrt.base.quantization import ONLINE


def _or_none(field_type: FieldType) -> FieldType:
    return either(field_type, FieldType("None", lambda v: v is None))


_SPECULATIVE = {
    "method": FieldType("the name of a way to draft", lambda v: isinstance(v, str)),
    "num_draft_tokens": integer(1, 15),
    "draft_model": _or_none(TEXT),
    "state_mode": one_of("auto", "intermediate", "replay"),
    "speculative_attention_mode": one_of("prefill", "decode"),
    "topk": integer(1, 8),
}


@knows_fields({"num_speculative_tokens": "num_draft_tokens", "model": "draft_model"})
@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: a step verifies `num_draft_tokens` drafts and the last sampled token.

    Args:
        method: "ngram" (prompt lookup), "draft" (a smaller model), "mtp" (the checkpoint's own
            prediction head), or the name of a plug-in (hybridrt.base.draft_methods).
        num_draft_tokens: drafts a step, 1 to 15; a verify step runs num_draft_tokens + 1 tokens a
            request.
        draft_model: checkpoint of the drafter; required by methods that use one, such as "draft".
        state_mode: how recurrent state rolls back: "intermediate" keeps the state after every
            token, "replay" keeps recent inputs and recomputes; "auto" picks replay for chains where
            kernels exist.
        speculative_attention_mode: which full-attention backend verifies: "prefill" or "decode".
        topk: drafts at each place. With 1, each follows the one before it (a chain); with more, the
            likeliest ones follow a token, and drafts fork (a draft tree).
    """

    method: str = "ngram"
    num_draft_tokens: int = 4
    draft_model: str | None = None
    state_mode: str = "auto"
    speculative_attention_mode: str = "decode"
    topk: int = 1

    def __post_init__(self) -> None:
        check_fields(self, _SPECULATIVE)
        takes_model = load_method(self.method).takes_model
        if takes_model and self.draft_model is None:
            raise ConfigError(
                f'method "{self.method}" needs draft_model: a checkpoint that shares the target\'s tokenizer'
            )
        if not takes_model and self.draft_model is not None:
            raise ConfigError(
                f'method "{self.method}" takes no draft_model; with method="draft" a smaller model drafts'
            )
        if self.topk > 1 and self.state_mode == "replay":
            raise ConfigError('topk > 1 needs state_mode="intermediate": "replay" keeps no state after each draft')

    @property
    def forks(self) -> bool:
        """Whether more than one draft may follow a token."""
        return self.topk > 1

    @property
    def num_verify_tokens(self) -> int:
        """T: tokens verified per request in one step, the root included."""
        return self.num_draft_tokens + 1


_WEIGHT = number(1e-3, 1e3)


def _is_weights(value: Any) -> bool:
    """True for weights of clients by name."""
    return isinstance(value, dict) and all(isinstance(name, str) and _WEIGHT.holds(value[name]) for name in value)


_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")
_PAGE_SIZES = [2**i for i in range(11)]
_ENGINE = {
    "model": FieldType("a checkpoint directory or a hub name, as text", lambda v: isinstance(v, str) and bool(v)),
    "device": FieldType("auto, cpu, cuda or cuda:N", lambda v: isinstance(v, str) and bool(_DEVICE.fullmatch(v))),
    **dict.fromkeys(("attention_backend", "linear_attn_backend"), TEXT),
    "prefill_attention_backend": _or_none(TEXT),
    **dict.fromkeys(("cuda_graph", "cuda_graph_prompts", "overlap", "images", "prompt_embeds"), FLAG),
    "seed": integer(-(2**63), 2**63 - 1),
    "dtype": one_of("auto", *DTYPES, elsewhere=VALUES["dtype"]),
    "load_format": one_of("auto", "dummy", elsewhere=VALUES["load_format"]),
    "quantization": _or_none(one_of(*ONLINE, elsewhere=VALUES["quantization"])),
    "max_model_len": _or_none(integer(2, 2**24)),  # one token of prompt and output
    **dict.fromkeys(("max_running_requests", "cuda_graph_max_bs"), _or_none(integer(1, 2**24))),
    "memory_fraction": _or_none(FieldType("a number between 0 and 1", lambda v: type(v) is float and 0 < v < 1)),
    "page_size": FieldType("a power of two from 1 to 1024", lambda v: type(v) is int and v in _PAGE_SIZES),
    "chunked_prefill_size": integer(1, 2**20),
    "target_itl_ms": _or_none(either(number(0.1, 1e6), one_of("auto"))),
    "max_ttft_factor": _or_none(number(1.01, 1e3)),
    "client_weights": _or_none(FieldType("a dictionary of names with numbers from 0.001 to 1000", _is_weights)),
    "mamba_ssm_dtype": one_of(*STATE_DTYPES),
    "mamba_ssm_rounding": one_of("auto", "nearest", "stochastic"),
    "kv_cache_dtype": one_of("auto", *KV_CODES, elsewhere=VALUES["kv_cache_dtype"]),
    "kv_scales": one_of("auto", "one"),
    "state_mode": one_of("auto", "classic", "replay"),
    "speculative": _or_none(FieldType("a SpeculativeConfig", lambda v: isinstance(v, SpeculativeConfig))),
    "tp_size": integer(1, 64),
    "expert_parallel": FLAG,
    "dp_size": integer(1, 64),
    "transfer_bytes": integer(0, 2**44),
    "prefix_cache": FLAG,
    "cache_slots": _or_none(integer(0, 2**24)),
    "host_cache_bytes": integer(0, 2**48),
    "encoder_cache_tokens": integer(1, 2**24),
    "encoder_host_tokens": integer(0, 2**26),
    "request_log": _or_none(TEXT),
    "audit_hits": number(0, 1),
}


@knows_fields(ENGINE)
@dataclass(frozen=True)
class EngineConfig:
    """The options of a run. `LLM(...)` takes these fields as keyword arguments.

    Args:
        model: checkpoint directory or hub name.
        device: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".
        dtype: weights and activations; "auto" is the checkpoint's on CUDA and float32 on a CPU.
        load_format: "auto" reads safetensors; "dummy" makes seeded random weights from config.json.
        quantization: quantise a plain checkpoint while it is loaded (docs/quantization.md): "fp8" (e4m3
            in blocks of 128 x 128), "int4" (groups of 128 inputs); None: keep it as it is.
        max_model_len: most tokens of prompt + output; None: the model's limit, or less if memory
            holds less.
        max_running_requests: requests that decode together; None lets the memory plan choose.
        memory_fraction: share of a GPU's memory for weights, pools and activations, other processes
            counted; on a CPU, share of free main memory. None: 0.85 of a GPU; a quarter of free
            main memory for the pools.
        page_size: tokens in a KV page, a power of two.
        chunked_prefill_size: most prompt tokens that one step computes. Next to decode rows they are fewer by the
            tokens of these rows (drafts count), but at least half of it.
        target_itl_ms: target for the milliseconds between tokens of a request: steps with decode
            rows get prompt chunks so short that they end in that time (docs/serving.md). "auto": on
            a GPU, four times the time of the decode rows alone, or more if much work waits or one
            step ends a prompt. None: no target.
        max_ttft_factor: with a target, prompts may need so many times longer than without decode
            rows; a step may then take longer than its target. None: 11, or 4/3 with "auto".
        client_weights: with a target, shares of prompt computation by client; others have 1.
        mamba_ssm_dtype: dtype of the recurrent state. "int8" and "fp8" need state mode "replay"
            (docs/quantization.md).
        mamba_ssm_rounding: how a state is rounded where it is stored: "nearest", or "stochastic" with
            state mode "replay". "auto" is "stochastic" with 8 bits.
        kv_cache_dtype: "auto" keeps keys and values in the model's dtype; "fp8_e4m3" keeps codes of
            one byte with scales for each layer (docs/quantization.md).
        kv_scales: of codes: "auto" takes those of the checkpoint, and measures those that it lacks
            when the model is loaded; "one" takes 1.
        state_mode: "classic" writes the recurrent state every step; "replay" keeps a ring of inputs
            and writes it about every 16 steps (kinds with `ring_shapes` only). "auto" picks replay
            on a GPU where it is faster (`replay_pays` of the kind).
        attention_backend, prefill_attention_backend: names from `hybridrt.recurrent.backends`; the
            second, if given, serves prefill only.
        linear_attn_backend: "auto" or the backend's name for the model's kind of recurrent layer.
        cuda_graph, cuda_graph_max_bs: capture steps as graphs, and the largest batch captured. On a
            CPU the first one records repeated decode steps, and the second one has no effect.
        cuda_graph_prompts: capture steps with up to 2176 prompt tokens too.
        overlap: launch a step before the tokens of the previous step have reached the host.
        speculative: a SpeculativeConfig, or None.
        images: load the tower of a model that sees, and take images. False saves its memory.
        prompt_embeds: take embeddings [n, hidden] as prompts, in Python. `encoder_cache_tokens` is the
            longest.
        tp_size: tensor-parallel ranks, each a process with a shard of the model and its own GPU.
        expert_parallel: each rank holds whole routed experts, instead of a part of every expert;
            with dp_size each rank of all replicas.
        dp_size: replicas of the model, each with `tp_size` ranks, pools and a prefix cache of its own
            (docs/several-gpus.md).
        transfer_bytes: size of the arena through which states move between workers; 0: none.
        prefix_cache: keep KV and states of prompts and answers, for requests that begin with the
            same tokens (docs/prefix-cache.md).
        cache_slots: recurrent states for cached prefixes, in addition to one per running request;
            None: as many as running requests, where memory allows.
        host_cache_bytes: main memory for prefixes that the device has no room for, over all ranks;
            page-locked with a GPU. 0: none.
        encoder_cache_tokens: tokens of images whose embeddings the device keeps, in a model that
            sees; no image may have more.
        encoder_host_tokens: tokens of images whose embeddings each rank keeps in main memory, for
            images that come again later; page-locked with a GPU. 0: none.
        request_log: file that gets the token ids of all requests, and lost cache entries, for
            `hybridrt explain`. None: none is written.
        audit_hits: share of hits of the prefix cache that are computed again when no request runs;
            entries that differ are dropped.
        seed: seeds dummy weights, and requests without a seed.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_running_requests: int | None = None
    memory_fraction: float | None = None
    page_size: int = 16
    chunked_prefill_size: int = 8192
    target_itl_ms: float | Literal["auto"] | None = None
    max_ttft_factor: float | None = None
    client_weights: Mapping[str, float] | None = None
    mamba_ssm_dtype: str = "float32"
    mamba_ssm_rounding: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_scales: str = "auto"
    state_mode: str = "auto"
    attention_backend: str = "auto"
    prefill_attention_backend: str | None = None
    linear_attn_backend: str = "auto"
    cuda_graph: bool = True
    cuda_graph_max_bs: int | None = None
    cuda_graph_prompts: bool = True
    overlap: bool = True
    speculative: SpeculativeConfig | None = None
    images: bool = True
    prompt_embeds: bool = False
    tp_size: int = 1
    expert_parallel: bool = False
    dp_size: int = 1
    transfer_bytes: int = 0
    prefix_cache: bool = True
    cache_slots: int | None = None
    host_cache_bytes: int = 0
    encoder_cache_tokens: int = 16384
    encoder_host_tokens: int = 0
    request_log: str | None = None
    audit_hits: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, _ENGINE)
        if self.host_cache_bytes and not self.prefix_cache:
            raise ConfigError("host_cache_bytes extends the prefix cache, which is off: set prefix_cache=True")
        if self.kv_scales != "auto" and self.kv_cache_dtype == "auto":
            raise ConfigError(f'kv_scales is {self.kv_scales!r}, but no codes are kept: set kv_cache_dtype="fp8_e4m3"')
        if self.expert_parallel and self.tp_size == self.dp_size == 1:
            raise ConfigError("expert_parallel shares experts over ranks, and tp_size is 1: set it to 2 or more")
        self._check_replicas()
        self._check_rounding()

    def _check_replicas(self) -> None:
        for name, none in (("transfer_bytes", 0), ("request_log", None)):
            if self.dp_size > 1 and getattr(self, name) != none:
                raise ConfigError(f"{name} belongs to one engine, and dp_size is {self.dp_size}: leave one of them out")

    def _check_rounding(self) -> None:
        dtype, rounding = self.mamba_ssm_dtype, self.mamba_ssm_rounding
        if rounding == "stochastic" and dtype == "float32":
            raise ConfigError(
                'mamba_ssm_rounding="stochastic" has no use for float32 states; set mamba_ssm_dtype to "bfloat16", '
                '"float16", "int8" or "fp8"'
            )
        if rounding == "nearest" and dtype not in DTYPES:
            raise ConfigError(
                f'mamba_ssm_rounding="nearest" would lose what a state of mamba_ssm_dtype="{dtype}" gains in 16 '
                'tokens; use "auto"'
            )

    @property
    def rounds_stochastically(self) -> bool:
        """Whether recurrent states are rounded stochastically where they are stored."""
        return self.mamba_ssm_rounding == "stochastic" or self.mamba_ssm_dtype not in DTYPES

    @property
    def num_verify_tokens(self) -> int:
        """T: tokens per request in one decode or verify step (1 without speculation)."""
        return self.speculative.num_verify_tokens if self.speculative else 1
