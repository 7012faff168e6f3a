"""Features of a run that are tried in pairs, and how a run uses each of them."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrt import LLM, SamplingParams, SpeculativeConfig, StructuredOutputs
from hybridrt.base.spans import EncoderInput, Span
from hybridrt.base.vision import VisionSpec
from hybridrt.runtime.load.model_path import ASSETS
from tests.support.mtp_oracle import write_with_head
from tests.support.newer_checkpoints import qwen35_seeing
from tests.support.transfer_pair import Decoder, Prefiller, run

Prompt = Any  # token ids, or these with spans
Answer = tuple[list[int], list[float]]  # tokens, and their log-probabilities
# No second turn leaves a state on the cache's grid: whether there is a slot for it differs, and it is rounded there.
TEXTS = ("def f(x):\n    return x", "import os, sys, re\n", "a b c a b c a b c a b c a b")
COUNT, MORE = 10, [7, 8, 9, 300]
VOCAB = 4096 + 64
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
    # Other prompts, so other tokens.
    "images": Feature(fields=("images", "encoder_cache_tokens", "encoder_host_tokens"), exact=False),
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
    # A feature that has no row yet.
    "prompt_embeds",
))  # fmt: skip
PAIRS = tuple(combinations(FEATURES, 2))


def write_model(path: Path) -> Path:
    """A tiny model with recurrent layers, attention, experts, a prediction head and a tower. Its matrices are large
    enough to be quantised; its tokenizer is the built-in model's, with tokens for images and videos."""
    make = qwen35_seeing(
        experts=True, vocab_size=VOCAB, hidden_size=128, moe_intermediate_size=128, shared_expert_intermediate_size=128,
        num_experts=4, num_hidden_layers=2, full_attention_interval=2,
        mtp_num_hidden_layers=1, linear_key_head_dim=32, linear_value_head_dim=32, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    write_with_head(make, path)
    _add_tokens(path)
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def _add_tokens(path: Path) -> None:
    source = ASSETS / "embedded"
    shutil.copyfile(source / "tokenizer_config.json", path / "tokenizer_config.json")
    tokenizer, config = (json.loads(file.read_text()) for file in (source / "tokenizer.json", path / "config.json"))
    first, like = len(tokenizer["model"]["vocab"]), tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [like | {"id": first + i, "content": f"<|{i}|>"} for i in range(2)]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "config.json").write_text(json.dumps(config | {"image_token_id": first, "video_token_id": first + 1}))


def with_image(tokens: list[int], seed: int, vision: VisionSpec) -> Prompt:
    """A prompt with a picture of random pixels after its first tokens."""
    rows, columns = 2, 3
    grid, place = (vision.merge * rows, vision.merge * columns), 2
    patches = np.random.default_rng(seed).integers(0, 256, (grid[0] * grid[1], vision.patch_numbers), np.uint8)
    span = Span(place, rows * columns, bytes([seed]) * 32, (rows, columns), EncoderInput(patches, grid))
    found = [*tokens[:place], *[vision.token] * span.length, *tokens[place:]]
    return {"prompt_token_ids": found, "spans": [span]}


def followed(prompt: Prompt, tokens: Sequence[int]) -> Prompt:
    """A prompt that goes on with these tokens."""
    if isinstance(prompt, Mapping):
        return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *tokens]}
    return [*prompt, *tokens]


def prompts_of(llm: LLM, names: Sequence[str]) -> list[Prompt]:
    """The first turns; with images all but the last see one."""
    assert llm.tokenizer is not None
    found: list[Any] = [llm.tokenizer.encode(text) for text in TEXTS]
    if "images" not in names:
        return found
    vision = llm.model_config.vision
    assert vision is not None, "the model has a tower"
    return [*(with_image(tokens, i, vision) for i, tokens in enumerate(found[:-1])), found[-1]]


def outputs(model: Path, names: Sequence[str], folder: Path) -> list[Answer]:
    """Answers of two turns of some requests, with these features."""
    options, params = dict(SMALL), {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    for name in names:
        options |= FEATURES[name].options
        params |= FEATURES[name].params
    if method := options.pop("speculative", None):
        draft = str(model) if method == ("draft",) else None
        options["speculative"] = SpeculativeConfig(method[0], num_draft_tokens=3, draft_model=draft)
    build, kept = partial(LLM, str(model), **options), folder if "sessions" in names else None
    run_turns = _moved if "transfer" in names else _talked
    return run_turns(build, names, SamplingParams(**params), kept)


def in_two_chunks(model: Path, names: Sequence[str], found: Sequence[Answer]) -> list[Answer]:
    """Answers of the prompts of `found`, each alone. The second chunk is the last token, which a worker that fetches a
    prompt's state computes, too."""
    options, answers = dict(SMALL), []
    for name in names:
        options |= FEATURES[name].options
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0)
    with LLM(str(model), **SMALL) as llm:
        prompts = prompts_of(llm, ())
    for prompt in [*prompts, *_turns(prompts, found[: len(prompts)])]:
        with LLM(str(model), **options | {"chunked_prefill_size": len(prompt) - 1}) as llm:
            answers += _generate(llm, [prompt], params)
    return answers


def _talked(build: Any, names: Sequence[str], params: SamplingParams, folder: Path | None) -> list[Answer]:
    """With `folder` another LLM answers the second turn, from saved sessions."""
    with build() as llm:
        prompts = prompts_of(llm, names)
        first = _generate(llm, prompts, params)
        turns = _turns(prompts, first)
        if folder is None:
            return first + _generate_twice(llm, turns, params)
        files = [folder / f"{i}.safetensors" for i in range(len(turns))]
        for file, prompt, (answer, _) in zip(files, prompts, first):
            llm.save_session(file, followed(prompt, answer))
    with build() as llm:
        for file in files:
            llm.load_session(file, trusted=True)
        return first + _generate_twice(llm, turns, params, cached=True)


def _turns(prompts: Sequence[Prompt], first: Sequence[Answer]) -> list[Prompt]:
    return [followed(prompt, [*answer, *MORE]) for prompt, (answer, _) in zip(prompts, first)]


def _generate(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, *, cached: bool = False) -> list[Answer]:
    found = llm.generate(prompts, params)
    assert not cached or all(output.metrics.cached_tokens for output in found), "nothing was kept"
    return [_answer(output.token_ids, output.logprobs) for output in found]


def _generate_twice(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, *, cached: bool = False
) -> list[Answer]:
    """A hit gives what the request gave that left the state. With a host tier, hits come from main memory."""
    if llm.config.host_cache_bytes:
        llm.generate([[token] * 40 for token in range(3, 15)], SamplingParams(max_tokens=1))
    found = _generate(llm, prompts, params, cached=cached)
    if llm.config.prefix_cache:
        again = _generate(llm, prompts, params)
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in found], "asked again"
    if llm.config.host_cache_bytes and llm.config.dp_size == 1:
        assert llm.engine.counters().cache_fetched, "nothing came from main memory"
    return found


def _answer(tokens: list[int], logprobs: Any) -> Answer:
    return tokens, [step[token] for token, step in zip(tokens, logprobs, strict=True)]


def _moved(build: Any, names: Sequence[str], params: SamplingParams, folder: Path | None) -> list[Answer]:
    """One worker computes prompts, another one goes on. It computes those with images itself."""
    hub: dict[str, torch.Tensor] = {}
    with build() as one, build() as other:
        prefill, decode = Prefiller(one, hub), Decoder(other, hub, compute_here=False)
        prefill.connect(decode)
        prompts = prompts_of(other, names)
        first = _answers(prefill, decode, prompts, params)
        if folder is not None:
            for i, (prompt, (answer, _)) in enumerate(zip(prompts, first)):
                other.save_session(folder / f"{i}.safetensors", followed(prompt, answer))
                other.load_session(folder / f"{i}.safetensors", trusted=True)
        found = first + _answers(prefill, decode, _turns(prompts, first), params)
        assert decode.worker.counters().fetched, "nothing was moved"
        return found


def _answers(prefill: Prefiller, decode: Decoder, prompts: Sequence[Prompt], params: SamplingParams) -> list[Answer]:
    ids = [decode.engine.add_request(prompt, params) for prompt in prompts]
    run(decode, prefill)
    return [_answer(sample.token_ids, sample.logprobs) for sample in (decode.outputs[i, 0] for i in ids)]
