"""The layer attention(window) + history: modes, fusion with a stub attention that copies the query, errors."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrt.attention.base import AttentionBackend, AttentionInputs
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import BackendError, ConfigError
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, GraphView, SpecInfo
from hybridrt.collectives.groups import TPGroup
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.weights import Build
from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.mem_cache.pools.mamba_pool_spec import MambaPoolSpec
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.models.hybrid_attention import HISTORY_MODES, HybridSSMAdapter
from hybridrt.models.loading.loader import fill_dummy
from hybridrt.models.swa_ssm import SwaSsmConfig
from hybridrt.models.window_history import WindowHistoryBackend
from hybridrt.runtime.load.load_target import load_target
from tests.support.by_hand import ByHand, Row
from tests.support.checkpoints import CheckpointStore, swa_ssm, write

VECTOR = json.loads((Path(__file__).parents[1] / "vectors" / "prefix_sum.json").read_text())
HIDDEN = 6


class CopiesTheQuery(AttentionBackend):
    """Window attention whose output is its query."""

    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        pass

    def run(self, layer: Any, batch: ForwardBatch, inputs: AttentionInputs, out: Tensor | None = None) -> Tensor:
        return inputs.q


def make_adapter(mode: str, hidden: int = HIDDEN, **more: Any) -> HybridSSMAdapter:
    adapter = HybridSSMAdapter(hidden, 4, 4, 10, mode=mode, **more)
    if adapter.targets(""):
        fill_dummy(adapter, 0)
    return adapter


class Bench:
    """One layer with the stub attention and an identity projection; request row i owns slot 8 - i."""

    def __init__(self, mode: str, hidden: int = HIDDEN, tokens: int = 1, **more: Any) -> None:
        self.adapter = make_adapter(mode, hidden, **more)
        groups = {state_shape(self.adapter.mixer.config): [0]} if self.adapter.mixer else {}
        state_mode = "intermediate" if tokens > 1 else "classic"
        spec = MambaPoolSpec(groups, torch.float32, torch.bfloat16, tokens, state_mode)
        self.pool = MambaPool(spec, num_slots=8, num_rows=7, device="cpu")
        table = HybridReqToTokenPool(num_rows=7, max_context=64, page_size=4, mamba_pool=self.pool, device="cpu")
        self.slots = torch.arange(8, 0, -1)
        table.admit_rows(torch.arange(1, 8), self.slots[1:])
        self.backend = WindowHistoryBackend(CopiesTheQuery(), [self.adapter], table)
        self.layer = SimpleNamespace(layer_id=0, attn=SimpleNamespace(layer_id=0), ssm_adapter=self.adapter)
        self.layer.project = lambda attended: attended.clone()
        self.lengths = [0] * 8

    @property
    def states(self) -> Tensor:
        """The recurrent state of each request row."""
        return self.pool.layer_cache(0).temporal[self.slots[1:]]

    def batch(self, decode: Sequence[int], extend: Sequence[tuple[int, int]], padding: int = 0, width: int = 1) -> Any:
        """Rows `decode` with `width` tokens each, then `extend` rows of (row, tokens), then padding rows."""
        rows = [*((row, width) for row in decode), *extend, *[(0, width)] * padding]
        lens = [count for _, count in rows]
        modes = {(True, False): ForwardMode.DECODE, (False, True): ForwardMode.EXTEND, (True, True): ForwardMode.MIXED}
        filler = torch.zeros(sum(lens), dtype=torch.int32)
        places = [p for row, n in rows for p in range(self.lengths[row], self.lengths[row] + n)]
        positions = torch.tensor(places, dtype=torch.int32)
        return ForwardBatch(
            forward_mode=modes[bool(decode), bool(extend)], input_ids=filler, positions=positions, out_cache_loc=filler,
            req_pool_indices=torch.tensor([row for row, _ in rows], dtype=torch.int32),
            seq_lens=torch.tensor([self.lengths[row] + n for row, n in rows], dtype=torch.int32),
            query_start_loc=torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32),
            num_real=len(rows) - padding, num_decode_rows=len(decode) + (0 if extend else padding),
            attn_backend=self.backend, seq_lens_cpu=[self.lengths[row] + n for row, n in rows], query_lens_cpu=lens,
            spec_info=SpecInfo(width) if width > 1 else None,
        )  # fmt: skip

    @torch.no_grad()
    def run(
        self, x: Tensor, decode: Sequence[int] = (), extend: Sequence[tuple[int, int]] = (), padding: int = 0
    ) -> Tensor:
        """A step over hidden states x, which are the query, too; returns what the branch added."""
        batch = self.batch(decode, extend, padding)
        self.backend.prepare(batch)
        out = self.backend.forward(x, None, None, self.layer, batch, hidden_states=x)
        self.backend.commit(batch)
        for row, count in [*((row, 1) for row in decode), *extend]:
            self.lengths[row] += count
        return out - x


def test_the_given_vector() -> None:
    """A mixed batch, decode row first, with the sums of earlier steps; then a decode step of all three."""
    bench, requests = Bench("prefix_sum", hidden=1), VECTOR["requests"]
    for row, request in enumerate(requests, 1):
        bench.pool.layer_cache(0).temporal[bench.slots[row]] = request["state"]
        bench.lengths[row] = 5
    x = torch.tensor([v for r in requests for v in r["x"]], dtype=torch.float32)[:, None]
    y = bench.run(x, [1], [(row, len(r["x"])) for row, r in enumerate(requests[1:], 2)])
    assert y[:, 0].tolist() == [v for r in requests for v in r["y"]]
    assert bench.states[:3, 0].tolist() == VECTOR["state_after"]
    x = torch.tensor(VECTOR["then_decode_x"], dtype=torch.float32)[:, None]
    assert bench.run(x, [1, 2, 3])[:, 0].tolist() == VECTOR["then_decode_y"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_sums_persist_over_any_schedule(data: st.DataObject) -> None:
    """Prefill, chunks, decode and mixed steps of several requests in any order, padding rows after them."""
    bench, generator = Bench("prefix_sum"), torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    history = {row: torch.zeros(0, HIDDEN) for row in range(1, 8)}
    for _ in range(data.draw(st.integers(1, 8), "steps")):
        rows = data.draw(st.permutations(range(1, 8)))[: data.draw(st.integers(1, 5), "rows")]
        split = data.draw(st.integers(0, len(rows)), "decode rows")
        extend = [(row, data.draw(st.integers(1, 9), "chunk")) for row in rows[split:]]
        padding = data.draw(st.integers(0, 2), "padding") if split and not extend else 0
        decode = [row for row in rows[:split] if bench.lengths[row]]
        if not decode and not extend:
            continue
        lens = [*((row, 1) for row in decode), *extend, *[(0, 1)] * padding]
        x = torch.randn(sum(n for _, n in lens), HIDDEN, generator=generator)
        y, first = bench.run(x, decode, extend, padding), 0
        for row, count in lens:
            part = slice(first, first + count)
            first += count
            if not row:
                assert not y[part].any()
                continue
            history[row] = torch.cat((history[row], x[part]))
            torch.testing.assert_close(y[part], history[row].cumsum(0)[-count:], rtol=0, atol=1e-5)
    for row, seen in history.items():
        torch.testing.assert_close(bench.states[row - 1], seen.sum(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", HISTORY_MODES)
def test_what_each_mode_adds_and_keeps(mode: str) -> None:
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    bench, full = Bench(mode), Bench("enabled")
    for each in (bench, full):
        each.run(x[:6], extend=[(2, 6)])
    before = None if mode == "disabled" else bench.states.clone()
    added, wanted = (each.run(x[6:], [2], [(4, 2)]) for each in (bench, full))
    assert wanted.abs().min() > 0
    if mode == "disabled":
        assert not added.any() and bench.pool.layer_ids == []
        return
    assert before is not None and not torch.equal(before[[1, 3]], bench.states[[1, 3]])
    assert torch.equal(before[[0, 2, 4, 5, 6]], bench.states[[0, 2, 4, 5, 6]])
    if mode == "benchmark":
        assert not added.any() and torch.equal(bench.states, full.states)
    if mode == "enabled":
        torch.testing.assert_close(added, wanted)


@pytest.mark.parametrize("mode", ["prefix_sum", "enabled"])
def test_segments_alone_equal_the_mixed_step(mode: str) -> None:
    """`forward_history_branch_decode` and `_prefill` on the two parts of one batch."""
    x = torch.randn(8, HIDDEN)
    mixed, parts = Bench(mode), Bench(mode)
    for each in (mixed, parts):
        each.run(x[:5], extend=[(1, 5)])
    wanted = mixed.run(x, [1], [(2, 4), (3, 3)])
    batch = parts.batch([1], [(2, 4), (3, 3)])
    with torch.no_grad():
        parts.backend.prepare(batch)
        prefill = parts.adapter.forward_history_branch_prefill(x[1:], batch)
        decode = parts.adapter.forward_history_branch_decode(x[:1], batch)
    torch.testing.assert_close(torch.cat((decode, prefill)), wanted, rtol=0, atol=1e-6)
    assert torch.equal(parts.states, mixed.states)
    step = batch.metadata[parts.backend.linear_attn_backend]
    assert step.decode and step.extends, "the step is as it was planned"


def test_sums_of_any_rank() -> None:
    bench = Bench("prefix_sum")
    batch, x = bench.batch([], [(3, 4)]), torch.randn(4, 2, 3)
    bench.backend.prepare(batch)
    torch.testing.assert_close(bench.adapter.forward_history_branch(x, batch), x.cumsum(0))
    torch.testing.assert_close(bench.states[2], x.sum(0).flatten())


@pytest.mark.parametrize("mode", HISTORY_MODES)
def test_a_step_that_is_not_planned_is_an_error_unless_the_branch_is_disabled(mode: str) -> None:
    bench, x = Bench(mode), torch.randn(3, HIDDEN)
    unplanned = bench.batch([1, 2, 3], [])
    for method in ("forward_history_branch", "forward_history_branch_decode", "forward_history_branch_prefill"):
        for arguments in ((x,), (x, None), (x, unplanned)):
            if mode == "disabled":
                assert not getattr(bench.adapter, method)(*arguments).any()
                continue
            with pytest.raises(BackendError, match="no planned step"):
                getattr(bench.adapter, method)(*arguments)


def test_one_tensor_parallel_rank_contributes_to_a_sum() -> None:
    """Every rank keeps it; the sum over ranks must hold it once."""
    build = Build(TPGroup(rank=1, size=2), torch.float32, torch.device("cpu"))
    bench = Bench("prefix_sum", build=build)
    assert not bench.run(torch.ones(3, HIDDEN), extend=[(1, 3)]).any()
    assert (bench.states[0] == 3).all()


def test_what_the_branch_raises_is_raised() -> None:
    bench, x = Bench("enabled"), torch.randn(3, HIDDEN)
    bench.adapter.mixer.in_proj = None  # type: ignore[union-attr, assignment]
    with pytest.raises(TypeError):
        bench.run(x, extend=[(1, 3)])
    batch = bench.batch([1], [(2, 4)])
    bench.backend.prepare(batch)
    with pytest.raises(BackendError, match="3 tokens of a step of 5"):
        bench.adapter.forward_history_branch(x, batch)
    with pytest.raises(BackendError, match="3 tokens of a step of 1"):
        bench.adapter.forward_history_branch_decode(x, batch)


def test_an_unknown_mode_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'on'; it must be one of disabled, prefix_sum, enabled, benchmark"):
        make_adapter("on")
    fields: dict[str, Any] = {
        "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 9, "sliding_window": 4,
    }  # fmt: skip
    for wrong in ("on", ["enabled"], ["enabled", "on"]):
        with pytest.raises(ConfigError, match="history_mode"):
            SwaSsmConfig(**fields, history_mode=wrong)
    for name, value in (("sliding_window", 0), ("num_key_value_heads", 3)):
        with pytest.raises(ConfigError, match=name):
            SwaSsmConfig(**fields | {name: value})
    with pytest.raises(ConfigError, match="windows"):
        SwaSsmConfig.from_json(fields | {"windows": 3})
    with pytest.raises(ConfigError, match="sliding_window"):
        SwaSsmConfig.from_json({k: v for k, v in fields.items() if k != "sliding_window"})


@pytest.mark.parametrize(("name", "layer_id", "what"), [("a", 1, "name 'a'"), ("b", 0, "layer_id 0")])
def test_two_layers_of_one_name_are_an_error(name: str, layer_id: int, what: str) -> None:
    adapters = [make_adapter("disabled", name="a", layer_id=0), make_adapter("disabled", name=name, layer_id=layer_id)]
    table = HybridReqToTokenPool(num_rows=1, max_context=4, page_size=4, mamba_pool=None, device="cpu")
    with pytest.raises(BackendError, match=f"{what} belongs to two"):
        WindowHistoryBackend(CopiesTheQuery(), adapters, table)


def test_the_layer_adds_both_branches_to_one_sum_over_ranks(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two a block of a model: this one and the MLP's; Mamba-1 has one more, for dt, B and C. The embedding has one."""
    hand = ByHand(checkpoints["swa_ssm-plain"].path)
    hand.admit(1)
    summed: list[tuple[int, ...]] = []
    groups = {id(group): group for m in hand.model.modules() if (group := getattr(m, "tp", None)) is not None}
    for group in groups.values():
        object.__setattr__(group, "size", 2)  # a group of one rank sums nothing
    monkeypatch.setattr(TPGroup, "all_gather_last", lambda group, x: x)
    monkeypatch.setattr(TPGroup, "all_reduce", lambda group, x: summed.append(tuple(x.shape)) or x)
    hand.extend(Row(1, 0, [5, 6, 7]))
    selections = [shape for shape in summed if shape[1] != 32]
    assert len(summed) - len(selections) == 1 + 2 * 4 and selections == [(3, 2 + 6 + 6)] * 2


def test_history_has_no_ring_and_no_backend_to_choose(checkpoints: CheckpointStore) -> None:
    path = str(checkpoints["swa_ssm-plain"].path)
    with pytest.raises(ConfigError, match="replay"):
        load_target(EngineConfig(path, device="cpu", state_mode="replay"), TPGroup())
    with pytest.raises(BackendError, match="the model has mamba1, prefix_sum layers"):
        ByHand(Path(path), linear_attn_backend="mamba1")


def test_sums_stay_float32_in_a_narrow_pool(tmp_path: Path) -> None:
    write(swa_ssm(history_mode=["enabled", "prefix_sum"], num_hidden_layers=2), tmp_path)
    hand = ByHand(tmp_path, mamba_ssm_dtype="bfloat16")
    assert [hand.mamba.layer_cache(i).temporal.dtype for i in (0, 1)] == [torch.bfloat16, torch.float32]


def test_a_checkpoint_may_hold_branches_that_are_switched_off(tmp_path: Path, checkpoints: CheckpointStore) -> None:
    config = json.loads((checkpoints["swa_ssm-plain"].path / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(checkpoints["swa_ssm-plain"].path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"history_mode": "disabled"}))
    hand = ByHand(tmp_path)
    assert hand.pools.req_to_token.mamba_pool is None and hand.plan.num_slots == 0
    hand.admit(1)
    assert hand.extend(Row(1, 0, [5, 6, 7])).isfinite().all()
