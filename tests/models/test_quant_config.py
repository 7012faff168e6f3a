"""Rules of quantised checkpoints from config.json and the files next to it: schemes by module, and what is refused."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt.base.dtypes import check_schemes
from hybridrt.base.errors import ConfigError, DeviceError, HybridrtError, UnsupportedModelError
from hybridrt.base.quantization import QuantRules
from hybridrt.models.config.read_quant import read_quant_config

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def rules(path: Path, said: Any, side: Any = None, **outer: Any) -> QuantRules:
    if side is not None:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": side}))
    found = read_quant_config(path, {"quantization_config": said, **outer}, {})
    assert found is not None and found.modules is None
    return found.rules


def compressed(*weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": each} for i, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"], **changes}


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 by 128x128"),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8 by tensor"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, "int4 by 64 inputs"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8 by row"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4 by 16 inputs"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8 by tensor"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "fp8 by 32 inputs"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PB_WO"}}, "fp8 by 128x128"),
        (compressed(INT4), "int4 by 128 inputs"),
        (compressed(FP8), "fp8 by row"),
        (compressed(INT4 | {"num_bits": 8}, format="pack-quantized"), "int8 by 128 inputs"),
        (compressed(INT4 | {"strategy": "channel", "group_size": None}), "int4 by row"),
        (compressed(FP8 | {"strategy": "block", "block_structure": "128x64"}), "fp8 by 128x64"),
        (compressed(FP8 | {"strategy": "tensor"}), "fp8 by tensor"),
        (compressed(FP8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}), "fp4 by 16 inputs"),
        (compressed(FP8 | {"num_bits": 4, "strategy": "group", "group_size": 32}), "fp4 by 32 inputs"),
    ],
)
def test_one_scheme_for_all(said: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    assert str(rules(tmp_path, said).scheme("model.layers.0.mlp.up_proj")) == scheme


def test_groups_are_found_by_name_then_expression_then_class(tmp_path: Path) -> None:
    said = compressed(INT4, FP8, FP8 | {"strategy": "tensor"}, ignore=["lm_head", "re:.*router"])
    groups = said["config_groups"]
    groups["group_1"]["targets"], groups["group_2"]["targets"] = ["re:.*self_attn"], ["model.layers.0.self_attn.k_proj"]
    found = rules(tmp_path, said)
    names = ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
    assert [str(found.scheme(name)) for name in names] == ["int4 by 128 inputs", "fp8 by row", "fp8 by tensor"]
    assert found.leaves_plain("lm_head") and found.leaves_plain("model.layers.0.router")
    assert not found.leaves_plain("x.lm_head")
    del groups["group_0"]
    assert rules(tmp_path, said).scheme("model.layers.0.mlp.up_proj") is None


def test_a_class_of_modules_comes_before_linear(tmp_path: Path) -> None:
    said = compressed(INT4, FP8, FP8 | {"strategy": "tensor"})
    groups = said["config_groups"]
    groups["group_1"]["targets"], groups["group_2"]["targets"] = ["Embedding"], ["Conv1d"]
    names = ("model.layers.0.mixer.in_proj", "model.embed_tokens", "backbone.embeddings", "model.layers.0.mixer.conv1d")
    shown = ["int4 by 128 inputs", "fp8 by row", "fp8 by row", "fp8 by tensor"]
    assert [str(rules(tmp_path, said).scheme(name)) for name in names] == shown
    del groups["group_1"], groups["group_2"]
    assert {str(rules(tmp_path, said).scheme(name)) for name in names} == {"int4 by 128 inputs"}


def test_a_table_of_modules(tmp_path: Path) -> None:
    layers = {"a.in_proj": {"quant_algo": "FP8"}, "a.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    found = rules(tmp_path, None, {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert [str(found.scheme(name)) for name in ("a.in_proj", "a.up_proj", "a.q_proj")] == [
        "fp8 by tensor", "fp4 by 16 inputs", "None"
    ]  # fmt: skip


def test_excluded_modules_are_wildcards(tmp_path: Path) -> None:
    said = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["layers.1*", "lm_head"]}
    found = rules(tmp_path, said)
    names = ("lm_head", "layers.1.up", "layers.10.up", "layers.2.up", "x.lm_head")
    assert [found.leaves_plain(name) for name in names] == [True, True, True, False, False]


def test_expressions_of_gptq_come_in_order(tmp_path: Path) -> None:
    dynamic = {"-:.*attn.*": {}, "+:.*up_proj": {"bits": 8, "group_size": 32}, ".*proj": {"group_size": 64}}
    found = rules(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic})
    assert found.leaves_plain("m.attn.q_proj") and not found.leaves_plain("m.up_proj")
    names = ("m.up_proj", "m.q_proj", "m.gate")
    assert [str(found.scheme(name)) for name in names] == [
        "int8 by 32 inputs",
        "int4 by 64 inputs",
        "int4 by 128 inputs",
    ]


@pytest.mark.parametrize(
    ("order", "indexed"), [("group", True), ("dynamic", True), ("weight", False), ("static", False), (None, False)]
)
def test_orders_of_activations(order: str | None, indexed: bool, tmp_path: Path) -> None:
    """Only groups of inputs that are not neighbours have an index."""
    scheme = rules(tmp_path, compressed(INT4 | {"actorder": order})).scheme("x")
    assert scheme is not None and scheme.indexed == indexed


@pytest.mark.parametrize("said", [{}, {"format": "gptq_v2"}, {"checkpoint_format": "gptq_v2"}, {"format": "gptq"}])
def test_newer_writers_name_gptq_s_layout_otherwise(said: dict[str, Any], tmp_path: Path) -> None:
    """The second version stores zero points as they are: read as the first one, each would be off by one."""
    scheme = rules(tmp_path, {"quant_method": "gptq", "bits": 4} | said).scheme("x")
    assert scheme is not None and scheme.layout == next(iter(said.values()), "gptq")


@pytest.mark.parametrize("changes", [{"format": "awq"}, {"checkpoint_format": "marlin"}, {"format": ["gptq"]}])
def test_some_modules_of_gptq_have_no_other_layout(changes: dict[str, Any], tmp_path: Path) -> None:
    said = {"quant_method": "gptq", "bits": 4, "format": "gptq_v2", "dynamic": {".*proj": changes | {"bits": 8}}}
    scheme = rules(tmp_path, said).scheme("up_proj")
    assert scheme is not None and (scheme.method, scheme.layout) == ("int8", "gptq_v2")


@pytest.mark.parametrize(
    "said", [{"version": "GEMM"}, {"version": None}, {"format": "gemm", "checkpoint_format": "gemm"}]
)
def test_names_of_awq_s_layout(said: dict[str, Any], tmp_path: Path) -> None:
    assert str(rules(tmp_path, {"quant_method": "awq", "bits": 4} | said).scheme("x")) == "int4 by 128 inputs"


def test_lists_name_modules_by_their_start_and_end(tmp_path: Path) -> None:
    said = {
        "quant_method": "fp8",
        "modules_to_not_convert": ["model.layers.0", "mlp.gate"],
        "ignored_layers": ["lm_head"],
    }
    found = rules(tmp_path, said)
    names = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.gate", "lm_head", "model.layers.01.up", "x.gate_proj")
    assert [found.leaves_plain(name) for name in names] == [True, True, True, False, False]


def test_the_older_file_of_gptq(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": True}))
    found = rules(tmp_path, None)
    scheme = found.scheme("x")
    assert found.name == "gptq" and scheme is not None and str(scheme) == "int4 by 32 inputs" and scheme.indexed


def test_an_algorithm_may_be_in_the_file_alone(tmp_path: Path) -> None:
    found = rules(tmp_path, {"quant_method": "modelopt", "config_groups": {}}, {"quant_algo": "NVFP4"})
    assert str(found.scheme("x")) == "fp4 by 16 inputs"


def test_the_text_part_may_have_it(tmp_path: Path) -> None:
    said = {"quant_method": "fp8"}
    found = read_quant_config(tmp_path, {}, {"quantization_config": said})
    assert found is not None and found.rules.name == "fp8"


@pytest.mark.parametrize("said", [None, {"quant_method": "fp8"}, {"quant_method": "modelopt", "quant_algo": "FP8"}])
def test_a_file_of_the_kv_cache_alone_says_nothing_of_the_weights(said: Any, tmp_path: Path) -> None:
    side = {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["x"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": side}))
    found = read_quant_config(tmp_path, {"quantization_config": said}, {})
    assert (found is None) == (said is None)
    assert found is None or not found.rules.leaves_plain("x")


def test_each_of_two_files_may_have_what_the_other_lacks(tmp_path: Path) -> None:
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["b", "a"], "group_size": 16}
    layers = {"x": {"quant_algo": "FP8"}}
    side = {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["a", "b"], "quantized_layers": layers}
    found = rules(tmp_path, said, side)
    assert str(found.scheme("x")) == "fp8 by tensor" and found.leaves_plain("a")


def test_lists_of_plain_modules_may_differ(tmp_path: Path) -> None:
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["a"]}
    found = rules(tmp_path, said, {"quant_algo": "NVFP4", "exclude_modules": ["a", "b"]})
    assert found.leaves_plain("a") and not found.leaves_plain("b"), "config.json's counts"


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_the_older_name_of_the_field(key: str, tmp_path: Path) -> None:
    found = read_quant_config(tmp_path, {"quantization_config": None, key: compressed(FP8)}, {})
    assert found is not None and str(found.rules.scheme("x")) == "fp8 by row"
    with pytest.raises(ConfigError, match=f"config.json: {key}: group_0: weights: num_bits is 5"):
        read_quant_config(tmp_path, {key: compressed(FP8 | {"num_bits": 5})}, {})


NVFP4 = FP8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        (compressed(NVFP4), torch.float8_e4m3fn),
        (compressed(NVFP4 | {"strategy": "group", "group_size": 32}), torch.float8_e8m0fnu),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, torch.float8_e4m3fn),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, torch.float8_e4m3fn),
        ({"quant_method": "modelopt", "quant_algo": "MXFP4"}, torch.float8_e8m0fnu),
    ],
)
def test_scales_of_fp4_are_known_without_files(said: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """So a GPU that converts no e4m3 numbers refuses NVFP4 with load_format="dummy", too."""
    scheme = rules(tmp_path, said).scheme("x")
    assert scheme is not None and scheme.method == "fp4" and scheme.scale_dtype == dtype
    refused = pytest.raises(DeviceError, match="a100 has no e4m3 numbers")
    with refused if dtype == torch.float8_e4m3fn else nullcontext():
        check_schemes({"x": scheme}, torch.device("cuda"), "a100")


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        ({"quant_method": "bitsandbytes"}, UnsupportedModelError, "quant_method is bitsandbytes.*use the checkpoint"),
        ({"quant_method": "torchao"}, UnsupportedModelError, "quant_method is torchao"),
        ({"quant_method": "spqr9"}, UnsupportedModelError, "spqr9"),
        ({"quant_method": "int4"}, UnsupportedModelError, "quant_method is int4.*use the checkpoint"),
        ({"quant_method": "dense"}, UnsupportedModelError, "quant_method is dense.*use the checkpoint"),
        ({"bits": 4}, ConfigError, "quant_method is None"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128, 128]}, ConfigError, "weight_block_size is"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, ConfigError, "weight_block_size is"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ConfigError, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "modules_to_not_convert": [3]}, ConfigError, "modules_to_not_convert"),
        ({"quant_method": "awq", "bits": 3}, ConfigError, "bits is 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ConfigError, "version is 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, ConfigError, "format is 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv"}, ConfigError, "checkpoint_format is 'gemv'"),
        ({"quant_method": "gptq", "bits": 7}, ConfigError, "bits is 7"),
        ({"quant_method": "gptq"}, ConfigError, "bits is missing"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ConfigError, "checkpoint_format is"),
        ({"quant_method": "gptq", "bits": 4, "format": "bitblas"}, ConfigError, "format is 'bitblas'"),
        (
            {"quant_method": "gptq", "bits": 4, "format": "gptq_v2", "checkpoint_format": "gptq"},
            ConfigError, "checkpoint_format is gptq and format is gptq_v2; remove",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 3}}}, ConfigError, r"dynamic \+:x: bits is 3"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, ConfigError, "no regular expression"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(((ab)+c)+d)+": {}}}, ConfigError, "nests repetitions 3"),
        ({"quant_method": "modelopt", "quant_algo": "FP7"}, UnsupportedModelError, "quant_algo is 'FP7'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, ConfigError, "group_size is 32"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"a": {"weights": {"group_size": 8}}}},
            ConfigError, "group_size is 8",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ConfigError, "quantized_layers is empty"),
        (compressed(INT4, format="pack-quantised-2"), UnsupportedModelError, "pack-quantised-2"),
        (compressed(INT4, format="nvfp4-pack-quantized"), ConfigError, "does not go with num_bits 4 of type int"),
        (compressed(INT4 | {"strategy": "hexagon"}), ConfigError, "strategy is 'hexagon'"),
        (compressed(INT4 | {"num_bits": 5}), ConfigError, "num_bits is 5"),
        (compressed(INT4 | {"group_size": None}), ConfigError, "group_size is missing"),
        (compressed(FP8 | {"strategy": "block", "block_structure": "128"}), ConfigError, "block_structure is '128'"),
        (
            compressed(FP8 | {"strategy": "block", "block_structure": "1" * 5000 + "x1"}),
            ConfigError, "block_structure is '111",
        ),
        (compressed(FP8 | {"strategy": "block", "block_structure": "128x0"}), ConfigError, "block_structure is '128x0"),
        (
            compressed(INT4 | {"num_bits": 8, "actorder": "group"}),
            UnsupportedModelError, "actorder is 'group', and format int-quantized",
        ),
        (compressed(INT4, ignore=["re:((("]), ConfigError, r"re:\(\(\("),
        (compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}), UnsupportedModelError, "sparsity_config"),
        (compressed(INT4, transform_config={"config_groups": {"u": {}}}), UnsupportedModelError, "transform_config"),
        (compressed(INT4, config_groups={"group_0": []}), ConfigError, "group_0 is"),
    ],
)  # fmt: skip
def test_what_is_refused(said: dict[str, Any], error: type[HybridrtError], text: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=text):
        rules(tmp_path, said)


@pytest.mark.parametrize("said", [{"quant_method": "fp8"}, {"quant_method": "modelopt", "quant_algo": "FP8"}])
def test_two_files_that_disagree(said: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hf_quant_config.json: quant_algo is 'NVFP4'"):
        rules(tmp_path, said, {"quant_algo": "NVFP4"})


@pytest.mark.parametrize(
    ("ours", "side", "text"),
    [
        ({"group_size": 16}, {"group_size": 32}, "group_size is 32"),
        ({}, {"group_size": 32}, "quantization_config, with hf_quant_config.json: group_size is 32; NVFP4 has"),
        ({"quantized_layers": {}}, {"quantized_layers": {"x": {}}}, "quantized_layers is"),
    ],
)
def test_two_files_that_disagree_in_a_field(
    ours: dict[str, Any], side: dict[str, Any], text: str, tmp_path: Path
) -> None:
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4"} | ours
    with pytest.raises(ConfigError, match=text):
        rules(tmp_path, said, {"quant_algo": "NVFP4"} | side)
