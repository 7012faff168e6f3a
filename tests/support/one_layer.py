"""The built-in model's first layer alone: its tokens mean nothing, and its steps take less than half of the time."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from hybridrt.runtime.load.model_path import resolve_model_path


def write_first_layer(path: Path) -> Path:
    """The model with its tokenizer, cut after the first layer, in a directory that does not exist."""
    shutil.copytree(resolve_model_path("embedded"), path)
    config = json.loads((path / "config.json").read_text())
    # One layer is sure of the last token once more. With smaller logits, tokens that are drawn differ.
    changes = {"num_hidden_layers": 1, "lm_head_multiplier": config["lm_head_multiplier"] / 5}
    (path / "config.json").write_text(json.dumps(config | changes))
    weights = load_file(path / "model.safetensors")
    kept = {name: t for name, t in weights.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return path
