"""Other runtimes' names of arguments and attributes, for errors that give the name here."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

from hybridrt.base.errors import UnknownNameError, shown

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_SPECULATIVE = "speculative=SpeculativeConfig(method=..., num_draft_tokens=...)"
_FORCED = "structured_outputs=StructuredOutputs(json=...), or its regex, choice or grammar"
# Our argument, or advice after "!".
ENGINE: Mapping[str, str] = {
    **dict.fromkeys(("tensor_parallel_size", "tp"), "tp_size"),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static", "gpu_memory_fraction"), "memory_fraction"),
    **dict.fromkeys(("max_num_seqs", "max_batch_size"), "max_running_requests"),
    **dict.fromkeys(("max_num_batched_tokens", "max_prefill_tokens"), "chunked_prefill_size"),
    **dict.fromkeys(("context_length", "max_seq_len", "n_ctx", "max_seq_len_to_capture"), "max_model_len"),
    **dict.fromkeys(("enable_prefix_caching", "enable_radix_cache"), "prefix_cache"),
    "disable_radix_cache": "prefix_cache=False",
    **dict.fromkeys(("model_path", "model_name_or_path", "model_id"), "model"),
    **dict.fromkeys(("torch_dtype", "precision"), "dtype"),
    **dict.fromkeys(("enable_expert_parallel", "enable_ep_moe"), "expert_parallel"),
    "block_size": "page_size",
    **dict.fromkeys(("enforce_eager", "disable_cuda_graph"), "cuda_graph=False"),
    **dict.fromkeys(("cuda_graph_sizes", "cuda_graph_bs"), "cuda_graph_max_bs"),
    **dict.fromkeys(("mamba_cache_dtype", "mamba_ssm_cache_dtype"), "mamba_ssm_dtype"),
    "calculate_kv_scales": "!leave it out: scales of kv_cache_dtype that the checkpoint lacks are measured",
    "random_seed": "seed",
    "language_model_only": "images=False",
    "limit_mm_per_prompt": "!leave it out: a prompt may have up to 128 images; images=False takes none",
    "device_map": "device",
    **dict.fromkeys(("speculative_config", "speculative_model", "num_speculative_tokens"), _SPECULATIVE),
    **dict.fromkeys(("speculative_algorithm", "speculative_num_draft_tokens"), _SPECULATIVE),
    "swap_space": "host_cache_bytes",
    "cpu_offload_gb": "!leave it out: weights stay on the device",
    **dict.fromkeys(("disable_overlap_schedule", "async_scheduling"), "overlap"),
    "trust_remote_code": "!leave it out: code of a checkpoint is never run",
    "enable_chunked_prefill": "!leave it out: prompts are always computed in chunks (chunked_prefill_size)",
    "pipeline_parallel_size": "!leave it out: tp_size alone splits a model",
    **dict.fromkeys(("data_parallel_size", "dp"), "dp_size"),
    **dict.fromkeys(("tokenizer", "tokenizer_mode"), "!leave it out: the tokenizer is the checkpoint's own"),
    **dict.fromkeys(("enable_lora", "lora_modules"), "!leave it out: adapters are not supported; merge them"),
}
# Values of our options that have other names elsewhere: ours, or advice after "!".
_RECOGNISED = "!leave it out: a quantised checkpoint is recognised"
_MODEL_DTYPE = ("bfloat16", "float16", "bf16")
VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3", **dict.fromkeys(_MODEL_DTYPE, "auto")},
    "load_format": {"safetensors": "auto"},
    "quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "modelopt_fp4", "mxfp4"),
        _RECOGNISED,
    ),
    "speculative": {"NGRAM": "ngram", "STANDALONE": "draft", "NEXTN": "mtp", "draft_model": "draft"},
    "reasoning_parser": {
        **dict.fromkeys(("qwen3", "qwen3-thinking", "deepseek_r1", "deepseek-r1", "nemotron_v3", "minimax"), "think"),
        **dict.fromkeys(("openai_gptoss", "gpt-oss"), "harmony"),
    },
    "tool_parser": {
        **dict.fromkeys(("qwen", "qwen25"), "hermes"),
        **dict.fromkeys(("qwen3_xml", "nemotron_v3"), "qwen3_coder"),
        **dict.fromkeys(("glm45", "glm47"), "glm"),
        **dict.fromkeys(("openai", "gpt-oss"), "harmony"),
        "olmo3": "olmo",
    },
}
CALLS: Mapping[str, str] = {
    **dict.fromkeys(("params", "sampling_param"), "sampling_params"),
    **dict.fromkeys(("prompt", "inputs", "text"), "prompts"),
    **dict.fromkeys(("prompt_token_ids", "input_ids"), "!pass token ids as the prompt"),
    "use_tqdm": "!leave it out: a progress bar shows on a terminal and in a notebook, and nowhere else",
    "priority": "SamplingParams(priority=...)",
    "lora_request": "!leave it out: adapters are not supported; merge them into the model",
    **dict.fromkeys(("max_tokens", "max_new_tokens"), "SamplingParams(max_tokens=...)"),
    **dict.fromkeys(("temperature", "top_p", "top_k", "stop", "seed", "n"), "SamplingParams, which has this field"),
    "stream": "!call `stream` instead",
}
SAMPLING: Mapping[str, str] = {
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_length"), "max_tokens"),
    **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens"),
    **dict.fromkeys(("guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), _FORCED),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "response_format"), _FORCED),
    "do_sample": "temperature (0 is greedy)",
    **dict.fromkeys(("num_return_sequences", "best_of"), "n"),
    **dict.fromkeys(("sampling_seed", "random_seed"), "seed"),
    "stop_strings": "stop",
    **dict.fromkeys(("eos_token_id", "stop_token_id"), "stop_token_ids"),
    **dict.fromkeys(("use_beam_search", "num_beams"), "!leave it out: there is no beam search"),
    "detokenize": "!leave it out: text is made where the model has a tokenizer",
}


LLM_ATTRIBUTES: Mapping[str, str] = {
    "get_tokenizer": "it is .tokenizer",
    "llm_engine": "it is .engine",
    "shutdown": "call close(), or use `with`",
    "get_default_sampling_params": "they are .default_sampling_params",
    "encode": "call .tokenizer.encode(text)",
}
ASYNC_LLM_ATTRIBUTES: Mapping[str, str] = {
    "stream": "call generate, which yields deltas",
    "embed": "call .llm.embed in a thread (asyncio.to_thread)",
    "tokenizer": "it is .llm.tokenizer",
    "get_tokenizer": "it is .llm.tokenizer",
    "engine": "it is .llm.engine",
    "default_sampling_params": "they are .llm.default_sampling_params",
    "shutdown": "call close(), or use `async with`",
}


def refuse(owner: str, name: str, instead: Mapping[str, str], known: Iterable[str] = ()) -> NoReturn:
    """Raises UnknownNameError for an argument that `owner` does not have.

    Args:
        instead: our names by foreign names.
        known: the arguments of `owner`.
    """
    raise UnknownNameError(f"{owner} has no argument {shown(name)}; {_advice(name, instead, list(known))}")


def _advice(name: str, instead: Mapping[str, str], known: list[str]) -> str:
    ours = instead.get(name)
    if ours is not None:
        return ours[1:] if ours.startswith("!") else f"pass {ours} instead"
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f"did you mean {close[0]}?"
    return f"its arguments are {', '.join(known)}" if known else "leave it out"


def knows_names(owner: str, instead: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Unknown keyword arguments of the function raise UnknownNameError."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - known:
                refuse(owner, name, instead, known)
            return function(*args, **kwargs)

        return call

    return decorate


def knows_fields(instead: Mapping[str, str]) -> Callable[[C], C]:
    """`knows_names` for the constructor of a dataclass."""

    def decorate(cls: C) -> C:
        made: Any = cls
        made.__init__ = knows_names(cls.__name__, instead)(made.__init__)
        return cls

    return decorate


def no_attribute(owner: object, name: str, instead: Mapping[str, str]) -> AttributeError:
    """The error for a missing attribute; an AttributeError, as `hasattr` and `copy` need it."""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    return AttributeError(f"{text}: {instead[name]}" if name in instead else text, name=name, obj=owner)
