"""Safetensors files that change while they are read, or whose headers are long: typed errors, and little work."""

import json
import os
import random
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from hybridrt import SessionError
from hybridrt.base.config_json import read_object
from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.base.files import CONFIG_BYTES, INDEX_BYTES, SESSION_HEADER_BYTES, TOKENIZER_BYTES, WEIGHTS_HEADER_BYTES
from hybridrt.base.files_safetensors import DTYPES, DamagedFileError, TensorFile
from hybridrt.engine.text.tokenizer import load_tokenizer
from hybridrt.models.loading.weight_files import equal_tensors, keys_of, tensors_of
from hybridrt.models.loading.weight_reader import staged_tensors
from tests.engine.test_sessions import TEXT, ask, build
from tests.models.test_loader import load as load_model
from tests.models.test_odd_files import image
from tests.support.checkpoints import CheckpointStore
from tests.support.tiny import write_tiny


def tensors() -> dict[str, torch.Tensor]:
    found = {name: torch.arange(24).to(dtype) for name, dtype in DTYPES.items() if dtype.itemsize < 9}
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "matrix": torch.randn(5, 7)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


def test_tensors_are_what_the_library_reads(tmp_path: Path) -> None:
    given = tensors()
    save_file(given, tmp_path / "a", {"note": "x"})
    with TensorFile(tmp_path / "a", 1 << 20) as file:
        assert file.metadata == {"note": "x"} and file.entries.keys() == given.keys()
        assert all(same(file.read(name), tensor) for name, tensor in given.items())
        file.check_unchanged()


@pytest.mark.parametrize("seed", range(3))
def test_a_spoilt_header_is_refused_or_read_as_the_library_reads_it(seed: int, tmp_path: Path) -> None:
    whole, draws, refused = save({"a": torch.randn(3, 4), "b": torch.arange(5)}), random.Random(seed), 0
    header = struct.unpack("<Q", whole[:8])[0] + 8
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(draws.randint(1, 3)):
            data[draws.randrange(header)] = draws.choice(b'0123456789"[]{},:-eFI\\\0 ')
        (tmp_path / "a").write_bytes(data)
        try:
            with TensorFile(tmp_path / "a", 1 << 20) as file:
                found = {name: file.read(name) for name in file.entries}
        except DamagedFileError:
            refused += 1
            continue
        try:
            wanted = load(bytes(data))
        except SafetensorError:
            continue  # it is stricter about names of fields
        assert found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in found)
    assert refused > 100


class Changes:
    """Changes a file after the first tensor that is read from it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
        read, self.left = TensorFile.fill, 1

        def fill(file: TensorFile, start: int, into: torch.Tensor) -> None:
            read(file, start, into)
            if self.left and into.numel():
                self.left -= 1
                change(file.path)

        monkeypatch.setattr(TensorFile, "fill", fill)


def rewritten(path: Path) -> None:
    """Other bytes, as many, at another time."""
    found = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"zzzz")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1_000_000))


def shorter(path: Path) -> None:
    os.truncate(path, int.from_bytes(path.read_bytes()[:8], "little") + 8)


@pytest.mark.parametrize(("change", "text"), [(shorter, "became shorter"), (rewritten, "changed while it was read")])
def test_a_checkpoint_that_changes_while_it_is_read_is_refused(
    change: Any, text: str, checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is mapped: to touch a page that a mapped file has no more kills the process."""
    shutil.copytree(checkpoints["falcon-plain"].path, tmp_path, dirs_exist_ok=True)
    changes = Changes(monkeypatch, change)
    with pytest.raises(CheckpointError, match=text):
        load_model(tmp_path)
    assert not changes.left


def test_a_file_that_is_replaced_while_threads_read_it_is_refused(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"x": torch.full((64,), value), "y": torch.full((64,), value)}, tmp_path / name)
    file = tmp_path / "a"
    shards = {file: keys_of(file)}
    found = staged_tensors(shards, torch.device("cpu"))
    next(found)
    os.replace(tmp_path / "b", file)
    assert all(tensor.unique().tolist() == [1.0] for _, tensor in found)  # the file that was opened
    assert [tensor.unique().tolist() for _, tensor in tensors_of(shards)] == [[2.0], [2.0]]


@pytest.mark.parametrize("shape", [[0, 2**70], [2**40, 2**40, 0], [1] * 1000])
def test_shapes_that_no_tensor_has_are_refused(shape: list[int], tmp_path: Path) -> None:
    size = 0 if 0 in shape else 4
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    with pytest.raises(DamagedFileError, match="no tensor can have the shape"):
        TensorFile(tmp_path / "a", 1 << 20)


def test_tensors_are_compared_by_their_bytes(tmp_path: Path) -> None:
    one = torch.randn(9, 5)
    save_file({"a": one, "b": one.clone(), "c": one + 1, "d": one.reshape(5, 9).clone()}, tmp_path / "x")
    assert [equal_tensors((tmp_path / "x", "a"), (tmp_path / "x", name)) for name in "bcd"] == [True, False, False]


@pytest.mark.parametrize("change", [shorter, rewritten])
def test_a_session_that_changes_while_it_is_loaded_is_refused(
    change: Any, checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build(checkpoints["falcon-plain"].path) as llm:
        ask(llm, TEXT[:20])
        llm.save_session(tmp_path / "talk", TEXT[:20])
        before = llm.engine.counters()
        Changes(monkeypatch, change)
        with pytest.raises(SessionError, match=r"became shorter|changed while it was read"):
            llm.load_session(tmp_path / "talk")
        assert llm.engine.counters() == before


def long_header(size: int) -> bytes:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return image({f"t{i}": entry for i in range(size // 60)}, bytes(4))


def test_a_long_header_is_refused_before_it_is_parsed(
    checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a session and of a weight file: the time of the thread shows that nothing was parsed."""
    session, weights = tmp_path / "talk", write_tiny(tmp_path / "model", tokenizer=False) / "model.safetensors"
    session.write_bytes(long_header(2 * SESSION_HEADER_BYTES))
    weights.write_bytes(image(b" " * (WEIGHTS_HEADER_BYTES + 1)))
    with build(checkpoints["falcon-plain"].path) as llm:
        with pytest.raises(SessionError, match="no file of this version"):
            empty = tmp_path / "empty"
            save_file({"x": torch.zeros(1)}, empty)
            llm.load_session(empty)  # reads samples of the weights once

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("parsed")

        monkeypatch.setattr(json, "loads", refuse)
        began = time.thread_time()
        with pytest.raises(SessionError, match=rf"its header has \d+ bytes; it may have {SESSION_HEADER_BYTES}"):
            llm.load_session(session)
        assert time.thread_time() - began < 0.1
    with pytest.raises(CheckpointError, match=f"it may have {WEIGHTS_HEADER_BYTES}"):
        keys_of(weights)


def test_other_files_are_bounded_before_they_are_parsed(tmp_path: Path) -> None:
    """Sparse files: nothing of them is read."""
    path = write_tiny(tmp_path)
    for name, limit, error in (
        ("tokenizer.json", TOKENIZER_BYTES, CheckpointError), ("tokenizer_config.json", CONFIG_BYTES, CheckpointError),
    ):  # fmt: skip
        file = path / name
        before = file.read_bytes()
        os.truncate(file, limit + 1)
        with pytest.raises(error, match=f"more than {limit} bytes"):
            load_tokenizer(path)
        file.write_bytes(before)
    before = (path / "config.json").read_bytes()
    os.truncate(path / "config.json", CONFIG_BYTES + 1)
    with pytest.raises(ConfigError, match=f"more than {CONFIG_BYTES} bytes"):
        read_object(path / "config.json")
    (path / "config.json").write_bytes(before)
    index = path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, INDEX_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"more than {INDEX_BYTES} bytes"):
        load_model(path)
