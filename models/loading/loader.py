"""Fills a model from safetensors, one tensor at a time, or with seeded random numbers."""

import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.base.files_safetensors import DTYPES
from hybridrt.base.quantization import QuantConfig
from hybridrt.layers.linear import finish
from hybridrt.layers.quant.encoders import encode
from hybridrt.layers.quant.pieces import PackedPiece, decoded
from hybridrt.layers.weights import CheckpointMap, CheckpointTarget, Transform
from hybridrt.models.base import MTP_KEYS, CausalLM
from hybridrt.models.loading.online_modules import matrix_of
from hybridrt.models.loading.shards import shards_of, some
from hybridrt.models.loading.stored_modules import ADVICE
from hybridrt.models.loading.weight_files import Shards, equal_tensors, opened
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
    targets = model.all_targets()
    shards = shards_of(path)
    check_keys(model, path, {key for keys in shards.values() for key in keys})
    filling, skipped = _Filling(model.config.quant), []
    shards = {file: [key for key in keys if not _elsewhere(model, key, targets)] for file, keys in shards.items()}
    with tqdm(total=sum(map(len, shards.values())), desc="loading", unit="tensor", disable=not progress) as bar:
        for key, tensor in read_tensors(shards, model.device):
            bar.update()
            if not filling.fill_from(model, targets, key, tensor):
                skipped.append(key)
                model.check_skipped(key, tensor)
                if _is_zero_bias(model, key) and bool(tensor.any()):
                    raise CheckpointError(
                        f"{key} is not zero, and this layer of {model.config.architecture} has no bias"
                    )
            del tensor  # before the next one is read
    filling.check_counts(path)
    finish(model)
    return skipped


@torch.no_grad()
def check_tensors(model: CausalLM, path: Path, shards: Shards) -> None:
    """Compares a plain checkpoint's keys, dtypes and shapes with a model on the "meta" device, and reads headers alone.

    Raises:
        CheckpointError: `load_weights` would refuse it.
    """
    targets, filling = model.all_targets(), _Filling(None)
    check_keys(model, path, {key for keys in shards.values() for key in keys})
    for file, keys in shards.items():
        with opened(file) as f:
            entries = [f.entry(key) for key in keys]
        for entry in entries:
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
            filling.fill_from(model, targets, entry.key, tensor)
    filling.check_counts(path)


class _Filling:
    """Gives tensors to pieces. A plain piece of a quantised module waits for all of its tensors.

    Attributes:
        counts: how often each piece was filled by a tensor of the same kind.
    """

    def __init__(self, quant: QuantConfig | None) -> None:
        self.counts, self._quant = Counter[str](), quant
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def fill_from(self, model: CausalLM, targets: CheckpointMap, key: str, tensor: torch.Tensor) -> bool:
        """Fills what a tensor of the checkpoint belongs to. False: the model skips it."""
        parts = [part for part in model.parts_of(_plain_key(model, key)) if not _skipped(model, part[0], targets)]
        for name, part in parts:
            if targets[name]:  # else an expert of another rank
                self.fill(targets[name], name, key, tensor, part)
        return bool(parts)

    def check_counts(self, path: Path) -> None:
        """CheckpointError: a piece was filled twice."""
        twice = [name for name, count in self.counts.items() if count > 1]
        if twice:
            raise CheckpointError(f"{path}: filled more than once: {some(twice)}")

    def fill(self, pieces: CheckpointTarget, name: str, key: str, tensor: torch.Tensor, part: Transform) -> None:
        """Fills the pieces of `name`, a key of the map, with a part of a tensor of the checkpoint."""
        online = self._quant is not None and self._quant.online and isinstance(pieces[0], PackedPiece)
        if not online:
            for piece in pieces:
                self._fill(piece, key, tensor, part)
            return
        module, tensors = encode(name.removesuffix(".weight"), pieces[0].weight.scheme, matrix_of(key, tensor, part))
        for last, made in tensors.items():
            for piece in pieces:
                self.counts[f"{piece.name} ({last})"] += 1
                piece.fill(module, last, made)

    def _fill(self, piece: Any, key: str, tensor: torch.Tensor, part: Transform) -> None:
        found = None if self._quant is None else self._quant.module_of(key)
        if found is None:
            if isinstance(piece, PackedPiece):
                raise CheckpointError(f"{key} is plain, and other tensors have {piece.name} as {piece.weight.scheme}")
            self.counts[piece.name] += 1
            piece.fill(key, tensor, part)
            return
        module, last = found
        self.counts[f"{piece.name} ({last})"] += 1
        if isinstance(piece, PackedPiece):
            piece.fill(module, last, tensor, part)
            return
        held = self._waiting.setdefault(piece.name, {})
        held[last] = tensor.cpu()
        if held.keys() == module.tensors.keys():
            del self._waiting[piece.name]
            piece.fill(f"{module.name}.weight", decoded(module, held), part)


def has_own_head(path: Path) -> bool:
    """True if a checkpoint's output head differs from its embedding. They are not tied then,
    whatever config.json says. Equal ones are a tied matrix written twice."""
    files = {key: file for file, keys in shards_of(path).items() for key in keys}
    embeddings = r"model(\.language_model)?\.embed_tokens|model\.word_embeddings|(model|backbone)\.embeddings?"
    ends = rf"(language_model\.)?(lm_head|{embeddings})\.(weight|weight_packed|qweight)"
    pair = [key for key in files if re.fullmatch(ends, key)]
    return len(pair) == 2 and not equal_tensors(*((files[key], key) for key in pair))


def _plain_key(model: CausalLM, key: str) -> str:
    """The key that stands for a tensor in the model's map: of a quantised module that of its weight."""
    return key if model.config.quant is None else model.config.quant.weight_key(key)


def _elsewhere(model: CausalLM, key: str, targets: CheckpointMap) -> bool:
    """Whether a tensor holds only experts of other ranks."""
    return all(targets.get(name) == () for name, _ in model.parts_of(_plain_key(model, key)))


def _is_zero_bias(model: CausalLM, key: str) -> bool:
    """GPTQ's older writers store a bias for layers that have none."""
    modules = {} if model.config.quant is None else model.config.quant.modules or {}
    module = modules.get(key.removesuffix(".bias"))
    return key.endswith(".bias") and module is not None and module.scheme.layout.startswith("gptq")


def _skipped(model: CausalLM, key: str, targets: object) -> bool:
    patterns = (*model.skipped_keys, FREQUENCIES, ADVICE)
    known = key in targets  # type: ignore[operator]
    return not known and (any(re.fullmatch(p, key) for p in patterns) or _is_zero_bias(model, key))


def check_keys(model: CausalLM, path: Path, present: Collection[str]) -> list[str]:
    """Compares the keys of a checkpoint with the model's map, without reading a tensor.

    Returns:
        The keys that the model skips on purpose.

    Raises:
        CheckpointError: keys are missing, or nothing consumes them.
    """
    wanted = set(model.all_targets())
    places = {key: [name for name, _ in model.parts_of(_plain_key(model, key))] for key in present}
    named = {name for names in places.values() for name in names}
    if model.mtp is not None and not any(re.fullmatch(MTP_KEYS, key) for key in named):
        raise CheckpointError(
            f'{path} holds no mtp.* weights, which method "mtp" needs: use a checkpoint that kept its prediction '
            'head, or method "ngram" or "draft"'
        )
    missing = sorted(key for key in wanted - named if not re.fullmatch(model.optional_keys or "", key))
    left_over = sorted(key for key in named - wanted if not _skipped(model, key, wanted))
    if model.config.tie_word_embeddings and "lm_head.weight" in left_over:
        left_over.remove("lm_head.weight")  # some writers store a tied matrix twice
        model.skipped_keys = (*model.skipped_keys, r"lm_head\.weight")
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {some(missing)}")
    if left_over:
        problems.append(f"{len(left_over)} that nothing consumes: {some(left_over)}")
    if problems:
        raise CheckpointError(f"{path} does not fit {model.config.architecture}: {'; '.join(problems)}")
    return [key for key, names in places.items() if not wanted & set(names)]


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
        if dummy == "codes":
            _fill_codes(param, generator)
        elif isinstance(dummy, float):
            param.fill_(dummy)
        elif dummy == "kept":
            continue
        elif dummy == "normal":
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
            raise ConfigError(
                f"{name}.dummy is {dummy!r}; use normal, decay, dt_bias, ones, zeros, codes, kept or a number"
            )


def _fill_codes(param: torch.Tensor, generator: torch.Generator) -> None:
    """Random numbers of the codes' format; bytes of any pair of codes."""
    if param.dtype.is_floating_point:
        for rows in param.view(-1, param.shape[-1]).split(4096):  # so that no float copy of a stack is made
            rows.copy_(torch.empty(rows.shape, device=rows.device).normal_(0.0, 1.0, generator=generator))
        return
    low, high = (-127, 128) if param.dtype == torch.int8 else (0, 256)
    param.random_(low, high, generator=generator)
