"""Configurations: what config.json means, and what is refused with a text that says what to do."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt.base.device import resolve_device
from hybridrt.base.dtypes import resolve_dtype, resolve_state_dtype
from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import ConfigError, DeviceError, HybridrtError, UnsupportedModelError
from hybridrt.base.model_config import LayerSpec
from hybridrt.kinds.base import next_power_of_two
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.kinds.registry import state_shape
from hybridrt.kinds.short_conv import ShortConvConfig
from hybridrt.models.config.read_config import read_model_config
from hybridrt.runtime.load.model_path import resolve_model_path
from hybridrt.runtime.load.target import resolve_state_mode
from tests.support.checkpoints import CheckpointStore
from tests.support.session import Session


def config_of(checkpoint: Path, target: Path, **changes: Any) -> Path:
    """A directory with config.json alone; None removes a field."""
    target.mkdir(exist_ok=True)
    fields = json.loads((checkpoint / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return target


def test_falcon_h1(checkpoints: CheckpointStore) -> None:
    config = read_model_config(checkpoints["falcon-odd_sizes"].path)
    mamba = config.linear_of(Mamba2Config)
    assert (mamba.num_heads, mamba.head_dim, mamba.state_size, mamba.n_groups) == (3, 9, 5, 1)
    assert (mamba.conv_kernel, mamba.chunk_size, mamba.dt_limit) == (3, 7, (0.0, math.inf))
    attention = config.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (5, 1, 6)
    assert config.layers == (LayerSpec(True, "mamba2", "mlp"),) * 2
    assert config.full_attention_layer_ids == config.linear_layer_ids("mamba2") == (0, 1)
    assert config.eos_token_ids == (2,)


def test_falcon_h1_inner_size_from_its_expansion(checkpoints: CheckpointStore) -> None:
    mamba = read_model_config(checkpoints["falcon-d_ssm_from_expand"].path).linear_of(Mamba2Config)
    assert (mamba.intermediate_size, mamba.head_dim) == (64, 16)


def test_nemotron_h(checkpoints: CheckpointStore) -> None:
    config = read_model_config(checkpoints["nemotron-experts"].path)
    mamba, attention = LayerSpec(False, "mamba2", None), LayerSpec(True, None, None)
    assert config.layers == (mamba, LayerSpec(False, None, "moe"), attention, LayerSpec(False, None, "moe"), mamba)
    assert config.attention.rope is None


def test_falcon_mamba(checkpoints: CheckpointStore) -> None:
    config = read_model_config(checkpoints["falcon_mamba-inner_size_beside_expand"].path)
    assert config.linear_of(Mamba1Config) == Mamba1Config(intermediate_size=48, state_size=8, conv_kernel=4, dt_rank=5)
    assert config.layers == (LayerSpec(False, "mamba1", None),) * 2
    assert config.full_attention_layer_ids == () and config.attention.num_heads == 0
    assert config.max_position_embeddings == 2**20, "nothing in it counts positions"


def test_jamba(checkpoints: CheckpointStore) -> None:
    config = read_model_config(checkpoints["jamba-projection_bias"].path)
    assert config.linear_of(Mamba1Config) == Mamba1Config(intermediate_size=64, state_size=8, conv_kernel=4, dt_rank=2)
    mamba = LayerSpec(False, "mamba1", "mlp")
    assert config.layers == (mamba, LayerSpec(True, None, "moe"), mamba)
    assert config.attention.rope is None
    dense = read_model_config(checkpoints["jamba-dense"].path)
    assert [spec.ffn for spec in dense.layers] == ["mlp"] * 3 and dense.full_attention_layer_ids == (2,)


def test_qwen3_next(checkpoints: CheckpointStore) -> None:
    config = read_model_config(checkpoints["qwen-every_second_sparse"].path)
    assert [spec.ffn for spec in config.layers] == ["mlp", "moe", "mlp", "mlp"]
    assert [spec.linear for spec in config.layers] == ["gdn", "gdn", "gdn", None]
    assert config.full_attention_layer_ids == (3,)


def test_fields_of_hub_files_that_ask_for_nothing(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Falcon-H1R and Jamba 1.5 and later as they are published, by the fields that transformers does not know."""
    falcon = {
        "attn_layer_indices": None, "mamba_use_mlp": True, "mlp_expansion_factor": 8, "rope_scaling": None,
        "rope_theta": 100000000000.0, "sliding_window": None, "projectors_bias": False, "mamba_norm_before_gate": False,
    }  # fmt: skip
    jamba = {
        "mamba_inner_layernorms": True, "sliding_window": None, "use_mamba_kernels": True, "num_logits_to_keep": 1,
        "num_experts": 1, "num_experts_per_tok": 2, "attn_layer_period": 14, "attn_layer_offset": 1,
    }  # fmt: skip
    for name, fields in (("falcon-plain", falcon), ("jamba-plain", jamba)):
        raw = json.loads((checkpoints[name].path / "config.json").read_text())
        raw.pop("rope_parameters", None)
        (tmp_path / "config.json").write_text(json.dumps(raw | fields))
        config = read_model_config(tmp_path)
        assert len(config.layers) == raw["num_hidden_layers"] and {spec.ffn for spec in config.layers} == {"mlp"}
        if name == "falcon-plain":
            assert config.attention.rope is not None and config.attention.rope["rope_theta"] == 1e11


@pytest.mark.parametrize(
    ("name", "field"),
    [("falcon-plain", "hidden_act"), ("jamba-plain", "hidden_act"), ("nemotron-plain", "mamba_hidden_act")],
)
def test_silu_by_its_other_name(name: str, field: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = checkpoints[name].path
    config = read_model_config(config_of(path, tmp_path, **{field: "swish"}))
    assert config.layers == read_model_config(path).layers


def test_lfm2(checkpoints: CheckpointStore) -> None:
    config = read_model_config(checkpoints["lfm2_moe-plain"].path)
    assert config.linear_of(ShortConvConfig) == ShortConvConfig(channels=32, conv_kernel=3)
    conv, attention = LayerSpec(False, "short_conv", "moe"), LayerSpec(True, None, "moe")
    assert config.layers == (LayerSpec(False, "short_conv", "mlp"), attention, conv, conv)


def test_published_configs_are_read() -> None:
    root = Path(__file__).parents[1] / "benchmarks" / "configs"
    kinds = {path.name: read_model_config(path) for path in root.iterdir()}
    linear = {type(c) for config in kinds.values() for c in config.linear.values()}
    assert linear >= {Mamba1Config, Mamba2Config, GDNConfig, ShortConvConfig}
    assert kinds["falcon-h1-7b"].linear_of(Mamba2Config).state_size == 256
    assert len(kinds["nemotron-h-8b"].full_attention_layer_ids) == 4


def test_end_of_sequence_ids_of_the_generation_config_win(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = config_of(checkpoints["falcon-plain"].path, tmp_path, eos_token_id=5)
    assert read_model_config(path).eos_token_ids == (5,)
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_model_config(path).eos_token_ids == (7, 9)
    (path / "generation_config.json").write_text("{}")
    assert read_model_config(path).eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["NopeForCausalLM"]}, "FalconH1ForCausalLM"),
        ({"architectures": []}, "FalconH1ForCausalLM"),
        ({"architectures": None}, "FalconH1ForCausalLM"),
        ({"architectures": ["X"], "quantization_config": {"quant_method": "fp8"}, "dtype": "float8"}, "'X' is not"),
    ],
)
def test_unknown_architectures(
    changes: dict[str, Any], text: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        read_model_config(config_of(checkpoints["falcon-plain"].path, tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("falcon-plain", {"dtype": "float8_e4m3fn"}, "float32"),
        ("falcon-plain", {"dtype": None, "torch_dtype": "int8"}, "int8"),
        ("falcon-plain", {"dtype": 7}, "dtype"),
        ("falcon-plain", {"hidden_act": "gelu"}, "gelu"),
        ("nemotron-plain", {"mlp_hidden_act": "silu"}, "relu2"),
        ("nemotron-plain", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("nemotron-plain", {"sliding_window": 64}, "sliding_window is 64"),
        ("jamba-plain", {"sliding_window": 8}, "sliding_window is 8"),
        ("falcon-plain", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("falcon-plain", {"mamba_n_heads": 5}, "mamba_n_heads"),
        ("mamba2-plain", {"num_heads": 3}, "num_heads is 3"),
        ("falcon-plain", {"mamba_n_groups": 4}, "groups"),
        ("nemotron-plain", {"n_groups": 4}, "groups"),
        ("nemotron-plain", {"layers_block_type": ["mamba", "nope"]}, "nope"),
        ("qwen-plain", {"linear_num_value_heads": 3}, "value heads"),
        ("qwen-plain", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("nemotron-experts", {"n_group": 3}, "n_group"),
        ("nemotron-experts", {"n_group": 2, "topk_group": 3}, "topk_group"),
        ("nemotron-experts", {"n_group": 8, "topk_group": 4}, "n_group is 8, and there are 8 experts"),
        (
            "nemotron-plain",
            {"n_routed_experts": 1, "num_experts_per_tok": 1, "num_nextn_predict_layers": 1},
            "n_group is 1, and there are 1 experts",
        ),
        (
            "kimi-plain",
            {"num_experts": 1, "num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 1},
            "n_group is 1, and there are 1 experts",
        ),
        ("zamba2-plain", {"use_long_context": True}, "use_long_context"),
        ("zamba2-plain", {"hidden_act": "silu"}, "gelu"),
        ("zamba2-plain", {"hidden_act": "swish"}, "gelu"),
        ("nemotron-plain", {"mlp_hidden_act": "swish"}, "relu2"),
        ("zamba2-two_blocks_adapters_rope", {"num_key_value_heads": 2}, "adapters of keys"),
        ("nemotron-plain", {"per_layer_config": {"1": {"intermediate_size": 24}}}, "per_layer_config"),
        ("qwen35-split", {"output_gate_type": "sigmoid"}, "output_gate_type"),
        ("qwen-plain", {"attn_output_gate": False}, "attn_output_gate"),
        ("kimi-plain", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound"),
        ("kimi-plain", {"linear_attn_config": {"use_full_rank_gate": True}}, "use_full_rank_gate"),
        ("kimi-plain", {"attn_res_block_size": 4}, "attn_res_block_size is 4"),
        ("kimi-plain", {"routed_expert_hidden_size": 16}, "routed_expert_hidden_size is 16"),
        ("kimi-plain", {"mla_use_output_gate": True}, "mla_use_output_gate"),
        ("ling-plain", {"linear_attention": "lightning"}, "linear_attention"),
        ("ling-plain", {"no_kda_lora": False}, "no_kda_lora"),
        ("nemotron-puzzle", {"block_configs": None}, "block_configs"),
        ("nemotron-puzzle", {"block_configs": []}, "block_configs"),
        ("nemotron-puzzle", {"block_configs": [{"block_type": "mamba", "conv_kernel": 2}]}, "conv_kernel"),
        ("nemotron-puzzle", {"block_configs": [{"block_type": "moe", "num_experts_per_tok": 9}]}, "are 8 experts"),
        (
            "nemotron-puzzle",
            {"block_configs": [{"block_type": "moe", "n_routed_experts": 7}], "n_group": 2},
            "block 0 of block_configs: n_group is 2",
        ),
        ("nemotron-puzzle", {"block_configs": [{"block_type": "moe", "moe_intermediate_size": 0}]}, "moe_intermediate"),
        ("nemotron-puzzle", {"block_configs": [{"block_type": "nope"}]}, "nope"),
        ("jamba-plain", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("jamba-plain", {"attn_layer_offset": 3}, "offset"),
        ("falcon-plain", {"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, "rope"),
        ("falcon-plain", {"vocab_size": "many"}, "vocab_size"),
        ("falcon-plain", {"quantization_config": {"quant_method": "spqr9"}}, "quantization_config.*spqr9"),
        ("falcon-plain", {"quantization_config": ["fp8"]}, "quantization_config is"),
        ("falcon-plain", {"sliding_window": 64}, "sliding_window is 64"),
        ("falcon-plain", {"attn_layer_indices": [0]}, "attn_layer_indices"),
        ("falcon-plain", {"mamba_use_mlp": False}, "mamba_use_mlp"),
        ("jamba-plain", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms"),
        ("granite-plain", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("granite-plain", {"logits_scaling": 0}, "logits_scaling"),
        ("granite-plain", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("bamba-plain", {"attn_layer_indices": ["x"]}, "attn_layer_indices"),
        ("minimax-plain", {"sliding_window": 0}, "sliding_window is 0"),
        ("gpt_oss-plain", {"quantization_config": {"quant_method": "quark"}}, "quant_method is .quark"),
        ("gpt_oss-plain", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("gpt_oss-plain", {"swiglu_limit": 0}, "swiglu_limit is 0"),
        ("gpt_oss-plain", {"swiglu_alpha": "x"}, "swiglu_alpha is 'x'"),
        ("gpt_oss-plain", {"sliding_window": 0}, "sliding_window is 0"),
        ("gpt_oss-plain", {"layer_types": ["conv"] * 4}, "layer_types"),
        ("gpt_oss-plain", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ("gpt_oss-plain", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 1 or null"),
        ("gpt_oss-plain", {"rope_parameters": {"rope_type": "yarn", "truncate": 2}}, "truncate is 2"),
        ("lara-plain", {"layer_types": ["conv"] * 5}, "layer_types"),
        ("lara-plain", {"sliding_window": "x"}, "sliding_window is 'x'"),
        ("lara-plain", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ("lara-plain", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ("lara-plain", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("minimax-plain", {"rotary_dim": 10}, "rotary_dim is 10; it must be at most head_dim, 8"),
        ("olmo-plain", {"linear_allow_neg_eigval": "yes"}, "linear_allow_neg_eigval"),
        ("qwen35-seeing_tied", {"text_config": None}, "text_config"),
        ("qwen35-seeing_tied", {"text_config": {"vocab_size": "x"}}, "vocab_size"),
        ("qwen35-seeing_tied", {"text_config": {"quantization_config": {"bits": 4}}}, "quantization_config"),
        ("qwen35-seeing_tied", {"image_token_id": "x"}, "image_token_id"),
    ],
)
def test_fields_that_cannot_be_used(
    name: str, changes: dict[str, Any], text: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """Refused before any weight is read, with the field in the text."""
    path = config_of(checkpoints[name].path, tmp_path, **changes)
    with pytest.raises(ConfigError, match=text):
        Session(path, load_format="dummy")


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_config_that_is_no_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_generation_config_that_is_no_object(text: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = config_of(checkpoints["falcon-plain"].path, tmp_path)
    (path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_model_config(path)


def test_directories_that_are_no_checkpoints(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(tmp_path)
    for name in (str(tmp_path / "nope"), "./nope", "a/b/c", "nope"):
        with pytest.raises(ConfigError, match="directory"):
            resolve_model_path(name)
    shutil.copy(checkpoints["falcon-plain"].path / "config.json", tmp_path)
    assert resolve_model_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int8"}, {"load_format": "gguf"}, {"mamba_ssm_dtype": "float64"}, {"state_mode": "intermediate"},
        {"page_size": 0}, {"page_size": 24}, {"page_size": 2048}, {"page_size": True}, {"chunked_prefill_size": 0},
        {"max_model_len": 0}, {"max_model_len": 1}, {"max_model_len": 2.5},
        {"max_running_requests": -1}, {"max_running_requests": "4"},
        {"memory_fraction": 0.0}, {"memory_fraction": 1.0}, {"memory_fraction": math.nan}, {"tp_size": 0},
        {"cuda_graph_max_bs": 0}, {"speculative": "ngram"},
    ],
)  # fmt: skip
def test_engine_options_out_of_range(changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(ConfigError, match=name) as error:
        EngineConfig("model", **changes)
    assert repr(value) in str(error.value) or str(value) in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "guess"}, {"num_draft_tokens": 0}, {"num_draft_tokens": 16}, {"state_mode": "classic"},
        {"speculative_attention_mode": "both"}, {"topk": 0}, {"method": "draft"}, {"draft_model": "x"},
        {"topk": 2, "state_mode": "replay"},
    ],
)  # fmt: skip
def test_speculative_options_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        SpeculativeConfig(**changes)


def test_verified_tokens_count_the_root() -> None:
    assert SpeculativeConfig(num_draft_tokens=4).num_verify_tokens == 5
    assert EngineConfig("x").num_verify_tokens == 1
    assert EngineConfig("x", speculative=SpeculativeConfig(num_draft_tokens=1)).num_verify_tokens == 2


def test_state_modes() -> None:
    cpu = torch.device("cpu")
    assert resolve_state_mode(EngineConfig("x"), (), cpu) == "classic"
    assert resolve_state_mode(EngineConfig("x", state_mode="replay"), (), cpu) == "replay"
    for mode in ("intermediate", "replay"):
        assert resolve_state_mode(EngineConfig("x", speculative=SpeculativeConfig(state_mode=mode)), (), cpu) == mode


def test_mamba1_has_no_replay() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_state_mode(EngineConfig("x"), ("mamba1", "mamba2"), cuda) == "classic"
    for asked in ({"state_mode": "replay"}, {"speculative": SpeculativeConfig(state_mode="replay")}):
        with pytest.raises(ConfigError, match=r'does not exist for Mamba-1; use "auto"'):
            resolve_state_mode(EngineConfig("x", **asked), ("mamba1",), cpu)


@pytest.mark.parametrize(("device", "kind", "plain", "chains"), [
    ("cpu", "mamba2", "classic", "intermediate"), ("cuda", "mamba2", "replay", "replay"),
    ("cuda", "mamba1", "classic", "intermediate"), ("cuda", "kda", "classic", "intermediate"),
])  # fmt: skip
def test_automatic_state_modes_follow_the_kernels(device: str, kind: str, plain: str, chains: str) -> None:
    """Which exist on CUDA, and pay there; a tree has no ring."""
    wanted = ((None, plain), (SpeculativeConfig(), chains), (SpeculativeConfig(topk=2), "intermediate"))
    for speculative, mode in wanted:
        assert resolve_state_mode(EngineConfig("x", speculative=speculative), (kind,), torch.device(device)) == mode


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    for name, text in (("nonsense", "cpu"), ("mps", "cuda"), ("cuda:99", "cpu"), ("", "cpu")):
        with pytest.raises(DeviceError, match=text):
            resolve_device(name)
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", torch.bfloat16, cpu) == torch.float32
    assert resolve_dtype("float16", torch.bfloat16, cpu) == torch.float16


def test_bfloat16_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    gpu = torch.device("cuda")
    for name, model_dtype in (("auto", torch.bfloat16), ("bfloat16", torch.float32)):
        with pytest.raises(DeviceError, match='Old GPU has no bfloat16; pass dtype="float16"'):
            resolve_dtype(name, model_dtype, gpu)
    assert resolve_dtype("float16", torch.bfloat16, gpu) == torch.float16
    with pytest.raises(DeviceError, match='Old GPU has no bfloat16; pass mamba_ssm_dtype="float16"'):
        resolve_state_dtype("bfloat16", gpu)
    assert resolve_state_dtype("float32", gpu) == torch.float32


def test_errors_can_be_caught_as_one(tmp_path: Path) -> None:
    with pytest.raises(HybridrtError):
        read_model_config(tmp_path / "nope")
    with pytest.raises(ValueError, match="page_size"):
        EngineConfig("x", page_size=3)


MAMBA = Mamba2Config(num_heads=8, head_dim=4, state_size=16, n_groups=2, conv_kernel=4, chunk_size=8, dt_limit=(0, 1))


def test_state_shapes_are_cut_over_ranks() -> None:
    whole, half = state_shape(MAMBA), state_shape(MAMBA, 2)
    assert dict(whole.segments) == {"x": 32, "B": 32, "C": 32} and whole.temporal == (8, 4, 16)
    assert dict(half.segments) == {"x": 16, "B": 16, "C": 16} and half.temporal == (4, 4, 16)
    assert (whole.groups, half.groups, whole.conv_dim, half.conv_dim) == (2, 1, 96, 48)
    with pytest.raises(ConfigError, match="divisor of 2"):
        state_shape(MAMBA, 4)
    with pytest.raises(ConfigError, match="heads"):
        state_shape(MAMBA, 3)


def test_one_group_is_on_every_rank() -> None:
    shape = state_shape(replace(MAMBA, n_groups=1), 4)
    assert dict(shape.segments) == {"x": 8, "B": 16, "C": 16} and shape.groups == 1


def test_channels_of_mamba1_are_cut_over_ranks() -> None:
    config = Mamba1Config(intermediate_size=12, state_size=5, conv_kernel=4, dt_rank=3)
    shape = state_shape(config, 4)
    assert (shape.kind, shape.segments, shape.temporal) == ("mamba1", (("x", 3),), (3, 5))
    with pytest.raises(ConfigError, match="12 Mamba-1 channels"):
        state_shape(config, 5)


@pytest.mark.parametrize(
    ("kernel", "tokens", "width"), [(4, 1, 4), (4, 2, 8), (4, 5, 8), (4, 6, 16), (2, 1, 2), (3, 1, 4)]
)
def test_conv_rings_hold_the_taps_and_a_step(kernel: int, tokens: int, width: int) -> None:
    assert state_shape(replace(MAMBA, conv_kernel=kernel)).conv_width(tokens) == width
    assert next_power_of_two(kernel - 1 + tokens) == width
