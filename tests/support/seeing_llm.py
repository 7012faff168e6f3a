"""A tiny checkpoint that sees, with tokenizer, chat template and image processor."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.models.test_models_parity import rewrite
from tests.support.sizes import VOCAB

TAGS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|pad|>")
PAD, VIDEO = "<|image_pad|>", "<|video_pad|>"  # the last tokens
TEMPLATE = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.content is string -%}{{ m.content }}{%- else -%}{%- for p in m.content -%}
{%- if p.type == 'image' -%}{%- if m.role == 'system' -%}{{ raise_exception('no images') }}{%- endif -%}
<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ p.text }}{%- endif -%}{%- endfor -%}{%- endif -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def write_seeing(checkpoint: Path, to: Path, patch: int) -> Path:
    """A copy of a checkpoint of `seeing_checkpoints` or `newer_checkpoints`. A character is a token."""
    copy = rewrite(checkpoint, to)
    characters = ["\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    tokenizer.decoder = decoders.Fuse()
    fill = [f"<|fill_{i}|>" for i in range(VOCAB - len(characters) - len(TAGS) - 2)]
    named = [*TAGS, *fill, VIDEO, PAD]
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in named])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    hf.chat_template = TEMPLATE
    hf.save_pretrained(copy)
    size = {"shortest_edge": (4 * patch) ** 2, "longest_edge": (16 * patch) ** 2}
    fields = {"image_processor_type": "Qwen2VLImageProcessorFast", "size": size, "patch_size": patch, "merge_size": 2}
    (copy / "preprocessor_config.json").write_text(json.dumps(fields))
    return copy
