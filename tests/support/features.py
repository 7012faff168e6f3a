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
Answer = tuple[list[int], list[float]]  # tokens, and their log-probabilities
# No second turn leaves a state on the cache's grid: whether there is a slot for it differs, and it is rounded there.
TEXTS = ("def f(x):\n    return x", "import os, sys, re\n", "a b c a b c a b c a b c a b")
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
    # A chunk's end rounds states, and where small chunks end depends on the batch. So prompts are one chunk.
    "8-bit states": Feature(
        {"mamba_ssm_dtype": "int8", "chunked_prefill_size": 128}, ("mamba_ssm_dtype", "mamba_ssm_rounding"), exact=False
    ),
    "tp": Feature({"tp_size": 2}, ("tp_size",)),
    "ep": Feature({"tp_size": 2, "expert_parallel": True}, ("expert_parallel",)),
    "dp": Feature({"dp_size": 2}, ("dp_size",)),
    "ngram": drafts("ngram"),
    "draft": drafts("draft"),
    "mtp": drafts("mtp"),
    "prefix cache": Feature({"prefix_cache": True}, ("prefix_cache", "cache_slots", "audit_hits")),
    "host tier": Feature(
        {"prefix_cache": True, "cache_slots": 4, "host_cache_bytes": 1 << 24}, ("host_cache_bytes",)
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
    # Features that have no row yet: the model here sees nothing.
    "images", "prompt_embeds", "encoder_cache_tokens", "encoder_host_tokens",
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


def outputs(model: Path, names: Sequence[str], folder: Path) -> list[Answer]:
    """Answers of two turns of some requests, with these features."""
    options, params = dict(SMALL), {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
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


def in_two_chunks(model: Path, names: Sequence[str], found: Sequence[Answer]) -> list[Answer]:
    """Answers of the prompts of `found`, each alone. The second chunk is the last token, which a worker that fetches a
    prompt's state computes, too."""
    options, answers = dict(SMALL), []
    for name in names:
        options |= FEATURES[name].options
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0)
    with LLM(str(model), **SMALL) as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    for prompt in [*prompts, *_turns(prompts, found[: len(prompts)])]:
        with LLM(str(model), **options | {"chunked_prefill_size": len(prompt) - 1}) as llm:
            answers += _generate(llm, [prompt], params)
    return answers


def _talked(build: Any, params: SamplingParams, folder: Path | None) -> list[Answer]:
    """With `folder` another LLM answers the second turn, from saved sessions."""
    with build() as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        first = _generate(llm, prompts, params)
        turns = _turns(prompts, first)
        if folder is None:
            return first + _generate_twice(llm, turns, params)
        files = [folder / f"{i}.safetensors" for i in range(len(turns))]
        for file, prompt, (answer, _) in zip(files, prompts, first):
            llm.save_session(file, [*prompt, *answer])
    with build() as llm:
        for file in files:
            llm.load_session(file, trusted=True)
        return first + _generate_twice(llm, turns, params, cached=True)


def _turns(prompts: Tokens, first: Sequence[Answer]) -> Tokens:
    return [[*prompt, *answer, *MORE] for prompt, (answer, _) in zip(prompts, first)]


def _generate(llm: LLM, prompts: Tokens, params: SamplingParams, *, cached: bool = False) -> list[Answer]:
    found = llm.generate(prompts, params)
    assert not cached or all(output.metrics.cached_tokens for output in found), "nothing was kept"
    return [_answer(output.token_ids, output.logprobs) for output in found]


def _generate_twice(llm: LLM, prompts: Tokens, params: SamplingParams, *, cached: bool = False) -> list[Answer]:
    """A hit gives what the request gave that left the state. With a host tier, hits come from main memory."""
    if llm.config.host_cache_bytes:
        llm.generate([[token] * 20 for token in range(3, 15)], SamplingParams(max_tokens=1))
    found = _generate(llm, prompts, params, cached=cached)
    if llm.config.prefix_cache:
        again = _generate(llm, prompts, params)
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in found], "asked again"
    if llm.config.host_cache_bytes and llm.config.dp_size == 1:
        assert llm.engine.counters().cache_fetched, "nothing came from main memory"
    return found


def _answer(tokens: list[int], logprobs: Any) -> Answer:
    return tokens, [step[token] for token, step in zip(tokens, logprobs, strict=True)]


def _moved(build: Any, params: SamplingParams, folder: Path | None) -> list[Answer]:
    """One worker computes prompts, another one goes on."""
    hub: dict[str, torch.Tensor] = {}
    with build() as one, build() as other:
        prefill, decode = Prefiller(one, hub), Decoder(other, hub, compute_here=False)
        prefill.connect(decode)
        prompts = [other.tokenizer.encode(text) for text in TEXTS]
        first = _answers(prefill, decode, prompts, params)
        if folder is not None:
            for i, (prompt, (answer, _)) in enumerate(zip(prompts, first)):
                other.save_session(folder / f"{i}.safetensors", [*prompt, *answer])
                other.load_session(folder / f"{i}.safetensors", trusted=True)
        found = first + _answers(prefill, decode, _turns(prompts, first), params)
        assert decode.worker.counters().fetched, "nothing was moved"
        return found


def _answers(prefill: Prefiller, decode: Decoder, prompts: Tokens, params: SamplingParams) -> list[Answer]:
    ids = [decode.engine.add_request(prompt, params) for prompt in prompts]
    run(decode, prefill)
    return [_answer(sample.token_ids, sample.logprobs) for sample in (decode.outputs[i, 0] for i in ids)]
