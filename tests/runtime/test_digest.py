"""The digest in the handshake: which changes of a model's weights it sees."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hybridrt import EngineConfig
from hybridrt.base.errors import CheckpointError
from hybridrt.runtime.load.digest import PIECES, SAMPLE, model_digest

SIZES = {"small": 7, "norm": SAMPLE // 4, "large": 150_000, "wide": 400_001, "half": 90_000}
GAP = 1 / (PIECES - 1)


def weights() -> dict[str, torch.Tensor]:
    """Tensors of up to 25 times the sample; one in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.rand(size, generator=generator) + 0.5 for name, size in SIZES.items()}
    return made | {"half": made["half"].bfloat16(), "wide": made["wide"][:400_000].view(400, 1000)}


def digest(folder: Path, *shards: dict[str, torch.Tensor], load_format: str = "auto") -> str:
    folder.mkdir(exist_ok=True)
    for file in folder.glob("*"):
        file.unlink()
    (folder / "config.json").write_text("{}")
    for i, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{i}.safetensors")
    return model_digest(folder, EngineConfig(str(folder), load_format=load_format))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SIZES)
def test_a_tensor_scaled_by_one_and_a_half_changes_the_digest(name: str, tmp_path: Path) -> None:
    ours = weights()
    theirs = {**ours, name: ours[name] * 1.5}
    assert digest(tmp_path, ours) != digest(tmp_path, theirs)
    assert digest(tmp_path, ours) == digest(tmp_path, weights()), "the same weights agree"


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_a_file_that_says_what_codes_mean_changes_the_digest(name: str, tmp_path: Path) -> None:
    config, found = EngineConfig(str(tmp_path)), [digest(tmp_path, weights())]
    for text in ("{}", '{"bits": 4}'):
        (tmp_path / name).write_text(text)
        found.append(model_digest(tmp_path, config))
    assert len(set(found)) == 3


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(SIZES)), at=st.floats(0, 1), width=st.floats(0, 0.2), change=st.floats(0.01, 9))
def test_any_changed_region_changes_the_digest(
    name: str, at: float, width: float, change: float, tmp_path: Path
) -> None:
    """A single element of a small tensor; of a large one, any run of a fifteenth of its bytes."""
    ours = weights()
    theirs = {key: tensor.clone() for key, tensor in ours.items()}
    flat = theirs[name].view(-1)
    small = flat.numel() * flat.element_size() <= SAMPLE
    count = 1 + int((width if small else GAP + width) * flat.numel())
    start = int(at * max(flat.numel() - count, 0))
    flat[start : start + count] += change
    if not torch.equal(ours[name], theirs[name]):
        assert digest(tmp_path, ours) != digest(tmp_path, theirs)


@pytest.mark.parametrize("end", [0, -1])
@pytest.mark.parametrize("name", SIZES)
def test_the_first_and_the_last_element_change_the_digest(name: str, end: int, tmp_path: Path) -> None:
    theirs = weights()
    theirs[name].view(-1)[end] *= 2
    assert digest(tmp_path, weights()) != digest(tmp_path, theirs)


def test_names_shapes_and_dtypes_change_the_digest_and_files_do_not(tmp_path: Path) -> None:
    ours = weights()
    wide = ours.pop("wide")
    seen = [
        digest(tmp_path, ours | {"wide": wide}),
        digest(tmp_path, ours | {"wide": wide.view(1000, 400)}),
        digest(tmp_path, ours | {"wide": wide.view(torch.int32)}),
        digest(tmp_path, ours | {"other": wide}),
        digest(tmp_path, ours),
        digest(tmp_path, ours, load_format="dummy"),
    ]
    assert len(set(seen)) == len(seen)
    assert digest(tmp_path, {"wide": wide}, ours) == digest(tmp_path, ours, {"wide": wide}) == seen[0]
    assert load_file(tmp_path / "model-1.safetensors").keys() == {"wide"}
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert model_digest(tmp_path, EngineConfig(str(tmp_path))) != seen[0]


def file_of(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x05", b"\xff" * 8, b"\x00" * 8, b"\xff" * 200, file_of(b"[]"), file_of(b"{"), file_of(b"[" * 9999),
        file_of(b"\xff\xff"), file_of(json.dumps({"x": 5}).encode()), file_of(json.dumps({"x": {}}).encode()),
        *(file_of(json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode(), b"1234")
          for offsets in ([0, 5], [-4, 0], [3, 1], [0], "ab", None, [0, 10**30])),
    ],
)  # fmt: skip
def test_what_is_no_weight_file_is_a_typed_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        model_digest(tmp_path, EngineConfig(str(tmp_path)))
