"""Tables of the values that fields of config.json may have, shared by families."""

from collections.abc import Mapping

from hybridrt.base.config_json import (
    FALSE,
    FLAG,
    NULL,
    OBJECT,
    TEXT,
    TRUE,
    FieldType,
    either,
    integer,
    list_of,
    number,
    one_of,
)
from hybridrt.base.dtypes import DTYPES

FieldTypes = Mapping[str, FieldType]
# So stacked matrices have fewer than 2**63 bytes.
MAX_SIZE, MAX_WIDTH, MAX_EXPERTS, MAX_LAYERS = 2**20, 2**22, 2**14, 2**12
MAX_POSITIONS = 2**24

SIZE = integer(1, MAX_SIZE)
STATE = integer(1, 2**16)
TAPS = integer(1, 64)
CHUNK = integer(1, 1024)
COUNT = integer(0, MAX_EXPERTS)
LAYERS = integer(1, MAX_LAYERS)
PERIOD = integer(1, MAX_LAYERS)
POSITIONS = integer(1, MAX_POSITIONS)
MULTIPLIER = number(-1e6, 1e6)
EPSILON = number(0.0, 1.0)
OFF = either(NULL, FALSE)
DT_LIMIT = list_of(either(number(0.0, 1e6), FieldType("infinity", lambda v: v == float("inf"))), 2)

# No model reads these Qwen fields: any other value would mean a different model.
OUTPUT_GATES: FieldTypes = {
    "attn_output_gate": either(NULL, TRUE),
    "output_gate_type": either(NULL, one_of("silu", "swish")),
}
EOS: FieldTypes = {"eos_token_id": either(either(NULL, integer(0, 2**31 - 1)), list_of(integer(0, 2**31 - 1)))}
# Checked first: advice about other fields is wrong for a model that cannot run.
NAMES: FieldTypes = {"architectures": either(NULL, list_of(TEXT)), "model_type": TEXT}
# Names of one field: llm-compressor's older checkpoints have the second.
QUANTISATION = ("quantization_config", "compression_config")
# Checked next: lists are built from some.
RAW: FieldTypes = {
    **NAMES,
    "per_layer_config": FieldType("absent: no architecture here takes one", lambda v: not v),
    "num_hidden_layers": either(NULL, LAYERS),
    **dict.fromkeys(("dtype", "torch_dtype"), either(NULL, one_of(*DTYPES))),
    **dict.fromkeys(QUANTISATION, either(NULL, OBJECT)),
    "tie_word_embeddings": FLAG,
    **EOS,
}
ROPE: FieldTypes = {
    "rope_type": TEXT,
    "rope_theta": number(1e-3, 1e15),
    "partial_rotary_factor": either(NULL, number(1e-3, 1.0)),
    "original_max_position_embeddings": either(NULL, POSITIONS),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "factor"), either(NULL, MULTIPLIER)),
    **dict.fromkeys(("high_freq_factor", "low_freq_factor"), either(NULL, MULTIPLIER)),
    **dict.fromkeys(("long_factor", "short_factor"), either(NULL, list_of(MULTIPLIER))),
    "truncate": either(NULL, FLAG),
    "mrope_section": either(NULL, list_of(COUNT, 3)),
}

COMMON: FieldTypes = {
    "vocab_size": integer(1, 2**24),
    "hidden_size": SIZE,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": FLAG,
}
ATTENTION: FieldTypes = {
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "head_dim": either(NULL, SIZE),
    "max_position_embeddings": POSITIONS,
    "intermediate_size": SIZE,
}
LATENT: FieldTypes = {
    **COMMON,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), SIZE),
    "max_position_embeddings": POSITIONS,
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), SIZE),
    "q_lora_rank": either(NULL, SIZE),
}
