"""Options that commands share, as dataclasses. None: the option is not given, and the config class decides."""

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from hybridrt import files
from hybridrt.errors import ConfigError
from hybridrt.speculative.registry import BUILT_IN, load_method

EMBEDDED, EMBEDDED_DRAFT = "embedded", "embedded_draft"
MAX_CHARS = 1 << 24  # of a prompt or a message that standard input brings
ModelOption = Annotated[
    str,
    typer.Option("--model", "-m", metavar="NAME", help="Checkpoint directory, hub name, or the built-in model."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def option(text: str, default: str, metavar: str | None = None) -> Any:
    """An option whose default is set by another class. The default is shown in the help and not passed."""
    return typer.Option(help=f"{text} [{default}]", show_default=False, metavar=metavar)


class Overrides:
    def given(self) -> dict[str, Any]:
        """The options that the command line set, by name."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {name: value for name, value in values.items() if value not in (None, [])}


_DTYPES = "float32|bfloat16|float16"


@dataclass(frozen=True)
class EngineOptions(Overrides):
    """Fields of EngineConfig. EngineConfig checks their values."""

    panel: ClassVar = "Engine"
    device: Annotated[str | None, option("Where to run.", "auto", "cpu|cuda|cuda:N")] = None
    dtype: Annotated[str | None, option("Of weights and activations.", "auto", _DTYPES)] = None
    load_format: Annotated[
        str | None, option("dummy: random weights from config.json alone.", "auto", "auto|dummy")
    ] = None
    max_model_len: Annotated[int | None, option("Longest prompt + output, in tokens.", "what fits", "N")] = None
    max_running_requests: Annotated[int | None, option("Requests that decode together.", "what fits", "N")] = None
    memory_fraction: Annotated[float | None, option("Share of the GPU's memory to take.", "0.85", "X")] = None
    page_size: Annotated[int | None, option("Tokens in a KV page, a power of two.", "16", "N")] = None
    chunked_prefill_size: Annotated[int | None, option("Prompt tokens computed in one step.", "8192", "N")] = None
    target_itl_ms: Annotated[
        float | None, option("Time between tokens to keep, by shorter chunks of prompts.", "none", "MS")
    ] = None
    mamba_ssm_dtype: Annotated[str | None, option("Of the recurrent state.", "float32", _DTYPES)] = None
    state_mode: Annotated[
        str | None, option("How recurrent state is kept while decoding.", "auto", "classic|replay")
    ] = None
    attention_backend: Annotated[
        str | None, option("Softmax attention; `hybridrt doctor` lists the names.", "auto", "NAME")
    ] = None
    prefill_attention_backend: Annotated[
        str | None, option("Another backend for prefill alone.", "the same", "NAME")
    ] = None
    linear_attn_backend: Annotated[str | None, option("Backend of the recurrent layers.", "auto", "NAME")] = None
    cuda_graph: Annotated[bool | None, option("Capture steps as graphs on a GPU.", "on")] = None
    cuda_graph_max_bs: Annotated[int | None, option("Largest batch captured.", "what fits", "N")] = None
    cuda_graph_prompts: Annotated[bool | None, option("Capture steps with short prompts too.", "on")] = None
    overlap: Annotated[bool | None, option("Launch a step before the last one's tokens are read.", "on")] = None
    prefix_cache: Annotated[bool | None, option("Keep prompts and answers for those that begin alike.", "on")] = None
    cache_slots: Annotated[int | None, option("Recurrent states kept for prefixes.", "one a request", "N")] = None
    host_cache_bytes: Annotated[int | None, option("Main memory for prefixes, in bytes.", "0", "N")] = None
    tp_size: Annotated[
        int | None, option("Tensor-parallel ranks, each on a GPU of its own.", "1, or torchrun's", "N")
    ] = None
    seed: Annotated[int | None, option("Of sampling and of dummy weights.", "0", "N")] = None


@dataclass(frozen=True)
class SpeculativeOptions:
    """Fields of SpeculativeConfig that have options."""

    panel: ClassVar = "Speculation"
    speculative: Annotated[str | None, option("Draft tokens and verify them at once.", "off", "|".join(BUILT_IN))] = (
        None
    )
    num_draft_tokens: Annotated[int | None, option("Drafts a step.", "4", "N")] = None
    draft_model: Annotated[str | None, option("Drafter of --speculative draft.", "the built-in model's", "NAME")] = None

    def given(self, model: str) -> dict[str, Any]:
        """{"speculative": SpeculativeConfig}, or nothing where speculation is off. The built-in model brings a drafter.

        Raises:
            ConfigError: drafts were asked for without a method, or fields that do not go together.
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
        from hybridrt.config import SpeculativeConfig

        return {"speculative": SpeculativeConfig(method=self.speculative, **fields)}  # type: ignore[arg-type]


_FILE = "the model's"


@dataclass(frozen=True)
class SamplingOptions(Overrides):
    """Fields of SamplingParams. SamplingParams checks their values. `seed` has no option here: the one of EngineOptions
    seeds every request."""

    panel: ClassVar = "Sampling"
    max_tokens: Annotated[int | None, option("Tokens to generate at most.", "128", "N")] = None
    temperature: Annotated[float | None, option("0 always takes the likeliest token.", _FILE, "X")] = None
    top_p: Annotated[float | None, option("Keep the likeliest tokens of this total probability.", _FILE, "X")] = None
    top_k: Annotated[int | None, option("Keep so many likeliest tokens; -1 is off.", _FILE, "N")] = None
    min_p: Annotated[float | None, option("Drop tokens below this share of the likeliest.", _FILE, "X")] = None
    repetition_penalty: Annotated[float | None, option("Above 1: seen tokens become unlikely.", _FILE, "X")] = None
    presence_penalty: Annotated[float | None, option("Subtracted for tokens already written.", "0", "X")] = None
    frequency_penalty: Annotated[float | None, option("The same for each time they were.", "0", "X")] = None
    stop: Annotated[list[str] | None, option("End before this text; repeatable.", "none", "TEXT")] = None
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", metavar="ID", help="End at this token; repeatable. [none]"),
    ] = None
    ignore_eos: Annotated[bool | None, option("Go on after the end-of-sequence token.", "off")] = None


def read_text(option_name: str, file: str) -> str:
    """The text of a file that an option names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return files.read_text(file)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{option_name}: {file} cannot be read: {e}") from e


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with one option for each field of its parameters that are options dataclasses. It makes the dataclasses
    from the options and calls `command`. The help shows the options of a dataclass under its `panel`, if it has one."""
    parameters = inspect.signature(command).parameters
    groups: dict[str, Any] = {name: p.annotation for name, p in parameters.items() if is_dataclass(p.annotation)}
    spread = [p.replace(kind=p.KEYWORD_ONLY) for name, p in parameters.items() if name not in groups]
    for group in groups.values():
        hints, panel = get_type_hints(group, include_extras=True), getattr(group, "panel", None)
        spread += [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=_under(panel, hints[f.name])
            )
            for f in fields(group)
        ]

    def run(**values: Any) -> None:
        made = {name: cls(**{f.name: values.pop(f.name) for f in fields(cls)}) for name, cls in groups.items()}
        command(**values, **made)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in spread}
    return run


def _under(panel: str | None, annotation: Any) -> Any:
    """Annotated[type, option] with the option in a panel of the help."""
    kind, info = get_args(annotation)
    info = copy(info)
    info.rich_help_panel = panel
    return Annotated[kind, info]
