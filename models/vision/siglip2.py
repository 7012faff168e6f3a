"""The tower of LFM2-VL: SigLIP2 NaFlex, and a projector of four neighbours.

    patches ─ projection ─ + position ─ blocks ─ norm ─ four neighbours as one ─ (norm) ─ MLP

Patches come row by row, and with their numbers by row, column, channel (Tschannen et al. 2025,
arXiv:2502.14786).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.base.config_fields import EPSILON, LAYERS, SIZE, FieldTypes
from hybridrt.base.config_json import FLAG, FieldType, check_fields, integer, one_of
from hybridrt.base.errors import ConfigError
from hybridrt.base.vision import VisionSpec
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.config.read_vision import table_side
from hybridrt.models.vision.layers import (
    Block,
    BlockKeys,
    LayerNorm,
    Linear,
    Pictures,
    area_weights,
    in_blocks,
    resized_table,
)
from hybridrt.models.vision.tower import Tower

KEY, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
PROJECTOR_EPS = 1e-5  # of torch's layer norm
FIELDS: FieldTypes = {
    "num_hidden_layers": LAYERS,
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), SIZE),
    "patch_size": integer(1, 128),
    "num_patches": integer(1, 2**20),
    "num_channels": FieldType("3: pictures are RGB", lambda v: v == 3),
    "hidden_act": one_of("gelu_pytorch_tanh"),
    "layer_norm_eps": EPSILON,
}
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_patches": 256,
}  # fmt: skip
OUTER: FieldTypes = {
    "downsample_factor": integer(1, 16),
    "projector_hidden_size": SIZE,
    "projector_hidden_act": one_of("gelu"),
    **dict.fromkeys(("projector_bias", "projector_use_layernorm"), FLAG),
}
OUTER_DEFAULTS: dict[str, Any] = {
    "downsample_factor": 2, "projector_hidden_size": 2560, "projector_hidden_act": "gelu", "projector_bias": True,
    "projector_use_layernorm": True,
}  # fmt: skip


def read(raw: Mapping[str, Any], hidden_size: int) -> VisionSpec:
    """The tower of a config.json whose text part has `hidden_size`. ConfigError."""
    fields, outer = {**DEFAULTS, **raw["vision_config"]}, {**OUTER_DEFAULTS, **raw}
    check_fields(fields, FIELDS, "vision_config")
    check_fields(outer, OUTER)
    size, heads = fields["hidden_size"], fields["num_attention_heads"]
    if size % heads:
        raise ConfigError(f"vision_config: hidden_size is {size}; it must be a multiple of num_attention_heads {heads}")
    return VisionSpec(
        tower="siglip2",
        token=raw["image_token_id"],
        num_layers=fields["num_hidden_layers"],
        hidden_size=size,
        intermediate_size=fields["intermediate_size"],
        num_heads=heads,
        patch_size=fields["patch_size"],
        merge=outer["downsample_factor"],
        table_side=table_side("num_patches", fields["num_patches"]),
        projector_size=outer["projector_hidden_size"],
        out_size=hidden_size,
        norm_eps=fields["layer_norm_eps"],
        projector_norm=outer["projector_use_layernorm"],
        projector_bias=outer["projector_bias"],
    )


class Siglip2Tower(Tower):
    channel_last = True

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        super().__init__(spec, build)
        plain, size = self.build, spec.hidden_size
        self.patch = Linear("vision_tower.patch", spec.patch_numbers, size, build=plain)
        self.table = Linear("vision_tower.table", size, spec.table_side**2, bias=False, build=plain)
        self.blocks = nn.ModuleList(Block(f"vision_tower.{i}", spec, build=plain) for i in range(spec.num_layers))
        self.norm = LayerNorm("vision_tower.norm", size, spec.norm_eps, build=plain)
        joined = size * spec.merge**2
        self.joined_norm = (
            LayerNorm("projector.norm", joined, PROJECTOR_EPS, build=plain) if spec.projector_norm else None
        )
        self.linear_1 = Linear("projector.1", joined, spec.projector_size, bias=spec.projector_bias, build=plain)
        self.linear_2 = Linear("projector.2", spec.projector_size, spec.out_size, bias=spec.projector_bias, build=plain)

    def begin(self, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, Pictures]:
        places = {grid: self._places(grid) for grid in dict.fromkeys(grids)}
        return self.patch(patches).add_(torch.cat([places[grid] for grid in grids])), Pictures(grids)

    def finish(self, x: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        parts = zip(self.norm(x).split(Pictures(grids).lengths), grids)
        joined = torch.cat([in_blocks(part.unflatten(0, grid), self.spec.merge) for part, grid in parts])
        joined = joined.view(-1, self.linear_1.weight.shape[1])
        if self.joined_norm is not None:
            joined = self.joined_norm(joined)
        return self.linear_2(F.gelu(self.linear_1(joined)))

    def _places(self, grid: tuple[int, int]) -> torch.Tensor:
        return resized_table(self.table.weight, grid, area_weights).flatten(0, 1).to(self.build.dtype)

    def checkpoint_map(self) -> CheckpointMap:
        found = {
            **self.patch.targets(f"{KEY}.embeddings.patch_embedding"),
            **self.table.targets(f"{KEY}.embeddings.position_embedding"),
            **self.norm.targets(f"{KEY}.post_layernorm"),
            **self.linear_1.targets(f"{PROJECTOR}.linear_1"),
            **self.linear_2.targets(f"{PROJECTOR}.linear_2"),
        }
        if self.joined_norm is not None:
            found |= self.joined_norm.targets(f"{PROJECTOR}.layer_norm")
        for i, block in enumerate(cast("Iterable[Block]", self.blocks)):
            key = f"{KEY}.encoder.layers.{i}"
            keys = BlockKeys(
                f"{key}.layer_norm1", f"{key}.layer_norm2", [f"{key}.self_attn.{part}_proj" for part in "qkv"],
                f"{key}.self_attn.out_proj", f"{key}.mlp.fc1", f"{key}.mlp.fc2",
            )  # fmt: skip
            found |= block.targets(keys)
        return found
