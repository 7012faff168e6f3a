"""transformers' model as the oracle: log-probabilities of prompts, and greedy tokens without a cache."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridrt.base.device import free_device_bytes, release_kept_memory
from hybridrt.base.dtypes import dtype_name
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
def loaded(
    path: Path, architecture: str, dtype: torch.dtype, device: torch.device, *, by_layer: bool = False
) -> Iterator[Any]:
    """transformers' model. Runs no code of the checkpoint and reads no pickles.

    Args:
        by_layer: weights stay in main memory, in the checkpoint's dtype. Those of a layer are on the device in
            `dtype`, float32, only while the layer runs.

    Raises:
        UnsupportedModelError: transformers cannot read the checkpoint, or a layer does not fit on the device.
    """
    cls = model_class_of(architecture)
    _hush()
    try:
        model = cls.from_pretrained(
            str(path), dtype="auto" if by_layer else dtype, local_files_only=True, trust_remote_code=False,
            use_safetensors=True,
        ).eval()  # fmt: skip
        if not by_layer:
            model.to(device)
    except Exception as e:  # of any type
        raise UnsupportedModelError(f"transformers does not load this checkpoint: {reason(e)}") from e
    try:
        if by_layer:
            _run_by_layer(model, dtype, device)
        yield model
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            release_kept_memory()


def _run_by_layer(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Each layer's weights come to the device before it runs, and leave it afterwards. Others come at once.

    Raises:
        UnsupportedModelError: a layer does not fit, or the model made numbers of its own in a shorter dtype.
    """
    stored_names = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in stored_names and buffer.is_floating_point() and buffer.dtype != dtype:
            raise UnsupportedModelError(
                f"transformers rounds {name} to {dtype_name(buffer.dtype)} when it runs layer by layer"
            )
    layers = [_tensors(layer) for layer in _layers(model)]
    in_layers = {tensor for layer in layers for tensor in layer}  # the same tensor, whatever its numbers
    others = [tensor for tensor in _tensors(model) if tensor not in in_layers]
    needed = dtype.itemsize * (_size(others) + max(map(_size, layers), default=0))
    if not fits(needed, device):
        raise UnsupportedModelError(f"transformers needs {needed:,} bytes of {device} even layer by layer")
    _bring(others, dtype, device)
    for layer, tensors in zip(_layers(model), layers):
        stored = [tensor.data for tensor in tensors]

        def bring(*_: Any, tensors: list[Tensor] = tensors) -> None:
            _bring(tensors, dtype, device)

        def take_back(*_: Any, tensors: list[Tensor] = tensors, stored: list[Tensor] = stored) -> None:
            for tensor, data in zip(tensors, stored):
                tensor.data = data

        layer.register_forward_pre_hook(bring)
        layer.register_forward_hook(take_back)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Modules of the outermost lists: the layers of the text part, and those of a tower."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _bring(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else None)


def _hush() -> None:
    """The check has a progress bar of its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@torch.inference_mode()
def ask(model: Any, prompt: Sequence[int], count: int) -> OracleAnswer:
    """A full forward for each token: no cache is trusted."""
    ids, steps, scores = list(prompt), list[Tensor](), None
    device = model.get_input_embeddings().weight.device
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
