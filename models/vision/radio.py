"""The tower of Nemotron Omni: C-RADIO, a ViT with a few learned tokens before the patches.

    patches ─ projection ─ + position ─ blocks ─ (norm) ─ four neighbours as one ─ norm ─ MLP

Patches come row by row, and with their numbers by channel, row, column (Ranzinger et al. 2024,
arXiv:2312.06709; NVIDIA 2026).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.base.config_fields import COUNT, EPSILON, LAYERS, SIZE, FieldTypes
from hybridrt.base.config_json import (
    FALSE,
    NULL,
    OBJECT,
    TRUE,
    FieldType,
    check_fields,
    either,
    integer,
    number,
    one_of,
)
from hybridrt.base.errors import ConfigError
from hybridrt.base.vision import CLIP_MEAN, CLIP_STD, VisionSpec
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointMap, parameter, whole
from hybridrt.models.vision.layers import (
    Block,
    BlockKeys,
    LayerNorm,
    Linear,
    Pictures,
    in_blocks,
    linear_weights,
    resized_table,
)
from hybridrt.models.vision.tower import Tower

KEY, FINAL_NORM = "vision_model.radio_model.model", "vision_final_layernorm"
PROJECTOR_EPS = 1e-5
FIELDS: FieldTypes = {
    "num_hidden_layers": LAYERS,
    **dict.fromkeys(("hidden_size", "num_attention_heads"), SIZE),
    "mlp_ratio": number(1e-2, 64),
    "patch_size": integer(1, 128),
    "max_img_size": integer(1, 2**16),
    **dict.fromkeys(("num_cls_tokens", "num_registers"), COUNT),
    "num_channels": FieldType("3: pictures are RGB", lambda v: v == 3),
    "hidden_act": one_of("gelu"),
    "layer_norm_eps": EPSILON,
    "use_swiglu_ffn": FALSE,
    "qkv_bias": TRUE,
}
DEFAULTS: dict[str, Any] = {
    "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "mlp_ratio": 4.0, "patch_size": 16,
    "max_img_size": 2048, "num_cls_tokens": 3, "num_registers": 7, "num_channels": 3, "hidden_act": "gelu",
    "layer_norm_eps": 1e-6, "use_swiglu_ffn": False, "qkv_bias": True,
}  # fmt: skip
OUTER: FieldTypes = {"downsample_ratio": number(1 / 16, 1), "projector_hidden_size": SIZE, "vision_hidden_size": SIZE}
OUTER_DEFAULTS: dict[str, Any] = {
    "downsample_ratio": 0.5, "projector_hidden_size": 4096, "vision_hidden_size": 1280,
}  # fmt: skip


# By the names of published configs: hidden_size, num_hidden_layers and num_attention_heads.
SIZES = {
    "vit_base_patch16_224": (768, 12, 12), "vit_large_patch16_224": (1024, 24, 16),
    "vit_huge_patch16_224": (1280, 32, 16),
}  # fmt: skip


def _of_arguments(vision: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that published configs have as `args`, of RADIO's training. ConfigError."""
    check_fields(vision, {"args": either(NULL, OBJECT)}, "vision_config")
    arguments = {"model": "vit_huge_patch16_224", "cpe_max_size": None} | (vision.get("args") or {})
    known = {"model": one_of(*SIZES), "cpe_max_size": either(NULL, integer(1, 2**16))}
    check_fields(arguments, known, "vision_config: args")
    size, layers, heads = SIZES[arguments["model"]]
    found = {"hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": heads}
    return found | ({"max_img_size": side} if (side := arguments["cpe_max_size"]) else {})


def read(raw: Mapping[str, Any], hidden_size: int) -> VisionSpec:
    """The tower of a config.json whose text part has `hidden_size`. ConfigError."""
    fields = {**DEFAULTS, **_of_arguments(raw["vision_config"]), **raw["vision_config"]}
    outer = {**OUTER_DEFAULTS, **raw}
    check_fields(fields, FIELDS, "vision_config")
    check_fields(outer, OUTER)
    size, heads, patch_size = fields["hidden_size"], fields["num_attention_heads"], fields["patch_size"]
    if size % heads or outer["vision_hidden_size"] != size:
        raise ConfigError(
            f"vision_config: hidden_size is {size}; it must be a multiple of num_attention_heads {heads}, and "
            f"vision_hidden_size, which is {outer['vision_hidden_size']}"
        )
    if fields["max_img_size"] < patch_size:
        raise ConfigError(f"vision_config: max_img_size is {fields['max_img_size']}; a patch has {patch_size} pixels")
    predicts = raw["text_config"].get("num_nextn_predict_layers") or 0
    return VisionSpec(
        tower="radio",
        token=raw["image_token_id"],
        num_layers=fields["num_hidden_layers"],
        hidden_size=size,
        intermediate_size=int(size * fields["mlp_ratio"]),
        num_heads=heads,
        patch_size=patch_size,
        merge=round(1 / outer["downsample_ratio"]),
        table_side=fields["max_img_size"] // patch_size,
        projector_size=outer["projector_hidden_size"],
        out_size=hidden_size,
        norm_eps=fields["layer_norm_eps"],
        num_prefix=fields["num_cls_tokens"] + fields["num_registers"],
        exact_gelu=True,
        final_norm=predicts > 0,  # as in the training code
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )


def _identity_norm(spec: VisionSpec, build: Build) -> LayerNorm:
    """Weights that change nothing: a checkpoint may lack them."""
    norm = LayerNorm("vision_model.final_norm", spec.hidden_size, spec.norm_eps, build=build)
    torch.nn.init.ones_(norm.weight)
    torch.nn.init.zeros_(norm.bias)
    return norm


class RadioTower(Tower):
    def __init__(self, spec: VisionSpec, build: Build) -> None:
        super().__init__(spec, build)
        plain, size, joined = self.build, spec.hidden_size, spec.hidden_size * spec.merge**2
        self.patch = Linear("vision_model.patch", spec.patch_numbers, size, bias=False, build=plain)
        self.table = parameter(spec.table_side**2, size, dtype=plain.dtype, device=plain.device)
        self.prefix = parameter(spec.num_prefix, size, dtype=plain.dtype, device=plain.device)
        self.blocks = nn.ModuleList(Block(f"vision_model.{i}", spec, build=plain) for i in range(spec.num_layers))
        self.final_norm = _identity_norm(spec, plain) if spec.final_norm else None
        self.norm = RMSNorm("mlp1.norm", joined, PROJECTOR_EPS, device=plain.device)
        self.linear_1 = Linear("mlp1.1", joined, spec.projector_size, bias=False, build=plain)
        self.linear_2 = Linear("mlp1.2", spec.projector_size, spec.out_size, bias=False, build=plain)

    def begin(self, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, Pictures]:
        places = {grid: self._places(grid) for grid in dict.fromkeys(grids)}
        parts = self.patch(patches).split(Pictures(grids).lengths)
        sequences = [(self.prefix, part + places[grid]) for part, grid in zip(parts, grids)]
        return torch.cat([part for pair in sequences for part in pair]), Pictures(grids, num_prefix=len(self.prefix))

    def _places(self, grid: tuple[int, int]) -> torch.Tensor:
        """Resizes the table to a square of the longer side, and cuts it."""
        longest = max(grid)
        found = resized_table(self.table, grid, lambda size, side, device: linear_weights(longest, side, device)[:size])
        return found.flatten(0, 1).to(self.build.dtype)

    def finish(self, x: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        spec = self.spec
        if self.final_norm is not None:
            x = self.final_norm(x)
        parts = zip(x.split(Pictures(grids, num_prefix=spec.num_prefix).lengths), grids)
        joined = torch.cat([in_blocks(part[spec.num_prefix :].unflatten(0, grid), spec.merge) for part, grid in parts])
        normed, _ = self.norm(joined.view(-1, spec.hidden_size * spec.merge**2))
        return self.linear_2(F.relu(self.linear_1(normed)).square())

    def checkpoint_map(self) -> CheckpointMap:
        found = {
            **self.patch.targets(f"{KEY}.patch_generator.embedder"),
            f"{KEY}.patch_generator.pos_embed": whole("vision_model.table", self.table.data, lambda t: t.squeeze(0)),
            f"{KEY}.patch_generator.cls_token.token": whole("vision_model.prefix", self.prefix.data),
            **self.norm.targets("mlp1.0"),
            **self.linear_1.targets("mlp1.1"),
            **self.linear_2.targets("mlp1.3"),
        }
        if self.final_norm is not None:
            found |= self.final_norm.targets(FINAL_NORM)
        for i, block in enumerate(cast("Iterable[Block]", self.blocks)):
            ends = "norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"
            found |= block.targets(BlockKeys(*(f"{KEY}.blocks.{i}.{end}" for end in ends)))
        return found
