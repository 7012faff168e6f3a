"""Which values the fields of config.json may have: every field that a model or its plan is made of, by family."""

from collections.abc import Mapping

from hybridrt.config_json import FLAG, NULL, OBJECT, TEXT, Kind, either, integer, list_of, number, one_of

Kinds = Mapping[str, Kind]
# A matrix of the largest sizes, stacked for the most experts, still has fewer than 2**63 bytes.
MAX_SIZE, MAX_WIDTH, MAX_EXPERTS, MAX_LAYERS = 2**20, 2**22, 2**14, 2**12
MAX_POSITIONS = 2**24

SIZE = integer(1, MAX_SIZE)
STATE = integer(1, 2**16)
TAPS = integer(2, 64)
CHUNK = integer(1, 2**16)
COUNT = integer(0, MAX_EXPERTS)
LAYERS = integer(1, MAX_LAYERS)
PERIOD = integer(1, MAX_LAYERS)
POSITIONS = integer(1, MAX_POSITIONS)
MULTIPLIER = number(-1e6, 1e6)
EPSILON = number(0.0, 1.0)
DT_LIMIT = list_of(number(0.0, float("inf")), 2)

EOS: Kinds = {"eos_token_id": either(either(NULL, integer(0, 2**31 - 1)), list_of(integer(0, 2**31 - 1)))}
# Before transformers reads it: what it would build lists from, and what is read from the file itself.
RAW: Kinds = {
    "architectures": either(NULL, list_of(TEXT)),
    "model_type": TEXT,
    "num_hidden_layers": either(NULL, LAYERS),
    "num_labels": either(NULL, integer(0, MAX_SIZE)),
    "dtype": either(NULL, TEXT),
    "torch_dtype": either(NULL, TEXT),
    "quantization_config": either(NULL, OBJECT),
    "tie_word_embeddings": FLAG,
    **EOS,
}
ROPE: Kinds = {
    "rope_type": TEXT,
    "rope_theta": number(1e-3, 1e15),
    "partial_rotary_factor": either(NULL, number(1e-3, 1.0)),
    "original_max_position_embeddings": either(NULL, POSITIONS),
    **{name: either(NULL, MULTIPLIER) for name in ("attention_factor", "beta_fast", "beta_slow", "factor")},
    **{name: either(NULL, MULTIPLIER) for name in ("high_freq_factor", "low_freq_factor")},
    **{name: either(NULL, list_of(MULTIPLIER)) for name in ("long_factor", "short_factor")},
}

COMMON: Kinds = {"vocab_size": integer(1, 2**24), "hidden_size": SIZE, "tie_word_embeddings": FLAG}
ATTENTION: Kinds = {
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "head_dim": either(NULL, SIZE),
    "max_position_embeddings": POSITIONS,
    "intermediate_size": SIZE,
}
_FALCON_H1: Kinds = {
    **COMMON,
    **ATTENTION,
    **dict.fromkeys(("mamba_expand", "mamba_n_heads", "mamba_n_groups"), SIZE),
    "mamba_d_ssm": either(NULL, SIZE),
    "mamba_d_state": STATE,
    "mamba_d_conv": TAPS,
    "mamba_chunk_size": CHUNK,
    "time_step_limit": DT_LIMIT,
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "mamba_norm_before_gate"), FLAG),
    **dict.fromkeys(("attention_bias", "projectors_bias", "mlp_bias"), FLAG),
    **dict.fromkeys(("lm_head_multiplier", "embedding_multiplier", "key_multiplier"), MULTIPLIER),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), MULTIPLIER),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), MULTIPLIER),
    "ssm_multipliers": list_of(MULTIPLIER, 5),
    "mlp_multipliers": list_of(MULTIPLIER, 2),
}
_FALCON_MAMBA: Kinds = {
    **COMMON,
    **dict.fromkeys(("intermediate_size", "time_step_rank"), SIZE),
    "state_size": STATE,
    "conv_kernel": TAPS,
    "max_position_embeddings": either(NULL, POSITIONS),
    **dict.fromkeys(("layer_norm_epsilon", "mixer_rms_eps"), EPSILON),
    **dict.fromkeys(("use_conv_bias", "use_bias", "residual_in_fp32"), FLAG),
}
_JAMBA: Kinds = {
    **COMMON,
    **ATTENTION,
    **dict.fromkeys(("mamba_expand", "mamba_dt_rank"), SIZE),
    "mamba_d_state": STATE,
    "mamba_d_conv": TAPS,
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "attn_layer_offset", "expert_layer_offset"), COUNT),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), PERIOD),
    "rms_norm_eps": EPSILON,
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), FLAG),
}
_NEMOTRON_H: Kinds = {
    **COMMON,
    **ATTENTION,
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "n_groups"), SIZE),
    "ssm_state_size": STATE,
    "conv_kernel": TAPS,
    "chunk_size": CHUNK,
    "time_step_limit": DT_LIMIT,
    **dict.fromkeys(("layers_block_type", "mtp_layers_block_type"), list_of(TEXT)),
    "num_nextn_predict_layers": COUNT,
    **dict.fromkeys(("n_routed_experts", "num_experts_per_tok"), COUNT),
    **dict.fromkeys(("n_group", "topk_group"), integer(1, MAX_EXPERTS)),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), SIZE),
    "moe_latent_size": either(NULL, SIZE),
    "routed_scaling_factor": MULTIPLIER,
    "layer_norm_epsilon": EPSILON,
    **dict.fromkeys(("use_bias", "use_conv_bias", "mlp_bias", "norm_topk_prob"), FLAG),
}
_QWEN3_NEXT: Kinds = {
    **COMMON,
    **ATTENTION,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), SIZE),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), STATE),
    "linear_conv_kernel_dim": TAPS,
    "layer_types": list_of(one_of("linear_attention", "full_attention")),
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), COUNT),
    "decoder_sparse_step": PERIOD,
    "mlp_only_layers": list_of(integer(0, MAX_LAYERS)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), SIZE),
    "num_nextn_predict_layers": either(NULL, COUNT),
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("attention_bias", "norm_topk_prob"), FLAG),
}
KINDS: Mapping[str, Kinds] = {
    "FalconH1ForCausalLM": _FALCON_H1,
    "FalconMambaForCausalLM": _FALCON_MAMBA,
    "JambaForCausalLM": _JAMBA,
    "NemotronHForCausalLM": _NEMOTRON_H,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
}
