"""Finds the family of an architecture, in this package or in an entry point."""

from functools import cache

from hybridrt.base.config_json import FieldType
from hybridrt.base.errors import BackendError, UnsupportedModelError, shown
from hybridrt.base.plugins import Plugins
from hybridrt.models.config.family import Family

# A table, so that reading config.json imports one model.
PLACES = {
    "BailingHybridForCausalLM": "hybridrt.models.bailing_hybrid:FAMILY",
    "BailingMoeV3ForCausalLM": "hybridrt.models.bailing_hybrid:PUBLISHED",
    "BailingMoeV2_5ForCausalLM": "hybridrt.models.bailing_moe_v2_5:FAMILY",
    "BambaForCausalLM": "hybridrt.models.bamba:FAMILY",
    "FalconH1ForCausalLM": "hybridrt.models.falcon_h1:FAMILY",
    "FalconMambaForCausalLM": "hybridrt.models.falcon_mamba:FAMILY",
    "GptOssForCausalLM": "hybridrt.models.gpt_oss:FAMILY",
    "GraniteMoeHybridForCausalLM": "hybridrt.models.granite_moe_hybrid:FAMILY",
    "JambaForCausalLM": "hybridrt.models.jamba:FAMILY",
    "KimiLinearForCausalLM": "hybridrt.models.kimi_linear:FAMILY",
    "LaraMiniForCausalLM": "hybridrt.models.lara_mini:FAMILY",
    "Lfm2ForCausalLM": "hybridrt.models.lfm2:FAMILY",
    "Lfm2MoeForCausalLM": "hybridrt.models.lfm2:MOE_FAMILY",
    "Lfm2VlForConditionalGeneration": "hybridrt.models.lfm2:SEEING",
    "Lfm3ForCausalLM": "hybridrt.models.lfm3:FAMILY",
    "Lfm3VlForConditionalGeneration": "hybridrt.models.lfm3:SEEING",
    "Mamba2ForCausalLM": "hybridrt.models.mamba:FAMILY2",
    "MambaForCausalLM": "hybridrt.models.mamba:FAMILY",
    "MiniCPMV4_6ForConditionalGeneration": "hybridrt.models.minicpm_v:V4_6",
    "MiniCPMV4_7ForConditionalGeneration": "hybridrt.models.minicpm_v:V4_7",
    "MiniMaxForCausalLM": "hybridrt.models.minimax:FAMILY",
    "MiniMaxM1ForCausalLM": "hybridrt.models.minimax:M1",
    "MiniMaxText01ForCausalLM": "hybridrt.models.minimax:TEXT_01",
    "NemotronHForCausalLM": "hybridrt.models.nemotron_h:FAMILY",
    "NemotronHPuzzleForCausalLM": "hybridrt.models.nemotron_puzzle:FAMILY",
    "NemotronH_Nano_Omni_Reasoning_V3": "hybridrt.models.nemotron_omni:NANO",
    "NemotronH_Nano_VL_V2": "hybridrt.models.nemotron_omni:NANO_VL",
    "NemotronH_Omni_Reasoning_V3": "hybridrt.models.nemotron_omni:FAMILY",
    "OlmoHybridForCausalLM": "hybridrt.models.olmo_hybrid:FAMILY",
    "Qwen3_5ForCausalLM": "hybridrt.models.qwen3_5:DENSE",
    "Qwen3_5ForConditionalGeneration": "hybridrt.models.qwen3_5:SEEING",
    "Qwen3_5MoeForCausalLM": "hybridrt.models.qwen3_5:MOE",
    "Qwen3_5MoeForConditionalGeneration": "hybridrt.models.qwen3_5:SEEING_MOE",
    "Qwen3NextForCausalLM": "hybridrt.models.qwen3_next:FAMILY",
    "SwaSsmForCausalLM": "hybridrt.models.swa_ssm:FAMILY",
    "Zamba2ForCausalLM": "hybridrt.models.zamba2:FAMILY",
}
# Packages add an entry point, "architecture = module:object".
KNOWN_FAMILIES = Plugins("hybridrt.families", PLACES, "architecture", Family, UnsupportedModelError)


@cache
def family_of(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        UnsupportedModelError: there is none.
        BackendError: the package that should bring it cannot be imported, or brings something else,
            or a field whose type is no FieldType.
    """
    family: Family = KNOWN_FAMILIES.load(architecture)
    if family.architecture != architecture:
        raise BackendError(f"the entry point {architecture!r} gives {family!r}; it must name a Family of that name")
    if wrong := [name for name, kind in family.fields.items() if not isinstance(kind, FieldType)]:
        raise BackendError(
            f"the family of {architecture} gives {shown(family.fields[wrong[0]])} as the type of {wrong[0]}; it must "
            "be a FieldType, such as integer(1, 64) of hybridrt.base.config_json"
        )
    return family
