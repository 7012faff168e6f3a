"""The families of 2025 and 2026: speculation, and tensors that checkpoints spell in several ways."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.minimax import modeling_minimax

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.models.config.read_config import read_model_config
from hybridrt.models.kimi_linear import EXPERTS
from tests.models.test_loader import load
from tests.models.test_models_parity import requests, rewrite
from tests.support.checkpoints import CheckpointStore, has_replay, write
from tests.support.levels import sweep
from tests.support.ling25 import ling25
from tests.support.mtp_oracle import HEADS, write_with_head
from tests.support.newer_checkpoints import NEWER
from tests.support.published import PUBLISHED
from tests.support.session import Session, check_sample
from tests.support.windowed_checkpoints import WINDOWED

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [40], [9, 9, 9, 9, 9]]


def texts(path: Path, **config: object) -> list[list[int]]:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(str(path), device="cpu", dtype="float32", max_model_len=64, **config) as llm:  # type: ignore[arg-type]
        return [output.token_ids for output in llm.generate(PROMPTS, params)]


plain_texts = cache(texts)


@pytest.mark.parametrize(("family", "state_mode"), sweep([
    (family, mode) for family in (*NEWER, *PUBLISHED, *WINDOWED, "lfm2", "lfm2_moe", "mamba", "mamba2")
    for mode in ("intermediate", "replay")[: 1 + has_replay(f"{family}-plain")]
], 19, thin=5))  # fmt: skip
def test_speculation_changes_no_text(family: str, state_mode: str, checkpoints: CheckpointStore) -> None:
    path = checkpoints[f"{family}-plain"].path
    drafted = texts(path, speculative=SpeculativeConfig("ngram", num_draft_tokens=3, state_mode=state_mode))
    assert drafted == plain_texts(path)


@pytest.mark.parametrize("name", sweep([name for name in HEADS if name.startswith(("qwen35", "ling"))], 3))
def test_a_prediction_head_changes_no_text(name: str, tmp_path: Path) -> None:
    write_with_head(HEADS[name], tmp_path)
    assert texts(tmp_path, speculative=SpeculativeConfig("mtp", num_draft_tokens=2)) == texts(tmp_path)


@pytest.mark.parametrize("name", ["qwen35-experts", "granite-plain", "kimi-plain", "kimi-odd_sizes", "lfm3-plain"])
def test_one_token_s_products(name: str, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes together for one row: norm, product and activation, and two projections of two inputs."""
    checkpoint, products = checkpoints[name], []
    monkeypatch.setattr("hybridrt.layers.linear.SKINNY_ON", ("cpu",))
    monkeypatch.setattr("hybridrt.layers.linear.is_skinny", lambda x, *_: len(x) == 1 and not products.append(x.shape))
    check_sample(checkpoint, Session(checkpoint.path).run(requests(1, steps=6))[0], name)
    assert products


@pytest.mark.parametrize("spelling", ["one", "three", "thirds"])
def test_convolutions_of_olmo_in_one_tensor_or_in_three(
    spelling: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = checkpoints["olmo-plain"]
    path = rewrite(checkpoint.path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    parts, sizes = [f"{part}_conv1d.weight" for part in "qkv"], (12, 12, 32)
    for stem in {key.removesuffix(parts[0]) for key in tensors if key.endswith(parts[0])}:
        joined = torch.cat([tensors.pop(f"{stem}{part}") for part in parts])
        cuts = {"one": (joined,), "three": joined.split(sizes), "thirds": joined.chunk(3)}[spelling]
        names = ["conv1d.weight"] if spelling == "one" else parts
        tensors |= {f"{stem}{name}": cut.contiguous() for name, cut in zip(names, cuts, strict=True)}
    save_file(tensors, path / "model.safetensors")
    check_sample(checkpoint, Session(path).run(requests(9, steps=6))[0], spelling)
    key = next(key for key in tensors if key.endswith("conv1d.weight"))
    save_file(tensors | {key: tensors[key][:-3].contiguous()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="shape"):
        load(path)


def test_norms_of_olmo_by_their_older_names(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = checkpoints["olmo-plain"]
    path = rewrite(checkpoint.path, tmp_path / "model")
    older = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    tensors = load_file(path / "model.safetensors")
    for new, old in older.items():
        tensors = {key.replace(new, old): t for key, t in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    check_sample(checkpoint, Session(path).run(requests(9, steps=6))[0], "older names")


def rotate_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """As many channels of each head as there are cosines; the others stay as they are."""
    size = cos.shape[-1]

    def rotated(t: Tensor) -> Tensor:
        a, b = t[..., :size].chunk(2, -1)
        return torch.cat((t[..., :size] * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None], t[..., size:]), -1)

    return rotated(q), rotated(k)


def test_a_part_of_each_head_of_minimax_is_rotated(
    checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What released files ask for (`rotary_dim`), and transformers does not do: the oracle is given it here."""
    checkpoint = checkpoints["minimax-attention_alone"]
    path = rewrite(checkpoint.path, tmp_path / "model", rotary_dim=4)
    rotary = checkpoint.model.model.rotary_emb
    monkeypatch.setitem(rotary._buffers, "inv_freq", 1e4 ** -(torch.arange(0, 4, 2) / 4))
    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", rotate_first)
    check_sample(checkpoint, Session(path).run(requests(9, steps=6))[0], "rotary_dim")


def test_the_prediction_head_of_ling_2_5_changes_no_text(tmp_path: Path) -> None:
    """It is a layer after the others, whose attention has no gates."""
    write(ling25(num_nextn_predict_layers=1, num_hidden_layers=2), tmp_path)
    plain = texts(tmp_path)
    assert texts(tmp_path, speculative=SpeculativeConfig("mtp", num_draft_tokens=2)) == plain


@pytest.mark.parametrize(("change", "text"), [
    ({"use_qk_norm": False}, "use_qk_norm is False; it must be true"), ({"norm_topk_prob": False}, "norm_topk_prob"),
    ({"linear_silu": True}, "linear_silu is True; it must be null, or false"), ({"use_linear_silu": True}, "_silu"),
    ({"linear_rope": False}, "linear_rope"), ({"rope_interleave": False}, "rope_interleave is False"),
    ({"use_qkv_bias": True}, "use_qkv_bias"), ({"use_bias": True}, "use_bias"), ({"linear_attention": "kda"}, "null"),
    ({"score_function": "softmax"}, "score_function"), ({"moe_router_enable_expert_bias": False}, "expert_bias"),
    ({"num_kv_heads_for_linear_attn": 2}, "num_kv_heads_for_linear_attn is 2; hybridrt runs 4"),
    ({"rotary_dim": 8}, "rotary_dim is 8; by head_dim and partial_rotary_factor it must be 4"),
    ({"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1; of the 8 numbers of a head it must turn pairs"),
    ({"partial_rotary_factor": "x"}, "partial_rotary_factor is 'x'"), ({"group_norm_size": 0}, "group_norm_size is 0"),
    ({"layer_group_size": 0}, "layer_group_size"), ({"model_type": "bailing_moe"}, "model_type is 'bailing_moe'"),
    ({"moe_shared_expert_intermediate_size": 24}, "moe_shared_expert_intermediate_size is 24"),
    ({"gated_attention_proj_granularity_type": "head_wise"}, "gated_attention_proj_granularity_type"),
    ({"expert_swiglu_limit_list": [0, 0, 0, 4]}, "expert_swiglu_limit_list"), ({"num_experts": 0}, "experts"),
])  # fmt: skip
def test_options_of_ling_2_5_that_are_refused(
    change: dict[str, Any], text: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    path = rewrite(checkpoints["ling25-plain"].path, tmp_path / "model", **change)
    with pytest.raises(ConfigError, match=text) as error:
        read_model_config(path)
    assert "\n" not in str(error.value)


def test_fields_that_a_file_of_ling_2_5_leaves_out(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Where the class of Ling 3, which reads the file, takes something else."""
    names = (
        "layer_group_size", "group_norm_size", "first_k_dense_replace", "num_nextn_predict_layers", "use_qk_norm",
        "partial_rotary_factor", "rope_theta", "routed_scaling_factor", "max_position_embeddings",
    )  # fmt: skip
    path = rewrite(checkpoints["ling25-plain"].path, tmp_path / "model", **dict.fromkeys(names), num_hidden_layers=6)
    config = read_model_config(path)
    hf, rope = config.hf, {"rope_type": "default", "rope_theta": 600000.0, "partial_rotary_factor": 0.5}
    assert [layer.linear is None for layer in config.layers] == [False] * 4 + [True] * 2 and not config.mtp_layers
    assert [layer.ffn for layer in config.layers] == ["mlp"] + ["moe"] * 5
    assert (hf.group_norm_size, hf.use_qk_norm, hf.rope_parameters) == (4, True, rope)
    assert (hf.routed_scaling_factor, config.max_position_embeddings) == (1.0, 32768)


def test_groups_of_a_norm_divide_the_channels(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = rewrite(checkpoints["ling25-plain"].path, tmp_path / "model", group_norm_size=3)
    with pytest.raises(ConfigError, match="3 groups of the norm cannot share 32 channels"):
        load(path)


STACKED = (
    "kimi-plain",
    "ling-plain",
    "minimax-plain",
    "granite-plain",
    "jamba-plain",
    "lfm2_moe-plain",
    "lfm3-plain",
    "nemotron-experts",
    "seeing-nemotron_omni",
    "lara-plain",
)


@pytest.mark.parametrize("name", sweep(STACKED, 3))
def test_tensors_by_their_names_in_memory(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """As `save_pretrained(save_original_format=False)` writes them: stacks of experts, joined convolutions, modules of
    gates."""
    checkpoint = checkpoints[name]
    path = rewrite(checkpoint.path, tmp_path / "model")
    tensors = {key: t.clone() for key, t in checkpoint.model.state_dict().items()}
    assert tensors.keys() != load_file(path / "model.safetensors").keys()
    save_file(tensors, path / "model.safetensors")
    check_sample(checkpoint, Session(path).run(requests(9, steps=6))[0], name)


SPELLED: dict[str, dict[str, Any]] = {
    "kimi-plain": {
        "linear_attn_config": {
            "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 8, "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "use_grouped_topk": True,
        "num_nextn_predict_layers": 0,
    },
    "ling-plain": {
        "architectures": ["BailingMoeV3ForCausalLM"], "head_dim": 8, "expert_swiglu_limit_list": [0] * 4,
        "mtp_use_kda": False, "score_function": "sigmoid", "q_lora_rank": None, "partial_rotary_factor": 0.5,
        "rotary_dim": 4,
    },
}  # fmt: skip
# Of a model without experts: all of its fields of experts are null or 0, but transformers reads no null of some.
NO_EXPERTS: dict[str, dict[str, Any]] = {
    "null": {"num_experts": None, "num_experts_per_token": None, "num_shared_experts": 0, "moe_intermediate_size": None,
             "first_k_dense_replace": 0},
    "zero": {"num_experts": 0, "num_experts_per_token": 0, "first_k_dense_replace": 2},
}  # fmt: skip
DERIVED = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")


@pytest.mark.parametrize("name", SPELLED)
def test_checkpoints_as_they_are_published(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Where layers stand and how wide they are by other fields; Kimi's dense layer under a name of its own."""
    checkpoint = checkpoints[name]
    changes = dict.fromkeys(DERIVED) | {"first_k_dense_replace": 1} | SPELLED[name]
    path = rewrite(checkpoint.path, tmp_path / "model", **changes)
    tensors = load_file(path / "model.safetensors")
    dense = "model.layers.0."
    tensors = {k.replace(f"{dense}block_sparse_moe.", f"{dense}mlp."): t for k, t in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    check_sample(checkpoint, Session(path).run(requests(9, steps=6))[0], name)


@pytest.mark.parametrize("name", NO_EXPERTS)
def test_kimi_without_experts(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = checkpoints["kimi-dense_alone"]
    raw = json.loads((checkpoint.path / "config.json").read_text())
    kept = {k: v for k, v in raw.items() if k not in EXPERTS} | NO_EXPERTS[name]
    path = rewrite(checkpoint.path, tmp_path / "model")
    (path / "config.json").write_text(json.dumps(kept))
    check_sample(checkpoint, Session(path).run(requests(9, steps=6))[0], name)


def test_layers_of_experts_need_a_number_of_experts(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = rewrite(checkpoints["kimi-plain"].path, tmp_path / "model")
    raw = json.loads((path / "config.json").read_text())
    for field in ("num_experts", "num_local_experts"):
        kept = {k: v for k, v in raw.items() if not k.endswith("_experts")} | {field: None}
        (path / "config.json").write_text(json.dumps(kept | {"mlp_layer_types": ["dense", "sparse"] * 2}))
        with pytest.raises(ConfigError, match=f"{field} is None, but mlp_layer_types has sparse layers"):
            read_model_config(path)


def test_clamped_experts_of_ling(checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routed experts of layer 3 and shared ones of layer 2, between layers without limits. transformers leaves the
    limits out: its modules are given them here."""
    checkpoint, limit, shared_limit = checkpoints["ling-plain"], 0.1, 0.2
    lists = {"expert_swiglu_limit_list": [0, 0, None, limit], "share_expert_swiglu_limit_list": [0, 0, shared_limit]}
    path = rewrite(checkpoint.path, tmp_path / "model", **lists)

    def clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    def routed(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for t, k in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
            gate, up = (experts.gate_up_proj[ids[t, k]] @ x[t]).chunk(2)
            out[t] += weights[t, k] * (experts.down_proj[ids[t, k]] @ clamped(gate, up, limit))
        return out

    layers = checkpoint.model.model.layers
    experts, shared = layers[3].mlp.experts, layers[2].mlp.shared_experts
    monkeypatch.setattr(experts, "forward", routed)
    through = lambda x: shared.down_proj(clamped(shared.gate_proj(x), shared.up_proj(x), shared_limit))  # noqa: E731
    monkeypatch.setattr(shared, "forward", through)
    check_sample(checkpoint, Session(path).run(requests(9, steps=6))[0], "limits")
    with pytest.raises(AssertionError, match="logits differ"):
        check_sample(checkpoint, Session(checkpoint.path).run(requests(9, steps=6))[0], "no limits")


@pytest.mark.parametrize(("name", "field", "value"), [
    ("kimi-plain", "mla_use_nope", False), ("kimi-plain", "moe_router_activation_func", "softmax"),
    ("kimi-plain", "num_nextn_predict_layers", 1),
    ("ling-plain", "expert_swiglu_limit_list", [0, 0, 0, -4]), ("ling-plain", "mtp_use_kda", True),
    ("ling-plain", "moe_shared_expert_intermediate_size", 24),
    ("ling-plain", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": "4", "mscale_all_dim": 1.0}),
])  # fmt: skip
def test_options_that_are_not_supported_are_refused_by_name(
    name: str, field: str, value: Any, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    path = rewrite(checkpoints[name].path, tmp_path / "model", **{field: value})
    with pytest.raises(ConfigError, match="factor '4'" if field == "rope_parameters" else f"{field} is"):
        read_model_config(path)


@pytest.mark.parametrize(("change", "text"), [
    ({"attn_type_list": None}, "attn_type_list is None; it must be a list of 3, each an integer from 0 to 1"),
    ({"attn_type_list": [0, 1]}, r"attn_type_list is \[0, 1\]; it must be a list of 3"),
    ({"attn_type_list": [0, 1, 2]}, "attn_type_list"), ({"attn_type_list": [0, 1, False]}, "attn_type_list"),
    ({"postnorm": None}, "postnorm is False; it must be true"), ({"postnorm": False}, "postnorm is False"),
    ({"shared_intermediate_size": 24}, "shared_intermediate_size is 24"),
    ({"shared_intermediate_size": [0, 8]}, "shared_intermediate_size"), ({"model_type": "minimax"}, "model_type"),
    ({"layernorm_mlp_alpha": "x"}, "layernorm_mlp_alpha is 'x'"), ({"sliding_window": 8}, "sliding_window is 8"),
    ({"rotary_dim": 10}, "rotary_dim is 10; it must be at most head_dim, 8"),
    ({"num_local_experts": [4, 4, 4]}, "num_local_experts"), ({"num_local_experts": 1}, "num_experts_per_tok is 2"),
    ({"num_hidden_layers": 2}, "attn_type_list is .* a list of 2"),
])  # fmt: skip
def test_published_options_of_minimax_that_are_refused(
    change: dict[str, Any], text: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    path = rewrite(checkpoints["minimax_published-plain"].path, tmp_path / "model", **change)
    with pytest.raises(ConfigError, match=text) as error:
        read_model_config(path)
    assert "\n" not in str(error.value)


def test_factors_that_a_published_file_leaves_out_are_1(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    published = checkpoints["minimax_published-plain"].path
    change = dict.fromkeys(("layernorm_full_attention_beta", "layernorm_mlp_alpha"))
    config = read_model_config(rewrite(published, tmp_path / "model", **change, shared_intermediate_size=[0, 0, 0])).hf
    assert (config.full_attn_beta_factor, config.mlp_alpha_factor, config.full_attn_alpha_factor) == (1, 1, 1.3)


@pytest.mark.parametrize("name", [
    "falcon-plain", "granite-rotary_tied", "lfm2-plain", "minimax-plain", "olmo-plain",
    "zamba2-two_blocks_adapters_rope",
])  # fmt: skip
def test_a_part_of_each_head_is_refused_where_transformers_rotates_whole_heads(
    name: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    path = rewrite(checkpoints[name].path, tmp_path / "model", rope_parameters=rope)
    with pytest.raises(ConfigError, match="partial_rotary_factor is 1 or null"):
        read_model_config(path)
