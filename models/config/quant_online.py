"""Which matrices of a plain checkpoint are quantised by us: while it loads, or into another checkpoint."""

from dataclasses import dataclass, replace

import torch

from hybridrt.base.quantization import QuantRules, Scheme
from hybridrt.models.config.quant_names import by_expression

SCHEMES = {
    "fp8": Scheme("fp8", "compressed", (128, 128), "group"),
    "int4": Scheme("int4", "compressed-packed", (1, 128), scale_dtype=torch.bfloat16),
    "nvfp4": Scheme("fp4", "compressed-nvfp4", (1, 16), scale_dtype=torch.float8_e4m3fn),
}
GROUPS_INT4 = (128, 64, 32)
SMALLEST = 128  # outputs or inputs. Smaller matrices are gates and decays, which save little and cost much
# Mamba-1's projections of the time step, for the same reason.
SENSITIVE = (".x_proj.", ".dt_proj.")


@dataclass(frozen=True)
class OnlineRules(QuantRules):
    """Attributes: name: of SCHEMES. ignore: names of modules, or "re:" and an expression."""

    name: str
    ignore: tuple[str, ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        return SCHEMES[self.name]

    def leaves_plain(self, module: str) -> bool:
        return any(each == module or by_expression(each, module) for each in self.ignore)

    def scheme_of(self, part: str, outputs: int, inputs: int) -> Scheme | None:
        """The scheme of a matrix of a linear layer or an expert, "layer.segment"; None: it is plain."""
        scheme = SCHEMES[self.name]
        if min(outputs, inputs) < SMALLEST or any(each in f"{part}." for each in SENSITIVE):
            return None
        if scheme.method == "int4":
            group = next((each for each in GROUPS_INT4 if inputs % each == 0), None)
            return None if group is None else replace(scheme, block=(1, group))
        return None if scheme.method == "fp4" and inputs % scheme.block[1] else scheme
