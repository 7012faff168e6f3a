"""A small model that sees, without weights: the built-in model's tokenizer, Qwen3.5's layers and tower in small.

python -m benchmarks.seeing_model FOLDER && hybridrt serve FOLDER --load-format dummy
"""

import json
import sys
from pathlib import Path

from hybridrt.runtime.load.model_path import resolve_model_path

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """{%- for m in messages -%}<|endoftext|>{{ m.role }}: {% if m.content is string -%}{{ m.content }}
{%- else -%}{%- for p in m.content -%}{%- if p.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ p.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}<|endoftext|>assistant: """
TEXT = {
    "model_type": "qwen3_5_text", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}  # fmt: skip
VISION = {
    "model_type": "qwen3_5", "depth": 4, "hidden_size": 128, "intermediate_size": 512, "num_heads": 4,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": TEXT["hidden_size"],
    "num_position_embeddings": 2304,
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def write_seeing_model(folder: Path) -> Path:
    """The folder, with all but weights."""
    source = resolve_model_path("embedded")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    first, like = len(tokenizer["model"]["vocab"]), tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [like | {"id": first + i, "content": text} for i, text in enumerate(TOKENS)]
    size = -(-(first + len(TOKENS)) // 64) * 64
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": True,
        "text_config": TEXT | {"vocab_size": size, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True},
        "vision_config": VISION, **{name: first + i for i, name in enumerate(names)},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer", tokenizer), ("config", config), ("preprocessor_config", PROCESSOR)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


if __name__ == "__main__":
    print(write_seeing_model(Path(sys.argv[1])))
