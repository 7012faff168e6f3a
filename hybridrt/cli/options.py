"""Options that commands share, as dataclasses: None means not given, so the config class decides."""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from hybridrt.base import files
from hybridrt.base.draft_methods import BUILT_IN, load_method
from hybridrt.base.errors import ConfigError

EMBEDDED, EMBEDDED_DRAFT = "embedded", "embedded_draft"
DEMONSTRATION = "the built-in model is a demonstration: it completes code, and was not made for conversations"
MAX_CHARS = 1 << 24  # characters of a prompt or a message that standard input brings
# Every command has MODEL, or --model where arguments are prompts.
_MODEL = f"Checkpoint directory or hub name. [{EMBEDDED}]"
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help=_MODEL)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def option(text: str, default: str, metavar: str | None = None, name: str | None = None) -> Any:
    """An option with the default of another class: shown in the help and not passed. `name`
    replaces the parameter's."""
    names = () if name is None else (name,)
    return typer.Option(*names, help=f"{text} [{default}]", show_default=False, metavar=metavar)


def setting(text: str, default: str, metavar: str | None = None, name: str | None = None) -> Any:
    """`option` as a field of an options dataclass."""
    return field(default=None, metadata={"option": option(text, default, metavar, name)})


class Overrides:
    """Base of dataclasses whose fields are options of a command; None: the option was left out."""

    def given(self) -> dict[str, Any]:
        """The options that the command line set, by name."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {name: value for name, value in values.items() if value not in (None, [])}


_DTYPES = "float32|bfloat16|float16"
ITL_TARGET = "Time between tokens to keep, by shorter chunks of prompts."
TTFT_FACTOR = "Times that a target may make prompts take longer."


@dataclass(frozen=True)
class EngineOptions(Overrides):
    """Fields of EngineConfig. EngineConfig checks their values."""

    panel: ClassVar = "Engine"
    device: str | None = setting("Where to run.", "auto", "cpu|cuda|cuda:N")
    dtype: str | None = setting("Type of weights and activations.", "auto", _DTYPES)
    load_format: str | None = setting("dummy: random weights from config.json alone.", "auto", "auto|dummy")
    quantization: str | None = setting("Quantise a plain checkpoint while it loads.", "off", "fp8|int4")
    max_model_len: int | None = setting("Longest prompt + output, in tokens.", "what fits", "N")
    max_running_requests: int | None = setting("Requests that decode together.", "what fits", "N")
    memory_fraction: float | None = setting("Share of the device's memory to take.", "0.85 of a GPU", "X")
    page_size: int | None = setting("Tokens in a KV page, a power of two.", "16", "N")
    chunked_prefill_size: int | None = setting("Prompt tokens computed in one step.", "8192", "N")
    target_itl_ms: str | None = setting(ITL_TARGET, "none", "MS|auto|none")
    max_ttft_factor: float | None = setting(TTFT_FACTOR, "11, or 4/3 with auto", "X")
    mamba_ssm_dtype: str | None = setting("Type of the recurrent state.", "float32", f"{_DTYPES}|int8|fp8")
    mamba_ssm_rounding: str | None = setting("Rounding of stored states.", "auto", "nearest|stochastic")
    kv_cache_dtype: str | None = setting("fp8_e4m3: keys and values in one byte each.", "auto", "auto|fp8_e4m3")
    kv_scales: str | None = setting("Scales of fp8_e4m3: the checkpoint's or measured; or 1.", "auto", "auto|one")
    state_mode: str | None = setting("How recurrent state is kept while decoding.", "auto", "classic|replay")
    attention_backend: str | None = setting("Softmax attention; `hybridrt doctor` lists the names.", "auto", "NAME")
    prefill_attention_backend: str | None = setting("Another backend for prefill alone.", "the same", "NAME")
    linear_attn_backend: str | None = setting("Backend of the recurrent layers.", "auto", "NAME")
    cuda_graph: bool | None = setting("Capture steps as graphs; on a CPU record them.", "on")
    cuda_graph_max_bs: int | None = setting("Largest batch captured.", "what fits", "N")
    cuda_graph_prompts: bool | None = setting("Capture steps with short prompts too.", "on")
    overlap: bool | None = setting("Launch a step before the last one's tokens are read.", "on")
    prefix_cache: bool | None = setting("Keep prompts and answers for those that begin alike.", "on")
    cache_slots: int | None = setting("Recurrent states kept for prefixes.", "one a request", "N")
    host_cache_bytes: int | None = setting("Main memory for prefixes, in bytes.", "0", "N")
    images: bool | None = setting("Load the tower of a model that sees, and take images.", "on")
    prompt_embeds: bool | None = setting("Take embeddings as prompts, in Python.", "off")
    encoder_cache_tokens: int | None = setting("Tokens of images whose embeddings are kept.", "16384", "N")
    encoder_host_tokens: int | None = setting("Tokens of images whose embeddings main memory keeps.", "0", "N")
    request_log: str | None = setting("Write all token ids to a file, for `hybridrt explain`.", "none", "FILE")
    audit_hits: float | None = setting("Share of cache hits that are computed again when idle.", "0.0", "X")
    transfer_bytes: int | None = setting("Memory for states that come from, or go to, other workers.", "0", "N")
    tp_size: int | None = setting("Tensor-parallel ranks, each on a GPU of its own.", "1, or torchrun's", "N")
    expert_parallel: bool | None = setting("Each rank holds whole experts.", "off")
    dp_size: int | None = setting("Replicas of the model, each with ranks of its own.", "1", "N")
    seed: int | None = setting("Seed of sampling and of dummy weights.", "0", "N")

    def given(self) -> dict[str, Any]:
        """ConfigError if the target is neither a number nor a known word."""
        values = super().given()
        if (target := values.get("target_itl_ms")) not in (None, "auto"):
            try:
                values["target_itl_ms"] = None if target == "none" else float(target)
            except ValueError as e:
                raise ConfigError(
                    f"--target-itl-ms is {target!r}; it must be a number of milliseconds, auto or none"
                ) from e
        return values


@dataclass(frozen=True)
class SpeculativeOptions:
    """Fields of SpeculativeConfig that have options."""

    panel: ClassVar = "Speculation"
    speculative: str | None = setting("Draft tokens and verify them at once.", "off", "|".join(BUILT_IN))
    num_draft_tokens: int | None = setting("Drafts a step.", "4", "N")
    draft_model: str | None = setting("Drafter of --speculative draft.", "the built-in model's", "NAME")

    def given(self, model: str) -> dict[str, Any]:
        """{"speculative": SpeculativeConfig}, or {} without speculation. The built-in model brings
        a drafter.

        Raises:
            ConfigError: drafts without a method, or fields that do not go together.
        """
        fields = {"num_draft_tokens": self.num_draft_tokens, "draft_model": self.draft_model}
        fields = {name: value for name, value in fields.items() if value is not None}
        if self.speculative is None:
            if fields:
                option_name = next(iter(fields)).replace("_", "-")
                *others, last = BUILT_IN
                raise ConfigError(f"--{option_name} goes with --speculative {', '.join(others)} or {last}")
            return {}
        if model == EMBEDDED and load_method(self.speculative).takes_model:
            fields.setdefault("draft_model", EMBEDDED_DRAFT)
        from hybridrt.base.engine_config import SpeculativeConfig

        return {"speculative": SpeculativeConfig(method=self.speculative, **fields)}  # type: ignore[arg-type]


_FILE = "the model's"


@dataclass(frozen=True)
class SamplingOptions(Overrides):
    """Fields of SamplingParams, which checks them. `seed` is an option of EngineOptions and seeds
    every request."""

    panel: ClassVar = "Sampling"
    max_tokens: int | None = setting("Tokens to generate at most.", "128", "N")
    temperature: float | None = setting("0 always takes the likeliest token.", _FILE, "X")
    top_p: float | None = setting("Keep the likeliest tokens of this total probability.", _FILE, "X")
    top_k: int | None = setting("Keep so many likeliest tokens; -1 is off.", _FILE, "N")
    min_p: float | None = setting("Drop tokens below this share of the likeliest.", _FILE, "X")
    repetition_penalty: float | None = setting("Above 1: seen tokens become unlikely.", _FILE, "X")
    presence_penalty: float | None = setting("Subtracted for tokens already written.", "0", "X")
    frequency_penalty: float | None = setting("Subtracted for each time that they were written.", "0", "X")
    stop: list[str] | None = setting("End before this text; repeatable.", "none", "TEXT")
    stop_token_ids: list[int] | None = setting("End at this token; repeatable.", "none", "ID", "--stop-token-id")
    ignore_eos: bool | None = setting("Go on after the end-of-sequence token.", "off")


def read_text(option_name: str, file: str) -> str:
    """The text of a file that an option names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return files.read_text(file)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{option_name}: {file} cannot be read: {e}") from e


def check_out(name: str | None, endings: Sequence[str]) -> None:
    """Checks `--out NAME`, the beginning of files' names, before a run whose results go there.

    Raises:
        ConfigError: a file with one of the endings cannot be written.
    """
    for file in () if name is None else (Path(f"{name}{ending}") for ending in endings):
        beginning = not name or name.endswith("/")
        if beginning or file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise ConfigError(f"--out: {file} cannot be written; name a file in a directory that exists")


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of its dataclass parameters, each in the `panel` of its dataclass.
    It makes the dataclasses and calls `command`."""
    parameters = inspect.signature(command).parameters
    groups: dict[str, Any] = {name: p.annotation for name, p in parameters.items() if is_dataclass(p.annotation)}
    spread = [p.replace(kind=p.KEYWORD_ONLY) for name, p in parameters.items() if name not in groups]
    spread += [parameter for group in groups.values() for parameter in _parameters(group)]

    def run(**values: Any) -> None:
        made = {name: cls(**{f.name: values.pop(f.name) for f in fields(cls)}) for name, cls in groups.items()}
        command(**values, **made)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in spread}
    return run


def _parameters(group: type) -> Iterator[inspect.Parameter]:
    kinds = get_type_hints(group, include_extras=True)
    for f in fields(group):
        kind, info = (kinds[f.name], copy(f.metadata["option"])) if f.metadata else get_args(kinds[f.name])
        info.rich_help_panel = getattr(group, "panel", None)
        yield inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=Annotated[kind, info]
        )
