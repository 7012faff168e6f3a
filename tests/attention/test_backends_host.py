"""A decode step reads nothing from the device: no operation makes the host wait."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrt.attention import paged
from hybridrt.attention.paged import PagedAttnBackend, PagedMetadata, TorchNativeAttnBackend
from hybridrt.kernels.attention.paged_attention import RowContexts, attend
from tests.runtime.test_graph_runner import inputs_of, runner_of
from tests.support.by_hand import ByHand, Row
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import sweep
from tests.support.session import Session, greedy

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal"}
MODELS = ("falcon-norm_after_gate", "nemotron-plain", "qwen-dense")


class Questions(TorchDispatchMode):
    """Collects the operations that wait for values: `.item()`, `bool(t)`, nonzero, unique, boolean masks as indices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = [t for t in (args[1] if name in ("index", "index_put", "index_put_") else ()) if t is not None]
        if name in WAITING or any(t.dtype in (torch.bool, torch.uint8) for t in masks):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_questions_are_noticed() -> None:
    tensor = torch.arange(3)
    for ask in (lambda: tensor[0].item(), lambda: bool(tensor[1] > 0), lambda: tensor[tensor > 1], tensor.nonzero):
        with Questions() as questions:
            ask()
        assert questions.found
    with Questions() as questions:
        _ = tensor[tensor] + tensor.clamp(min=1)
    assert not questions.found


STATE_WAYS = [("classic", 1), ("replay", 1), ("intermediate", 3), ("replay", 3)]


@pytest.mark.parametrize(("name", "mode", "tokens"), sweep(((n, *way) for n in MODELS for way in STATE_WAYS), 3))
def test_decode_and_verify_steps(name: str, mode: str, tokens: int, checkpoints: CheckpointStore) -> None:
    """Planning, all layers and the commit; eagerly and as a graph, padded."""
    hand = ByHand(checkpoints[name].path, mode=mode, tokens=tokens)
    hand.admit(1, 2, 3)
    hand.extend(*(Row(row, 0, [5, 6, 7]) for row in (1, 2, 3)))
    rows = [Row(row, 3, [10 + row] * tokens) for row in (1, 2, 3)]
    graphs, batch = runner_of(hand), hand.batch(rows, padding=1)
    accepted = torch.tensor([1, 1, 1, 0], dtype=torch.int32) if tokens > 1 else None
    with Questions() as questions, torch.inference_mode():
        graphs.replay(inputs_of(rows, tokens))
        if tokens > 1:
            hand.backend.commit(graphs.prepared, accepted)
        hand.backend.prepare(batch)
        hand.model.logits(hand.model(batch))
        hand.backend.commit(batch, accepted)
    assert not questions.found


@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_sampled_steps_of_the_runner(name: str, checkpoints: CheckpointStore) -> None:
    """Everything between a plan and a handle on its tokens."""
    session = Session(checkpoints[name].path)
    sampler = session._sampler
    engine = session.engine()
    engine.add_request([5, 6, 7], greedy(30))
    engine.add_request([5, 6], greedy(30, presence_penalty=0.5))
    for _ in range(3):
        engine.step()
    session.runner.sampler = sampler
    questions = Questions()
    launch = session.runner.launch

    def watched(plan: Any) -> Any:
        with questions:
            return launch(plan)

    session.runner.launch = watched  # type: ignore[method-assign]
    for _ in range(5):
        engine.step()
    assert not questions.found


@pytest.mark.parametrize(("device", "shared"), [("cpu", True), ("cuda", False)])
def test_layers_share_what_a_step_computes_where_no_graph_can_keep_it(
    device: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step runs once before it is captured: what is kept from that run would be a constant of the graph."""
    monkeypatch.setattr(paged, "Branch", lambda _: None)  # a stream needs a GPU
    monkeypatch.setattr(paged, "select", lambda *_: None)
    pools: Any = SimpleNamespace(device=torch.device(device), specs={}, windows=(None,), tables=torch.zeros(1, 1, 1))
    backend = TorchNativeAttnBackend(kv_pool=pools, req_to_token_pool=pools)
    batch = SimpleNamespace(metadata={}, tokens_per_row=1)
    step = batch.metadata[backend] = PagedMetadata(object(), None)
    monkeypatch.setattr(PagedAttnBackend, "prepare", lambda *_, **__: None)
    backend.prepare(cast(Any, batch))
    assert (bool(step.plans), isinstance(step.decode, RowContexts)) == (shared, shared)
    assert (backend._decode is attend) is shared
