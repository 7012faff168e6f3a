"""Fields of config.json, read without transformers: the same as transformers' own classes make of them."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt.base.config_json import check_fields, read_object
from hybridrt.base.errors import ConfigError
from hybridrt.layers.rotary import rotary_table
from hybridrt.models.config.family import Family, routed_experts
from hybridrt.models.config.family_registry import KNOWN_FAMILIES, family_of
from hybridrt.models.config.read_config import read_model_config
from hybridrt.models.config.read_fields import read_fields
from tests.models.test_odd_files import FAMILIES, fields_of
from tests.support.config_oracle import compared, same_fields, their_fields, their_frequencies
from tests.support.levels import sweep
from tests.support.odd_configs import write_fields

FILE = Path("config.json")
READ = [name for name in KNOWN_FAMILIES.names() if family_of(name).model_type]
LAYOUTS = [name for name in FAMILIES if name != "swa_ssm"]
# Ways in which files say how they rotate.
ROPES: list[dict[str, Any]] = [
    {}, {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": None},
    {"rope_parameters": {"rope_theta": 7e5}}, {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
]  # fmt: skip


def text_part(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """What is read of a file's object."""
    raw = dict(fields)
    if family.section:
        raw = {**raw[family.section], "architectures": raw["architectures"]}
    return family.rewrite(raw, FILE) if family.rewrite else raw


def made(name: str, path: Path) -> tuple[dict[str, Any], Family]:
    """The config.json of a small model of a family, and the family."""
    fields_of(name, path)
    fields = read_object(path / "config.json")
    return fields, family_of(fields["architectures"][0])


def check_same(raw: Mapping[str, Any], family: Family) -> None:
    same_fields(read_fields(raw, family, FILE), their_fields(raw, family), family)


@pytest.mark.parametrize("architecture", READ)
def test_fields_that_a_file_leaves_out(architecture: str) -> None:
    """All of them at once."""
    check_same({}, family_of(architecture))


@pytest.mark.parametrize("name", sweep(LAYOUTS, 3))
def test_each_field_left_out_in_turn(name: str, tmp_path: Path) -> None:
    fields, family = made(name, tmp_path)
    raw, alike = text_part(fields, family), 0
    for gone in [None, *raw]:
        left = {field: value for field, value in raw.items() if field != gone}
        with contextlib.suppress(ConfigError):  # sizes that do not fit without it
            theirs = their_fields(left, family)
            check_fields(theirs, {name: family.fields[name] for name in compared(family)}, FILE)
            check_same(left, family)
            alike += 1
    assert alike > len(raw) / 2


# Of the families that transformers has.
OLDER = [(name, older) for name in READ if not family_of(name).rewrite for older in family_of(name).older]


@pytest.mark.parametrize(("architecture", "older"), OLDER)
def test_older_names_of_fields(architecture: str, older: str) -> None:
    family = family_of(architecture)
    default = vars(read_fields({}, family, FILE))[family.older[older]]
    value = not default if isinstance(default, bool) else default[::-1] if isinstance(default, list) else default * 2
    check_same({older: value}, family)
    assert getattr(read_fields({older: value}, family, FILE), family.older[older]) == value


PLACES: list[tuple[str, dict[str, Any]]] = [
    ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-E"}),
    ("NemotronHForCausalLM", {"layers_block_type": ["linear_attention", "mlp"], "hybrid_override_pattern": "M*-E"}),
    ("NemotronHForCausalLM", {"layers_block_type": ["linear_attention"], "hybrid_override_pattern": None}),
    ("NemotronHForCausalLM", {"mtp_hybrid_override_pattern": "*-"}),
    ("NemotronHForCausalLM", {"mtp_layers_block_type": ["attention", "mlp"], "mtp_hybrid_override_pattern": "M"}),
    ("Qwen3NextForCausalLM", {"full_attention_interval": 3, "num_hidden_layers": 7}),
    ("Qwen3_5ForCausalLM", {"full_attention_interval": 2, "num_hidden_layers": 7}),
    ("Lfm2ForCausalLM", {"full_attn_idxs": [1, 3], "num_hidden_layers": 5}),
    ("Lfm3ForCausalLM", {"num_hidden_layers": 1}), ("Lfm3ForCausalLM", {"num_hidden_layers": 10}),
    ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2}),
    ("OlmoHybridForCausalLM", {"num_hidden_layers": 3}), ("OlmoHybridForCausalLM", {"num_hidden_layers": 6}),
    ("BambaForCausalLM", {"attn_layer_indices": [1], "num_hidden_layers": 3}),
    ("BailingHybridForCausalLM", {"layer_group_size": 3, "first_k_dense_replace": 1, "num_hidden_layers": 7}),
    ("BailingHybridForCausalLM", {"head_dim": 64, "short_conv_kernel_size": 3, "num_attention_heads": 8}),
    ("KimiLinearForCausalLM", {"first_k_dense_replace": 2, "num_hidden_layers": 9}),
    ("KimiLinearForCausalLM", {"linear_attn_config": {
        "head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 3, "full_attn_layers": [1, 3], "kda_layers": [2]},
        "num_hidden_layers": 3}),
    # Kinds by the names that published files have for them.
    ("Zamba2ForCausalLM", {"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2}),
    ("NemotronHForCausalLM", {"layers_block_type": ["mamba", "moe", "attention"], "num_nextn_predict_layers": 1}),
    ("Qwen3NextForCausalLM", {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2}),
    ("NemotronHForCausalLM", {"mtp_layers_block_type": [], "num_nextn_predict_layers": 1}),
    # Fields of other families.
    ("BambaForCausalLM", {"mamba_d_ssm": 4096}), ("GraniteMoeHybridForCausalLM", {"mamba_d_ssm": 4096}),
    ("MambaForCausalLM", {"num_key_value_heads": None}),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "fields"), PLACES)
def test_fields_that_follow_from_others(architecture: str, fields: dict[str, Any]) -> None:
    check_same(fields, family_of(architecture))


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Zamba2ForCausalLM", {"layers_block_type": ["hybrid"], "layer_types": None, "num_hidden_layers": 1}),
        ("NemotronHForCausalLM", {"layers_block_type": ["mlp"], "layer_types": None}),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["full_attention"], "layers_block_type": None,
                                         "num_hidden_layers": 1}),
    ],
)  # fmt: skip
def test_an_older_name_that_is_null_hides_no_list(architecture: str, fields: dict[str, Any]) -> None:
    """transformers refuses these files."""
    read = vars(read_fields(fields, family_of(architecture), FILE))
    assert next(kinds for kinds in fields.values() if kinds) == (read.get("layer_types") or read["layers_block_type"])


@pytest.mark.parametrize("name", ["kimi", "ling", "minimax"])
def test_experts_are_counted_by_the_family_s_own_field(name: str, tmp_path: Path) -> None:
    fields, _ = made(name, tmp_path)
    write_fields(tmp_path, {**fields, "n_routed_experts": 1})
    hf = read_model_config(tmp_path).hf
    assert routed_experts(hf) == hf.num_local_experts > 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_ways_to_say_how_heads_rotate(name: str, tmp_path: Path) -> None:
    """Scaled frequencies included."""
    fields, family = made(name, tmp_path)
    if "rope_parameters" not in family.defaults or family.rope_kinds:
        return  # it rotates nothing, or each type of layers in its own way
    inner = fields[family.section] if family.section else fields
    for known in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"):
        inner.pop(known, None)
    if "model_max_length" in inner:  # which transformers reads only after the scaling that starts from it
        inner["max_position_embeddings"] = inner.pop("model_max_length")
    for rope in ROPES:
        changed = {**inner, **rope}
        whole = {**fields, family.section: changed} if family.section else changed
        raw = text_part(whole, family)
        check_same(raw, family)
        write_fields(tmp_path, whole)
        config = read_model_config(tmp_path)
        if config.attention.rope and config.attention.rope["rope_type"] != "default":
            theirs = their_frequencies(their_fields(raw, family), config.attention)
            angles = torch.arange(3.0).outer(theirs[0])
            table = rotary_table(config, config.attention, 3, torch.device("cpu"))
            assert torch.equal(table, torch.cat((angles.cos(), angles.sin()), -1) * theirs[1]), rope


@pytest.mark.parametrize("fields", [
    {"rope_parameters": None}, {"rope_theta": 5e5},
    {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
    {"rope_parameters": {"full_attention": {"type": "linear", "factor": 2.0}, "sliding_attention": {"rope_theta": 7}}},
    {"rope_scaling": {"full_attention": {"rope_type": "yarn", "factor": 4.0}, "sliding_attention": {}}},
    {"rope_parameters": {"full_attention": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                            "high_freq_factor": 4.0}, "sliding_attention": {}}, "rope_theta": 9.0},
])  # fmt: skip
def test_the_ways_to_say_how_heads_rotate_in_each_type_of_layers(fields: dict[str, Any]) -> None:
    check_same(fields, family_of("Lfm3ForCausalLM"))


def test_the_length_of_the_training_beside_the_other_fields(tmp_path: Path) -> None:
    """It wins over what rotary embeddings say themselves, as in transformers when it computes frequencies."""
    fields, family = made("qwen", tmp_path)
    fields |= {"original_max_position_embeddings": 16, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    write_fields(tmp_path, fields)
    config = read_model_config(tmp_path)
    theirs = their_fields(fields, family)
    angles = torch.arange(3.0).outer(
        their_frequencies(theirs, replace(config.attention, rope=theirs.rope_parameters))[0]
    )
    table = rotary_table(config, config.attention, 3, torch.device("cpu"))
    assert config.attention.rope is not None and config.attention.rope["original_max_position_embeddings"] == 16
    torch.testing.assert_close(table[:, : angles.shape[1]] / table[0, 0], angles.cos())


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "benchmarks" / "configs").iterdir()), ids=str)
def test_published_files(path: Path) -> None:
    fields = read_object(path / "config.json")
    family = family_of(fields["architectures"][0])
    check_same(text_part(fields, family), family)


@pytest.mark.parametrize(
    ("architecture", "fields", "text"),
    [
        ("FalconH1ForCausalLM", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "holds an object"),
        ("Qwen3NextForCausalLM", {"layer_types": ["linear_attention"], "num_hidden_layers": 2}, "1 entries"),
        ("Qwen3NextForCausalLM", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'MX'"),
        ("NemotronHForCausalLM", {"mtp_hybrid_override_pattern": None}, "mtp_hybrid_override_pattern is None"),
        ("KimiLinearForCausalLM", {"linear_attn_config": {"kda_layers": [0]}}, "kda_layers"),
        ("FalconH1ForCausalLM", {"layer_types": ["x"]}, "layer_types"),
        ("KimiLinearForCausalLM", {"linear_attn_config": {"kda_layers": [1]}}, "has kda_layers alone"),
        ("KimiLinearForCausalLM", {"linear_attn_config": {"full_attn_layers": [1]}}, "has full_attn_layers alone"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-E", "num_hidden_layers": 5}, "is 5, but .* has 4"),
        ("NemotronHForCausalLM", {"layers_block_type": ["mamba"], "num_hidden_layers": 2}, "is 2, but .* has 1"),
        ("KimiLinearForCausalLM", {"layer_types": []}, "layer_types has 0 entries"),
        ("BailingHybridForCausalLM", {"mlp_layer_types": []}, "mlp_layer_types has 0 entries"),
        ("OlmoHybridForCausalLM", {"linear_num_key_heads": "auto"}, "linear_num_key_heads is 'auto'"),
        ("Lfm2ForCausalLM", {"full_attn_idxs": "auto"}, "full_attn_idxs is 'auto'"),
    ],
)
def test_fields_that_contradict_others(architecture: str, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{text}"):
        read_fields(fields, family_of(architecture), FILE)


def test_what_is_read_is_no_part_of_the_defaults() -> None:
    """A model that changes its fields changes no other's."""
    family = family_of("Qwen3NextForCausalLM")
    read_fields({}, family, FILE).layer_types.append("x")
    assert "x" not in read_fields({}, family, FILE).layer_types
    rope = {"rope_theta": 1e4}
    read_fields({"rope_parameters": rope}, family, FILE)
    assert rope == {"rope_theta": 1e4}
