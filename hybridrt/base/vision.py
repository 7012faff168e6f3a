"""VisionSpec, the vision tower of a model that sees."""

from dataclasses import dataclass
from typing import Literal

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
NO_PATCHES = 0, "uint8"


@dataclass(frozen=True)
class VisionSpec:
    """A tower from patches of a picture to embeddings of the text model.

    Attributes:
        tower: its sort. "qwen3_5" takes patches block by block of `merge` x `merge`, rows first in
            and between blocks, with numbers by channel, y, x (once: a picture does not move).
            "lfm3" does, too. "siglip2" takes them row by row, with numbers by y, x, channel, "radio"
            row by row, by channel, y, x.
        token: the placeholder of an image's tokens.
        num_layers, hidden_size, intermediate_size, num_heads, norm_eps: its transformer.
        patch_size: pixels of a patch's side.
        merge: patches of the side of a block, which becomes one token.
        table_side: rows and columns of its table of positions; 0: it has none.
        projector_size: width between the two projections to the text model, which has `out_size`.
        projector_norm, projector_bias: whether the projector has them.
        rope_theta: base of rotary embeddings by row and column; 0: it has none.
        num_kv_heads: heads of keys and values; 0: as many as of queries.
        convolutions: the layers that convolve a picture instead of attending to it, by kernels with
            a side of `kernel_size` patches.
        num_prefix: learned tokens before each picture, which are dropped after the transformer.
        exact_gelu: its MLP has the GELU itself, not its tanh approximation.
        final_norm: a layer norm follows the transformer.
        mean, std: of the channels red, green and blue, in parts of 255, as in transformers' class.
    """

    tower: Literal["qwen3_5", "siglip2", "lfm3", "radio"]
    token: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    merge: int
    table_side: int
    projector_size: int
    out_size: int
    norm_eps: float = 1e-6
    projector_norm: bool = True
    projector_bias: bool = True
    rope_theta: float = 0.0
    num_kv_heads: int = 0
    convolutions: frozenset[int] = frozenset()
    kernel_size: int = 0
    num_prefix: int = 0
    exact_gelu: bool = False
    final_norm: bool = False
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dtype(self) -> Literal["uint8", "float32"]:
        """dtype of patches, which have numbers from 0 to 255. Nemotron's processor keeps what a bicubic
        resize has beyond them."""
        return "float32" if self.tower == "radio" else "uint8"

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch, three for each pixel."""
        return 3 * self.patch_size**2


def patch_form(spec: VisionSpec | None) -> tuple[int, str]:
    """Numbers of a patch and their dtype; none without a tower."""
    return NO_PATCHES if spec is None else (spec.patch_numbers, spec.patch_dtype)
