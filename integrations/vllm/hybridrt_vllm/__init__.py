"""hybridrt's replay decode of Gated Delta Nets in vLLM. README.md says what it does and what was run."""

ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


def register() -> None:
    """The entry point of the group `vllm.general_plugins`. vLLM calls it in each of its processes.

    The names are strings: nothing of a model is imported before vLLM asks for it.
    """
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"hybridrt_vllm.models:{architecture}")
