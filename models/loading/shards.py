"""The files of a checkpoint and their tensors, which an index may list."""

from pathlib import Path

from hybridrt.base.config_json import read_object, shown
from hybridrt.base.errors import CheckpointError
from hybridrt.base.files import INDEX_BYTES
from hybridrt.models.loading.weight_files import Shards, keys_of


def shards_of(path: Path) -> Shards:
    """Checks that they agree with the index, if there is one."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return _indexed_shards(index)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f'{path} has no *.safetensors file; load_format="dummy" runs without weights')
    return {file: keys_of(file) for file in files}


def _indexed_shards(index: Path) -> Shards:
    weight_map = _weight_map(index)
    files = sorted({index.parent / name for name in weight_map.values()})
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise CheckpointError(f"{index} names shards that are not there: {some(missing)}")
    shards = {file: keys_of(file) for file in files}
    held = {(key, file.name) for file, keys in shards.items() for key in keys}
    wrong = sorted({key for key, _ in held ^ set(weight_map.items())})
    if wrong:
        raise CheckpointError(f"{index} and the shards disagree on where these keys are: {some(wrong)}")
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


def some(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
