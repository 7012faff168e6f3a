"""How a checkpoint stores its matrices: a scheme for each module, by the module's own name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Scheme:
    """How one matrix [out, in] is stored.

    Attributes:
        method: name of the method of linear layers that keeps and multiplies it.
        layout: names and packing of its tensors (`hybridrt.layers.quant.layouts`); "" for a method
            from outside, which names its own.
        block: outputs and inputs that share a scale; 0: all of them.
        activations: how inputs may be quantised: "", "token", "tensor" or "group". The method `Fp8`
            quantises them on some GPUs, by its own groups; other products leave them as they are.
        options: of a method from outside, the checkpoint's quantization_config.
        scale_dtype, zeros, indexed: what the file's tensors tell: dtype of the scales, whether there
            are zero points, and whether a tensor gives the group of each input.
        dtype: of the numbers of a plain matrix; None: the model's.
    """

    method: str = "dense"
    layout: str = ""
    block: tuple[int, int] = (0, 0)
    activations: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    scale_dtype: torch.dtype = torch.float32
    zeros: bool = False
    indexed: bool = False
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        """For people: "fp8 by 128x128", "int4 by 32 inputs"."""
        if not self.layout:
            return self.method
        rows, columns = self.block
        if rows == 1:
            return f"{self.method} by {f'{columns} inputs' if columns else 'row'}"
        return f"{self.method} by {f'{rows}x{columns}' if rows else 'tensor'}"


PLAIN = Scheme()
ONLINE = ("fp8", "int4")  # how plain checkpoints may be quantised while they are loaded
# gpt-oss joins them with the name of the matrix.
_JOINED = ("_blocks", "_scales")


def split_key(key: str) -> tuple[str, str]:
    """The module of a checkpoint key, and the last name of its tensor."""
    for end in _JOINED:
        if key.endswith(end):
            return key.removesuffix(end), end.removeprefix("_")
    name, _, last = key.rpartition(".")
    return name, last


class QuantRules(ABC):
    """What a checkpoint's configuration says of its modules.

    Attributes:
        name: the configuration's quant_method.
    """

    name: str

    @abstractmethod
    def scheme(self, module: str) -> Scheme | None:
        """The scheme of a module that is quantised; None if the configuration has none for it."""

    @abstractmethod
    def leaves_plain(self, module: str) -> bool:
        """Whether the configuration says that a module is not quantised."""


@dataclass(frozen=True)
class StoredModule:
    """The tensors of a quantised module in the checkpoint: dtype and shape by their last names."""

    name: str
    scheme: Scheme
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class QuantConfig:
    """A quantised checkpoint, or a plain one that is quantised while it is loaded.

    Attributes:
        modules: the quantised modules that the files hold, by name. None: no file was read
            (load_format="dummy"), and the rules decide alone.
        plain: dtypes of the plain weights that the files hold, by module.
        online: the files are plain, and the rules say which matrices are quantised.
    """

    rules: QuantRules
    modules: Mapping[str, StoredModule] | None = None
    plain: Mapping[str, torch.dtype] = field(default_factory=dict)
    online: bool = False

    def module_of(self, key: str) -> tuple[StoredModule, str] | None:
        """The quantised module that a checkpoint key belongs to, and the rest of the key."""
        name, last = split_key(key)
        module = (self.modules or {}).get(name)
        return None if module is None or not module.scheme.layout or last not in module.tensors else (module, last)

    def weight_key(self, key: str) -> str:
        """The key of the plain weight that a tensor stands for; other keys as they are."""
        found = self.module_of(key)
        return key if found is None else f"{found[0].name}.weight"
