"""The reader with threads gives what safetensors gives, and says what it cannot read. On the main memory's device."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridrt.base.errors import CheckpointError
from hybridrt.models.loading import weight_reader
from hybridrt.models.loading.weight_files import Shards, keys_of
from hybridrt.models.loading.weight_reader import read_tensors, staged_tensors

CPU = torch.device("cpu")


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shards:
    """Two files. Blocks of 1000 bytes cut numbers in two, and few bytes are read ahead."""
    monkeypatch.setattr(weight_reader, "BLOCK", 1000)
    monkeypatch.setattr(weight_reader, "AHEAD", 5000)
    for file in range(2):
        tensors = {
            f"{file}.whole": torch.randn(37, 41).bfloat16(), f"{file}.scalar": torch.tensor(file + 0.5),
            f"{file}.empty": torch.empty(0, 3), f"{file}.ids": torch.arange(999), f"{file}.flags": torch.ones(5) > 0,
            f"{file}.eight": torch.randn(2100).to(torch.float8_e4m3fn), f"{file}.odd": torch.arange(9).to(torch.uint32),
        }  # fmt: skip
        save_file(tensors, tmp_path / f"{file}.safetensors")
    return {file: keys_of(file) for file in sorted(tmp_path.glob("*.safetensors"))}


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_blocks_in_threads_are_what_safetensors_reads(shards: Shards) -> None:
    expected = {key: bits(tensor) for key, tensor in read_tensors(shards, CPU)}
    found = [(key, bits(tensor)) for key, tensor in staged_tensors(shards, CPU)]
    assert dict(found) == expected and len(found) == len(expected) == 14
    assert [key[0] for key, _ in found] == ["0"] * 7 + ["1"] * 7  # file by file


def test_a_file_that_becomes_shorter_is_named(shards: Shards) -> None:
    file, tensors = list(shards)[1], staged_tensors(shards, CPU)
    next(tensors)
    os.truncate(file, 3000)
    with pytest.raises(CheckpointError, match=rf"{file.name}: .* became shorter"):
        list(tensors)


def test_no_thread_is_left_when_a_loader_gives_up(shards: Shards) -> None:
    import threading

    tensors = staged_tensors(shards, CPU)
    next(tensors)
    tensors.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
