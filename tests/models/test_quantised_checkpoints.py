"""Whole models from quantised checkpoints: the logits are those of a plain checkpoint of the same numbers."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hybridrt.base import dtypes
from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import CheckpointError, ConfigError, DeviceError
from hybridrt.base.quantization import QuantConfig, Scheme
from hybridrt.cli.inspect import describe_model
from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.quant.methods import QuantMethod
from hybridrt.layers.quant.packed_weight import PackedWeight
from hybridrt.models.config.quant_modelopt import modelopt_rules
from hybridrt.models.loading.stored_modules import with_stored_modules
from hybridrt.runtime.load.build_model import build_model, empty_model, weight_bytes
from hybridrt.runtime.load.load_target import load_target
from tests.support.checkpoints import CheckpointStore, falcon, write
from tests.support.levels import sweep
from tests.support.mtp_oracle import HEADS, write_with_head
from tests.support.online import write_plain
from tests.support.quantised import KINDS, of_integers
from tests.support.session import Session

PLAIN = r"norm|embed|\.gate\.weight|router|shared_expert_gate|conv1d|lm_head"
Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


def group(targets: list[str], weights: dict[str, Any], form: str) -> dict[str, Any]:
    return {"targets": targets, "weights": weights, "format": form}


def compressed(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"]} | {
        "config_groups": {f"group_{i}": each for i, each in enumerate(groups)}
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": False}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [4, 8], "modules_to_not_convert": ["lm_head"]}


class Case:
    """rules: expressions of keys and the kind of matrix there, the first one counts. said: quantization_config."""

    def __init__(
        self, name: str, rules: dict[str, str], said: dict[str, Any], side: dict[str, Any] | None = None
    ) -> None:
        self.name, self.rules, self.said, self.side = name, rules, said, side

    def kind(self, key: str) -> str | None:
        if re.search(PLAIN, key):
            return None
        return next((kind for rule, kind in self.rules.items() if re.search(rule, key)), None) or None

    def write(self, store: CheckpointStore, folder: Path, edit: Edit | None = None) -> tuple[Path, Path]:
        return self.write_from(store[self.name].path, folder, edit)

    def write_from(self, source: Path, folder: Path, edit: Edit | None = None) -> tuple[Path, Path]:
        """The quantised checkpoint and its plain twin."""
        torch.manual_seed(11)
        tensors = {key: t for file in source.glob("*.safetensors") for key, t in load_file(file).items()}
        small, dense = dict[str, Tensor](), dict[str, Tensor]()
        for key, tensor in tensors.items():
            kind, name = self.kind(key), key.removesuffix(".weight")
            if kind is None or tensor.dim() not in (2, 3) or not key.endswith("weight"):
                small[key] = dense[key] = tensor
                continue
            made = [KINDS[kind](*tensor.shape[-2:]) for _ in range(len(tensor) if tensor.dim() == 3 else 1)]
            joined = torch.stack if tensor.dim() == 3 else (lambda parts: parts[0])
            small |= {f"{name}.{last}": joined([each.tensors[last] for each in made]) for last in made[0].tensors}
            dense[key] = joined([each.dense for each in made])
        fields = json.loads((source / "config.json").read_text())
        quantised = fields | ({"quantization_config": self.said} if self.said else {})
        if edit is not None:
            edit(quantised, small)
        paths = folder / "quantised", folder / "twin"
        for path, held, config in zip(paths, (small, dense), (quantised, fields)):
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config))
            save_file({key: t.contiguous() for key, t in held.items()}, path / "model.safetensors")
        if self.side is not None:
            (paths[0] / "hf_quant_config.json").write_text(json.dumps({"quantization": self.side}))
        return paths


CASES = {
    "falcon int4": Case("falcon-plain", {"": "int4-zeros"}, compressed(group(["Linear"], INT4, "pack-quantized"))),
    "qwen fp8 blocks": Case("qwen-plain", {r"shared_expert\.|in_proj_ba": "", "": "fp8-blocks"}, BLOCKS),
    "kimi two groups": Case(
        "kimi-plain",
        {r"experts\.\d+\.": "int4-zeros", r"self_attn\.[qkvo]_proj|kv_[ab]_proj": "fp8-rows"},
        compressed(
            group(["re:.*experts.*"], INT4, "pack-quantized"), group(["re:.*self_attn.*"], FP8, "float-quantized")
        ),
    ),
    "falcon fp8 by vLLM's names": Case("falcon-plain", {"": "fp8-tensor"}, {"quant_method": "fp8"}),
    "falcon gptq": Case(
        "falcon-plain", {r"o_proj|[qkv]_proj|down_proj": "gptq-index", "": ""},
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "granite stacks": Case("granite-plain", {"": "fp8-rows"}, compressed(group(["Linear"], FP8, "float-quantized"))),
    "nemotron by its file": Case(
        "nemotron-plain", {"": "fp8-tensor"}, {}, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    ),
}  # fmt: skip


def with_cache_scales(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Advice for a KV cache in fp8, and for activations."""
    for key in [key for key in tensors if key.endswith("k_proj.weight")]:
        tensors[key.replace("weight", "k_scale")] = torch.tensor(0.0)
        tensors[key.replace("weight", "input_scale")] = torch.tensor(0.5)


@pytest.mark.parametrize("name", sweep(CASES, 2))
def test_logits_are_those_of_the_plain_twin(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    paths = CASES[name].write(checkpoints, tmp_path, with_cache_scales if "nemotron" in name else None)
    prompts = [([5, 9, 17, 3, 40, 8], 4), ([2, 3], 4)]
    sessions = [Session(path) for path in paths]
    ours, theirs = ([sample.logits for sample in session.run(prompts, chunk=4)] for session in sessions)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    held = [weight_bytes(session.runner.model) for session in sessions]
    assert held[0] < 0.9 * held[1], "matrices stay packed"


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_table_that_is_looked_up_is_decoded(tied: bool, tmp_path: Path) -> None:
    """A head of its own is multiplied by torch's kernel on a CPU, as other matrices in int4."""
    write(falcon(hidden_size=64, tie_word_embeddings=tied), tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.embed_tokens" if tied else "lm_head"
    matrix = of_integers(Scheme("int4", "compressed-packed", (1, 32)))(*tensors.pop(f"{name}.weight").shape)
    save_file(tensors | {f"{name}.{last}": t for last, t in matrix.tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = compressed(
        group([name], INT4 | {"group_size": 32, "symmetric": True}, "pack-quantized")
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine_config = EngineConfig(str(tmp_path), device="cpu", dtype="bfloat16")
    file, target = load_target(engine_config, TPGroup())
    model = build_model(engine_config, target, file, progress=False)
    method = model.head.method
    assert isinstance(method, QuantMethod) and (model.head is model.embed) == tied
    assert (method.weight.for_torch is None) == tied
    x = torch.randn(2, 64).to(torch.bfloat16)
    meant = x.float() @ matrix.dense.t()
    assert float((model.head.logits(x) - meant).norm() / meant.norm()) < 0.01


def test_a_prediction_head_is_quantised_like_the_model(tmp_path: Path) -> None:
    """Its experts and attention; also its fusion, which no rank cuts."""
    (tmp_path / "source").mkdir()
    write_with_head(HEADS["qwen35-experts"], tmp_path / "source")
    paths = Case("", {"": "fp8-blocks"}, BLOCKS).write_from(tmp_path / "source", tmp_path)
    heads = []
    for path in paths:
        config = EngineConfig(str(path), device="cpu", dtype="float32", speculative=SpeculativeConfig("mtp"))
        file, target = load_target(config, TPGroup())
        model = build_model(config, target, file, progress=False)
        assert model.mtp is not None
        heads.append(model.mtp)
    assert len(packed_weights(heads[0])) >= 3 and not packed_weights(heads[1])
    x = torch.randn(3, 64)
    torch.testing.assert_close(heads[0].fuse(x), heads[1].fuse(x))
    (left, right) = (next(iter(head.stack))[1].qkv(x[:, :32]) for head in heads)
    torch.testing.assert_close(left, right)


def refused(path: Path) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as error:
        config = EngineConfig(str(path), device="cpu", dtype="float32")
        file, target = load_target(config, TPGroup())
        build_model(config, target, file, progress=False)
    return str(error.value)


UP = "model.layers.0.mlp.experts.1.up_proj"


def without(key: str) -> Edit:
    return lambda config, tensors: tensors.__delitem__(key)


def changed(key: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda config, tensors: tensors.__setitem__(key, change(tensors[key]))


def plain_weight(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].float()


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (without(f"{UP}.weight_scale_inv"), rf"{UP}.weight_scale_inv is missing"),
        (without(f"{UP}.weight"), rf"{UP}.weight_scale_inv belongs to a quantised matrix, but there is no weight"),
        (plain_weight, rf"{UP}.weight_scale_inv belongs to a quantised matrix, but .*float32"),
        (changed(f"{UP}.weight", lambda t: t.float().to(torch.float8_e5m2)), rf"{UP}.weight holds float8_e5m2"),
        (changed(f"{UP}.weight_scale_inv", lambda t: t.int()), rf"{UP}.weight_scale_inv holds int32"),
        (lambda config, tensors: config.pop("quantization_config"), "weight_scale_inv"),
        (lambda config, tensors: tensors.update({f"{UP}.weight_packed": torch.zeros(3)}), rf"{UP}.weight_packed"),
        (lambda config, tensors: tensors.update({f"{UP}.pre_quant_scale": torch.zeros(3)}), rf"{UP}.pre_quant_scale"),
        (lambda config, tensors: tensors.update({"model.norm.weight_scale": torch.ones(1)}), "model.norm.weight_scale"),
    ],
)
def test_files_that_are_not_whole(edit: Edit, text: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path, _ = CASES["qwen fp8 blocks"].write(checkpoints, tmp_path, edit)
    said = refused(path)
    assert re.search(text.replace(".", r"\."), said) or re.search(text, said), said


def test_groups_without_their_index(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    key = "model.layers.0.self_attn.o_proj.g_idx"
    path, _ = CASES["falcon gptq"].write(checkpoints, tmp_path, without(key))
    assert f"{key} is missing: with desc_act or actorder" in refused(path)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bias_that_the_layer_does_not_have(value: float, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Older writers of GPTQ store zeros."""

    def with_bias(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.full((32,), value)

    path, _ = CASES["falcon gptq"].write(checkpoints, tmp_path, with_bias)
    if value:
        assert "o_proj.bias is not zero" in refused(path)
    else:
        config = EngineConfig(str(path), device="cpu", dtype="float32")
        file, target = load_target(config, TPGroup())
        assert build_model(config, target, file, progress=False)


def test_a_table_without_the_prefix_of_the_text_model(tmp_path: Path) -> None:
    """Of a model with a vision tower."""
    matrix = {"weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)}
    names = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    stored = [names[0].replace("model.", "model.language_model."), f"language_model.{names[1]}"]
    tensors = {f"{name}.{last}": t.clone() for name in stored for last, t in matrix.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    table = {name: {"quant_algo": "FP8"} for name in names}
    rules = modelopt_rules({"quant_algo": "MIXED_PRECISION", "quantized_layers": table}, "config.json")
    modules = with_stored_modules(QuantConfig(rules), tmp_path).modules or {}
    assert {name: str(module.scheme) for name, module in modules.items()} == dict.fromkeys(stored, "fp8 by tensor")


def test_a_plain_matrix_next_to_its_codes(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    def twice(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(32, 32)

    path, _ = CASES["falcon gptq"].write(checkpoints, tmp_path, twice)
    assert "model.layers.0.self_attn.o_proj.weight is plain, and other tensors have layers.0." in refused(path)


def test_experts_of_a_layer_that_are_stored_in_different_ways(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    def one_plain(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[f"{UP}.weight_scale_inv"]
        tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].float()

    path, _ = CASES["qwen fp8 blocks"].write(checkpoints, tmp_path, one_plain)
    assert f"{UP} is stored as dense and model.layers.0.mlp.experts.0.gate_proj as fp8 by 4x8" in refused(path)


def packed_weights(model: nn.Module) -> list[PackedWeight]:
    methods = [module.method for module in model.modules() if hasattr(module, "method")]
    methods += [run for method in methods for run in getattr(method, "runs", ())]
    return [method.weight for method in methods if isinstance(getattr(method, "weight", None), PackedWeight)]


def test_inspect_counts_matrices_and_bytes(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path, twin = CASES["kimi two groups"].write(checkpoints, tmp_path)
    config = EngineConfig(str(path), device="cpu", dtype="float32")
    report, plain = describe_model(config), describe_model(replace(config, model=str(twin)))
    assert report.quantization == "compressed-tensors" and plain.quantization is None and plain.schemes == {}
    assert set(report.schemes) == {"int4 by 8 inputs", "fp8 by row"}
    assert report.num_parameters == plain.num_parameters
    file, target = load_target(config, TPGroup())
    held: dict[str, int] = {}
    for param in build_model(config, target, file, progress=False).parameters():
        name = str(param.dtype).removeprefix("torch.")
        held[name] = held.get(name, 0) + param.nbytes
    assert {name: held[name] for name in ("float8_e4m3fn", "uint8", "int8")} == {
        name: report.weight_bytes_by_dtype[name] for name in ("float8_e4m3fn", "uint8", "int8")
    }
    assert abs(sum(held.values()) - report.weight_bytes) < 0.02 * report.weight_bytes


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
@pytest.mark.parametrize(("name", "online"), [("qwen fp8 blocks", None), ("", "fp8"), ("falcon int4", None)])
def test_a_gpu_without_e4m3(
    name: str, online: str | None, capability: tuple[int, int], checkpoints: CheckpointStore, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before memory is taken: its kernels do not compile."""
    path = write_plain("falcon", tmp_path) if online else CASES[name].write(checkpoints, tmp_path)[0]
    config = EngineConfig(str(path), device="cpu", quantization=online)
    _, target = load_target(config, TPGroup())
    target = replace(target, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dtypes, "gpu_name", lambda *_: "an A100")
    if capability == (8, 9) or name == "falcon int4":
        assert empty_model(config, target, torch.device("meta"))
        return
    with pytest.raises(DeviceError, match=r"an A100 has no e4m3 numbers .* layers\.\d.* is stored as fp8 by .*int4"):
        empty_model(config, target, torch.device("meta"))


@pytest.mark.parametrize("name", ["falcon int4", "qwen fp8 blocks"])
def test_random_weights_of_a_quantised_model(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """config.json alone says which modules are quantised; codes are valid numbers."""
    path, _ = CASES[name].write(checkpoints, tmp_path)
    (path / "model.safetensors").unlink()
    session = Session(path, load_format="dummy")
    packed = packed_weights(session.runner.model)
    assert packed and all(bool(weight.dequantize().isfinite().all()) for weight in packed)
    assert all(0.001 < float(weight.dequantize().std()) < 0.1 for weight in packed)
    (sample,) = session.run([([5, 9, 17], 3)], chunk=4)
    assert bool(sample.logits.isfinite().all())


def test_a_module_that_is_listed_as_plain_has_plain_random_weights(
    checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    def listed(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["quantization_config"] = BLOCKS | {"modules_to_not_convert": [f"model.layers.{i}.mlp" for i in range(4)]}

    path, _ = CASES["qwen fp8 blocks"].write(checkpoints, tmp_path, listed)
    config = EngineConfig(str(path), device="cpu", load_format="dummy")
    _, target = load_target(config, TPGroup())
    found = {name: p.dtype for name, p in empty_model(config, target, torch.device("meta")).named_parameters()}
    kinds = {name.rpartition(".")[0]: dtype for name, dtype in found.items() if dtype == torch.float8_e4m3fn}
    assert kinds and not any("experts" in name for name in kinds)
