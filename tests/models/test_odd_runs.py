"""Odd configs and odd weights of every family, not read alone but run: each ends in a typed error, or gives tokens."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from hybridrt import LLM, SamplingParams
from hybridrt.base.errors import HybridrtError
from tests.models.test_odd_files import FAMILIES, image
from tests.support.checkpoints import write
from tests.support.odd_configs import leaves, mutated

PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
Tensors = dict[str, tuple[str, list[int], bytes]]  # dtype, shape and bytes by key
SOME, MANY = pytest.param(4, marks=pytest.mark.slow), pytest.mark.soak


def run(path: Path, what: str, **options: Any) -> bool:
    """Whether a few tokens came out; False for a typed error, of a text that is short enough to be read."""
    try:
        with LLM(str(path), device="cpu", max_model_len=32, max_running_requests=2, **options) as llm:
            llm.generate([[1, 0, 1]], PARAMS)
    except HybridrtError as e:
        assert 12 <= len(str(e)) < 1500, what
        return False
    except Exception as e:
        raise AssertionError(what) from e
    return True


@pytest.mark.parametrize("count", [SOME, pytest.param(300, marks=MANY)])
@pytest.mark.parametrize("family", FAMILIES)
def test_odd_configs_run_or_end_in_typed_errors(family: str, count: int, tmp_path: Path) -> None:
    write(FAMILIES[family], tmp_path)
    file, rng = tmp_path / "config.json", random.Random(f"{family} {count}")
    fields = json.loads(file.read_text())
    others, ran = list(leaves(fields)), 0
    for _ in range(count):
        changed = fields
        for _ in range(rng.choice((1, 1, 2, 3))):
            changed = mutated(changed, rng, others)
        file.write_text(json.dumps(changed))
        ran += run(tmp_path, f"{changed}"[:3000], load_format="dummy")
    assert count < 100 or count // 6 < ran < count


def parse(data: bytes) -> Tensors:
    """A safetensors file's contents."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    return {key: (e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for key, e in header.items()}


def unparse(tensors: Tensors) -> bytes:
    header, body = {}, b""
    for key, (dtype, shape, raw) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    return image(header, body)


def spoilt(tensors: Tensors, rng: random.Random) -> tuple[str, Tensors]:
    """A tensor renamed, reshaped, of another dtype, of odd numbers, swapped, doubled or gone; what was done."""
    key, other = rng.choice(list(tensors)), rng.choice(list(tensors))
    dtype, shape, raw = tensors[key]
    count = len(raw) // SIZES[dtype]
    kind = rng.randrange(9)
    if kind == 0:
        dtype = rng.choice(list(SIZES))
        raw = rng.randbytes(count * SIZES[dtype])
    elif kind == 1:
        shape = rng.choice([shape[::-1], [1, *shape], [count], [*shape, 1], [0, *shape[1:]], []])
        raw = raw if 0 not in shape else b""
    elif kind == 2:
        number = rng.choice((float("nan"), float("inf"), -3e38, 1e-45))
        dtype, raw = "F32", struct.pack("<f", number) * count
    elif kind == 3:
        return f"swapped {key} and {other}", tensors | {key: tensors[other], other: tensors[key]}
    elif kind == 4:
        return f"{key} is gone", {name: tensor for name, tensor in tensors.items() if name != key}
    elif kind == 5:
        more = rng.choice(["", "a", "\0", f"{key}_scale", f"{key}.weight", key.replace("0", "99")])
        return f"{more!r} is one more", tensors | {more: tensors[key]}
    elif kind == 6:
        raw = raw[:-1] if rng.random() < 0.5 else raw + b"\0"
    elif shape:
        shape = [shape[0] + 1, *shape[1:]]
        raw += raw[: len(raw) // (shape[0] - 1)]
    return f"{key} as {dtype} {shape}", tensors | {key: (dtype, shape, raw)}


@pytest.mark.parametrize("count", [SOME, pytest.param(100, marks=MANY)])
@pytest.mark.parametrize("family", FAMILIES)
def test_odd_weights_run_or_end_in_typed_errors(family: str, count: int, tmp_path: Path) -> None:
    write(FAMILIES[family], tmp_path)
    file, rng = tmp_path / "model.safetensors", random.Random(f"{family} {count}")
    tensors, ran = parse(file.read_bytes()), 0
    for _ in range(count):
        what, changed = spoilt(tensors, rng)
        file.write_bytes(unparse(changed))
        ran += run(tmp_path, what)
    assert count < 100 or 0 < ran < count // 2
