"""Plain checkpoints that are quantised while they are loaded."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.cli.inspect import describe_model
from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.quant.pieces import PackedPiece
from hybridrt.models.base import CausalLM
from hybridrt.runtime.load.build_model import build_model, weight_bytes
from hybridrt.runtime.load.digest import model_digest
from hybridrt.runtime.load.load_target import load_target
from hybridrt.speculative.draft_model import draft_config
from tests.support.checkpoints import CheckpointStore, falcon, write
from tests.support.levels import sweep
from tests.support.live_bytes import LiveBytes
from tests.support.online import MODELS, with_number, write_plain, write_twin
from tests.support.session import Session

SCHEMES = ("fp8", "int4")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("online")
    return {name: write_plain(name, folder / name) for name in MODELS}


def load(path: Path, quantization: str | None, tp: TPGroup | None = None, **options: Any) -> CausalLM:
    tp = tp or TPGroup()
    config = EngineConfig(
        str(path), device="cpu", dtype="float32", tp_size=tp.size, quantization=quantization, **options
    )
    file, target = load_target(config, tp)
    return build_model(config, target, file, progress=False)


@pytest.mark.parametrize(("name", "scheme"), sweep(product(MODELS, SCHEMES), 3))
def test_logits_are_those_of_the_plain_twin(name: str, scheme: str, plain: dict[str, Path], tmp_path: Path) -> None:
    twin = write_twin(name, scheme, plain[name], tmp_path / "twin")
    prompts = [([5, 9, 17, 3, 40, 8], 4), ([2, 3], 4)]
    sessions = Session(plain[name], quantization=scheme), Session(twin)
    ours, theirs = ([sample.logits for sample in session.run(prompts, chunk=4)] for session in sessions)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    held = [weight_bytes(session.runner.model) for session in sessions]
    assert held[0] < (0.45 if scheme == "fp8" else 0.4) * held[1], "matrices stay packed"


def packed(model: CausalLM) -> dict[str, Tensor]:
    """The numbers of each quantised part of a rank."""
    found = {}
    for piece in (piece for pieces in model.all_targets().values() for piece in pieces):
        if isinstance(piece, PackedPiece):
            weight, starts = piece.weight, piece.weight.starts
            found[piece.name] = weight.dequantize(starts[piece.part], starts[piece.part + 1], piece.e)
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["falcon", "qwen"])
def test_ranks_have_the_numbers_of_one(name: str, scheme: str, plain: dict[str, Path]) -> None:
    """They cut blocks and groups: scales are those of whole matrices."""
    whole, *ranks = (packed(load(plain[name], scheme, tp)) for tp in (TPGroup(), TPGroup(0, 2), TPGroup(1, 2)))
    assert whole.keys() == ranks[0].keys() == ranks[1].keys()
    cut = 0
    for part, numbers in whole.items():
        shards = [rank[part] for rank in ranks]
        dim = next((i for i in (0, 1) if shards[0].shape[i] < numbers.shape[i]), None)
        cut += dim is not None
        torch.testing.assert_close(shards[0] if dim is None else torch.cat(shards, dim), numbers, rtol=0, atol=0)
    assert cut > len(whole) / 2


@pytest.mark.parametrize("name", MODELS)
def test_what_stays_plain(name: str, plain: dict[str, Path]) -> None:
    model = load(plain[name], "int4")
    floats = {key for key, p in model.named_parameters() if p.dtype == torch.float32}
    for part in ("embed", "head", "router", "norm", "conv"):
        own = [key for key, _ in model.named_parameters() if part in key]
        assert all(key in floats for key in own), part
    assert any("router" in key for key in floats) == (name != "falcon")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_peak_memory_is_the_quantised_model_and_a_tensor(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridrt.kernels.quant.encode.NUMBERS", 1 << 17)
    sizes = {"hidden_size": 256, "intermediate_size": 4096, "mamba_d_ssm": 512, "mamba_d_head": 64, "mamba_n_heads": 8}
    write(falcon(**sizes, num_hidden_layers=4, vocab_size=64), tmp_path / "model")
    held = load_file(tmp_path / "model" / "model.safetensors")
    largest = max(t.nbytes for t in held.values())
    with LiveBytes() as live:
        model = load(tmp_path / "model", scheme)
    live.count()
    assert abs(live.now - weight_bytes(model)) < 0.05 * weight_bytes(model), "all allocations are seen"
    at_once = 4 * 128 * (4096 if scheme == "fp8" else 1024)  # bytes of a block's rows, or of NUMBERS
    assert weight_bytes(model) + largest < live.peak < weight_bytes(model) + 1.25 * largest + 3 * at_once
    assert weight_bytes(model) + 3 * largest < sum(t.nbytes for t in held.values()), "the plain model is larger"


def test_a_quantised_checkpoint_is_refused(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    fields = json.loads((checkpoints["falcon-plain"].path / "config.json").read_text())
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": said}))
    for options in ({}, {"load_format": "dummy"}):
        with pytest.raises(ConfigError, match=r"quantization is 'int4', but .* quantised already \(by fp8\): leave"):
            load(path, "int4", **options)


def test_other_options_are_refused_before_anything_is_read(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization is 'int3'; it must be one of fp8, int4"):
        EngineConfig("nowhere", quantization="int3")
    path = checkpoints["falcon-plain"].path
    with pytest.raises(ConfigError, match="FalconH1ForCausalLM has no matrix of at least 128 x 128"):
        describe_model(EngineConfig(str(path), device="cpu", quantization="fp8"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_have_no_scale_are_named(
    scheme: str, value: float, plain: dict[str, Path], tmp_path: Path
) -> None:
    path = with_number(plain["falcon"], tmp_path / "model", value)
    with pytest.raises(CheckpointError, match=r"layers\.1\.feed_forward\.up_proj contains NaN or infinity"):
        load(path, scheme)


def test_inspection_counts_what_is_loaded(plain: dict[str, Path]) -> None:
    config = EngineConfig(str(plain["falcon"]), device="cpu", dtype="float32", quantization="int4")
    report, model = describe_model(config), load(plain["falcon"], "int4")
    assert report.quantization == "int4"
    assert report.schemes == {"int4 by 128 inputs": 14, "int4 by 32 inputs": 4}
    assert abs(report.weight_bytes - weight_bytes(model)) < 0.04 * report.weight_bytes  # multipliers of rows
    assert report.num_parameters == describe_model(EngineConfig(str(plain["falcon"]), device="cpu")).num_parameters


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_weights(scheme: str, plain: dict[str, Path]) -> None:
    model = load(plain["qwen"], scheme, load_format="dummy")
    assert packed(model) and all(bool(numbers.isfinite().all()) for numbers in packed(model).values())
    assert abs(weight_bytes(model) - weight_bytes(load(plain["qwen"], scheme))) < 0.001 * weight_bytes(model)


def test_states_of_a_quantised_model_are_other_states(plain: dict[str, Path]) -> None:
    path = plain["falcon"]
    digests = {model_digest(path, EngineConfig(str(path), quantization=q)) for q in (None, *SCHEMES)}
    assert len(digests) == 3


def test_a_draft_model_stays_as_it_is_stored(plain: dict[str, Path]) -> None:
    spec = SpeculativeConfig("draft", draft_model="embedded_draft")
    assert draft_config(EngineConfig("embedded", quantization="int4", speculative=spec)).quantization is None
