"""A checkpoint's generation_config.json as SamplingParams."""

from pathlib import Path

from hybridrt.base.config_json import FLAG, NULL, check_fields, either, read_object
from hybridrt.base.errors import CheckpointError, RequestError
from hybridrt.base.sampling_params import SamplingParams

# name in generation_config.json -> in SamplingParams
FILE_FIELDS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
}


def default_sampling_params(path: str | Path) -> SamplingParams:
    """The sampling of requests without parameters, in Python and on the command line.

    Fields that generation_config.json sets (FILE_FIELDS) are read from there; others have the
    defaults of SamplingParams. `"do_sample": false` means temperature 0, whatever the file's
    temperature is.

    Raises:
        CheckpointError: the file cannot be read, is no JSON object, or holds a value out of range.
    """
    file = Path(path) / "generation_config.json"
    written = read_object(file, CheckpointError) if file.exists() else {}
    fields = {ours: written[theirs] for theirs, ours in FILE_FIELDS.items() if written.get(theirs) is not None}
    check_fields(written, {"do_sample": either(NULL, FLAG)}, file, CheckpointError)
    if written.get("do_sample") is False:
        fields["temperature"] = 0.0
    try:
        return SamplingParams(**fields)
    except RequestError as e:
        raise CheckpointError(f"{file} cannot be used: {e}; correct or remove it") from e
