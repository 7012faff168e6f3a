"""Writes what a version leaves for the next one: files of a tiny model, into tests/vectors/upgrade/VERSION.

python -m tests.support.upgrade_files    # once, at a release. Later versions read these files in tests/test_upgrade.py
"""

import json
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hybridrt import LLM, SamplingParams, __version__
from hybridrt.cli.conversation import ConversationMessage as Said
from hybridrt.cli.conversation import TextPart, encoded
from hybridrt.models.loading.prepared_weights import VARIABLE
from hybridrt.transfer.handshake import Handshake, handshake_of
from hybridrt.verify.results import Report
from tests.support.checkpoints import falcon

FOLDER = Path(__file__).parents[1] / "vectors" / "upgrade"
TEXT = [5, 9, 2, 7, 11, 3, 8, 4, 6, 10, 12, 13, 5, 9, 2, 7, 11, 3]
NOTE = "a note"
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_running_requests": 2, "page_size": 4}
SMALL = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "mamba_d_ssm": 8, "mamba_n_heads": 2, "mamba_d_head": 4,
    "mamba_d_state": 4,
}  # fmt: skip


def ask(llm: LLM, prompt: list[int], count: int = 6) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt were cached."""
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))
    return list(output.token_ids), output.metrics.cached_tokens


def write_model(path: Path) -> Path:
    """A model of few numbers, with random weights."""
    torch.manual_seed(0)
    config, kind = falcon(**SMALL)()
    model = kind(config)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


def handshake(llm: LLM) -> Handshake:
    """What a worker says of itself before states move."""
    runner: Any = llm.engine.executor
    return handshake_of(runner.config, runner.target, runner.model_path)


def write_files(out: Path) -> None:
    """All files of this version. `out` does not exist."""
    model = write_model(out / "model")
    with TemporaryDirectory() as prepared:
        os.environ[VARIABLE] = prepared
        with LLM(str(model), request_log=str(out / "requests.jsonl"), **OPTIONS) as llm:  # type: ignore[arg-type]
            ask(llm, TEXT)
            llm.save_session(out / "session", TEXT, note=NOTE)
            llm.dump_cache(out / "cache.json")
            facts = handshake(llm)
        (file,) = Path(prepared).iterdir()
        shutil.copy(file, out / "prepared.safetensors")
    (out / "handshake.json").write_text(json.dumps(facts, indent=1) + "\n")
    config = json.loads((model / "config.json").read_text())
    machine = {"device": "CPU", "hybridrt": __version__}
    report = Report("tiny", True, {}, machine, hashes={"files": {}, "tensors": {}}, config=config)
    (out / "report.json").write_text(json.dumps(report.as_json()) + "\n")
    (out / "conversation.json").write_bytes(encoded([Said("user", "Hello"), Said("assistant", [TextPart("Hi")])]))


if __name__ == "__main__":
    target = FOLDER / __version__
    if target.exists():
        sys.exit(f"{target} exists: files of a version that was released stay as they are")
    write_files(target)
    print(
        *sorted(f"{file.stat().st_size:6} {file.relative_to(target)}" for file in target.rglob("*") if file.is_file()),
        sep="\n",
    )
