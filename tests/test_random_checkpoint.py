"""scripts/random_checkpoint.py."""

from pathlib import Path

import pytest
import torch

from hybridrt import LLM, SamplingParams
from scripts.random_checkpoint import SPREAD, write
from tests.support.checkpoints import CheckpointStore


def test_a_random_checkpoint_has_all_weights_and_logits_that_differ(
    checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    write(checkpoints["falcon-plain"].path, tmp_path / "made", torch.device("cpu"))
    with LLM(str(tmp_path / "made"), device="cpu", dtype="float32", max_running_requests=1) as llm:
        (out,) = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, ignore_eos=True))
    assert out.logprobs is not None
    likeliest = out.logprobs[0].values()
    assert max(likeliest) - min(likeliest) > SPREAD / 4


def test_a_directory_with_files_is_refused(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("")
    with pytest.raises(FileExistsError, match="is empty or not there"):
        write(checkpoints["falcon-plain"].path, tmp_path, torch.device("cpu"))
