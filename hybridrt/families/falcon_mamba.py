"""Falcon-Mamba: Mamba-1 blocks, whose time steps and keys are normed."""

from hybridrt.base.config_fields import EPSILON
from hybridrt.families.base import Family
from hybridrt.families.mamba import DEFAULTS, FIELDS, derive, describe

FAMILY = Family(
    model="hybridrt.models.falcon_mamba:FalconMambaForCausalLM",
    model_type="falcon_mamba",
    fields={**FIELDS, "mixer_rms_eps": EPSILON},
    defaults={**DEFAULTS, "mixer_rms_eps": 1e-06},
    derive=derive,
    describe=describe,
)
