"""transformers' model as the oracle: log-probabilities of prompts, and greedy tokens without a cache."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrt.base.device import free_device_bytes, release_kept_memory
from hybridrt.base.errors import UnsupportedModelError, reason
from hybridrt.runtime.load.host_memory import free_host_memory

ROOM = 1.3  # times the weights: activations need memory too


@dataclass(frozen=True)
class OracleAnswer:
    """transformers' result for one prompt.

    Attributes:
        scores: [n, vocab] float32 log-probabilities after each of the prompt's tokens.
        tokens: greedy continuation.
        steps: log-probabilities [vocab] before each of these tokens.
    """

    scores: Tensor
    tokens: list[int]
    steps: list[Tensor]


def fits(weight_bytes: int, device: torch.device) -> bool:
    free = free_device_bytes(device) if device.type == "cuda" else free_host_memory()
    return weight_bytes * ROOM < free


def model_class_of(architecture: str) -> Any:
    """transformers' class of an architecture.

    Raises:
        UnsupportedModelError: it has none.
    """
    import transformers

    found = getattr(transformers, architecture, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UnsupportedModelError(f"transformers {transformers.__version__} has no {architecture}")
    return found


@contextmanager
def loaded(path: Path, architecture: str, dtype: torch.dtype, device: torch.device) -> Iterator[Any]:
    """transformers' model. Runs no code of the checkpoint and reads no pickles.

    Raises:
        UnsupportedModelError: transformers cannot read the checkpoint.
    """
    cls = model_class_of(architecture)
    _hush()
    try:
        model = cls.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        model = model.eval().to(device)
    except Exception as e:  # of any type
        raise UnsupportedModelError(f"transformers does not load this checkpoint: {reason(e)}") from e
    try:
        yield model
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            release_kept_memory()


def _hush() -> None:
    """The check has a progress bar of its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@torch.inference_mode()
def ask(model: Any, prompt: Sequence[int], count: int) -> OracleAnswer:
    """A full forward for each token: no cache is trusted."""
    ids, steps, scores = list(prompt), list[Tensor](), None
    device = next(model.parameters()).device
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
        found = logits.float().log_softmax(-1).cpu()
        scores = found if scores is None else scores
        steps.append(found[-1])
        ids.append(int(found[-1].argmax()))
    assert scores is not None, "count is at least 1"
    return OracleAnswer(scores, ids[len(prompt) :], steps)


def frequencies(model: Any) -> list[tuple[str, Tensor]]:
    """Rotary frequencies of a model's text part by the name of their buffer."""
    return [
        (name, buffer.float().cpu())
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name and not any(p in name for p in ("vision", "visual"))
    ]
