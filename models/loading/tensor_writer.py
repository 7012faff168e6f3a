"""Writes a safetensors file tensor by tensor."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from hybridrt.base.files_safetensors import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8  # bytes, of the first tensor
# dtype and shape of each tensor, in the order in which they are written.
Contents = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class TensorWriter(AbstractContextManager["TensorWriter"]):
    """A new file with a header of what will be in it. OSError if it cannot be written."""

    def __init__(self, path: Path, contents: Contents) -> None:
        self._waiting = list(contents.items())
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for key, (dtype, shape) in contents.items():
            start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
            header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.size = end
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: torch.Tensor) -> None:
        """The next tensor."""
        key, told = self._waiting.pop(0)
        assert told == (tensor.dtype, tuple(tensor.shape)), f"{key}: {told}, not {tensor.dtype} {tuple(tensor.shape)}"
        found: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        self._file.write(memoryview(found))

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        assert kind is not None or not self._waiting, f"{self._waiting[0][0]} was not written"
