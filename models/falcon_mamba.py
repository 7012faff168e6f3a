"""Falcon-Mamba: Mamba-1 blocks with RMS norms without weights of dt, B and C (TII 2024).

arXiv:2410.05355.
"""

from hybridrt.base.config_fields import EPSILON
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.models.config.family import Family
from hybridrt.models.mamba import DEFAULTS, FIELDS, PureMamba, derive, describe
from hybridrt.recurrent.mamba1 import Mamba1Mixer

FAMILY = Family(
    model="hybridrt.models.falcon_mamba:FalconMambaForCausalLM",
    model_type="falcon_mamba",
    fields={**FIELDS, "mixer_rms_eps": EPSILON},
    defaults={**DEFAULTS, "mixer_rms_eps": 1e-06},
    derive=derive,
    describe=describe,
)


class FalconMambaForCausalLM(PureMamba):
    def mixer(self, layer_id: int, name: str) -> Mamba1Mixer:
        hf, config = self.config.hf, self.config
        return Mamba1Mixer(
            name, config.linear_of(Mamba1Config), layer_id, config.hidden_size, conv_bias=hf.use_conv_bias,
            proj_bias=hf.use_bias, norm_eps=hf.mixer_rms_eps, learned_norms=False, build=self.build,
        )  # fmt: skip
