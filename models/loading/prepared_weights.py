"""Weights as a model holds them, in one file that a later start maps or reads as it is.

A checkpoint's tensors are cut, joined and converted while they are loaded. The file has the result, of
one rank: a CPU maps it, so that replicas of a host share the page cache and copy nothing; a GPU reads it
through pinned memory into its place.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from hybridrt.base.errors import CheckpointError
from hybridrt.base.files_safetensors import DTYPES
from hybridrt.base.formats import Format
from hybridrt.base.version import __version__
from hybridrt.models.base import CausalLM
from hybridrt.models.loading.shards import shards_of
from hybridrt.models.loading.weight_files import opened
from hybridrt.models.loading.weight_reader import staged_tensors

FORMAT = Format("hybridrt prepared weights", 2, "delete the file, and the next start prepares the weights again")
VARIABLE = "HYBRIDRT_PREPARED_WEIGHTS"  # a directory
ALIGNED = 64  # bytes, of each tensor in memory
_PADDING = "padding."
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
log = logging.getLogger("hybridrt.load")


@torch.no_grad()
def load_or_map(model: CausalLM, path: Path, decided: object, load: Callable[[], object]) -> None:
    """Fills a model: from prepared weights, if a directory for them is set, else by `load`, which
    prepares them for the next start. Layers of quantised weights store them in another way at the
    end, so these are loaded each time.

    Args:
        decided: what decides the weights, in addition to the files and the shapes.

    Raises:
        CheckpointError: prepared weights are damaged. The errors of `load`.
    """
    directory = os.environ.get(VARIABLE)
    if not directory or model.config.quant is not None:
        load()
        return
    before = kinds_of(model)
    facts = (str(FORMAT), __version__, torch.__version__, type(model).__name__, decided, sorted(before.items()))
    prepared = PreparedWeights(Path(directory), [*shards_of(path), path / "config.json"], facts)
    if not prepared.load(model):
        load()
        if kinds_of(model) == before:
            prepared.save(model)


class PreparedWeights:
    """A file in a directory. Its name follows from the checkpoint's files and all that decides the
    weights.

    Args:
        files: of the checkpoint.
        facts: further things that decide the weights.
    """

    def __init__(self, directory: Path, files: list[Path], facts: object) -> None:
        stamps = [(str(file.resolve()), (found := file.stat()).st_size, found.st_mtime_ns) for file in sorted(files)]
        name = hashlib.sha256(repr((stamps, facts)).encode()).hexdigest()[:32]
        self.file = directory / f"{name}.safetensors"

    def load(self, model: nn.Module) -> bool:
        """Fills a model. False if there is no file, or the directory may not be searched.

        Raises:
            CheckpointError: the file is damaged, of another format, or has other tensors than the model.
        """
        if not os.path.exists(self.file):
            return False
        places = named_tensors(model)
        with opened(self.file) as held:
            if refusal := FORMAT.refusal(held.metadata.get("format")):
                raise CheckpointError(f"{self.file} has no prepared weights that this version reads: {refusal}")
            found = {key: entry for key, entry in held.entries.items() if not key.startswith(_PADDING)}
            kinds = {key: (entry.dtype, tuple(entry.shape)) for key, entry in found.items()}
            aligned = all(entry.start % ALIGNED == 0 for entry in found.values())
            if not aligned or kinds != {key: _kind(tensor) for key, tensor in places.items()}:
                raise CheckpointError(f"{self.file} has other tensors than the model, or other places: delete it")
            if next(iter(places.values())).device.type == "cpu":
                mapped = held.mapped()
                for key, entry in found.items():
                    part = mapped[entry.start : entry.start + entry.size]
                    places[key].data = part.view(DTYPES[entry.dtype]).view(entry.shape)
                return True
        device = next(iter(places.values())).device
        for key, tensor in staged_tensors({self.file: list(found)}, device):
            places[key].copy_(tensor)
        return True

    def save(self, model: nn.Module) -> None:
        """Writes the file for later starts. A warning says why it cannot be written."""
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.file.parent, suffix=".part", delete=False) as file:
                try:
                    for part in _written(named_tensors(model)):
                        file.write(part)
                    file.flush()
                    os.fsync(file.fileno())  # some file systems tell only now that they are full
                    os.replace(file.name, self.file)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as e:
            log.warning("prepared weights cannot be written to %s: %s", self.file.parent, e)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each once, in the order in which a model is loaded."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def kinds_of(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each."""
    return {name: _kind(tensor) for name, tensor in named_tensors(model).items()}


def _kind(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return _NAMES[tensor.dtype], tuple(tensor.shape)


def _written(tensors: dict[str, torch.Tensor]) -> Iterator[bytes]:
    """The bytes of the file; each tensor begins at a multiple of ALIGNED."""
    header, at = dict[str, object](__metadata__={"format": str(FORMAT)}), 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
        if rest := -at % ALIGNED:
            header[_PADDING + name] = {"dtype": "U8", "shape": [rest], "data_offsets": [at, at + rest]}
            at += rest
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield data + bytes(-len(data) % ALIGNED)
