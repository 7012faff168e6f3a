"""The file of choices that `hybridrt tune` measured on a GPU, next to Triton's compiled kernels.

There is one file for each name of a GPU. It is used if it is of this GPU and of these versions. Nothing in it is run:
each choice must be a candidate that this version of the launch names itself.
"""

import hashlib
import importlib
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from hybridrt.base.device import GPUFacts
from hybridrt.base.errors import ConfigError, reason
from hybridrt.base.files import read_bytes, replacing
from hybridrt.base.formats import Format, json_format
from hybridrt.base.version import __version__
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.core.launch_choice import LAUNCHES, Tuned, Values, tuned_for, use_tuned
from hybridrt.runtime.load.kernel_digest import kernel_digest

logger = logging.getLogger(__name__)

VARIABLE = "HYBRIDRT_TUNED"
FORMAT = Format("hybridrt tuned choices", 1, "run hybridrt tune again")
MAX_BYTES = 1 << 23
MAX_CHOICES = 1 << 14
_OFF = ("", "0")
_FILES_OF_LAUNCHES = (
    "dense.linear", "dense.skinny_linear", "dense.skinny_linear_triton", "mamba.mamba2_scan_triton",
    "delta_rule.delta_rule_triton", "attention.paged_attention_triton",
)  # fmt: skip

Text = Annotated[str, msgspec.Meta(max_length=200)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a measurement holds for. kernels: `kernel_digest` in hexadecimal."""

    gpu: Text
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    hybridrt: Text
    torch: Text
    triton: Text
    kernels: Text

    @classmethod
    def of_gpu(cls, gpu: GPUFacts) -> "Origin":
        """A GPU with this process's versions."""
        import triton

        versions = __version__, str(torch.__version__), str(triton.__version__), kernel_digest().hex()
        return cls(gpu.name, gpu.capability, gpu.multiprocessors, gpu.shared_memory, *versions)

    def objection(self, here: "Origin") -> str | None:
        """Why a measurement of this origin is not used here; None if it is."""
        for name in self.__struct_fields__:
            then, now = getattr(self, name), getattr(here, name)
            if name == "kernels" and then != now:
                return "it was measured with other kernels"
            if then != now:
                return f"it is of {name.replace('_', ' ')} {_text(then)}, and here is {_text(now)}"
        return None


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice that was measured for a shape. same_bits: its output had the bits of the built-in choice, which it may
    be itself."""

    launch: Text
    shape: dict[Text, int | bool | Text]
    values: dict[Text, Number]
    microseconds: float
    built_in_microseconds: float
    same_bits: bool


class TunedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a file. made: UTC, ISO 8601."""

    made: Text
    origin: Origin
    choices: Annotated[list[Choice], msgspec.Meta(max_length=MAX_CHOICES)]
    format: Text = str(FORMAT)


@dataclass(frozen=True)
class Loaded:
    """The choices for a GPU. path: None if no file is there, or the variable turns files off. objection: why the
    file is not used."""

    path: Path | None = None
    file: TunedFile | None = None
    objection: str | None = None
    choices: Tuned = field(default_factory=dict)


def import_launches() -> None:
    """Fills LAUNCHES. Needs Triton."""
    for name in _FILES_OF_LAUNCHES:
        importlib.import_module(f"hybridrt.kernels.{name}")


def tuned_folder() -> Path:
    """Where files are stored. Imports Triton."""
    import triton

    return Path(triton.knobs.cache.dir, "hybridrt", "tuned")


def tuned_path(gpu: GPUFacts) -> Path | None:
    """The file for a GPU, which may not exist; None if HYBRIDRT_TUNED is 0."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return None if named in _OFF else Path(named)
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return tuned_folder() / f"{slug}.json"


def load_tuned(gpu: GPUFacts, device: torch.device) -> Loaded:
    """The choices measured for a GPU.

    Raises:
        ConfigError: the file cannot be read or is damaged, or HYBRIDRT_TUNED names none.
    """
    path = tuned_path(gpu)
    if path is None or (VARIABLE not in os.environ and not path.exists()):
        return Loaded()
    file = read_tuned(path)
    if (objection := file.origin.objection(Origin.of_gpu(gpu))) is not None:
        return Loaded(path, file, objection)
    return Loaded(path, file, choices=table_of(file, device, path))


def read_tuned(path: Path) -> TunedFile:
    """Reads a file and checks its form. ConfigError if it has another one, or is of another version's."""
    try:
        data = read_bytes(path, MAX_BYTES)
    except OSError as e:
        raise ConfigError(f"tuned choices in {path} cannot be read: {reason(e)}") from e
    try:
        refusal = FORMAT.refusal(json_format(data))
        file = None if refusal else msgspec.json.decode(data, type=TunedFile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} holds no tuned choices ({e}); delete it, or run hybridrt tune again") from e
    if file is None:
        raise ConfigError(f"{path} holds no tuned choices that this version reads: {refusal}")
    return file


def table_of(file: TunedFile, device: torch.device, path: Path) -> Tuned:
    """The choices of a file by launch and shape. ConfigError for one that its launch does not name."""
    import_launches()
    table: dict[str, dict[tuple[Any, ...], Values]] = {}
    for choice in file.choices:
        launch = LAUNCHES.get(choice.launch)
        if launch is None:
            raise ConfigError(f"{path}: there is no launch {choice.launch!r}; known are {', '.join(sorted(LAUNCHES))}")
        shape = shape_of(launch.shape, choice.shape, path)
        if choice.values not in (launch.built_in(shape, device), *launch.candidates(shape, device)):
            raise ConfigError(
                f"{path}: {choice.values} is no candidate of {choice.launch!r} for {choice.shape}; run hybridrt tune "
                "again"
            )
        table.setdefault(choice.launch, {})[shape] = choice.values
    return table


def shape_of(kind: type[Any], fields: dict[str, int | bool | str], path: Path | str) -> Any:
    """The NamedTuple `kind` of a shape's fields as they are stored. ConfigError if they do not fit."""
    types = kind.__annotations__
    values = {name: _dtype(value) if types.get(name) is torch.dtype else value for name, value in fields.items()}
    if values.keys() != types.keys() or any(type(values[name]) is not types[name] for name in types):
        wanted = ", ".join(f"{name}: {each.__name__}" for name, each in types.items())
        raise ConfigError(f"{path}: {fields} is no shape of {wanted}")
    if any(isinstance(value, int) and not 0 <= value < 1 << 40 for value in values.values()):
        raise ConfigError(f"{path}: {fields} has a number that is negative or too large")
    return kind(**values)


def fields_of(shape: Any) -> dict[str, int | bool | str]:
    """A shape's fields as they are stored."""
    found = shape._asdict().items()
    return {name: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for name, v in found}


def _dtype(name: object) -> object:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else name


def write_tuned(path: Path, file: TunedFile) -> None:
    """Writes a file whole. ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
    except OSError as e:
        raise ConfigError(f"tuned choices cannot be written to {path}: {reason(e)}") from e


def use_tuned_choices(device: torch.device, tp: TPGroup) -> None:
    """Before a run on a GPU: its launches use the choices that were measured there. A process keeps those of its first
    run. All ranks call it.

    Raises:
        ConfigError: the file is damaged, or the ranks have different choices.
    """
    if device.type != "cuda":
        return
    found = tuned_for(device)
    if found is None:
        loaded = load_tuned(GPUFacts.of_device(device), device)
        if loaded.objection is not None:
            logger.warning("%s is not used: %s; run hybridrt tune again", loaded.path, loaded.objection)
        found = loaded.choices
        use_tuned(device, found)
    digest = digest_of(found)
    if tp.minimum(digest) != tp.maximum(digest):
        raise ConfigError(
            f"the ranks have different tuned choices, so they would not compute alike (rank {tp.rank}: "
            f"{sum(map(len, found.values()))}); give all hosts the same file, or set {VARIABLE}=0"
        )


def digest_of(choices: Tuned) -> int:
    """63 bits that tell tables of choices apart; 0 for no choice."""
    lines = sorted(
        f"{name} {fields_of(shape)} {sorted(values.items())}"
        for name, of in choices.items()
        for shape, values in of.items()
    )
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big") >> 1 if lines else 0


def _text(value: object) -> str:
    return ".".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
