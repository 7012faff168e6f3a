"""transformers' model as the oracle: log-probabilities of prompts, and greedy tokens without a cache."""

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hybridrt.base.device import free_device_bytes, release_kept_memory
from hybridrt.base.errors import UnsupportedModelError, reason
from hybridrt.base.files_safetensors import DTYPES
from hybridrt.models.loading.shards import shards_of
from hybridrt.models.loading.weight_files import opened
from hybridrt.runtime.load.host_memory import free_host_memory

ROOM = 1.3  # times the weights: activations need memory too
THREADS = 8  # that copy weights to a device


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


def stored_dtype(path: Path) -> torch.dtype | None:
    """The one dtype of a checkpoint's numbers; None if it has several, or none.

    Raises:
        CheckpointError: a file is damaged.
    """
    found = set[torch.dtype]()
    for file in shards_of(path):
        with opened(file) as f:
            found |= {DTYPES[entry.dtype] for entry in f.entries.values()}
    found = {dtype for dtype in found if dtype.is_floating_point}
    return found.pop() if len(found) == 1 else None


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
    cls, stored = model_class_of(architecture), stored_dtype(path)
    # transformers maps files whose dtype it keeps, and converts others in main memory: the device is quicker.
    widened = not by_layer and dtype == torch.float32 and stored in (torch.bfloat16, torch.float16)
    _hush()
    try:
        model = cls.from_pretrained(
            str(path), dtype="auto" if by_layer else stored if widened else dtype, local_files_only=True,
            trust_remote_code=False, use_safetensors=True,
        ).eval()  # fmt: skip
        if not by_layer:
            _bring(_tensors(model), None, device)
        if widened:
            widen(model)
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


def widen(model: nn.Module) -> None:
    """Converts a model that has the dtype of its checkpoint to float32, in place. Its numbers are then those of a model
    that was loaded in float32: what no file has is computed again."""
    computed = _computed(model)
    for tensor in _tensors(model):
        tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
    for name, buffer in model.named_buffers():
        if name in computed:
            buffer.data = computed[name].to(buffer.device)


def _computed(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that transformers computes and has rounded, in float32. They are those of a second model without
    weights."""
    stored = model.state_dict().keys()
    rounded = [name for name, b in model.named_buffers() if b.is_floating_point() and b.dtype != torch.float32]
    rounded = [name for name in rounded if name not in stored]
    if not rounded:
        return {}
    without_numbers: Any = _without_numbers  # torch's annotation lacks the parameter that a hook may return
    hook = register_module_parameter_registration_hook(without_numbers)
    try:
        twin = type(model)(deepcopy(model.config))
    finally:
        hook.remove()
    buffers = dict(twin.named_buffers())
    return {name: buffers[name] for name in rounded}


def _without_numbers(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.to("meta"), requires_grad=False)


def _run_by_layer(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Each layer's weights come to the device before it runs, and leave it afterwards. Others come at once.

    Raises:
        UnsupportedModelError: a layer does not fit.
    """
    computed, buffers = _computed(model), dict(model.named_buffers())
    for name, buffer in computed.items():
        buffers[name].data = buffer
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


def _bring(tensors: Sequence[Tensor], dtype: torch.dtype | None, device: torch.device) -> None:
    """`dtype`: of those of floating-point numbers; None keeps it."""

    def bring(tensor: Tensor) -> None:
        there = tensor.data.to(device)  # by itself: a copy that also converts does so in main memory
        tensor.data = there.to(dtype) if dtype and tensor.is_floating_point() else there

    with ThreadPoolExecutor(THREADS) as pool:  # a thread waits for the pages of a file
        list(pool.map(bring, tensors))


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
