"""gpt-oss with experts in MXFP4, as it is published, and a plain checkpoint of the same numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write
from tests.support.windowed_checkpoints import gpt_oss

PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_mxfp4(folder: Path) -> tuple[Path, Path]:
    """The published form and its plain twin, which transformers decodes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # Ranks of 48 inputs cut a group of 32.
    write(gpt_oss(hidden_size=64, intermediate_size=96, num_hidden_layers=2), folder / "twin")
    shutil.copytree(folder / "twin", folder / "mxfp4")
    dense = load_file(folder / "twin" / "model.safetensors")
    stored, generator = dict(dense), torch.Generator().manual_seed(3)
    for key in [key for key in dense if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = stored.pop(key).shape
        size = (count, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 124, size, generator=generator, dtype=torch.uint8)
        stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        dense[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, folder / "mxfp4" / "model.safetensors")
    save_file(dense, folder / "twin" / "model.safetensors")
    edit_config(folder / "mxfp4", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": PLAIN})
    return folder / "mxfp4", folder / "twin"


def edit_config(path: Path, **changes: Any) -> None:
    fields = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(fields))
