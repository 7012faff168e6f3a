"""Planning: a step prepared before the one in front of it has run, graphs by hand, and every spelling of the hooks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrt.attention.base import AttentionInputs
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, GraphView
from hybridrt.recurrent import backend as linear
from hybridrt.recurrent.gdn import GDNAttnBackend
from tests.support.by_hand import ByHand, Row, assert_close
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import sweep

MODELS = ["falcon-plain", "qwen-plain", "falcon_mamba-plain"]
STEPS = [
    (name, mode, tokens)
    for name in MODELS
    for mode, tokens in (("classic", 1), ("replay", 1), ("intermediate", 3), ("replay", 3))
    if mode != "replay" or name != "falcon_mamba-plain"
]
PROMPTS = {1: [5, 6, 7, 8, 9], 2: [11, 12]}


def started(checkpoints: CheckpointStore, name: str, mode: str, tokens: int = 1) -> ByHand:
    hand = ByHand(checkpoints[name].path, mode=mode, tokens=tokens, rows=3)
    hand.admit(1, 2, 3)
    hand.extend(*(Row(row, 0, prompt) for row, prompt in PROMPTS.items()))
    return hand


def fill(batch: ForwardBatch, source: ForwardBatch) -> None:
    """What the device writes into a step once the one in front of it has been accepted; the host's bounds stay."""
    for name in ("input_ids", "positions", "seq_lens", "out_cache_loc"):
        getattr(batch, name).copy_(getattr(source, name))


@pytest.mark.parametrize(("name", "mode", "tokens"), sweep(STEPS, 4, thin=3))
def test_preparing_a_step_ahead_changes_nothing(
    name: str, mode: str, tokens: int, checkpoints: CheckpointStore
) -> None:
    """Step n + 1 is prepared, with upper bounds of its lengths, before step n runs; a prompt chunk comes in between."""
    ahead, plain = (started(checkpoints, name, mode, tokens) for _ in range(2))
    lengths, bounds = {1: 5, 2: 2}, {1: 5, 2: 2}

    def batch(hand: ByHand, step: int, lens: dict[int, int]) -> ForwardBatch:
        chunk = [Row(3, step, [step + 1])] if step in (3, 4) else []
        return hand.batch([Row(row, n, [step + row, 7, 8][:tokens]) for row, n in lens.items()], chunk)

    following = batch(ahead, 0, bounds)
    ahead.backend.prepare(following)
    for step in range(20):
        accepted = [1 + (step + row) % tokens for row in lengths]
        bounds = {row: n + tokens for row, n in lengths.items()}
        current, following = following, batch(ahead, step + 1, bounds)
        ahead.backend.prepare(following)
        wanted = plain.forward(batch(plain, step, lengths))
        plain.commit(accepted if tokens > 1 else None)
        with torch.inference_mode():
            fill(current, batch(ahead, step, lengths))
            got = ahead.model.logits(ahead.model(current))
            ahead.backend.commit(current, torch.tensor(accepted, dtype=torch.int32) if tokens > 1 else None)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)  # bounds of lengths round sums in other ways
        lengths = {row: n + kept for (row, n), kept in zip(lengths.items(), accepted)}
    for row, length in lengths.items():
        assert_close(ahead.state(row, length), plain.state(row, length))


def test_a_graph_is_prepared_behind_what_it_reads(checkpoints: CheckpointStore) -> None:
    """Its buffers are filled at once: a step in front of it must have been committed."""
    hand = started(checkpoints, "falcon-plain", "replay")
    view = hand.backend.init_cuda_graph_state(2, 2)
    first = hand.batch([Row(1, 5, [4])])
    hand.forward(first)
    following = hand.batch([Row(1, 6, [4]), Row(2, 2, [4])])
    with pytest.raises(BackendError, match="call commit"):
        hand.backend.prepare(following, graph=view)
    hand.commit()
    hand.backend.prepare(following, graph=view)


def test_the_first_layer_of_an_eager_step_may_read_its_metadata_early(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last kernel that starts alone has written may not be visible yet (pdl_triton): the one that fills the
    metadata is not the last."""
    hand, found = started(checkpoints, "qwen-plain", "replay"), list[str]()

    def note(place: Any, name: str) -> None:
        called = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args: (found.append(name), called(*args))[1])

    filler = hand.backend.linear_attn_backend
    for place, name in ((filler, "fill_decode_metadata"), (linear, "end_launches"), (GDNAttnBackend, "decode")):
        note(place, name)
    hand.forward(hand.batch([Row(1, 5, [4])]))
    assert found[:3] == ["fill_decode_metadata", "end_launches", "decode"]
    with Launches() as launches:
        linear.end_launches(torch.device("meta"))
    assert launches.names


class Launches(TorchDispatchMode):
    """Notes the operations of PyTorch that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.name.startswith("aten::empty"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rows", "tokens"), [(3, 1), (2, 3)])
def test_a_view_lists_what_it_holds(rows: int, tokens: int, checkpoints: CheckpointStore) -> None:
    hand = started(checkpoints, "falcon-plain", "replay", 3)
    view = hand.backend.init_cuda_graph_state(2, 2)
    batch = hand.batch([Row(row, 5, [4] * tokens) for row in (1, 2, 3)[:rows]])
    with pytest.raises(BackendError, match=f"{rows} rows of {tokens} tokens in a view of graphs of up to 2 rows of 1"):
        hand.backend.prepare(batch, graph=view)


def test_a_step_that_nothing_has_planned_is_an_error(checkpoints: CheckpointStore) -> None:
    hand = started(checkpoints, "falcon-plain", "replay")
    batch = hand.batch([Row(1, 5, [4])])
    for forgotten in (batch, replace(hand.last_batch)):
        with pytest.raises(BackendError, match=r"call prepare\(batch\)"):
            hand.model(forgotten)
    with pytest.raises(BackendError, match=r"call prepare\(batch\)"):
        hand.backend.commit(batch)
    with pytest.raises(BackendError, match=r"call commit\(batch\)"):
        hand.backend.commit_decode()
    hand.backend.prepare(batch)
    with pytest.raises(BackendError, match="after the step's last layer"):
        hand.backend.commit(batch)


def test_a_refused_step_is_prepared_again(checkpoints: CheckpointStore) -> None:
    hand = started(checkpoints, "falcon-plain", "replay")
    first, second = hand.batch([Row(1, 5, [4])]), hand.batch([Row(1, 6, [4])])
    hand.forward(first)
    with pytest.raises(BackendError, match="call commit"):
        hand.forward(second)
    hand.backend.commit(first)
    with pytest.raises(BackendError, match=r"call prepare\(batch\)"):
        hand.model(second)
    hand.forward(second)
    hand.commit()


# -- three spellings ------------------------------------------------------------------------------------------------


class Spelling:
    """The hooks under their own names. `view` is that of graphs of two rows."""

    def __init__(self, hand: ByHand) -> None:
        self.backend: Any = hand.backend
        self.view: GraphView = hand.backend.init_cuda_graph_state(2, 2 * hand.tokens)

    def eager(self, batch: ForwardBatch) -> None:
        self.backend.prepare(batch)

    def capture(self, batch: ForwardBatch) -> None:
        self.backend.prepare(replace(batch, num_real=0), graph=self.view)

    def replay(self, batch: ForwardBatch) -> None:
        self.backend.prepare(batch, graph=self.view)

    def in_graph(self, batch: ForwardBatch) -> None:
        pass

    def commit(self, batch: ForwardBatch, accepted: Tensor | None) -> None:
        self.backend.commit(batch, accepted)


class TensorHooks(Spelling):
    """The hooks of graphs get tensors, and the batch of the layers is another."""

    def eager(self, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata(batch)

    def capture(self, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata_capture_cuda_graph(
            batch.batch_size, len(batch.input_ids), batch.req_pool_indices, batch.seq_lens, batch.forward_mode,
            batch.spec_info,
        )  # fmt: skip

    def replay(self, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata_replay_cuda_graph(
            batch.batch_size, batch.num_real, batch.req_pool_indices, batch.seq_lens, batch.forward_mode,
            batch.spec_info, None,
        )  # fmt: skip

    def commit(self, batch: ForwardBatch, accepted: Tensor | None) -> None:
        if accepted is None:
            self.backend.commit_decode()
        else:
            self.backend.update_mamba_state_after_mtp_verify(accepted)


class BatchHooks(TensorHooks):
    """The hooks of graphs get the batch, one outside the graph and one inside it."""

    def capture(self, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def replay(self, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata_out_graph(batch, in_capture=False)

    def in_graph(self, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata_in_graph(batch)


@pytest.mark.parametrize("spelling", [Spelling, TensorHooks, BatchHooks])
@pytest.mark.parametrize(("mode", "tokens"), [("replay", 1), ("replay", 3)])
def test_every_spelling_does_the_same(
    spelling: Callable[[ByHand], Spelling], mode: str, tokens: int, checkpoints: CheckpointStore
) -> None:
    """Eager steps and replays by turns, against a twin that is driven by `prepare` without graphs."""
    hand, plain = (started(checkpoints, "falcon-plain", mode, tokens) for _ in range(2))
    hooks, lengths = spelling(hand), {1: 5, 2: 2}
    accepted = [1, 1] if tokens == 1 else [2, 1]

    def batch(of: ByHand, real: int = 2) -> ForwardBatch:
        rows = [Row(row, n, [n + row, 7, 8][:tokens]) for row, n in lengths.items()]
        return of.batch(rows[:real], padding=2 - real)

    def layers(step: ForwardBatch, in_graph: bool) -> Tensor:
        if in_graph:
            hooks.in_graph(step)
        logits = hand.model.logits(hand.model(step))
        if in_graph and tokens == 1:
            hand.backend.commit(step)  # a plain step's graph commits within it
        return logits

    before, static = hand.snapshot(), batch(hand)
    static.seq_lens_cpu = None
    static.out_cache_loc.zero_()
    with torch.inference_mode():
        hooks.capture(static)
        if isinstance(hooks, TensorHooks):
            layers(static, True)
    assert not any(hand.touched(before).values())
    for step, real in enumerate((2, 1, 2, 2, 1, 2)):
        kept = torch.tensor([*accepted[:real], *[0] * (2 - real)], dtype=torch.int32) if tokens > 1 else None
        wanted = plain.forward(batch(plain, real))
        plain.backend.commit(plain.last_batch, kept)
        current = batch(hand, real)
        with torch.inference_mode():
            if in_graph := step % 2 == 0:
                fill(static, current)
                static.req_pool_indices.copy_(current.req_pool_indices)
                static.num_real = real
                hooks.replay(current := static)
            else:
                hooks.eager(current)
            got = layers(current, in_graph)
            if tokens > 1 or not in_graph:
                hooks.commit(current, kept)
        torch.testing.assert_close(got[: real * tokens], wanted[: real * tokens], rtol=0, atol=1e-5)
        lengths |= {row: lengths[row] + n for row, n in zip([1, 2][:real], accepted)}


def test_the_fill_value_is_an_attribute_and_a_method(checkpoints: CheckpointStore) -> None:
    backend = ByHand(checkpoints["falcon-plain"].path).backend
    backend.full_attn_backend.seq_len_fill = 4
    assert backend.full_attn_backend.get_cuda_graph_seq_len_fill_value() == 4
    assert backend.get_cuda_graph_seq_len_fill_value() == backend.seq_len_fill == 1


def test_forward_by_segment_is_forward(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch that has this one segment; a batch with both would lose rows."""
    hand, plain = (started(checkpoints, "falcon-plain", "classic") for _ in range(2))
    seen: list[str] = []

    def by_segment(backend: Any, layer: Any, batch: ForwardBatch, inputs: Any, out: Tensor | None = None) -> Tensor:
        """The composite's `run` from outside: a kind's record as keywords."""
        keywords, q, k, v, save = inputs._asdict(), None, None, None, True
        if isinstance(inputs, AttentionInputs):
            (q, k, v, save, rope) = inputs
            keywords = {"rope": rope}
        good, bad = ("decode", "extend") if batch.num_decode_rows else ("extend", "decode")
        with pytest.raises(BackendError, match="call forward"):
            getattr(backend, f"forward_{bad}")(q, k, v, layer, batch, save, out=out, **keywords)
        seen.append(good)
        found: Tensor = getattr(backend, f"forward_{good}")(q, k, v, layer, batch, save, out=out, **keywords)
        return found

    wanted = plain.decode(Row(1, 5, [4])), plain.extend(Row(3, 0, [4, 5]))
    monkeypatch.setattr(type(hand.backend), "run", by_segment)
    got = hand.decode(Row(1, 5, [4])), hand.extend(Row(3, 0, [4, 5]))
    assert all(map(torch.equal, got, wanted)) and set(seen) == {"decode", "extend"}
