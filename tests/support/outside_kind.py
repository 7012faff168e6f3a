"""A kind of recurrent layer as another package brings it: a causal conv whose window is all that it keeps."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import LinearConfig
from hybridrt.kernels.core.records import ConvWeights
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kinds.base import LinearKind, StateShape, split_over
from hybridrt.layers.weights import Build, parameter
from hybridrt.recurrent.backend import MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


@dataclass(frozen=True)
class OutsideConfig(LinearConfig):
    kind = "outside"
    channels: int
    conv_kernel: int = 3
    chunk_size: int = 16


def _shape(config: OutsideConfig, tp_size: int) -> StateShape:
    channels = split_over("channels", config.channels, tp_size)
    return StateShape("outside", (("x", channels),), config.conv_kernel, (0,), 1)


OUTSIDE = LinearKind(
    title="outside conv",
    letter="O",
    config=OutsideConfig,
    shape=_shape,
    backend="tests.support.outside_kind:OutsideBackend",
    mixer="tests.support.outside_kind:OutsideMixer",
    conv_parts={"x": False},
    temporal_dims=(),
)


class OutsideInputs(NamedTuple):
    """x [T, channels]."""

    x: Tensor


class OutsideBackend(MambaAttnBackendBase["OutsideMixer", OutsideInputs]):
    inputs = OutsideInputs
    kind, extend_in_graphs = "outside", True

    def decode(
        self, layer: "OutsideMixer", inputs: OutsideInputs, segment: DecodeSegment, out: Tensor | None = None
    ) -> Tensor:
        conv = segment.conv_rows(layer.conv_weights, self.layer_cache(layer.layer_id))
        return causal_conv1d_update(segment.by_row(inputs.x), *conv).flatten(0, 1)

    def extend(
        self, layer: "OutsideMixer", inputs: OutsideInputs, segment: ExtendSegment, out: Tensor | None = None
    ) -> Tensor:
        conv = segment.conv_chunks(layer.conv_weights, self.layer_cache(layer.layer_id))
        return causal_conv1d_varlen(inputs.x, *conv)


class OutsideMixer(nn.Module):
    kind = "outside"

    def __init__(self, name: str, config: OutsideConfig, layer_id: int, hidden_size: int, *, build: Build) -> None:
        super().__init__()
        self.name, self.config, self.layer_id, self.width = name, config, layer_id, config.channels
        self.conv_weight = parameter(config.channels, config.conv_kernel, dtype=build.dtype, device=build.device)

    @property
    def conv_weights(self) -> ConvWeights:
        return ConvWeights(self.conv_weight)

    def summand(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        backend = batch.attn_backend.route(self)
        conved: torch.Tensor = backend.forward(None, None, None, self, batch, x=x)
        return conved
