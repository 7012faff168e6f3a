"""States that travel: pools to image to reads to image to pools, for every pair of tensor-parallel sizes."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import PoolError, TransferError
from hybridrt.base.model_config import AttentionConfig, LatentConfig, LayerSpec, LinearConfig, ModelConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.kda import KDAConfig
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.kinds.prefix_sum import PrefixSumConfig
from hybridrt.kinds.registry import linear_kind, state_shape
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan, PageGroup, UnitCosts
from hybridrt.runtime.load.kept_state import page_demands
from hybridrt.runtime.load.runtime import build_pools
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.run.state_arena import StateArena
from hybridrt.runtime.step.plan import StateCopy
from hybridrt.transfer.reads import image_reads, tp_ratio
from tests.support.by_hand import ByHand, Row, assert_close
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import sweep
from tests.support.session import spoil

PAGE, ROWS = 4, 3
LINEAR: dict[str, LinearConfig] = {
    "mamba2, one group": Mamba2Config(8, 2, 3, 1, 4, 16, (0.0, 1.0)),
    "mamba2, eight groups": Mamba2Config(8, 3, 5, 8, 2, 16, (0.0, 1.0)),
    "mamba1": Mamba1Config(16, 3, 4, 2),
    "gdn, equal heads": GDNConfig(8, 8, 3, 2, 4),
    "gdn, unequal heads": GDNConfig(8, 16, 2, 3, 3),
    "prefix sum, whole on every rank": PrefixSumConfig(6),
    "kda, latent attention": KDAConfig(8, 3, 4),
}
LATENT = AttentionConfig(8, 1, 5, None, v_head_dim=3, latent=LatentConfig(3, 4, 2, 6))


def model_config(linear: LinearConfig, kv_heads: int, window: int | None = None) -> ModelConfig:
    kind = state_shape(linear).kind
    layers = LayerSpec(True, kind, None), LayerSpec(False, kind, None), LayerSpec(True, None, None)
    attention = LATENT if kind == "kda" else AttentionConfig(8, kv_heads, 3, None, window)
    return ModelConfig("X", 9, 8, layers, attention, {kind: linear}, 64, torch.bfloat16, False, (), None)


@dataclass
class Whole:
    """State of one request before sharding: conv inputs [conv_dim, length], recurrent state and KV of each layer."""

    config: ModelConfig
    length: int
    conv: dict[int, Tensor]
    temporal: dict[int, Tensor]
    kv: dict[int, tuple[Tensor, ...]]

    @classmethod
    def random(cls, config: ModelConfig, length: int, seed: int) -> "Whole":
        generator = torch.Generator().manual_seed(seed)
        (linear,) = config.linear.values()
        shape, heads = state_shape(linear), config.attention.num_kv_heads
        dims = (config.attention.head_dim,) * (1 if config.attention.latent else 2)

        def draw(*dims: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(dims, generator=generator).to(dtype)

        return cls(
            config, length, {i: draw(shape.conv_dim, length) for i in (0, 1)},
            {i: draw(*shape.temporal, dtype=torch.float32) for i in (0, 1)},
            {i: tuple(draw(length, heads, dim) for dim in dims) for i in (0, 2)},
        )  # fmt: skip


class Side:
    """Pools and arena of one rank, with a request in row `row`. Slots and pages differ from side to side."""

    def __init__(self, config: ModelConfig, rank: int, tp: int, *, row: int, tokens: int) -> None:
        self.tp, self.row = TPGroup(rank, tp), row
        speculative = SpeculativeConfig(num_draft_tokens=tokens - 1) if tokens > 1 else None
        mode = "intermediate" if speculative else "classic"
        target = RunTarget(config, torch.device("cpu"), torch.bfloat16, torch.float32, mode, self.tp)
        engine = EngineConfig("x", page_size=PAGE, speculative=speculative)
        groups = tuple(PageGroup(demand, ROWS * 16, 0) for demand in page_demands(engine, target))
        plan = MemoryPlan(ROWS, ROWS, groups, PAGE, 64, UnitCosts(0, 0, ()), 0)
        self.pools = build_pools(engine, target, plan)
        spoil(self.pools)
        self.arena = StateArena(target, self.pools, 10_000)
        self.slot = ROWS + 1 - row
        pages = torch.randperm(ROWS * 16, generator=torch.Generator().manual_seed(rank + 7 * tp))[:16] + 1
        self.pools.req_to_token.admit_rows(torch.tensor([row]), torch.tensor([self.slot]))
        self.pools.req_to_token.write_pages(torch.full((16,), row), torch.arange(16), pages)

    def fill(self, whole: Whole) -> None:
        """This rank's share of a state, cut directly."""
        mamba, table = self.pools.req_to_token.mamba_pool, self.pools.req_to_token.req_to_token[self.row]
        assert mamba is not None
        for layer_id in (0, 1):
            cache = mamba.layer_cache(layer_id)
            cache.temporal[self.slot] = self._temporal(whole, layer_id)
            inputs = self._conv(whole, layer_id)
            for position in range(max(0, whole.length - cache.conv.shape[2]), whole.length):
                cache.conv[self.slot, :, position % cache.conv.shape[2]] = inputs[:, position]
        for layer_id, tensors in whole.kv.items():
            for pool, tensor in zip(self.pools.kv.layer_tensors(layer_id), tensors, strict=True):
                pool.flatten(0, 1)[table[: whole.length].long()] = self._heads(whole, tensor)

    def check(self, whole: Whole, start: int = 0) -> None:
        """The pools hold this rank's share, byte for byte, KV from token `start` on, and nothing else has changed."""
        mamba, table = self.pools.req_to_token.mamba_pool, self.pools.req_to_token.req_to_token[self.row]
        assert mamba is not None
        slot, position = torch.tensor([self.slot]), torch.tensor([whole.length])
        for layer_id in (0, 1):
            assert torch.equal(mamba.layer_cache(layer_id).temporal[self.slot], self._temporal(whole, layer_id))
            window, inputs = mamba.conv_window(layer_id, slot, position)[0], self._conv(whole, layer_id)
            padded = torch.cat((torch.zeros_like(window), inputs), 1)
            assert torch.equal(window, padded[:, inputs.shape[1] :])
            others = [i for i in range(1, ROWS + 1) if i != self.slot]
            assert mamba.layer_cache(layer_id).temporal[others].isnan().all()
        for layer_id, tensors in whole.kv.items():
            window = whole.config.attention.sliding_window
            first = start if window is None else max(whole.length - window + 1, 0)
            for pool, tensor in zip(self.pools.kv.layer_tensors(layer_id), tensors, strict=True):
                tokens = pool.flatten(0, 1)[table[:64].long()]
                assert torch.equal(tokens[first : whole.length], self._heads(whole, tensor)[first:])
                others = torch.cat((tokens[:first], tokens[whole.length :]))
                assert (others == torch.tensor(1e4, dtype=tokens.dtype)).all()

    def _temporal(self, whole: Whole, layer_id: int) -> Tensor:
        (kind,) = map(linear_kind, whole.config.linear)
        return self.tp.shard(whole.temporal[layer_id], 0, self.tp.size if kind.cut_state else 1)

    def _conv(self, whole: Whole, layer_id: int) -> Tensor:
        (linear,) = whole.config.linear.values()
        if not state_shape(linear).segments:
            return whole.conv[layer_id]
        wide, mine = state_shape(linear), state_shape(linear, self.tp.size)
        parts = whole.conv[layer_id].split([width for _, width in wide.segments])
        shards = [full // width for (_, full), (_, width) in zip(wide.segments, mine.segments)]
        return torch.cat([self.tp.shard(part, 0, n) for part, n in zip(parts, shards)])

    def _heads(self, whole: Whole, tensor: Tensor) -> Tensor:
        return self.tp.shard(tensor, 1, min(self.tp.size, whole.config.attention.num_kv_heads))


def move(sources: list[Side], sinks: list[Side], length: int, offset: int = 5, at: int = 9, start: int = 0) -> None:
    """Every image by its reads; arenas start where nothing is aligned."""
    for source in sources:
        source.arena.export_state(StateCopy(source.row, length, offset, None, start))
    for rank, sink in enumerate(sinks):
        written = torch.zeros(len(sink.arena.buffer), dtype=torch.int)
        layout = sink.arena.layout
        for number, reads in image_reads(layout.sections(length, start), rank, len(sinks), len(sources)):
            for read in reads:
                data = sources[number].arena.buffer[offset + read.source :][: read.nbytes]
                sink.arena.buffer[at + read.destination :][: read.nbytes] = data
                written[at + read.destination :][: read.nbytes] += 1
        assert (written[at:][: layout.image_bytes(length, start)] == 1).all(), "every byte once"
        assert written.sum() == layout.image_bytes(length, start)
        sink.arena.import_state(StateCopy(sink.row, length, at, None, start))


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("prefill, decode", sweep(product([1, 2, 4, 8], [1, 2, 4, 8]), 3))
def test_state_moved_equals_state_cut_directly(name: str, prefill: int, decode: int) -> None:
    config = model_config(LINEAR[name], kv_heads=2)  # fewer than ranks
    whole = Whole.random(config, 11, seed=prefill + 10 * decode)
    sources = [Side(config, rank, prefill, row=2, tokens=1) for rank in range(prefill)]
    sinks = [Side(config, rank, decode, row=1, tokens=3) for rank in range(decode)]
    for side in sources:
        side.fill(whole)
    move(sources, sinks, 11)
    for side in sinks:
        side.check(whole)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_length_and_any_heads(data: st.DataObject) -> None:
    sizes = st.sampled_from([1, 2, 4])
    prefill, decode, length = data.draw(sizes), data.draw(sizes), data.draw(st.integers(1, 40))
    heads, window = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.sampled_from([None, 1, 5, 30]))
    config = model_config(data.draw(st.sampled_from(list(LINEAR.values()))), heads, window)
    whole = Whole.random(config, length, data.draw(st.integers(0, 9)))
    rows = data.draw(st.tuples(st.integers(1, ROWS), st.integers(1, ROWS)))
    widths = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    sources = [Side(config, rank, prefill, row=rows[0], tokens=widths[0]) for rank in range(prefill)]
    sinks = [Side(config, rank, decode, row=rows[1], tokens=widths[1]) for rank in range(decode)]
    for side in sources:
        side.fill(whole)
    start = data.draw(st.integers(0, length))
    move(sources, sinks, length, *data.draw(st.tuples(st.integers(0, 99), st.integers(0, 99))), start)
    for side in sinks:
        side.check(whole, start)


def test_equal_sizes_need_one_read() -> None:
    config = model_config(LINEAR["gdn, equal heads"], 2)
    for tp in (1, 2, 4):
        sections = Side(config, 0, tp, row=1, tokens=1).arena.layout.sections(7)
        assert [(source, len(reads)) for source, reads in image_reads(sections, 0, tp, tp)] == [(0, 1)]


def test_a_prefill_rank_of_which_nothing_is_needed_is_left_alone() -> None:
    config = model_config(LINEAR["mamba2, one group"], 1)
    config = replace(config, layers=(LayerSpec(True, None, None),), linear={})
    sections = Side(config, 0, 1, row=1, tokens=1).arena.layout.sections(7)
    assert [source for source, _ in image_reads(sections, 0, 1, 4)] == [0], "one KV head, which all four hold"


def test_sizes_that_do_not_divide_are_refused() -> None:
    assert [tp_ratio(*sizes) for sizes in ((1, 1), (6, 2), (2, 8))] == [1, 3, -4]
    with pytest.raises(TransferError, match="2 prefill ranks cannot feed 3"):
        tp_ratio(3, 2)


def arenas_after_27_tokens(source: ByHand, sink: ByHand, tokens: list[int]) -> list[StateArena]:
    """Row 2 of the source has a prompt of 20 and has decoded 7; row 1 of the sink is admitted."""
    source.admit(2)
    sink.admit(1)
    source.extend(Row(2, 0, tokens[:20]))
    for i in range(20, 27):
        source.decode(Row(2, i, tokens[i : i + 1]))
    return [StateArena(hand.target, hand.pools, 1 << 16) for hand in (source, sink)]


@pytest.mark.parametrize("name", ["falcon-plain", "qwen-plain", "kimi-dense_alone"])
@pytest.mark.parametrize("ours, theirs", [("replay", "classic"), ("classic", "replay")])
def test_a_request_that_decodes_can_be_moved(name: str, ours: str, theirs: str, checkpoints: CheckpointStore) -> None:
    """In replay mode the state is checkpoint and ring: the image holds what both come to."""
    path, tokens = checkpoints[name].path, [7 * i % 131 for i in range(40)]
    source, sink = ByHand(path, mode=ours), ByHand(path, mode=theirs)
    arenas = arenas_after_27_tokens(source, sink, tokens)
    state, before = source.state(2, 27), source.snapshot()
    with torch.inference_mode():
        arenas[0].export_state(StateCopy(2, 27, 3))
        assert {entry for entries in source.touched(before).values() for entry in entries} <= {2, source.slot(2)}
        assert_close(source.state(2, 27), state, 0.0)
        arenas[1].buffer.copy_(arenas[0].buffer)
        arenas[1].import_state(StateCopy(1, 27, 3))
    assert_close(sink.state(1, 27), source.state(2, 27), 0.0)
    for i in range(27, 40):
        logits = [hand.decode(Row(row, i, tokens[i : i + 1])) for hand, row in ((source, 2), (sink, 1))]
        assert torch.allclose(*logits, atol=1e-5)


@pytest.mark.parametrize("wrong", ["small room", "end of the arena", "before the arena"])
def test_an_image_larger_than_its_room_is_not_written(wrong: str, checkpoints: CheckpointStore) -> None:
    """Next to it lie images of other requests."""
    hand = ByHand(checkpoints["falcon-plain"].path)
    hand.admit(2)
    hand.extend(Row(2, 0, list(range(20))))
    arena = StateArena(hand.target, hand.pools, 1 << 16)
    needed, end = arena.layout.image_bytes(20), len(arena.buffer)
    offset, room = {
        "small room": (3, needed - 1), "end of the arena": (end - needed + 1, needed), "before the arena": (-1, needed)
    }[wrong]  # fmt: skip
    arena.buffer.fill_(77)
    with torch.inference_mode():
        with pytest.raises(PoolError, match=f"{needed} bytes"):
            arena.export_state(StateCopy(2, 20, offset, room))
        assert (arena.buffer == 77).all()
        with pytest.raises(PoolError, match=f"{needed} bytes"):
            arena.import_state(StateCopy(2, 20, offset, room))
        arena.export_state(StateCopy(2, 20, end - needed, needed))
    assert (arena.buffer[: end - needed] == 77).all() and not (arena.buffer == 77).all()


@pytest.mark.parametrize("name", ["mamba2-plain", "qwen-plain", "kimi-dense_alone"])
def test_states_in_8_bits_move_as_they_are_stored(name: str, checkpoints: CheckpointStore) -> None:
    path, tokens = checkpoints[name].path, [7 * i % 131 for i in range(40)]
    source, sink = (ByHand(path, mode="replay", mamba_ssm_dtype="int8") for _ in range(2))
    arenas = arenas_after_27_tokens(source, sink, tokens)
    with torch.inference_mode():
        arenas[0].export_state(StateCopy(2, 27, 3))
        arenas[1].buffer.copy_(arenas[0].buffer)
        arenas[1].import_state(StateCopy(1, 27, 3))
    for what, held in source.state(2, 27).items():
        assert torch.equal(sink.state(1, 27)[what], held), what
    for i in range(27, 40):
        logits = [hand.decode(Row(row, i, tokens[i : i + 1])) for hand, row in ((source, 2), (sink, 1))]
        assert torch.allclose(*logits, atol=1e-5)
