"""Mamba-1 (Gu & Dao 2023, arXiv:2312.00752): mixer and backend."""

from typing import Any, NamedTuple, cast

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.core.records import BCNorms, ConvWeights, SSMInputs, SSMWeights
from hybridrt.kernels.dense.norm_activation import rms_norm
from hybridrt.kernels.mamba.mamba1_update import mamba1_update
from hybridrt.kernels.mamba.selective_scan import selective_scan
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import Build, CheckpointTarget, parameter, sharded
from hybridrt.recurrent.backend import MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment

_NORMED = ("dt", "b", "c")


class Mamba1ConvInputs(NamedTuple):
    """x [T, I], the conv's input. The mixer then projects the conv's output, and calls the backend
    again with SSMInputs: x, dt [T, I] before bias and softplus, B and C [T, N] before their norms,
    z [T, I]."""

    x: torch.Tensor


Mamba1Inputs = Mamba1ConvInputs | SSMInputs


class Mamba1Mixer(nn.Module):
    """Mamba-1 over hidden states. Its state is in MambaPool, under `layer_id`.

    Channels are sharded. Two sums over ranks: one for dt, B and C, one for the output.

    Args:
        conv_bias, proj_bias: whether the conv, and the input and output projections, have biases.
        norm_eps: epsilon of the RMS norms of dt, B and C; None: no norms.
        learned_norms: False if these norms have no weights (Falcon-Mamba).
    """

    kind = "mamba1"

    def __init__(
        self,
        name: str,
        config: Mamba1Config,
        layer_id: int,
        hidden_size: int,
        *,
        conv_bias: bool = True,
        proj_bias: bool = False,
        norm_eps: float | None = None,
        learned_norms: bool = True,
        build: Build,
    ) -> None:
        super().__init__()
        self.name, self.config, self.layer_id, self.tp = name, config, layer_id, build.tp
        self.shape = state_shape(config, build.tp.size)
        inner, device = config.intermediate_size, build.device
        self.widths = (config.dt_rank, config.state_size, config.state_size)
        halves = [Segment(part, inner, bias=proj_bias) for part in ("x", "z")]
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden_size, halves, build=build)
        self.x_proj = RowLinear(f"{name}.x_proj", [Segment("x", inner)], sum(self.widths), build=build)
        self.dt_proj = ColumnLinear(f"{name}.dt_proj", config.dt_rank, [Segment("dt", inner)], build=build)
        self.out_proj = RowLinear(f"{name}.out_proj", [Segment("x", inner, bias=proj_bias)], hidden_size, build=build)
        local, states = self.shape.temporal
        self.width = local
        self.conv_weight = parameter(local, config.conv_kernel, dtype=build.dtype, device=device)
        self.conv_bias = parameter(local, dtype=build.dtype, device=device, dummy="zeros") if conv_bias else None
        self.A = parameter(local, states, dtype=torch.float32, device=device, dummy="decay")
        self.D = parameter(local, dtype=torch.float32, device=device, dummy="ones")
        self.dt_bias = parameter(local, dtype=torch.float32, device=device, dummy="dt_bias")
        norms = nn.ModuleList()
        if norm_eps is not None:
            norms.extend(
                RMSNorm(f"{name}.{part}_norm", width, norm_eps, device=device, learned=learned_norms)
                for part, width in zip(_NORMED, self.widths)
            )
        self.norms = cast(list[RMSNorm], norms)

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        projected, residual = self.in_proj.normed(norm, x, residual)
        return self.out_proj.onto(residual, self._mix(projected, batch))

    def summand(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """This rank's summand of the output: [T, hidden] to [T, hidden]."""
        return self.out_proj(self._mix(self.in_proj(hidden_states), batch), reduce=False)

    def _mix(self, projected: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        backend = batch.attn_backend
        x, z = projected.chunk(2, dim=-1)
        x = backend.run(self, batch, Mamba1ConvInputs(x))
        # A sum over ranks.
        dt, B, C = self.x_proj(x).split(self.widths, dim=-1)
        if self.norms:  # the scan norms B and C
            dt, _ = self.dt_proj.method.apply_normed(self.norms[0], dt, None, None)
        else:
            dt = self.dt_proj(dt)
        return backend.run(self, batch, SSMInputs(x, dt, B, C, z))

    @property
    def conv_weights(self) -> ConvWeights:
        return ConvWeights(self.conv_weight, self.conv_bias)

    @property
    def weights(self) -> SSMWeights:
        return SSMWeights(self.A, self.D, self.dt_bias)

    @property
    def bc_norms(self) -> BCNorms | None:
        if not self.norms:
            return None
        _, b, c = self.norms
        return BCNorms(b.weight, c.weight, b.eps)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        found = {
            **self.in_proj.targets(f"{key}.in_proj", ["x", "z"]),
            **self.x_proj.targets(f"{key}.x_proj", "x"),
            **self.dt_proj.targets(f"{key}.dt_proj", ["dt"]),
            **self.out_proj.targets(f"{key}.out_proj", "x"),
            f"{key}.dt_proj.bias": sharded(self.tp, f"{self.name}.dt_bias", self.dt_bias.data),
            f"{key}.conv1d.weight": sharded(
                self.tp, f"{self.name}.conv.weight", self.conv_weight.data, lambda t: t.squeeze(1)
            ),
            f"{key}.A_log": sharded(self.tp, f"{self.name}.A", self.A.data, lambda t: -torch.exp(t.float())),
            f"{key}.D": sharded(self.tp, f"{self.name}.D", self.D.data),
        }
        if self.conv_bias is not None:
            found[f"{key}.conv1d.bias"] = sharded(self.tp, f"{self.name}.conv.bias", self.conv_bias.data)
        for part, norm in zip(_NORMED, self.norms):
            found |= norm.targets(f"{key}.{part}_layernorm")
        return found


class Mamba1AttnBackend(MambaAttnBackendBase[Mamba1Mixer, Mamba1Inputs]):
    """Mamba-1 layers (Gu & Dao 2023). A mixer calls `run` twice, because it projects between conv
    and scan. Strided views are fine."""

    kind, saves_at_chunks, extend_in_graphs = "mamba1", True, True

    def inputs_from(
        self, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, save_kv_cache: bool, **kwargs: Any
    ) -> Mamba1Inputs:
        return SSMInputs(**kwargs) if "dt" in kwargs else Mamba1ConvInputs(**kwargs)

    def decode(
        self, layer: Mamba1Mixer, inputs: Mamba1Inputs, segment: DecodeSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        cache = self.layer_cache(layer.layer_id)
        if isinstance(inputs, Mamba1ConvInputs):
            conv = segment.conv_rows(layer.conv_weights, cache)
            return causal_conv1d_update(segment.by_row(inputs.x), *conv).flatten(0, 1)
        tokens = SSMInputs(*(None if t is None else segment.by_row(t) for t in inputs))  # type: ignore[arg-type]
        return mamba1_update(tokens, layer.weights, segment.state(cache), layer.bc_norms).flatten(0, 1)

    def extend(
        self, layer: Mamba1Mixer, inputs: Mamba1Inputs, segment: ExtendSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        cache = self.layer_cache(layer.layer_id)
        if isinstance(inputs, Mamba1ConvInputs):
            return causal_conv1d_varlen(inputs.x, *segment.conv_chunks(layer.conv_weights, cache))
        tokens = inputs
        if norms := layer.bc_norms:
            B, C = rms_norm(tokens.B, norms.B_weight, norms.eps), rms_norm(tokens.C, norms.C_weight, norms.eps)
            tokens = tokens._replace(B=B, C=C)
        return selective_scan(tokens, layer.weights, segment.state(cache), segment.prompts)
