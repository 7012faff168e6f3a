"""Falcon-Mamba: a stack of Mamba-1 blocks, as Mamba, whose dt, B and C are RMS-normed without weights (TII 2024,
arXiv:2410.05355)."""

from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.models.mamba import PureMamba
from hybridrt.recurrent.mamba1 import Mamba1Mixer


class FalconMambaForCausalLM(PureMamba):
    """Falcon-Mamba (TII 2024)."""

    def mixer(self, layer_id: int, name: str) -> Mamba1Mixer:
        hf, config = self.config.hf, self.config
        return Mamba1Mixer(
            name, config.linear_of(Mamba1Config), layer_id, config.hidden_size, conv_bias=hf.use_conv_bias,
            proj_bias=hf.use_bias, norm_eps=hf.mixer_rms_eps, learned_norms=False, build=self.build,
        )  # fmt: skip
