"""What we hand to flashinfer and sglang-kernel, held against stand-ins in plain torch: pages, plans, windows."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.step_peers import register_peers
from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import SpecInfo
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.attention.paged_attention import attention_decode, attention_extend
from hybridrt.kernels.core import providers
from hybridrt.kernels.core.providers import select
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import Admission, DecodeRow, DecodeRows, ExtendRow, PageWrite, StepPlan
from tests.attention.test_backends_verify import random_tokens
from tests.runtime.test_graph_runner import inputs_of, runner_of
from tests.support.by_hand import ByHand, Row
from tests.support.checkpoints import CheckpointStore
from tests.support.fake_libraries import installed
from tests.support.flat import flat
from tests.support.page_sets import page_sets
from tests.support.tiny import write_tiny

BACKENDS = ("fa3", "flashinfer")
MODEL = "falcon-norm_after_gate"


@pytest.fixture(autouse=True)
def _stand_ins() -> Iterator[None]:
    with installed():
        yield


def both(checkpoints: CheckpointStore, backend: str, **changes: Any) -> tuple[ByHand, ByHand]:
    """The same model and prompts with a library's attention, and with plain torch."""
    made = []
    for name in (backend, "torch"):
        hand = ByHand(checkpoints[MODEL].path, attention_backend=name, **changes)
        hand.admit(1, 2, 4)
        made.append(hand)
    return made[0], made[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_of_every_kind(backend: str, checkpoints: CheckpointStore) -> None:
    """Prompts, later chunks, a last chunk of one token, decode rows next to them, padding rows in each."""
    hand, plain = both(checkpoints, backend)
    generator = torch.Generator().manual_seed(3)
    long, short, other = (random_tokens(generator, n) for n in (21, 3, 9))
    for step in (
        lambda h: h.extend(Row(1, 0, long), Row(2, 0, short), padding=2),
        lambda h: h.extend(Row(1, 21, other), padding=1),
        lambda h: h.decode(Row(2, 3, [7]), Row(1, 30, [8])),
        lambda h: h.decode(Row(1, 31, [9]), extend=[Row(4, 0, short), Row(2, 4, [5])], padding=1),
        lambda h: h.extend(Row(4, 3, [6])),
        lambda h: h.decode(Row(4, 4, [5]), Row(2, 5, [4]), padding=2),
    ):
        torch.testing.assert_close(step(hand), step(plain), rtol=0, atol=1e-5)


def test_flash_attention_copies_long_prompts_of_codes(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernels compute short prompts and decode."""
    hand, plain = both(checkpoints, "fa3", kv_cache_dtype="fp8_e4m3")
    library, copied = importlib.import_module("hybridrt.kernels.libraries.sgl_kernel"), list[int]()
    monkeypatch.setattr(library, "COPY_FROM", 6)
    pages = library._pages
    monkeypatch.setattr(library, "_pages", lambda *args: copied.append(1) or pages(*args))
    for step, copies in (
        (lambda h: h.extend(Row(1, 0, [*range(5, 25)]), padding=2), True),
        (lambda h: h.extend(Row(1, 20, [7, 8])), False),
        (lambda h: h.decode(Row(1, 22, [9]), extend=[Row(4, 0, [*range(9, 20)])]), True),
        (lambda h: h.decode(Row(1, 23, [9]), Row(4, 11, [3])), False),
    ):
        copied.clear()
        torch.testing.assert_close(step(hand), step(plain), rtol=0, atol=1e-5)
        assert bool(copied) == copies


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_steps(backend: str, checkpoints: CheckpointStore) -> None:
    hand, plain = both(checkpoints, backend, tokens=4, mode="replay")
    for each in (hand, plain):
        each.extend(Row(1, 0, [5, 6, 7, 8, 9]), Row(2, 0, [5]))
    for computed in ((5, 1), (7, 3)):
        rows = [Row(1, computed[0], [5, 6, 7, 8]), Row(2, computed[1], [8, 7, 6, 5])]
        got, wanted = (h.verify(rows, [2, 2], padding=1)[:8] for h in (hand, plain))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_graphs(backend: str, tokens: int, checkpoints: CheckpointStore) -> None:
    """Replays of several buckets in turn, whose buffers are spoiled in between."""
    hand, plain = both(checkpoints, backend, tokens=tokens, mode="replay")
    graphs = runner_of(hand, max_bs=4)
    for each in (hand, plain):
        each.extend(Row(1, 0, [5] * 6), Row(2, 0, [6] * 11), Row(4, 0, [7] * 3))
    computed = {1: 6, 2: 11, 4: 3}
    for step in range(9):
        rows = [Row(row, computed[row], [10 + row, 7, 8][:tokens]) for row in (1, 2, 4)[: step % 3 + 1]]
        got = graphs.replay(inputs_of(rows, tokens)).clone()
        if tokens == 1:
            wanted = plain.decode(*rows)
        else:
            hand.commit([2] * len(rows))
            wanted = plain.verify(rows, [2] * len(rows))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        computed |= {row.row: row.computed + min(tokens, 2) for row in rows}


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_that_arrive_with_the_step(backend: str, tmp_path: Path) -> None:
    """A graph writes a row's new page into the table itself, after the step was planned."""
    path, tokens = str(write_tiny(tmp_path, tokenizer=False)), {}
    for name, graphs in ((backend, True), ("torch", False)):
        config = EngineConfig(
            path, device="cpu", load_format="dummy", max_model_len=32, max_running_requests=2, page_size=2,
            attention_backend=name, speculative=SpeculativeConfig(num_draft_tokens=1), cuda_graph_prompts=False,
        )  # fmt: skip
        runner = ModelRunner(config)
        if graphs:
            runner.capture()
        prompt = [5, 6, 7]
        start = StepPlan(
            [Admission.from_prompt(1, 1, prompt, SamplingParams(temperature=0.0), 1)],
            [PageWrite(1, 0, page_sets([9, 4]))],
            extend=[ExtendRow(1, 0, prompt, 0, True)],
        )  # fmt: skip
        runner.launch(start).result()
        found = tokens.setdefault(name, [])
        for computed, page in ((3, 4), (4, 12), (5, 12), (6, 3), (7, 3)):
            writes = [PageWrite(1, computed // 2, page_sets([page]))] if computed % 2 == 0 else []
            found += (
                runner.launch(StepPlan(page_writes=writes, decode=DecodeRows.from_rows([DecodeRow(1, computed, 0)])))
                .result()
                .tokens
            )
    assert tokens[backend] == tokens["torch"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_draft_trees_are_refused(backend: str, checkpoints: CheckpointStore) -> None:
    hand, _ = both(checkpoints, backend, tokens=2, mode="intermediate", topk=2)
    tree = SpecInfo(2, torch.tensor([[-1, 0]], dtype=torch.int32), torch.ones(1, 2, 2, dtype=torch.bool).tril())
    with pytest.raises(BackendError, match="verifies no drafts that fork"):
        hand.forward(hand.batch([Row(1, 0, [5, 6])], spec=tree))


def paged(lengths: list[int]) -> dict[str, Any]:
    pages = (torch.randperm(40) + 1).view(4, 10)
    table = torch.zeros(5, 40, dtype=torch.int32)
    table[1:] = (pages[:, :, None] * 4 + torch.arange(4)).view(4, 40)
    k, v = torch.randn(2, 41, 4, 2, 8)
    rows = torch.tensor([3, 1, 4, 2], dtype=torch.int32)[: len(lengths)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return {"k_cache": k, "v_cache": v, "req_to_token": table, "rows": rows, "seq_lens": seq_lens, "scale": 0.4}


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("provider", ["sgl_kernel", "sgl_kernel copied", "flashinfer"])
def test_extend_with_windows_and_surplus_tokens(
    provider: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(providers, "_IMPLEMENTATIONS", {op: dict(by) for op, by in providers._IMPLEMENTATIONS.items()})
    register_peers()
    provider, _, copied = provider.partition(" ")
    if copied:
        monkeypatch.setattr(importlib.import_module("hybridrt.kernels.libraries.sgl_kernel"), "COPY_FROM", 0)
    new, lengths = [7, 1, 12], [7, 30, 40]
    args = paged(lengths) | {
        "q": torch.randn(23, 6, 8), "query_start_loc": torch.tensor([0, 7, 8, 20], dtype=torch.int32),
        "query_lens": new, "seq_lens_host": lengths, "sliding_window": window,
    }  # fmt: skip
    op, want = select("attention_extend", "cpu", provider), flat(attention_extend.reference, **args)
    torch.testing.assert_close(flat(op, **args), want, rtol=0, atol=1e-5)
    place = torch.full((23, 50), torch.nan)[:, :48].unflatten(1, (6, 8))
    assert flat(op, **args, out=place) is place
    torch.testing.assert_close(place, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("max_len", [None, 33])
def test_decode_with_windows(window: int | None, max_len: int | None) -> None:
    torch.manual_seed(0)
    args = paged([33, 4, 17]) | {"q": torch.randn(3, 2, 6, 8), "sliding_window": window, "max_len": max_len}
    got = flat(select("attention_decode", "cpu", "sgl_kernel"), **args)
    torch.testing.assert_close(got, flat(attention_decode.reference, **args), rtol=0, atol=1e-5)


def test_conv_of_prompts() -> None:
    """Rows shorter than the window, a start at position 0, a later chunk, padding, tokens past the last row."""
    torch.manual_seed(0)
    slots = torch.tensor([4, 1, 2, -1], dtype=torch.int32)
    args = {
        "x": torch.randn(20, 6), "weight": torch.randn(6, 4), "bias": torch.randn(6), "read_state_slots": slots,
        "write_state_slots": slots, "query_start_loc": torch.tensor([0, 2, 3, 15, 18], dtype=torch.int32),
        "start_positions": torch.tensor([0, 9, 5, 0], dtype=torch.int32),
    }  # fmt: skip
    ring = torch.randn(5, 6, 8)
    rings = ring.clone(), ring.clone()
    got = flat(select("causal_conv1d_varlen", "cpu", "sgl_kernel"), **args, conv=rings[0])
    torch.testing.assert_close(got, flat(causal_conv1d_varlen.reference, **args, conv=rings[1]))
    torch.testing.assert_close(*rings)


@pytest.mark.parametrize("reach", [2**32, 5 * 6 * 8 - 1])
@pytest.mark.parametrize("tokens", [1, 3])
def test_conv_of_decode_steps(tokens: int, reach: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rings that are farther apart than the library reaches."""
    module = importlib.import_module("hybridrt.kernels.libraries.sgl_kernel")
    monkeypatch.setattr(module, "REACH", reach)
    update, largest = module.sgl_conv_update, list[int]()
    monkeypatch.setattr(
        module, "sgl_conv_update", lambda x, ring, *more: (largest.append(ring.numel()), update(x, ring, *more))
    )
    torch.manual_seed(0)
    slots = torch.tensor([4, -1, 2], dtype=torch.int32)
    merged = torch.randn(3, tokens, 10)
    args = {
        "x": merged[..., :6], "weight": torch.randn(6, 4), "bias": None, "read_state_slots": slots,
        "write_state_slots": slots, "start_positions": torch.tensor([7, 0, 30], dtype=torch.int32),
    }  # fmt: skip
    ring = torch.randn(5, 6, 8)
    rings = ring.clone(), ring.clone()
    got = flat(select("causal_conv1d_update", "cpu", "sgl_kernel"), **args, conv=rings[0])
    torch.testing.assert_close(got, flat(causal_conv1d_update.reference, **args, conv=rings[1]))
    torch.testing.assert_close(*rings)
    assert largest == [5 * 6 * 8 if reach == 2**32 else 3 * 6 * 8]
    with pytest.raises(BackendError, match="same slot"):
        args |= {"conv": rings[0], "write_state_slots": slots + 0}
        flat(select("causal_conv1d_update", "cpu", "sgl_kernel"), **args)
    for taps in (1, 5):
        with pytest.raises(BackendError, match=f"{taps} taps, from 2 to 4"):
            flat(select("causal_conv1d_update", "cpu", "sgl_kernel"), **args | {"weight": torch.randn(6, taps)})
