"""How tokens are drawn, as users import it."""

from hybridrt.base.sampling_params import SamplingParams as SamplingParams
