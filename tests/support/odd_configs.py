"""Changes that make a config.json odd: each field in turn gets values of wrong types and sizes."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEEP = "@deep@"  # replaced by JSON that is nested 10,000 levels deep, which json.dumps cannot write
VALUES: list[Any] = [
    None, "x", "", -1, 0, 1, 3, 2**31, 10**12, 10**40, 10**400, -(10**12), 0.5, -1.5, 1e300, float("nan"), float("inf"),
    True, False, [], [1], ["x"], [[1]], {}, {"x": 1}, [None] * 3, DEEP, "linear_attention", "\ud800",
]  # fmt: skip
# Fields that a checkpoint may hold in addition to those that it was saved with.
MORE = (
    "architectures", "model_type", "dtype", "torch_dtype", "eos_token_id", "quantization_config", "auto_map",
    "num_labels", "id2label", "label2id", "head_dim", "rope_parameters", "rope_scaling", "rope_theta",
    "partial_rotary_factor", "per_layer_config", "layers_block_type", "layer_types", "hybrid_override_pattern",
    "mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_nextn_predict_layers", "max_position_embeddings",
    "intermediate_size", "time_step_limit", "mamba_n_groups", "mamba_d_conv", "mamba_chunk_size", "mamba_expand",
    "full_attention_interval", "sub_configs", "attribute_map", "to_dict", "__class__", "vocab_size", "tokenizer_class",
    "attn_implementation", "configuration_files", "problem_type", "history_mode", "block_configs",
)  # fmt: skip
ROPES: list[Any] = [
    {"rope_type": kind, "rope_theta": theta, **more}
    for kind in ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "x", 3)
    for theta in (10000.0, 0, "x", None, float("nan"))
    for more in ({}, {"factor": 0}, {"factor": "x"}, {"factor": 2.0, "short_factor": [1, 2], "long_factor": "x",
                 "original_max_position_embeddings": 16}, {"partial_rotary_factor": 0}, {"partial_rotary_factor": 0.03})
]  # fmt: skip


def changes(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every change of one field, and of the rotary parameters."""
    for name in dict.fromkeys((*fields, *MORE)):
        yield from ({name: value} for value in VALUES)
    yield from ({"rope_parameters": rope} for rope in ROPES)
    yield from ({"rope_scaling": rope} for rope in ROPES)


def some(fields: dict[str, Any], count: int, seed: str) -> list[dict[str, Any]]:
    """A sample of `changes`, and as many pairs of them."""
    rng, found = random.Random(seed), list(changes(fields))
    return rng.sample(found, count) + [{**a, **b} for a, b in zip(rng.sample(found, count), rng.sample(found, count))]


def write_fields(path: Path, fields: dict[str, Any], file: str = "config.json") -> None:
    """Writes a JSON file; DEEP becomes nested arrays."""
    text = json.dumps(fields).replace(f'"{DEEP}"', "[" * 10_000 + "]" * 10_000)
    (path / file).write_text(text, encoding="utf-8")


def mutated(value: Any, rng: random.Random, others: list[Any]) -> Any:
    """A copy of a config with one place changed, at any depth: a field gone, renamed or swapped, a list longer, shorter
    or shuffled, a value near the old one, of another type, or `others`' (what the config holds elsewhere)."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        copied, name, other = dict(value), rng.choice(list(value)), rng.choice(list(value))
        kind = rng.randrange(12)
        if kind == 0:
            del copied[name]
        elif kind == 1:
            copied[name + "_x"] = copied.pop(name)
        elif kind == 2:
            copied[name] = copied[other]
        else:
            copied[name] = mutated(copied[name], rng, others)
        return copied
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        changed = [*value[:place], mutated(value[place], rng, others), *value[place + 1 :]]
        shuffled = rng.sample(value, len(value))
        return rng.choice([value[:-1], [*value, value[place]], shuffled, value[:1] * len(value), value * 3, changed])
    return rng.choice([*_near(value), None, [value], {"x": value}, rng.choice(others)])


def _near(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, int(value), str(value)]
    if isinstance(value, int):
        near = [value + 1, value - 1, 2 * value, 3 * value, 2 * value + 1, value // 2, -value, value + 0.5]
        return [*near, float(value), str(value), 0, 1, 7, 2**15, 2**16 + 1, 2**62, 2**63, 2**64]
    if isinstance(value, float):
        return [-value, 1000 * value, 0.0, -0.0, 1e-45, 1e-320, 3.5e38, 1e39, -1e39, 2**70, str(value), float("-inf")]
    if isinstance(value, str):
        return [value.upper(), value + " ", "", "auto", "none", "relu", "float64", "int8", "\u00e9\0", "a" * 5000, 3]
    return [0, -5, "auto", [], {}, 2.0]


def leaves(value: Any) -> Iterator[Any]:
    """Every value inside that is no object, lists included."""
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    if not isinstance(value, dict):
        yield value
