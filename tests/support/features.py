"""Features of a run that are tried in pairs, and how a run uses each of them."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from hybridrt import LLM, SamplingParams, SpeculativeConfig, StructuredOutputs
from hybridrt.runtime.load.build import ASSETS
from tests.support.mtp_oracle import write_with_head
from tests.support.newer_checkpoints import qwen35_moe
from tests.support.transfer_pair import Decoder, Prefiller, run

Tokens = list[list[int]]
TEXTS = ("def f(x):\n    return x", "import os, sys, re", "a b c a b c a b c a b c a b")
COUNT, MORE = 10, [7, 8, 9, 300]
SMALL: dict[str, Any] = {
    "device": "cpu", "max_model_len": 128, "max_running_requests": 4, "page_size": 4, "state_mode": "replay",
    "chunked_prefill_size": 16, "prefix_cache": False,
}  # fmt: skip


@dataclass(frozen=True)
class Feature:
    """A feature.

    Attributes:
        options: of LLM. fields: those of EngineConfig that are this feature.
        exact: tokens are those of a run without it.
        params: of each request.
    """

    options: dict[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    exact: bool = True
    params: dict[str, Any] = field(default_factory=dict)


def drafts(method: str) -> Feature:
    return Feature({"speculative": (method,)}, ("speculative",))


FEATURES: dict[str, Feature] = {
    "quantised": Feature({"quantization": "int4"}, ("quantization",), exact=False),
    "fp8 KV": Feature({"kv_cache_dtype": "fp8_e4m3"}, ("kv_cache_dtype", "kv_scales"), exact=False),
    "8-bit states": Feature({"mamba_ssm_dtype": "int8"}, ("mamba_ssm_dtype", "mamba_ssm_rounding"), exact=False),
    "tp": Feature({"tp_size": 2}, ("tp_size",)),
    "ep": Feature({"tp_size": 2, "expert_parallel": True}, ("expert_parallel",)),
    "dp": Feature({"dp_size": 2}, ("dp_size",)),
    "ngram": drafts("ngram"),
    "draft": drafts("draft"),
    "mtp": drafts("mtp"),
    "prefix cache": Feature({"prefix_cache": True}, ("prefix_cache", "cache_slots", "audit_hits")),
    "host tier": Feature(
        {"prefix_cache": True, "cache_slots": 2, "host_cache_bytes": 1 << 24}, ("host_cache_bytes",)
    ),
    "sessions": Feature({"prefix_cache": True}),
    "transfer": Feature({"transfer_bytes": 1 << 22}, ("transfer_bytes",)),
    "structured": Feature(
        params={"structured_outputs": StructuredOutputs(regex="[a-z]{20,40}"), "ignore_eos": False}, exact=False
    ),
}  # fmt: skip
# Fields of EngineConfig that any run has. A new field is a feature, or belongs here.
USUAL = frozenset((
    "model", "device", "dtype", "load_format", "max_model_len", "max_running_requests", "memory_fraction", "page_size",
    "chunked_prefill_size", "target_itl_ms", "max_ttft_factor", "client_weights", "state_mode", "attention_backend",
    "prefill_attention_backend", "linear_attn_backend", "cuda_graph", "cuda_graph_max_bs", "cuda_graph_prompts",
    "overlap", "request_log", "seed",
    "images", "encoder_cache_tokens",  # features that have no row yet: the model here sees nothing
))  # fmt: skip
PAIRS = tuple(combinations(FEATURES, 2))


def write_model(path: Path) -> Path:
    """A tiny model with recurrent layers, attention, experts and a prediction head. Its matrices are large enough to be
    quantised; its tokenizer is the built-in model's."""
    make = qwen35_moe(
        vocab_size=4096, hidden_size=128, moe_intermediate_size=128, shared_expert_intermediate_size=128,
        num_experts=4, num_hidden_layers=2, full_attention_interval=2,
        mtp_num_hidden_layers=1, linear_key_head_dim=32, linear_value_head_dim=32, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    write_with_head(make, path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ASSETS / "embedded" / name, path / name)
    return path


def outputs(model: Path, names: Sequence[str], folder: Path) -> Tokens:
    """Tokens of two turns of some requests, with these features."""
    options, params = dict(SMALL), {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
    for name in names:
        options |= FEATURES[name].options
        params |= FEATURES[name].params
    if method := options.pop("speculative", None):
        draft = str(model) if method == ("draft",) else None
        options["speculative"] = SpeculativeConfig(method[0], num_draft_tokens=3, draft_model=draft)
    build = partial(LLM, str(model), **options)
    if "transfer" in names:
        return _moved(build, SamplingParams(**params), folder if "sessions" in names else None)
    return _talked(build, SamplingParams(**params), folder if "sessions" in names else None)


def _talked(build: Any, params: SamplingParams, folder: Path | None) -> Tokens:
    """With `folder` another LLM answers the second turn, from saved sessions."""
    with build() as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        first = [output.token_ids for output in llm.generate(prompts, params)]
        turns = [[*prompt, *answer, *MORE] for prompt, answer in zip(prompts, first)]
        if folder is None:
            return first + [output.token_ids for output in llm.generate(turns, params)]
        files = [folder / f"{i}.safetensors" for i in range(len(turns))]
        for file, prompt, answer in zip(files, prompts, first):
            llm.save_session(file, [*prompt, *answer])
    with build() as llm:
        for file in files:
            llm.load_session(file, trusted=True)
        found = llm.generate(turns, params)
        assert all(output.metrics.cached_tokens for output in found), "no session was used"
        return first + [output.token_ids for output in found]


def _moved(build: Any, params: SamplingParams, folder: Path | None) -> Tokens:
    """One worker computes prompts, another one goes on."""
    hub: dict[str, torch.Tensor] = {}
    with build() as one, build() as other:
        prefill, decode = Prefiller(one, hub), Decoder(other, hub, compute_here=False)
        prefill.connect(decode)
        prompts = [other.tokenizer.encode(text) for text in TEXTS]
        first = _answers(prefill, decode, prompts, params)
        if folder is not None:
            for i, (prompt, answer) in enumerate(zip(prompts, first)):
                other.save_session(folder / f"{i}.safetensors", [*prompt, *answer])
                other.load_session(folder / f"{i}.safetensors", trusted=True)
        turns = [[*prompt, *answer, *MORE] for prompt, answer in zip(prompts, first)]
        found = first + _answers(prefill, decode, turns, params)
        assert decode.worker.counters().fetched, "nothing was moved"
        return found


def _answers(prefill: Prefiller, decode: Decoder, prompts: Tokens, params: SamplingParams) -> Tokens:
    ids = [decode.engine.add_request(prompt, params) for prompt in prompts]
    run(decode, prefill)
    return [decode.tokens(i) for i in ids]
