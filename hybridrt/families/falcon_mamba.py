"""Falcon-Mamba: Mamba-1 blocks, whose time steps and keys are normed."""

from hybridrt.config_fields import EPSILON
from hybridrt.families.base import Family
from hybridrt.families.mamba import FIELDS, describe

FAMILY = Family(
    model="hybridrt.models.falcon_mamba:FalconMambaForCausalLM",
    config_class="FalconMambaConfig",
    fields={**FIELDS, "mixer_rms_eps": EPSILON},
    describe=describe,
)
