"""Who runs what: the prefill/decode split and the composite over layers, with instrumented backends."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hybridrt.attention.base import AttentionBackend, AttentionInputs
from hybridrt.attention.paged import SegmentedAttnBackend, TorchNativeAttnBackend
from hybridrt.attention.prefill_decode import HybridAttnBackend, PrefillDecodeAttnBackend
from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import BackendError, ConfigError
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, GraphView, SpecInfo
from hybridrt.base.model_config import AttentionSpec
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.recurrent import backends as registry
from hybridrt.recurrent.backend import HybridLinearAttnBackend
from hybridrt.recurrent.gdn import GDNAttnBackend
from hybridrt.recurrent.mamba2 import Mamba2AttnBackend
from tests.support.by_hand import ByHand, Row
from tests.support.checkpoints import CheckpointStore

LAYER = SimpleNamespace(layer_id=0, spec=AttentionSpec(2, 2, 4, 4, None, 0.5, torch.float32))


class Instrumented(SegmentedAttnBackend):
    """Notes every call in a shared log; its output says who computed it."""

    def __init__(self, name: str, number: float, log: list[tuple[str, str]], fill: int = 1) -> None:
        self.name, self.number, self.log, self.seq_len_fill = name, number, log, fill

    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        self.log.append((self.name, "metadata" if graph is None else "replay" if batch.num_real else "capture"))

    def save_kv(self, k: Tensor, v: Tensor, layer: Any, batch: ForwardBatch) -> None:
        self.log.append((self.name, "save"))

    def decode(self, q: Tensor, layer: Any, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        self.log.append((self.name, "decode"))
        return torch.full_like(q, self.number)

    def extend(self, q: Tensor, layer: Any, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        self.log.append((self.name, "extend"))
        return torch.full_like(q, self.number + 10)

    def allocate_graph(self, view: GraphView) -> None:
        self.log.append((self.name, "graph state"))


def split(speculative: str = "decode") -> tuple[PrefillDecodeAttnBackend, list[tuple[str, str]]]:
    log: list[tuple[str, str]] = []
    both = Instrumented("prefill", 1, log, 5), Instrumented("decode", 2, log, 7)
    return HybridAttnBackend(*both, speculative), log  # the name that serving runtimes know


def step(
    mode: ForwardMode, decode: int = 0, extend: int = 0, tokens: int = 1, spec: bool | None = None
) -> ForwardBatch:
    """`decode` rows of `tokens` tokens each, then `extend` rows of three."""
    rows, total = decode + extend, decode * tokens + extend * 3
    starts = [*range(0, decode * tokens + 1, tokens), *(decode * tokens + 3 * (i + 1) for i in range(extend))]
    return ForwardBatch(
        mode, torch.zeros(total, dtype=torch.int32), torch.zeros(total, dtype=torch.int32),
        torch.ones(rows, dtype=torch.int32), torch.full((rows,), 8, dtype=torch.int32), torch.tensor(starts),
        torch.zeros(total, dtype=torch.int32), rows, decode, None,  # type: ignore[arg-type]
        seq_lens_cpu=[8] * rows, query_lens_cpu=[tokens] * decode + [3] * extend,
        spec_info=SpecInfo(tokens) if (tokens > 1 if spec is None else spec) else None,
    )  # fmt: skip


def run(backend: AttentionBackend, batch: ForwardBatch) -> list[float]:
    """Metadata and one layer; who computed each token."""
    backend.prepare(batch)
    q, k, v = torch.zeros(3, len(batch.input_ids), 8)
    return backend.forward(q, k, v, LAYER, batch)[:, 0].tolist()


def test_extend_steps_go_to_the_prefill_backend_alone() -> None:
    backend, log = split()
    assert run(backend, step(ForwardMode.EXTEND, extend=2)) == [11.0] * 6
    assert {name for name, _ in log} == {"prefill"}


def test_decode_steps_go_to_the_decode_backend_alone() -> None:
    backend, log = split()
    assert run(backend, step(ForwardMode.DECODE, decode=3)) == [2.0] * 3
    assert {name for name, _ in log} == {"decode"}


def test_mixed_steps_are_split_by_segment() -> None:
    backend, log = split()
    assert run(backend, step(ForwardMode.MIXED, decode=2, extend=1)) == [2.0, 2.0, 11.0, 11.0, 11.0]
    assert {("prefill", "metadata"), ("decode", "metadata")} <= set(log)
    assert sum(call == "save" for _, call in log) == 1, "keys and values are written once"


@pytest.mark.parametrize("speculative", ["prefill", "decode"])
def test_verify_steps_follow_the_speculative_mode(speculative: str) -> None:
    backend, log = split(speculative)
    run(backend, step(ForwardMode.TARGET_VERIFY, decode=2, tokens=3))
    assert {name for name, _ in log} == {speculative}


@pytest.mark.parametrize("speculative", ["prefill", "decode"])
@pytest.mark.parametrize(("decode", "extend"), [(2, 0), (0, 2)])
def test_draft_extend_steps_follow_the_speculative_mode(speculative: str, decode: int, extend: int) -> None:
    """Whether the drafter catches up in rows of equal or of any length."""
    backend, log = split(speculative)
    run(backend, step(ForwardMode.DRAFT_EXTEND, decode, extend, tokens=3 if decode else 1))
    assert {name for name, _ in log} == {speculative}


@pytest.mark.parametrize("speculative", ["prefill", "decode"])
def test_verify_rows_of_mixed_steps_follow_the_speculative_mode(speculative: str) -> None:
    backend, log = split(speculative)
    number = 1.0 if speculative == "prefill" else 2.0
    assert run(backend, step(ForwardMode.MIXED, decode=1, extend=1, tokens=2)) == [number] * 2 + [11.0] * 3
    assert {name for name, _ in log} == {speculative, "prefill"}


def test_idle_steps_go_to_the_decode_backend_and_give_empty_tensors() -> None:
    backend, log = split("prefill")
    batch = step(ForwardMode.IDLE)
    assert run(backend, batch) == []
    assert {name for name, _ in log} == {"decode"}
    assert backend.forward(*torch.zeros(3, 0, 8), LAYER, batch).shape == (0, 8)


def test_saving_is_left_out_when_asked() -> None:
    backend, log = split()
    batch = step(ForwardMode.DECODE, decode=1)
    backend.forward(*torch.zeros(3, 1, 8), LAYER, batch, save_kv_cache=False)
    assert log == [("decode", "decode")]


@pytest.mark.parametrize("speculative", ["prefill", "decode"])
@pytest.mark.parametrize("hook", ["capture", "replay"])
def test_graph_hooks_follow(speculative: str, hook: str) -> None:
    backend, log = split(speculative)
    backend.init_cuda_graph_state(4, 4)
    backend.init_cuda_graph_state(4, 12)
    assert set(log) == {("decode", "graph state"), (speculative, "graph state")}
    for mode, name in ((ForwardMode.DECODE, "decode"), (ForwardMode.TARGET_VERIFY, speculative)):
        log.clear()
        rows, spec = torch.ones(4, dtype=torch.int32), SpecInfo(3) if mode is ForwardMode.TARGET_VERIFY else None
        if hook == "capture":
            backend.init_forward_metadata_capture_cuda_graph(4, 12 if spec else 4, rows, rows, mode, spec)
        else:
            backend.init_forward_metadata_replay_cuda_graph(4, 3, rows, rows, mode, spec, None)
        assert log == [(name, hook)]


def test_an_unknown_speculative_mode_is_refused() -> None:
    with pytest.raises(BackendError, match="prefill"):
        split("both")


def test_needing_host_lengths_is_passed_on() -> None:
    backend, _ = split()
    assert not backend.needs_host_lens
    eager = Instrumented("decode", 2, [])
    eager.needs_host_lens = True
    assert PrefillDecodeAttnBackend(Instrumented("prefill", 1, []), eager, "decode").needs_host_lens


class Linear(Instrumented):
    """Passes for a recurrent backend of a kind, with the layers 1 and 2."""

    layers: ClassVar = {1: None, 2: None}
    kind = "mamba2"
    committed: Any = "nothing"

    @property
    def members(self) -> list[Any]:
        return [self]

    @members.setter
    def members(self, members: list[Any]) -> None:
        self.plans_for = [member.kind for member in members]

    def commit(self, batch: ForwardBatch, accepted: Tensor | None = None, path: Tensor | None = None) -> None:
        self.committed = accepted


class Third(Linear):
    """One of another kind, which shares the id 2 with the first."""

    layers: ClassVar = {2: None, 7: None}
    kind = "gdn"


def composite(*more: Linear) -> tuple[Any, Linear, list[tuple[str, str]]]:
    log: list[tuple[str, str]] = []
    linear = Linear("linear", 3, log, fill=1)
    full: Any = Instrumented("full", 1, log, fill=9)
    backend = HybridLinearAttnBackend(full, [linear, *more], [0, 2, 3])  # type: ignore[list-item]
    return backend, linear, log


def ask(backend: AttentionBackend, layer_id: int, kind: str | None = None) -> float:
    batch, layer = step(ForwardMode.DECODE, decode=1), SimpleNamespace(**{**vars(LAYER), "layer_id": layer_id})
    if kind:
        layer.kind = kind
    return float(backend.forward(*torch.zeros(3, 1, 8), layer, batch)[0, 0])


def test_layers_are_routed_by_id_and_kind() -> None:
    """Two branches of one block share an id; attention has no kind."""
    backend, linear, _ = composite()
    assert [ask(backend, i) for i in (0, 2, 3)] == [1.0] * 3
    assert [ask(backend, i, "mamba2") for i in (1, 2)] == [3.0] * 2
    assert backend.linear_attn_backend is linear


def test_a_layer_without_a_backend_is_an_error() -> None:
    backend, _, _ = composite()
    for layer_id, kind, message in ((4, None, "attention layer 4"), (0, "mamba2", "mamba2 layer 0"), (1, "gdn", "gdn")):
        with pytest.raises(BackendError, match=message):
            ask(backend, layer_id, kind)


def test_further_kinds_of_layers_have_backends_of_their_own() -> None:
    backend, linear, log = composite(Third("third", 8, []))
    assert [ask(backend, i, "mamba2") for i in (1, 2)] == [3.0] * 2
    assert [ask(backend, i, "gdn") for i in (2, 7)] == [8.0] * 2
    log.clear()
    backend.prepare(step(ForwardMode.DECODE, decode=1))
    assert log == [("full", "metadata"), ("linear", "metadata")] and linear.plans_for == ["mamba2", "gdn"]
    with pytest.raises(BackendError, match="mamba2, gdn"):
        _ = backend.linear_attn_backend
    with pytest.raises(BackendError, match="one for each kind"):
        composite(Linear("again", 8, []))


def test_every_hook_reaches_every_backend_once() -> None:
    backend, _, log = composite()
    rows = torch.ones(2, dtype=torch.int32)
    backend.prepare(step(ForwardMode.DECODE, decode=2))
    backend.init_cuda_graph_state(2, 2)
    backend.init_forward_metadata_capture_cuda_graph(2, 2, rows, rows, ForwardMode.DECODE, None)
    backend.init_forward_metadata_replay_cuda_graph(2, 1, rows, rows, ForwardMode.DECODE, None, None)
    calls = ("metadata", "graph state", "capture", "replay")
    assert sorted(log) == sorted((name, call) for name in ("full", "linear") for call in calls)


def test_fill_values_are_each_backends_own() -> None:
    backend, linear, _ = composite()
    assert backend.get_cuda_graph_seq_len_fill_value() == 9
    assert linear.get_cuda_graph_seq_len_fill_value() == 1
    assert split()[0].get_cuda_graph_seq_len_fill_value() == 7


def test_accepted_lengths_reach_the_recurrent_backend() -> None:
    backend, linear, _ = composite()
    accepted = torch.tensor([2, 0], dtype=torch.int32)
    backend.commit(step(ForwardMode.DECODE, decode=2), accepted)
    assert linear.committed is accepted
    backend.commit(step(ForwardMode.DECODE, decode=2))
    assert linear.committed is None


def pools(hand: ByHand) -> dict[str, Any]:
    return {"kv_pool": hand.pools.kv, "req_to_token_pool": hand.pools.req_to_token}


@pytest.mark.parametrize(("name", "wrong"), [("qwen-plain", Mamba2AttnBackend), ("falcon-plain", GDNAttnBackend)])
def test_the_wrong_recurrent_backend_is_refused_when_built(name: str, wrong: Any, checkpoints: CheckpointStore) -> None:
    hand = ByHand(checkpoints[name].path)
    with pytest.raises(BackendError, match="linear_attn_backend"):
        wrong(layers=hand.model.mixers(), req_to_token_pool=hand.pools.req_to_token, chunk_size=16)
    config = EngineConfig("x", linear_attn_backend="gdn" if name.startswith("falcon") else "mamba2")
    with pytest.raises(BackendError, match="auto"):
        registry.create_backend(config, hand.target.model_config, layers=hand.model.mixers(), **pools(hand))


def test_a_recurrent_backend_needs_state_pools(checkpoints: CheckpointStore) -> None:
    hand = ByHand(checkpoints["falcon-plain"].path)
    table = HybridReqToTokenPool(num_rows=2, max_context=8, page_size=4, mamba_pool=None, device="cpu")
    with pytest.raises(BackendError, match="MambaPool"):
        Mamba2AttnBackend(layers=hand.model.mixers(), req_to_token_pool=table, chunk_size=16)


def test_a_ring_that_is_too_narrow_for_a_layer_is_refused_when_built(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps do not look at it again."""
    hand = ByHand(checkpoints["falcon-plain"].path)
    mixers: Any = hand.model.mixers()
    layer = next(iter(mixers.values()))
    wide = layer.conv_weights._replace(weight=torch.zeros(layer.shape.conv_dim, 64))
    monkeypatch.setattr(layer, "conv_weights", wide)
    with pytest.raises(ConfigError, match="cannot serve 64 taps"):
        Mamba2AttnBackend(layers=mixers, req_to_token_pool=hand.pools.req_to_token, chunk_size=16)


@pytest.mark.parametrize("numbers", [(4, 6), (4, 3), (0, 0), (4, 0)])
@pytest.mark.parametrize("kind", ["paged", "linear", "composite"])
def test_graphs_have_as_many_tokens_in_every_row(
    kind: str, numbers: tuple[int, int], checkpoints: CheckpointStore
) -> None:
    backend = ByHand(checkpoints["falcon-plain"].path).backend
    parts = {"paged": backend.full_attn_backend, "linear": backend.linear_attn_backend, "composite": backend}
    with pytest.raises(BackendError, match="multiple of max_bs"):
        parts[kind].init_cuda_graph_state(*numbers)
    parts[kind].init_cuda_graph_state(4, 8)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE])
def test_only_decode_steps_are_captured(mode: ForwardMode, checkpoints: CheckpointStore) -> None:
    backend = ByHand(checkpoints["falcon-plain"].path).backend
    rows = torch.zeros(2, dtype=torch.int32)
    for part in (backend.full_attn_backend, backend.linear_attn_backend):
        part.init_cuda_graph_state(2, 2)
        with pytest.raises(BackendError, match=mode.name):
            part.init_forward_metadata_capture_cuda_graph(2, 2, rows, rows, mode, None)


def test_a_model_without_recurrent_layers_needs_no_composite(checkpoints: CheckpointStore) -> None:
    hand = ByHand(checkpoints["falcon-plain"].path)
    config = EngineConfig("x", device="cpu")
    backend = registry.create_backend(config, hand.target.model_config, layers={}, **pools(hand))
    assert isinstance(backend, TorchNativeAttnBackend)
    with pytest.raises(BackendError, match="HybridLinearAttnBackend"):
        _ = backend.linear_attn_backend


@pytest.mark.parametrize("model", ["falcon-plain", "kimi-plain"])
def test_prefill_and_decode_backends_are_split_when_asked(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Only the full-attention side: there is one recurrent backend. And the model's logits stay."""

    class Other(TorchNativeAttnBackend):
        steps = 0

        def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
            Other.steps += 1
            super().prepare(batch, graph=graph)

    load = registry.load_attention_backend
    monkeypatch.setattr(registry, "load_attention_backend", lambda name, d: Other if name == "other" else load(name, d))
    monkeypatch.setitem(registry.BACKENDS.built_in, "other", "somewhere:Other")
    path = checkpoints[model].path
    hand, plain = ByHand(path, prefill_attention_backend="other"), ByHand(path)
    assert isinstance(hand.backend.full_attn_backend, PrefillDecodeAttnBackend)
    assert isinstance(hand.backend.linear_attn_backend, Mamba2AttnBackend) == (model == "falcon-plain")
    for each in (hand, plain):
        each.admit(1, 2)
    for run_step in (
        lambda h: h.extend(Row(1, 0, [5, 6, 7])),
        lambda h: h.decode(Row(1, 3, [8]), extend=[Row(2, 0, [9, 10])]),
        lambda h: h.decode(Row(1, 4, [8]), Row(2, 2, [4])),
    ):
        assert torch.equal(run_step(hand), run_step(plain))
    assert Other.steps == 2


def test_queries_are_rotated_whether_or_not_keys_are_saved(checkpoints: CheckpointStore) -> None:
    """A layer that reads KV that is already there (save_kv_cache=False) gives what it gave when it was written."""
    hand = ByHand(checkpoints["falcon-plain"].path)
    hand.admit(1)
    seen: list[tuple[Tensor, Tensor]] = []
    run, forward = hand.backend.run, hand.backend.forward

    def twice(layer: Any, batch: ForwardBatch, inputs: Any, out: Tensor | None = None) -> Tensor:
        first: Tensor = run(layer, batch, inputs, out).clone()
        if isinstance(inputs, AttentionInputs):
            seen.append((first, forward(inputs.q, inputs.k, inputs.v, layer, batch, False, rope=inputs.rope)))
            seen.append((first, forward(inputs.q, None, None, layer, batch, False, rope=inputs.rope)))
        return first

    hand.backend.run = twice
    hand.extend(Row(1, 0, [5, 6, 7, 8]))
    assert seen
    for first, second in seen:
        torch.testing.assert_close(second, first)


def test_bad_names_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match="speculative_attention_mode"):
        SpeculativeConfig(speculative_attention_mode="verify")


def test_kv_pool_holds_attention_layers_alone(checkpoints: CheckpointStore) -> None:
    hand = ByHand(checkpoints["qwen-plain"].path)
    assert hand.pools.kv.tensors[0].shape[0] == len(hand.target.model_config.full_attention_layer_ids) == 1
    assert isinstance(hand.pools.kv, KVPool)
    with pytest.raises(KeyError):
        hand.pools.kv.layer(0)
