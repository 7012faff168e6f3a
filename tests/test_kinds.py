"""Kinds of recurrent layer: what their records say, kinds of other packages, and models that mix kinds."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridrt.base import plugins
from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import BackendError, ConfigError, UnsupportedLayerError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionConfig, LayerSpec, LinearConfig, ModelConfig
from hybridrt.base.plugins import load_object
from hybridrt.cli.inspect import _symbol
from hybridrt.collectives.groups import TPGroup
from hybridrt.kinds.base import LinearKind
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.kda import KDAConfig
from hybridrt.kinds.lightning import LightningConfig
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.kinds.prefix_sum import PrefixSumConfig
from hybridrt.kinds.registry import check_replay, kind_names, linear_kind, state_dtype, state_shape
from hybridrt.kinds.short_conv import ShortConvConfig
from hybridrt.kinds.simple_gla import SimpleGLAConfig
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan, UnitCosts
from hybridrt.mem_cache.pools.state_slices import MambaSpec, derive_mamba_conv_split
from hybridrt.recurrent.backend import MambaAttnBackendBase
from hybridrt.recurrent.backends import create_backend
from hybridrt.recurrent.gdn import GDNKeys
from hybridrt.recurrent.lightning import decay_rates
from hybridrt.recurrent.mamba2 import mamba2_segments
from hybridrt.runtime.load.runtime import build_pools
from hybridrt.runtime.load.target import RunTarget
from tests.support.by_hand import ByHand, Row, assert_close
from tests.support.levels import sweep
from tests.support.outside_kind import OUTSIDE, OutsideConfig
from tests.support.session import spoil

HIDDEN, ROWS, CPU = 12, 4, torch.device("cpu")
CONFIGS: dict[str, LinearConfig] = {
    "mamba1": Mamba1Config(16, 3, 4, 2, chunk_size=8),
    "mamba2": Mamba2Config(4, 3, 5, 2, 4, 16, (0.0, 1.0)),
    "gdn": GDNConfig(2, 4, 6, 5, 3, chunk_size=8),
    "kda": KDAConfig(4, 6, 4, chunk_size=8, gate_rank=3, lower_bound=-5.0),
    "prefix_sum": PrefixSumConfig(HIDDEN),
    "short_conv": ShortConvConfig(16, 3, chunk_size=8),
    "lightning": LightningConfig(4, 3, chunk_size=8),
    "simple_gla": SimpleGLAConfig(4, 6, chunk_size=8),
    "outside": OutsideConfig(HIDDEN),
}


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package names its kind in an entry point."""
    point = SimpleNamespace(name="outside", value="tests.support.outside_kind:OUTSIDE")
    wrong = SimpleNamespace(name="wrong", value="tests.support.outside_kind:OUTSIDE")
    found = {"hybridrt.kinds": [point, wrong]}
    monkeypatch.setattr(plugins, "entry_points", lambda group: found[group])
    linear_kind.cache_clear()
    yield
    linear_kind.cache_clear()


class Layer(nn.Module):
    """A mixer with what it needs around it, added to its input."""

    def __init__(self, layer_id: int, kind: str, build: Build) -> None:
        super().__init__()
        config: Any = CONFIGS[kind]
        cls = load_object(linear_kind(kind).mixer)
        self.kind, self.norm = kind, RMSNorm(f"norm{layer_id}", HIDDEN, 1e-5, device=build.device)
        if kind == "mamba2":
            self.into = nn.Linear(HIDDEN, sum(s.size for s in mamba2_segments(config, build.tp)), bias=False)
            self.mixer = cls("m", config, layer_id, conv_bias=True, gated_norm=None, build=build)
            self.out = nn.Linear(self.mixer.width, HIDDEN, bias=False)
        elif kind == "gdn":
            self.mixer = cls("m", config, layer_id, HIDDEN, 1e-5, keys=GDNKeys({}), build=build)  # no checkpoint
        elif kind == "kda":
            self.mixer = cls("m", config, layer_id, HIDDEN, 1e-5, build=build)
        elif kind == "simple_gla":
            angles = torch.outer(torch.arange(128.0), torch.tensor([1.0, 0.1]))
            options: dict[str, Any] = {"rates": decay_rates(4), "cos_sin": torch.cat((angles.cos(), angles.sin()), 1)}
            self.mixer = cls("m", config, layer_id, HIDDEN, eps=1e-5, groups=2, build=build, **options)
        else:
            self.mixer = cls("m", config, layer_id, HIDDEN, build=build)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        if self.kind == "mamba2":
            return x + self.out(self.mixer(self.into(self.norm(x)[0]), batch))
        if self.kind in ("gdn", "kda", "short_conv", "simple_gla"):
            return sum(t for t in self.mixer(self.norm, x.clone(), None, batch) if t is not None)  # type: ignore[return-value]
        of_one_rank = self.mixer.output if self.kind == "lightning" else self.mixer.summand
        return x + of_one_rank(self.norm(x)[0], batch)


class Stack(ByHand):
    """Layers over a table of inputs, one a token; `inputs` and `outputs` hold what each layer saw and gave."""

    def __init__(
        self,
        layers: list[Layer | None],
        table: Tensor,
        mode: str = "classic",
        tokens: int = 1,
        tp: TPGroup | None = None,
    ) -> None:
        self.layers, self.table = layers, table
        kinds = [layer.kind if layer else None for layer in layers]
        linear = {kind: CONFIGS[kind] for kind in kinds if kind}
        specs = tuple(LayerSpec(False, kind, None) for kind in kinds)
        attention = AttentionConfig(0, 0, 0, None)
        config = ModelConfig("X", 9, HIDDEN, specs, attention, linear, 128, torch.float32, False, (), None)
        speculative = SpeculativeConfig(num_draft_tokens=tokens - 1) if tokens > 1 else None
        self.config = EngineConfig("x", device="cpu", page_size=4, speculative=speculative)
        self.target = RunTarget(config, CPU, torch.float32, torch.float32, mode, tp or TPGroup())
        plan = MemoryPlan(ROWS, ROWS + 1, (), 4, 128, UnitCosts(0, 0, ()), 0)
        self.pools = build_pools(self.config, self.target, plan)
        mixers = {i: layer.mixer for i, layer in enumerate(layers) if layer}
        self.backend = create_backend(
            self.config, config, layers=mixers, kv_pool=self.pools.kv, req_to_token_pool=self.pools.req_to_token,
        )  # fmt: skip
        spoil(self.pools)
        self._slots, self._pages = torch.tensor([3, 1, 4, 2]), torch.zeros(ROWS, 0, 1, dtype=torch.int64)
        self._spare_slot = ROWS + 1
        self.inputs: list[list[Tensor]] = [[] for _ in layers]
        self.outputs: list[list[Tensor]] = [[] for _ in layers]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        self.backend.prepare(batch)
        self.last_batch = batch
        x = self.table[batch.input_ids.long()]
        for i, layer in enumerate(self.layers):
            self.inputs[i].append(x)
            x = layer(x, batch) if layer else x
            self.outputs[i].append(x)
        return x


def make_layers(*kinds: str) -> list[Layer | None]:
    build = Build(TPGroup(), torch.float32, CPU)
    layers = [Layer(i, kind, build) for i, kind in enumerate(kinds)]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in (param for layer in layers for param in layer.parameters()):
            dummy = getattr(param, "dummy", "normal")
            param.normal_(0.0, 0.3, generator=generator)
            if dummy in ("ones", "decay"):
                param.abs_().add_(0.3).mul_(-1.0 if dummy == "decay" else 1.0)
    return list(layers)


def run_rows(stack: Stack, count: int) -> list[list[int]]:
    """Rows 1 and 2 with tokens from 0 and from `count`: chunks, mixed steps, decode. The row of each token that ran."""
    stack.admit(1, 2)
    stack.extend(Row(1, 0, range(7)))
    stack.extend(Row(1, 7, range(7, 21)), Row(2, 0, range(count, count + 3)))
    order = [[1] * 7, [1] * 14 + [2] * 3]
    for i in range(3, 6):
        stack.decode(
            Row(1, 18 + i, [18 + i]), extend=[Row(2, 3 * (i - 2), range(count + 3 * (i - 2), count + 3 * (i - 1)))]
        )
        order.append([1, 2, 2, 2])
    for i in range(24, count):
        stack.decode(Row(1, i, [i]), Row(2, i - 12, [count + i - 12]))
        order.append([1, 2])
    return order


MIXES = [
    (("mamba2", "gdn", "mamba2"), "classic"), (("mamba2", "gdn", "mamba2"), "replay"), (("gdn", "mamba2"), "replay"),
    (("mamba1", "prefix_sum"), "classic"), (("short_conv", "gdn"), "replay"),
    (("gdn", "outside", "mamba1", "mamba2"), "classic"), (("kda", "gdn"), "classic"),
    (("lightning", "mamba2"), "classic"), (("gdn", "lightning", "lightning"), "replay"),
    (("simple_gla", "mamba2"), "classic"),
]  # fmt: skip


@pytest.mark.parametrize(("kinds", "mode"), sweep(MIXES, 2))
def test_a_model_of_several_kinds_equals_its_layers_run_alone(kinds: tuple[str, ...], mode: str) -> None:
    """Chunks, mixed steps and decode, more of it than a ring holds, against each layer's whole prefill in a pool of its
    own, in outputs and states."""
    count = 70
    layers = make_layers(*kinds)
    stack = Stack(layers, torch.randn(2 * count, HIDDEN, generator=torch.Generator().manual_seed(1)), mode)
    order = torch.tensor([row for step in run_rows(stack, count) for row in step])
    states = {1: stack.state(1, count), 2: stack.state(2, count - 12)}
    for i, layer in enumerate(layers):
        inputs, outputs = torch.cat(stack.inputs[i]), torch.cat(stack.outputs[i])
        alone: list[Layer | None] = [None] * len(layers)
        alone[i] = layer
        for row, state in states.items():
            reference = Stack(alone, inputs[order == row])
            reference.admit(1)
            wanted = reference.extend(Row(1, 0, range(len(reference.table))))
            torch.testing.assert_close(outputs[order == row], wanted, rtol=1e-4, atol=1e-4)
            own = {name: t for name, t in state.items() if name.endswith(f"layer {i}")}
            assert_close(own, {k: v for k, v in reference.state(1, len(wanted)).items() if k in own}, 1e-4)


@pytest.mark.parametrize(
    ("kinds", "mode"),
    [
        (("mamba2", "gdn"), "replay"),
        (("lightning",), "replay"),
        (("lightning", "gdn"), "intermediate"),
        (("simple_gla", "kda"), "intermediate"),
        (("gdn", "mamba2", "mamba1"), "intermediate"),
        (("mamba1", "outside"), "intermediate"),
        (("short_conv", "gdn"), "intermediate"),
        (("short_conv", "gdn"), "replay"),
        (("kda", "mamba2"), "intermediate"),
    ],
)
def test_verify_steps_of_several_kinds_keep_what_was_accepted(kinds: tuple[str, ...], mode: str) -> None:
    layers, table = make_layers(*kinds), torch.randn(100, HIDDEN, generator=torch.Generator().manual_seed(2))
    stack = Stack(layers, table, mode, tokens=3)
    stack.admit(2)
    stack.extend(Row(2, 0, range(9)))
    known = 9
    for accepted in [1, 3, 2, 2, 1, 3] * 5:
        drafts = [known, *(known + 1 if accepted > 1 else 99, known + 2 if accepted > 2 else 98)]
        stack.verify([Row(2, known, drafts)], [accepted])
        known += accepted
    whole = Stack(layers, table)
    whole.admit(2)
    whole.extend(Row(2, 0, range(known)))
    assert_close(stack.state(2, known), whole.state(2, known), 1e-4)


def test_the_first_backend_plans_and_commits_for_all() -> None:
    stack: Any = Stack(make_layers("mamba2", "gdn"), torch.randn(9, HIDDEN), "replay")
    assert [len(b.members) for b in stack.backend.linear_attn_backends] == [2, 1] and len(stack.backend.backends) == 1
    stack.admit(1)
    stack.extend(Row(1, 0, range(4)))
    mamba2, gdn = stack.backend.linear_attn_backends
    steps = stack.last_batch.metadata
    assert steps.keys() == {mamba2, gdn} and steps[gdn] is steps[mamba2], "one plan, which each finds by itself"
    extends = mamba2.begin_step(stack.last_batch).extends
    assert (
        gdn.begin_step(stack.last_batch).extends is extends
        and extends[16].write_state_slots is extends[8].write_state_slots
    )
    assert [extends[backend.chunk_size].prompts.plan.chunk_size for backend in (mamba2, gdn)] == [16, 8]
    stack.decode(Row(1, 4, [4]))
    assert stack.mamba.ring_length[1] == 1, "once, not once a kind"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_record_agrees_with_its_layer_backend_and_config(name: str) -> None:
    kind = linear_kind(name)
    backend, mixer = load_object(kind.backend), load_object(kind.mixer)
    assert issubclass(backend, MambaAttnBackendBase)
    assert {kind.config.kind, backend.kind, mixer.kind, state_shape(CONFIGS[name]).kind} == {name}
    assert tuple(part for part, _ in state_shape(CONFIGS[name]).segments) == tuple(kind.conv_parts)
    assert len(state_shape(CONFIGS[name]).temporal) == max(1, len(kind.temporal_dims))


@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_hold_prompts_of_the_kinds_that_say_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = Stack(make_layers(name, "mamba2" if name == "gdn" else "gdn"), torch.zeros(3, HIDDEN)).backend
    assert backends.captures_prompts
    monkeypatch.setattr(load_object(linear_kind(name).backend), "extend_in_graphs", False)
    assert not backends.captures_prompts, "one kind that reads on the host is enough"


def test_a_package_brings_a_kind() -> None:
    """A conv window without a recurrent state: pool, memory, transfer and inspect take it from the record."""
    assert "outside" in kind_names() and linear_kind("outside") is OUTSIDE
    stack = Stack(make_layers("outside"), torch.zeros(3, HIDDEN))
    spec = stack.mamba.spec
    assert spec.slot_bytes() == 4 * HIDDEN * 4 and spec.row_bytes() == 8, "a window of 4 columns, and cursors"
    assert _symbol(LayerSpec(False, "outside", None)) == "O"
    with pytest.raises(ConfigError, match="outside conv"):
        check_replay(["gdn", "outside"])
    shapes = ((HIDDEN // 2, 2), (0,))
    info = derive_mamba_conv_split(MambaSpec(shapes, (torch.float32,) * 2, "outside"), 2)
    assert info.remote_conv_offsets(1, 2) == [(48, 48)] and info.local_proj_dims == (HIDDEN // 2,)


def test_kinds_that_are_unknown_or_wrong_are_refused() -> None:
    with pytest.raises(UnsupportedLayerError, match=r"'nope'.*gdn, kda, .*mamba1"):
        linear_kind("nope")
    with pytest.raises(BackendError, match=r"'wrong'.*LinearKind of that name"):
        linear_kind("wrong")
    with pytest.raises(BackendError, match=r"hybridrt.absent:X cannot be imported"):
        load_object("hybridrt.absent:X")


def test_a_configuration_of_another_class_is_refused() -> None:
    class Other(LinearConfig):
        kind = "gdn"

    with pytest.raises(ConfigError, match="use GDNConfig"):
        state_shape(Other())


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "4", None])
def test_numbers_of_a_configuration_are_positive_integers(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="gdn: head_k_dim"):
        GDNConfig(2, 4, wrong, 5, 3)
    with pytest.raises(ConfigError, match="mamba2: n_groups"):
        Mamba2Config(4, 3, 5, wrong, 4, 16, (0.0, 1.0))


def test_a_record_may_set_the_dtype_of_its_state() -> None:
    shapes = [state_shape(CONFIGS[name]) for name in ("gdn", "prefix_sum")]
    assert [state_dtype(shape, torch.bfloat16) for shape in shapes] == [torch.bfloat16, torch.float32]


def test_rings_have_the_shapes_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate for each key channel, as Kimi Delta Attention has."""

    def per_channel(shape: Any, width: int) -> dict[str, tuple[int, ...]]:
        heads, values, keys = shape.temporal
        return {
            "ring_values": (heads, width, values),
            "ring_keys": (heads, width, keys),
            "ring_gates": (heads, width, keys),
        }

    kind: LinearKind = replace(linear_kind("gdn"), ring_shapes=per_channel)
    monkeypatch.setattr("hybridrt.mem_cache.pools.mamba_pool_spec.linear_kind", lambda name: kind)
    stack = Stack(make_layers("gdn"), torch.zeros(3, HIDDEN), "replay")
    assert stack.mamba.layer_cache(0).ring_gates.shape == (ROWS + 1, 4, 16, 6)  # type: ignore[union-attr]
