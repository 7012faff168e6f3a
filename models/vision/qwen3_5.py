"""The tower of Qwen3.5: a ViT with rotary embeddings by row and column, and a merger.

    patches ─ projection ─ + position ─ blocks ─ norm ─ four neighbours as one ─ MLP

Patches come in blocks of four, and with their numbers by channel, row, column (Qwen team 2025,
arXiv:2511.21631, without its DeepStack).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.base.config_fields import LAYERS, SIZE, FieldTypes
from hybridrt.base.config_json import FieldType, check_fields, integer, one_of
from hybridrt.base.errors import ConfigError
from hybridrt.base.vision import CLIP_MEAN, CLIP_STD, VisionSpec
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.config.read_vision import rope_theta, table_side
from hybridrt.models.vision.layers import (
    Block,
    BlockKeys,
    LayerNorm,
    Linear,
    Pictures,
    Rotations,
    axial_rotations,
    corner_weights,
    in_blocks,
    resized_table,
)
from hybridrt.models.vision.tower import Tower

KEY = "model.visual"
THETA = 10000.0
FIELDS: FieldTypes = {
    "depth": LAYERS,
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_heads", "out_hidden_size"), SIZE),
    "patch_size": integer(1, 128),
    "spatial_merge_size": integer(1, 16),
    "temporal_patch_size": integer(1, 16),
    "num_position_embeddings": integer(1, 2**20),
    "in_channels": FieldType("3: pictures are RGB", lambda v: v == 3),
    "hidden_act": one_of("gelu_pytorch_tanh"),
    "deepstack_visual_indexes": FieldType(
        "absent or empty: features of inner layers (DeepStack) are not supported", lambda v: not v
    ),
}
DEFAULTS: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}  # fmt: skip


def read(raw: Mapping[str, Any], hidden_size: int) -> VisionSpec:
    """The tower of a config.json whose text part has `hidden_size`. ConfigError."""
    fields = {**DEFAULTS, **raw["vision_config"]}
    check_fields(fields, FIELDS, "vision_config")
    size, heads = fields["hidden_size"], fields["num_heads"]
    if size % heads or size // heads % 4:
        raise ConfigError(
            f"vision_config: hidden_size is {size} and num_heads {heads}; a head has a multiple of 4 numbers"
        )
    if fields["out_hidden_size"] != hidden_size:
        raise ConfigError(
            f"vision_config: out_hidden_size is {fields['out_hidden_size']}; it must be {hidden_size}, the text part's "
            "hidden_size"
        )
    merge = fields["spatial_merge_size"]
    return VisionSpec(
        tower="qwen3_5",
        token=raw["image_token_id"],
        num_layers=fields["depth"],
        hidden_size=size,
        intermediate_size=fields["intermediate_size"],
        num_heads=heads,
        patch_size=fields["patch_size"],
        merge=merge,
        table_side=table_side("num_position_embeddings", fields["num_position_embeddings"]),
        projector_size=size * merge**2,
        rope_theta=rope_theta(fields, THETA),
        out_size=hidden_size,
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )


class Qwen3_5Tower(Tower):
    def __init__(self, spec: VisionSpec, build: Build) -> None:
        super().__init__(spec, build)
        plain, size = self.build, spec.hidden_size
        self.patch = Linear("visual.patch", spec.patch_numbers, size, build=plain)
        self.table = Linear("visual.table", size, spec.table_side**2, bias=False, build=plain)
        self.blocks = nn.ModuleList(Block(f"visual.{i}", spec, build=plain) for i in range(spec.num_layers))
        self.norm = LayerNorm("visual.norm", size, spec.norm_eps, build=plain)
        self.fc1 = Linear("visual.fc1", spec.projector_size, spec.projector_size, build=plain)
        self.fc2 = Linear("visual.fc2", spec.projector_size, spec.out_size, build=plain)

    def begin(self, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, Pictures]:
        places = {grid: self._placed(grid) for grid in dict.fromkeys(grids)}
        x = self.patch(patches).add_(torch.cat([places[grid][0] for grid in grids]))
        return x, Pictures(grids, Rotations.from_parts([places[grid][1] for grid in grids]))

    def _placed(self, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Position embeddings [n, size] of a grid's patches, and `axial_rotations` [n, dim]."""
        merge, device = self.spec.merge, self.build.device
        table = resized_table(self.table.weight, grid, corner_weights).to(self.build.dtype)
        rotations = axial_rotations(grid, self.spec.head_dim, self.spec.rope_theta, device)
        return in_blocks(table, merge), in_blocks(rotations, merge)

    def finish(self, x: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        merged = self.norm(x).view(-1, self.spec.projector_size)
        return self.fc2(F.gelu(self.fc1(merged)))

    def checkpoint_map(self) -> CheckpointMap:
        found = {
            # A picture is two equal frames: one product with the sum of their weights.
            **self.patch.targets(f"{KEY}.patch_embed.proj", lambda t: t.sum(2).flatten(1)),
            **self.table.targets(f"{KEY}.pos_embed"),
            **self.norm.targets(f"{KEY}.merger.norm"),
            **self.fc1.targets(f"{KEY}.merger.linear_fc1"),
            **self.fc2.targets(f"{KEY}.merger.linear_fc2"),
        }
        for i, block in enumerate(cast("Iterable[Block]", self.blocks)):
            key = f"{KEY}.blocks.{i}"
            ends = "norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"
            found |= block.targets(BlockKeys(*(f"{key}.{end}" for end in ends)))
        return found
