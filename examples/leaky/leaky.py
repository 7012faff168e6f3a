"""A kind of recurrent layer and a family of models, as a package outside hybridrt brings them (docs/extending.md).

The layer is a leaky sum of each channel: s = a * s + (1 - a) * x, with a = sigmoid(decay). Each channel
has a decay of its own. The model has leaky layers, and softmax attention in every second layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, FieldTypes
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.config import LinearConfig
from hybridrt.kernels.core.slots import advance_states, pad_mask
from hybridrt.kinds.base import LinearKind, StateShape, split_over
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import MLP, ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import ResidualPart, RMSNorm
from hybridrt.layers.weights import Build, CheckpointMap, parameter, sharded
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import Family, FamilyFields, attention_config, interleaved
from hybridrt.recurrent.backend import MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


# -- the kind: what the runtime must know of a layer's state ------------------------------------------------------
@dataclass(frozen=True)
class LeakyConfig(LinearConfig):
    kind = "leaky"
    channels: int
    chunk_size: int = 32


def _state(config: LeakyConfig, ranks: int) -> StateShape:
    channels = split_over("channels", config.channels, ranks)
    return StateShape("leaky", segments=(), conv_kernel=1, temporal=(channels,), groups=1)


KIND = LinearKind(
    title="leaky sum",
    letter="Y",
    config=LeakyConfig,
    shape=_state,
    backend="leaky:LeakyBackend",
    mixer="leaky:LeakyMixer",
    conv_parts={},
    temporal_dims=("channels",),
)


# -- the backend: how a step reads and writes the state -----------------------------------------------------------
class LeakyInputs(NamedTuple):
    """x [T, channels]."""

    x: Tensor


class LeakyBackend(MambaAttnBackendBase["LeakyMixer", LeakyInputs]):
    """Gives the sums after each token, [T, channels]."""

    inputs = LeakyInputs
    kind, extend_in_graphs = "leaky", False  # `extend` reads slots on the host, so no graph may hold it

    def decode(
        self, layer: "LeakyMixer", inputs: LeakyInputs, segment: DecodeSegment, out: Tensor | None = None
    ) -> Tensor:
        """One token of each row, or the tokens that a verify step checks: a chain or a tree."""
        x, keep = segment.by_row(inputs.x), layer.keep()
        state, sums = segment.state(self.layer_cache(layer.layer_id)), torch.empty_like(x)

        def step(t: int, before: Tensor) -> Tensor:
            after = keep * before + (1 - keep) * x[:, t].float()
            sums[:, t] = after
            return after

        advance_states(state, x.shape[1], step)
        return sums.masked_fill_(pad_mask(state.read_state_slots, 3), 0.0).flatten(0, 1)

    def extend(
        self, layer: "LeakyMixer", inputs: LeakyInputs, segment: ExtendSegment, out: Tensor | None = None
    ) -> Tensor:
        """Chunks of prompts: row b starts from one slot and leaves its state in another one."""
        x, keep = inputs.x, layer.keep()
        state = segment.state(self.layer_cache(layer.layer_id))
        states, read, write = state.states, state.read_state_slots, state.write_state_slots
        starts, sums = segment.prompts.query_start_loc.tolist(), torch.zeros_like(x)
        for row, (source, target) in enumerate(zip(read.tolist(), write.tolist(), strict=True)):
            first, end = starts[row], starts[row + 1]
            if first == end or source < 0:  # nothing to compute, or padding
                continue
            current = states[source].float()
            for t in range(first, end):
                current = keep * current + (1 - keep) * x[t].float()
                sums[t] = current
            states[target] = current.to(states.dtype)
        return sums


# -- the mixer: weights and projections ---------------------------------------------------------------------------
class LeakyMixer(nn.Module):
    """Projects to channels, sums, projects back. The state is in the backend's pool, under `layer_id`."""

    kind = "leaky"

    def __init__(self, name: str, config: LeakyConfig, layer_id: int, hidden_size: int, *, build: Build) -> None:
        super().__init__()
        self.name, self.config, self.layer_id, self.tp = name, config, layer_id, build.tp
        self.width = split_over("channels", config.channels, build.tp.size)
        channels = [Segment("x", config.channels)]
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden_size, channels, build=build)
        self.out_proj = RowLinear(f"{name}.out_proj", channels, hidden_size, build=build)
        self.decay = parameter(self.width, dtype=torch.float32, device=build.device)

    def keep(self) -> Tensor:
        return self.decay.sigmoid()

    def forward(
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """What the layer adds to x + residual, and that sum."""
        h, residual = norm(x, residual)
        summed = batch.attn_backend.run(self, batch, LeakyInputs(self.in_proj(h)))
        return self.out_proj(summed), residual

    def targets(self, key: str) -> CheckpointMap:
        """Where the checkpoint's tensors under `key` go."""
        return {
            **self.in_proj.targets(f"{key}.in_proj", ["x"]),
            **self.out_proj.targets(f"{key}.out_proj", "x"),
            f"{key}.decay": sharded(self.tp, f"{self.name}.decay", self.decay.data),
        }


# -- the family: config.json, and what each layer is made of ------------------------------------------------------
FIELDS: FieldTypes = {**COMMON, **ATTENTION, "rms_norm_eps": EPSILON}


def _describe(hf: Any) -> FamilyFields:
    full = [bool(i % 2) for i in range(hf.num_hidden_layers)]
    return interleaved(hf, LeakyConfig(hf.hidden_size), attention_config(hf, rotary=False), "mlp", full)


FAMILY = Family(
    model="leaky:LeakyForCausalLM",
    model_type="leaky",
    fields=FIELDS,
    defaults={"head_dim": None, "rms_norm_eps": 1e-5},
    describe=_describe,
)


class LeakyForCausalLM(CausalLM):
    """norm, leaky sum or attention, norm, MLP."""

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, build = self.config, self.build
        hidden, mixer = config.hidden_size, config.linear_of(LeakyConfig)
        part: Any
        if config.layer(layer_id).attention:
            part = Attention(f"{name}.mixer", config.attention_of(layer_id), layer_id, hidden, build=build)
        else:
            part = LeakyMixer(f"{name}.mixer", mixer, layer_id, hidden, build=build)
        mlp = MLP(f"{name}.mlp", hidden, config.hf.intermediate_size, build=build)
        return [ResidualPart("norm1", "mixer", part), ResidualPart("norm2", "mlp", mlp)]
