"""A family as another package brings it: Jamba's layers under a name of its own, in one record and one class."""

from dataclasses import replace

from hybridrt.models.jamba import FAMILY as JAMBA
from hybridrt.models.jamba import JambaForCausalLM

ARCHITECTURE = "OutsideForCausalLM"


class OutsideForCausalLM(JambaForCausalLM):
    """Nothing of its own."""


FAMILY = replace(JAMBA, model=f"{__name__}:{ARCHITECTURE}")
