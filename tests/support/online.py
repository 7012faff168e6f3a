"""Matrices as they are after quantisation by us, written from the formulas, and plain checkpoints of them."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import falcon, qwen, write
from tests.support.windowed_checkpoints import gpt_oss

# Models with sides from 128 on, and the modules that are quantised: expressions of whole keys.
MODELS: dict[str, tuple[Any, str]] = {
    "falcon": (
        falcon(hidden_size=128, intermediate_size=160, mamba_d_ssm=160, mamba_n_heads=20, head_dim=64),
        r".*(q_proj|k_proj|v_proj|o_proj|in_proj|out_proj|gate_proj|up_proj|down_proj)\.weight",
    ),
    "qwen": (
        qwen(
            hidden_size=128, moe_intermediate_size=128, shared_expert_intermediate_size=128, num_experts=3,
            linear_value_head_dim=64, linear_key_head_dim=64, head_dim=64,
        ),
        r".*(\.[qkvo]_proj|in_proj_qkvz|out_proj|gate_proj|up_proj|down_proj)\.weight|.*\.experts\.\w+_proj",
    ),
    "gpt_oss": (
        gpt_oss(hidden_size=128, intermediate_size=128, head_dim=64, num_hidden_layers=2, num_local_experts=3),
        r".*\.[qkvo]_proj\.weight|.*\.experts\.\w+_proj",
    ),
}  # fmt: skip


def after_fp8(matrix: Tensor) -> Tensor:
    """e4m3 with one scale for each 128 x 128 numbers: the largest becomes 448."""
    found = matrix.clone()
    for i in range(0, matrix.shape[0], 128):
        for j in range(0, matrix.shape[1], 128):
            block = matrix[i : i + 128, j : j + 128]
            scale = block.abs().max() / 448
            found[i : i + 128, j : j + 128] = (block / scale).to(torch.float8_e4m3fn).float() * scale
    return found


def after_int4(matrix: Tensor) -> Tensor:
    """-8 to 7 times a bfloat16 scale for each group of inputs of a row, the largest one that divides them. Of nine
    scales the one with the least square error."""
    group = next(each for each in (128, 64, 32) if matrix.shape[1] % each == 0)
    found = torch.empty_like(matrix)
    for j in range(0, matrix.shape[1], group):
        part = matrix[:, j : j + group]
        scales = [(part.abs().amax(1, True) / (7 + i / 2)).bfloat16().float() for i in range(9)]
        tried = torch.stack([(part / scale).round().clamp(-8, 7) * scale for scale in scales])
        best = (tried - part).square().sum(-1).argmin(0)
        found[:, j : j + group] = tried[best, torch.arange(len(part))]
    return found


def after_nvfp4(matrix: Tensor) -> Tensor:
    """e2m1 with an e4m3 scale for each 16 inputs of a row, and one float32 number for all. The largest of a group is 6
    or 4 times its scale, by the square error."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    common, found = 6 * 448 / matrix.abs().max(), torch.empty_like(matrix)
    for j in range(0, matrix.shape[1], 16):
        part, tried = matrix[:, j : j + 16], list[Tensor]()
        for divisor in (6, 4):
            stored = (part.abs().amax(1, True) / divisor * common).clamp(2**-9, 448).to(torch.float8_e4m3fn)
            scale = stored.float() / common
            nearest = ((part / scale).abs().unsqueeze(-1) - values).abs().argmin(-1)
            tried.append(values[nearest] * part.sign() * scale)
        best = [(each - part).square().sum(1, True) for each in tried]
        found[:, j : j + 16] = torch.where(best[1] < best[0], tried[1], tried[0])
    return found


AFTER: dict[str, Callable[[Tensor], Tensor]] = {"fp8": after_fp8, "int4": after_int4, "nvfp4": after_nvfp4}


def write_plain(name: str, path: Path) -> Path:
    write(MODELS[name][0], path)
    return path


def with_number(plain: Path, path: Path, value: float) -> Path:
    """The checkpoint of "falcon" with another number in one matrix."""
    shutil.copytree(plain, path)
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.1.feed_forward.up_proj.weight"][3, 5] = value
    save_file(tensors, path / "model.safetensors")
    return path


def write_twin(name: str, scheme: str, plain: Path, path: Path) -> Path:
    """A plain checkpoint of the numbers that `plain` has after quantisation."""
    shutil.copytree(plain, path)
    tensors = load_file(plain / "model.safetensors")
    for key, tensor in tensors.items():
        if re.fullmatch(MODELS[name][1], key):
            tensors[key] = _after(AFTER[scheme], tensor, interleaved=name == "gpt_oss").contiguous()
    save_file(tensors, path / "model.safetensors")
    return path


def _after(change: Callable[[Tensor], Tensor], tensor: Tensor, interleaved: bool) -> Tensor:
    """Of a stack: each matrix of each expert by itself. gpt-oss has [E, in, out], where outputs of gate and up
    alternate."""
    if tensor.dim() == 2:
        return change(tensor)
    found = tensor.clone()
    stack, into = (t.transpose(1, 2) if interleaved else t for t in (tensor, found))
    joined = 1 if stack.shape[1] == stack.shape[2] else 2
    for e in range(len(stack)):
        for i in range(joined):
            rows = slice(i, None, joined) if interleaved else slice(i * stack.shape[1] // joined, None)
            rows = rows if interleaved else slice(rows.start, rows.start + stack.shape[1] // joined)
            into[e, rows] = change(stack[e, rows].contiguous())
    return found
