"""Fills a model from safetensors, one tensor at a time, or with seeded random numbers."""

import re
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from hybridrt.base.config_json import read_object, shown
from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.base.files import INDEX_BYTES
from hybridrt.models.base import MTP_KEYS, CausalLM
from hybridrt.models.loading.weight_files import equal_tensors, keys_of
from hybridrt.models.loading.weight_reader import read_tensors

# Saved by older transformers; they follow from config.json.
FREQUENCIES = r".*rotary_emb\.inv_freq"


def load_weights(model: CausalLM, path: Path, progress: bool = False) -> list[str]:
    """Streams a checkpoint into the model. Peak memory: the model, what is read ahead, one tensor.

    Returns:
        The keys that the model skips on purpose.

    Raises:
        CheckpointError: no weights, an unreadable shard, keys without a target, parameters that no
            key or two keys fill, or wrong shapes. It lists the offenders.
    """
    targets = model.checkpoint_map()
    if model.mtp is not None:
        targets |= model.mtp.checkpoint_map()
    shards = _shards(path)
    _check_keys(model, path, set(targets), {key for keys in shards.values() for key in keys})
    filled, skipped = Counter[str](), []
    with tqdm(total=sum(map(len, shards.values())), desc="loading", unit="tensor", disable=not progress) as bar:
        for key, tensor in read_tensors(shards, model.device):
            bar.update()
            parts = [part for part in model.parts_of(key) if not _skipped(model, part[0], targets)]
            for name, part in parts:
                for piece in targets[name]:
                    piece.fill(key, tensor, part)
                    filled[piece.name] += 1
            if not parts:
                skipped.append(key)
    twice = [name for name, count in filled.items() if count > 1]
    if twice:
        raise CheckpointError(f"{path}: filled more than once: {_some(twice)}")
    return skipped


def has_own_head(path: Path) -> bool:
    """True if a checkpoint's output head differs from its embedding. They are not tied then,
    whatever config.json says. Equal ones are a tied matrix written twice."""
    files = {key: file for file, keys in _shards(path).items() for key in keys}
    embeddings = r"model(\.language_model)?\.embed_tokens|model\.word_embeddings|(model|backbone)\.embeddings?"
    ends = rf"(language_model\.)?(lm_head|{embeddings})\.weight"
    pair = [key for key in files if re.fullmatch(ends, key)]
    return len(pair) == 2 and not equal_tensors(*((files[key], key) for key in pair))


def _skipped(model: CausalLM, key: str, targets: object) -> bool:
    patterns = (*model.skipped_keys, FREQUENCIES)
    return key not in targets and any(re.fullmatch(p, key) for p in patterns)  # type: ignore[operator]


def _check_keys(model: CausalLM, path: Path, wanted: set[str], present: set[str]) -> None:
    named = {name for key in present for name, _ in model.parts_of(key)}
    if model.mtp is not None and not any(re.fullmatch(MTP_KEYS, key) for key in named):
        raise CheckpointError(
            f'{path} holds no mtp.* weights, which method "mtp" needs: use a checkpoint that kept its prediction '
            'head, or method "ngram" or "draft"'
        )
    missing = sorted(wanted - named)
    left_over = sorted(key for key in named - wanted if not _skipped(model, key, wanted))
    if model.config.tie_word_embeddings and "lm_head.weight" in left_over:
        left_over.remove("lm_head.weight")  # some writers store a tied matrix twice
        model.skipped_keys = (*model.skipped_keys, r"lm_head\.weight")
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {_some(missing)}")
    if left_over:
        problems.append(f"{len(left_over)} that nothing consumes: {_some(left_over)}")
    if problems:
        raise CheckpointError(f"{path} does not fit {model.config.architecture}: {'; '.join(problems)}")


def _shards(path: Path) -> dict[Path, list[str]]:
    """Checks that they agree with the index, if there is one."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return _indexed_shards(index)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f'{path} has no *.safetensors file; load_format="dummy" runs without weights')
    return {file: keys_of(file) for file in files}


def _indexed_shards(index: Path) -> dict[Path, list[str]]:
    weight_map = _weight_map(index)
    files = sorted({index.parent / name for name in weight_map.values()})
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise CheckpointError(f"{index} names shards that are not there: {_some(missing)}")
    shards = {file: keys_of(file) for file in files}
    held = {(key, file.name) for file, keys in shards.items() for key in keys}
    wrong = sorted({key for key, _ in held ^ set(weight_map.items())})
    if wrong:
        raise CheckpointError(f"{index} and the shards disagree on where these keys are: {_some(wrong)}")
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    """Checks only names: files of a hub snapshot are symbolic links."""
    weight_map = read_object(index, CheckpointError, INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} is no index of shards: weight_map is {shown(weight_map)}; download the checkpoint again"
        )
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain(name):
            raise CheckpointError(
                f"{index}: the shard of {key} is {shown(name)}; it must be the name of a *.safetensors file next to "
                "the index"
            )
    return weight_map


def _is_plain(name: str) -> bool:
    """Whether a name leads to no other directory, on any platform."""
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0")


def _some(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


@torch.no_grad()
def fill_dummy(model: nn.Module, seed: int) -> None:
    """Fills in seeded random weights whose activations and states stay finite.

    Raises:
        ConfigError: a parameter's `dummy` names no way to fill it.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, param in model.named_parameters():
        dummy = getattr(param, "dummy", "normal")
        if dummy == "normal":
            param.normal_(0.0, 0.02, generator=generator)
        elif dummy == "decay":
            param.uniform_(1.0, 16.0, generator=generator).neg_()
        elif dummy == "dt_bias":
            # softplus(dt_bias) between 0.001 and 0.1, as in Mamba
            dt = torch.empty_like(param).uniform_(-6.9, -2.3, generator=generator).exp_()
            param.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif dummy in ("ones", "zeros"):
            param.fill_(float(dummy == "ones"))
        else:
            raise ConfigError(f"{name}.dummy is {dummy!r}; use normal, decay, dt_bias, ones or zeros")
