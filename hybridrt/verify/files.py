"""Checks of a checkpoint's files: config.json, keys, values of tensors, and hashes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hybridrt.base.config_fields import QUANTISATION
from hybridrt.base.config_json import read_object
from hybridrt.base.dtypes import dtype_name
from hybridrt.base.errors import ConfigError, HybridrtError, shown
from hybridrt.base.files import INDEX_BYTES
from hybridrt.base.files_safetensors import DTYPES
from hybridrt.collectives.groups import TPGroup
from hybridrt.models.loading.loader import check_keys, has_own_head
from hybridrt.models.loading.shards import shards_of, some
from hybridrt.runtime.load.build_model import empty_model
from hybridrt.runtime.load.load_target import load_target
from hybridrt.verify.published_hashes import checkpoint_files, has_hash, published_hash, sha256_of
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject
from hybridrt.verify.tensor_judge import judge
from hybridrt.verify.tensor_stats import TensorStats, scan

EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "layer_norm_eps")
LEAST_EPSILON, MOST_EPSILON = 1e-9, 1e-4
INDEX = "model.safetensors.index.json"


def check_config(subject: Subject, result: Result) -> None:
    """config.json: hybridrt reads it, and transformers finds the same values."""
    try:
        config = subject.read_config()
    except ConfigError as e:
        subject.broken = str(e)
        result.fail(str(e))
        return
    result.done(f"{config.architecture}, {len(config.layers)} layers, vocabulary {config.vocab_size}")
    if subject.raw.get("auto_map"):
        result.notes.append("config.json names Python code of the checkpoint (auto_map); it was not run")
    _compare_fields(subject, result)
    _compare_ends(subject, result)
    _check_ids(subject, config.vocab_size, result)
    _check_epsilon(subject, result)


def _check_ids(subject: Subject, size: int, result: Result) -> None:
    """A negative pad_token_id stands for none."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = {token for fields in (subject.raw, subject.text_fields) for token in _tokens(fields.get(name))}
        for token in sorted(ids):
            if token >= size or (token < 0 and name != "pad_token_id"):
                result.fail(f"config.json: {name} is {token}; vocab_size is {size}")


def _check_epsilon(subject: Subject, result: Result) -> None:
    for name in EPSILONS:
        value = subject.text_fields.get(name)
        if isinstance(value, int | float) and not LEAST_EPSILON <= value <= MOST_EPSILON:
            result.warn(f"config.json: {name} is {value:g}; published models have 1e-6 to 1e-5")


def _compare_fields(subject: Subject, result: Result) -> None:
    from transformers import AutoConfig

    assert subject.config is not None, "it was read"
    try:
        theirs = AutoConfig.from_pretrained(str(subject.path), local_files_only=True, trust_remote_code=False)
        theirs = theirs.get_text_config()
    except Exception as e:  # of any type
        result.notes.append(f"transformers does not read config.json ({shown(e)}): fields were not compared")
        return
    # A model with images has this field outside of its text part.
    compared, skipped = 0, ("tie_word_embeddings",) if subject.text_fields is not subject.raw else ()
    for name in ("vocab_size", "hidden_size", *vars(subject.config.hf)):
        a, b = getattr(subject.config.hf, name, None), getattr(theirs, name, None)
        if name in skipped or name.startswith("rope") or not all(isinstance(v, int | float | str) for v in (a, b)):
            continue
        compared += 1
        if a != b:
            result.warn(f"config.json: {name} is {shown(a)} to hybridrt and {shown(b)} to transformers")
    result.notes.append(f"{compared} fields equal transformers' reading, but for those named")


def _compare_ends(subject: Subject, result: Result) -> None:
    """Runtimes use the tokens of generation_config.json, or those of both files."""
    file = subject.path / "generation_config.json"
    if not file.is_file():
        return
    told = _tokens(subject.text_fields.get("eos_token_id") or subject.raw.get("eos_token_id"))
    other = _tokens(read_object(file).get("eos_token_id"))
    if told and other and not set(told) <= set(other):
        result.warn(
            f"config.json: eos_token_id is {told}, and {other} in generation_config.json: runtimes differ in which "
            "they use"
        )


def _tokens(told: Any) -> list[int]:
    return sorted(each for each in (told if isinstance(told, list) else [told]) if isinstance(each, int))


def check_keys_of(subject: Subject, result: Result) -> None:
    """Each tensor of the files fills one place of the model, and each place is filled."""
    if subject.config is None:
        return result.leave_out("config.json cannot be read")
    import torch

    shards = shards_of(subject.path)
    engine = subject.engine_config()
    _, target = load_target(engine, TPGroup())
    model = empty_model(engine, target, torch.device("meta"))
    present = {key for keys in shards.values() for key in keys}
    skipped = check_keys(model, subject.path, present)
    filled = len(present) - len(skipped)
    result.figures |= {"keys": len(present), "filled": filled, "skipped": len(skipped)}
    text = f"{filled} of {len(present)} keys fill the model"
    if _says_tied(subject) and has_own_head(subject.path):
        result.fail(
            "config.json: tie_word_embeddings is true, but the stored output head differs from the embeddings: "
            "runtimes differ in which they use"
        )
    result.done(text + (f"; the model skips {len(skipped)}: {some(sorted(skipped), 4)}" if skipped else ""))


def _says_tied(subject: Subject) -> bool:
    told = (fields.get("tie_word_embeddings") for fields in (subject.raw, subject.text_fields))
    return next((value for value in told if value is not None), False) is True


def check_tensors(subject: Subject, result: Result) -> None:
    """Numbers of each tensor, compared with its siblings in other layers."""
    shards = shards_of(subject.path)
    stats: list[TensorStats] = []
    for each in scan(shards, sampled=subject.quick):
        stats.append(each)
        subject.progress(f"tensors {len(stats)}/{sum(map(len, shards.values()))}")
    subject.hashes["tensors"] = {each.key: each.sha256 for each in stats if each.sha256}
    judge(stats, result)
    _compare_dtype(subject, stats, result)
    sampled = " (large ones at 16 places)" if subject.quick else ""
    result.done(f"the numbers of {len(stats)} tensors were compared with their siblings'{sampled}")
    result.notes.append("numbers of the usual size that are wrong cannot be seen without a hash")


def _compare_dtype(subject: Subject, stats: Sequence[TensorStats], result: Result) -> None:
    told = subject.text_fields.get("dtype") or subject.text_fields.get("torch_dtype") or subject.raw.get("dtype")
    if not isinstance(told, str) or any(map(subject.raw.get, QUANTISATION)) or not stats:
        return
    sizes = Counter[str]()
    for each in stats:
        sizes[each.dtype] += each.count
    most = dtype_name(DTYPES[sizes.most_common(1)[0][0]])
    if most != told:
        result.warn(f"config.json: dtype is {told}; most numbers are stored as {most}. Were the weights converted?")


def check_hashes(subject: Subject, result: Result) -> None:
    """Files against the hashes that the hub published, and the index's own size."""
    files = [file for file in checkpoint_files(subject.path) if not (subject.quick and _is_large(file.stat().st_size))]
    known = {file: hashed for file in files if (hashed := published_hash(file)) is not None}
    for file in files:
        subject.progress(f"hash of {file.name}")
        subject.hashes["files"][file.name] = sha256_of(file)
    for file, wanted in known.items():
        if not has_hash(file, wanted, subject.hashes["files"][file.name]):
            result.fail(f"{file.name} differs from what the hub published: its hash is not {wanted}")
    _check_index_size(subject, result)
    _check_unlisted(subject, result)
    result.figures |= {"files": len(files), "published": len(known)}
    if known:
        result.done(f"{len(known)} of {len(files)} files have a hash that the hub published")
    else:
        result.done(f"{len(files)} files were hashed; no published hash is at hand to compare them with")


def _is_large(size: int) -> bool:
    return size > 1 << 28


def _check_index_size(subject: Subject, result: Result) -> None:
    index = subject.path / INDEX
    if not index.exists():
        return
    metadata = read_object(index, ConfigError, INDEX_BYTES).get("metadata")
    told = metadata.get("total_size") if isinstance(metadata, dict) else None
    try:
        found = _tensor_bytes(subject)
    except HybridrtError as e:
        return result.fail(str(e))
    if isinstance(told, int) and told != found:
        result.warn(f"{index.name}: total_size is {told}; the tensors of the files have {found} bytes")


def _check_unlisted(subject: Subject, result: Result) -> None:
    """Files of weights that no runtime reads: of another download, or left out of an old index."""
    if not (subject.path / INDEX).exists():
        return
    try:
        listed = {file.name for file in shards_of(subject.path)}
    except HybridrtError:
        return  # the size of the index has told it
    for file in sorted(subject.path.glob("*.safetensors")):
        if file.name not in listed:
            result.warn(f"{file.name} is not in {INDEX}, so it is not read: is the index of another download?")


def _tensor_bytes(subject: Subject) -> int:
    from hybridrt.models.loading.weight_files import opened

    total = 0
    for file in shards_of(subject.path):
        with opened(file) as f:
            total += sum(entry.size for entry in f.entries.values())
    return total
