"""The tower of LFM3-VL: gated convolutions over the patches, and a few layers of attention.

    patches ─ projection ─ norm ─ layers ─ norm ─ four neighbours as one ─ MLP

    layer:  x ─ norm ─ convolution or attention ─ + ─ norm ─ MLP ─ +

Patches come as those of Qwen3.5 (Liquid AI 2026).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.base.config_fields import EPSILON, LAYERS, SIZE, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, FieldType, check_fields, either, integer, list_of, one_of
from hybridrt.base.errors import ConfigError
from hybridrt.base.vision import CLIP_MEAN, CLIP_STD, VisionSpec
from hybridrt.kernels.attention.paged_attention import qk_norm_rotary
from hybridrt.kernels.core.records import Rope
from hybridrt.kernels.dense.norm_activation import silu_and_mul
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointMap, parameter, whole
from hybridrt.models.config.read_vision import rope_theta
from hybridrt.models.vision.layers import (
    QKV,
    AnyBlock,
    JoinedLinear,
    LayerNorm,
    Linear,
    Pictures,
    Rotations,
    axial_rotations,
    in_blocks,
    out_of_blocks,
)
from hybridrt.models.vision.tower import Tower

KEY, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
THETA, PROJECTOR_EPS = 1e6, 1e-6
CONV, FULL = "conv", "full_attention"
FIELDS: FieldTypes = {
    "num_hidden_layers": LAYERS,
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), SIZE),
    "in_channels": FieldType("3: pictures are RGB", lambda v: v == 3),
    "patch_size": integer(1, 128),
    **dict.fromkeys(("spatial_merge_size", "temporal_patch_size"), integer(1, 16)),
    "layer_types": either(NULL, list_of(one_of(CONV, FULL))),
    "conv_kernel_size": FieldType("an odd number from 1 to 15", lambda v: type(v) is int and v in range(1, 16, 2)),
    "norm_eps": EPSILON,
}
DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2560, "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_hidden_layers": 14, "num_attention_heads": 16, "num_key_value_heads": 8,
    "layer_types": None, "conv_kernel_size": 3, "norm_eps": 1e-5,
}  # fmt: skip
OUTER: FieldTypes = {"projector_hidden_size": SIZE, "projector_hidden_act": one_of("gelu"), "projector_bias": FLAG}
OUTER_DEFAULTS: dict[str, Any] = {
    "projector_hidden_size": 4096, "projector_hidden_act": "gelu", "projector_bias": True,
}  # fmt: skip


def read(raw: Mapping[str, Any], hidden_size: int) -> VisionSpec:
    """The tower of a config.json whose text part has `hidden_size`. ConfigError."""
    fields, outer = {**DEFAULTS, **raw["vision_config"]}, {**OUTER_DEFAULTS, **raw}
    check_fields(fields, FIELDS, "vision_config")
    check_fields(outer, OUTER)
    size, heads, kv_heads = (fields[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if size % heads or size // heads % 4 or heads % kv_heads:
        raise ConfigError(
            f"vision_config: hidden_size is {size}, num_attention_heads {heads} and num_key_value_heads {kv_heads}; a "
            "head has a multiple of 4 numbers, and each KV head serves equally many heads"
        )
    count = fields["num_hidden_layers"]
    kinds = fields["layer_types"] or [CONV if i < 2 or i % 2 else FULL for i in range(count)]
    if len(kinds) != count:
        raise ConfigError(f"vision_config: layer_types has {len(kinds)} entries; there are {count} layers")
    return VisionSpec(
        tower="lfm3",
        token=raw["image_token_id"],
        num_layers=count,
        hidden_size=size,
        intermediate_size=fields["intermediate_size"],
        num_heads=heads,
        patch_size=fields["patch_size"],
        merge=fields["spatial_merge_size"],
        table_side=0,
        projector_size=outer["projector_hidden_size"],
        out_size=hidden_size,
        norm_eps=fields["norm_eps"],
        projector_bias=outer["projector_bias"],
        rope_theta=rope_theta(fields, THETA),
        num_kv_heads=kv_heads,
        convolutions=frozenset(i for i, kind in enumerate(kinds) if kind == CONV),
        kernel_size=fields["conv_kernel_size"],
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )


class GatedConv(nn.Module):
    """out(c * convolution(b * x)), with one kernel for each channel; b, c and x are projections."""

    def __init__(self, name: str, spec: VisionSpec, *, build: Build) -> None:
        super().__init__()
        size, side = spec.hidden_size, spec.kernel_size
        self.name = name
        self.into = Linear(f"{name}.in", size, 3 * size, bias=False, build=build)
        self.kernels = parameter(size, 1, side, side, dtype=build.dtype, device=build.device)
        self.out = Linear(f"{name}.out", size, size, bias=False, build=build)

    def forward(self, x: torch.Tensor, pictures: Pictures) -> torch.Tensor:
        """[T, size], row by row."""
        before, after, values = self.into(x).chunk(3, -1)
        gated, found, start = before * values, [], 0
        for (rows, columns), group in groupby(pictures.grids):
            count = len(list(group))
            part = gated[start : start + count * rows * columns].view(count, rows, columns, -1).permute(0, 3, 1, 2)
            mixed = F.conv2d(part, self.kernels, padding=self.kernels.shape[-1] // 2, groups=len(self.kernels))
            found.append(mixed.permute(0, 2, 3, 1).flatten(0, 2))
            start += count * rows * columns
        return self.out(after * torch.cat(found))

    def targets(self, key: str) -> CheckpointMap:
        kernels = whole(f"{self.name}.kernels", self.kernels.data)
        return {
            **self.into.targets(f"{key}.in_proj"),
            f"{key}.spatial_conv.weight": kernels,
            **self.out.targets(f"{key}.out_proj"),
        }


class GroupedAttention(nn.Module):
    """Attention within each picture, with normed queries and keys, and heads that share keys."""

    def __init__(self, name: str, spec: VisionSpec, *, build: Build) -> None:
        super().__init__()
        size, kv_size = spec.hidden_size, spec.num_kv_heads * spec.head_dim
        self.head_dim, self.eps = spec.head_dim, spec.norm_eps
        self.qkv = JoinedLinear(f"{name}.qkv", size, [size, kv_size, kv_size], bias=False, build=build)
        self.q_norm, self.k_norm = (
            RMSNorm(f"{name}.{part}_norm", spec.head_dim, spec.norm_eps, device=build.device) for part in "qk"
        )
        self.out = Linear(f"{name}.out", size, size, bias=False, build=build)

    def inputs(self, x: torch.Tensor, rotations: Rotations | None) -> QKV:
        parts = self.qkv(x).split(self.qkv.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        assert rotations is not None, "this tower turns queries and keys"
        rope = Rope(rotations.cos_sin, self.q_norm.weight, self.k_norm.weight, self.eps)
        return QKV(*qk_norm_rotary(q, k, rotations.order, rope), v)

    def targets(self, key: str) -> CheckpointMap:
        found = self.qkv.targets_apart([f"{key}.{part}_proj" for part in "qkv"])
        found |= {**self.q_norm.targets(f"{key}.q_norm"), **self.k_norm.targets(f"{key}.k_norm")}
        return found | self.out.targets(f"{key}.out_proj")


class Lfm3Layer(AnyBlock):
    """With a gated MLP."""

    def __init__(self, name: str, spec: VisionSpec, convolves: bool, *, build: Build) -> None:
        super().__init__()
        size, eps, inner = spec.hidden_size, spec.norm_eps, spec.intermediate_size
        kind: type[GatedConv] | type[GroupedAttention] = GatedConv if convolves else GroupedAttention
        self.mixer, self.attends = kind(f"{name}.mixer", spec, build=build), not convolves
        self.mixer_norm = RMSNorm(f"{name}.mixer_norm", size, eps, device=build.device)
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm", size, eps, device=build.device)
        self.up = JoinedLinear(f"{name}.up", size, [inner, inner], bias=False, build=build)
        self.down = Linear(f"{name}.down", inner, size, bias=False, build=build)

    def inputs(self, x: torch.Tensor, rotations: Rotations | None) -> QKV:
        assert isinstance(self.mixer, GroupedAttention), "convolutions have no queries"
        return self.mixer.inputs(self.mixer_norm(x)[0], rotations)

    def joined(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return x + self.mixer.out(attended.flatten(1))

    def mixed(self, x: torch.Tensor, pictures: Pictures) -> torch.Tensor:
        if isinstance(self.mixer, GatedConv):
            return x + self.mixer(self.mixer_norm(x)[0], pictures)
        return super().mixed(x, pictures)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(silu_and_mul(self.up(self.mlp_norm(x)[0])))

    def targets(self, key: str) -> CheckpointMap:
        mixer = f"{key}.conv" if isinstance(self.mixer, GatedConv) else f"{key}.self_attn"
        return {
            **self.mixer.targets(mixer),
            **self.mixer_norm.targets(f"{key}.operator_norm"),
            **self.mlp_norm.targets(f"{key}.ffn_norm"),
            **self.up.targets_apart([f"{key}.feed_forward.w1", f"{key}.feed_forward.w3"]),
            **self.down.targets(f"{key}.feed_forward.w2"),
        }


class Lfm3Tower(Tower):
    """Within it, patches are in rows, for the convolutions."""

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        super().__init__(spec, build)
        plain, size, joined = self.build, spec.hidden_size, spec.hidden_size * spec.merge**2
        self.patch = Linear("vision_tower.patch", spec.patch_numbers, size, bias=False, build=plain)
        self.first_norm = RMSNorm("vision_tower.first_norm", size, spec.norm_eps, device=plain.device)
        self.blocks = nn.ModuleList(
            Lfm3Layer(f"vision_tower.{i}", spec, i in spec.convolutions, build=plain) for i in range(spec.num_layers)
        )
        self.norm = LayerNorm("projector.norm", size, PROJECTOR_EPS, build=plain)
        self.linear_1 = Linear("projector.1", joined, spec.projector_size, bias=spec.projector_bias, build=plain)
        self.linear_2 = Linear("projector.2", spec.projector_size, spec.out_size, bias=spec.projector_bias, build=plain)

    def begin(self, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, Pictures]:
        spec, device = self.spec, patches.device
        blocks = zip(patches.split(Pictures(grids).lengths), grids)
        in_rows = torch.cat([out_of_blocks(part, grid, spec.merge) for part, grid in blocks])
        rotations = {
            grid: axial_rotations(grid, spec.head_dim, spec.rope_theta, device).flatten(0, 1)
            for grid in dict.fromkeys(grids)
        }
        x = self.first_norm(self.patch(in_rows))[0]
        return x, Pictures(grids, Rotations.from_parts([rotations[grid] for grid in grids]))

    def finish(self, x: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        parts = zip(self.norm(x).split(Pictures(grids).lengths), grids)
        joined = torch.cat([in_blocks(part.unflatten(0, grid), self.spec.merge) for part, grid in parts])
        return self.linear_2(F.gelu(self.linear_1(joined.view(-1, self.linear_1.weight.shape[1]))))

    def checkpoint_map(self) -> CheckpointMap:
        found = {
            # A picture is two equal frames: one product with the sum of their weights.
            **self.patch.targets(f"{KEY}.patch_embed", self._patch_weights),
            **self.first_norm.targets(f"{KEY}.embedding_norm"),
            **self.norm.targets(f"{PROJECTOR}.layer_norm"),
            **self.linear_1.targets(f"{PROJECTOR}.linear_1"),
            **self.linear_2.targets(f"{PROJECTOR}.linear_2"),
        }
        for i, block in enumerate(cast("Iterable[Lfm3Layer]", self.blocks)):
            found |= block.targets(f"{KEY}.layers.{i}")
        return found

    def _patch_weights(self, t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (3, -1, self.spec.patch_size**2)).sum(2).flatten(1)
