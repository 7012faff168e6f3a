"""A graph's replay is the eager step padded to the same bucket, bit for bit, and touches nothing but its rows."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.runtime.replay.graph_runner import CudaGraphRecorder, GraphRunner
from hybridrt.runtime.step.plan import DecodeRow, DecodeRows
from tests.gpu.rig import DECODING, DEVICE, PRODUCTION, VERIFYING, Owned, Rows, changed_entries, pool_tensors, same_bits
from tests.support.checkpoints import CheckpointStore
from tests.support.decode_rows import rows_of

pytestmark = PRODUCTION
LENGTHS = [1 + 7 * i % 40 for i in range(17)]  # more rows than the bucket of 16 holds


class Twin:
    """Runs one decode or verify step twice from the same pools: as a replay, and eagerly with the same padding."""

    def __init__(self, rows: Rows, tokens: int) -> None:
        self.rows, self.tokens = rows, tokens
        self.runner = rows.runner
        self.graphs: GraphRunner = self.runner.graphs[tokens]
        self.tensors = pool_tensors(self.runner.pools)
        self.before = self.snapshot()

    def snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def restore(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(self.before[name])

    def inputs(self, chosen: list[int]) -> DecodeRows:
        """A step of the chosen rows, each with a random number of random drafts."""
        counts = [self.rows.random.randint(0, self.tokens - 1) for _ in chosen]
        return DecodeRows.from_rows(
            DecodeRow(row, self.rows.computed[row], 0, self.rows.prompt(count)) for row, count in zip(chosen, counts)
        )

    def last_pages(self, inputs: DecodeRows) -> np.ndarray:
        """The pages of each row's last draft, [n, G] int32. Every page is known already; a graph must cope with hearing
        of one again."""
        return np.array([self.page(r.row, r.computed + len(r.drafts)) for r in rows_of(inputs)], np.int32)

    def page(self, row: int, position: int) -> list[int]:
        """The KV page of a position in each page group; -1 in a model without attention, whose requests have none."""
        pages = self.rows.pages[row]
        return pages[position // self.runner.memory_plan.page_size].tolist() if len(pages) else [-1]

    @torch.inference_mode()
    def replay(self, inputs: DecodeRows, bucket: int, accepted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of the real rows, and the pools after the step and its commit."""
        self.graphs.bucket = lambda rows: bucket  # type: ignore[method-assign]
        logits = self.graphs.replay(inputs, self.last_pages(inputs)).clone()
        if self.tokens > 1:
            self.runner.backend.commit(self.graphs.prepared, accepted)
        return logits, self.snapshot()

    @torch.inference_mode()
    def eager(self, inputs: DecodeRows, bucket: int, accepted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        batch = self.batch(inputs, bucket)
        self.runner.backend.prepare(batch)
        logits = self.runner.model.logits(self.runner.model(batch))
        self.runner.backend.commit(batch, accepted if self.tokens > 1 else None)
        return logits[: len(inputs) * self.tokens], self.snapshot()

    def batch(self, inputs: DecodeRows, bucket: int) -> ForwardBatch:
        """The step as an eager batch of `bucket` rows: padding rows are row 0, padding drafts the root once more."""
        device, tokens, padding = self.runner.device, self.tokens, bucket - len(inputs)

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        found = [*rows_of(inputs), *[DecodeRow(0, 0, 0)] * padding]
        rows, seq_lens = int32([r.row for r in found]), int32([r.computed + tokens for r in found])
        counts = int32([len(r.drafts) for r in found])
        offsets = torch.arange(tokens, dtype=torch.int32, device=device)
        positions = seq_lens[:, None] - tokens + offsets
        drafts = int32([t for r in found for t in [*r.drafts, *[0] * (tokens - 1 - len(r.drafts))]]).view(bucket, -1)
        roots = self.runner.last_tokens[rows, None]
        ids = torch.cat((roots, torch.where(offsets[1:] <= counts[:, None], drafts, roots)), 1)
        token_rows = torch.where(offsets <= counts[:, None], rows[:, None], 0)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if tokens > 1 else ForwardMode.DECODE,
            input_ids=ids.view(-1),
            positions=positions.view(-1),
            req_pool_indices=rows,
            seq_lens=seq_lens,
            query_start_loc=torch.arange(bucket + 1, dtype=torch.int32, device=device) * tokens,
            out_cache_loc=self.runner.pools.req_to_token.token_slots(token_rows, positions).view(-1),
            num_real=len(inputs),
            num_decode_rows=bucket,
            attn_backend=self.runner.backend,
            spec_info=SpecInfo(tokens, num_drafts=counts) if tokens > 1 else None,
        )

    def check(self, bucket: int, real: int) -> None:
        """`real` random rows in the graph of `bucket` rows."""
        what = f"{real} rows in the bucket of {bucket}"
        inputs = self.inputs(self.rows.random.sample(range(1, len(LENGTHS) + 1), real))
        kept = [self.rows.random.randint(1, 1 + count) for count in inputs.num_drafts.tolist()]
        accepted = torch.tensor([*kept, *[0] * (bucket - real)], dtype=torch.int32, device=self.runner.device)
        self.restore()
        logits, after = self.replay(inputs, bucket, accepted)
        self.restore()
        wanted_logits, wanted = self.eager(inputs, bucket, accepted)
        assert logits.isfinite().all(), what
        assert same_bits(logits, wanted_logits), f"{what}: logits"
        touched = self.touched(inputs)
        for name, tensor in after.items():
            assert not changed_entries(wanted[name], tensor), f"{what}: {name} differs"
            if name == "slabs":
                others = self.owned(inputs).others_changed(self.before[name], tensor)
                assert not others, f"{what}: {others} bytes of others' pages and slots changed"
                continue
            changed = changed_entries(self.before[name], tensor)
            allowed = touched.get(name.partition(" of ")[0], set())
            assert changed <= allowed, f"{what}: {name}, entries {changed}"

    def pages_of(self, inputs: DecodeRows) -> list[set[int]]:
        """The pages of each page group that a step of these rows may change."""
        places = [self.page(r.row, r.computed + i) for r in rows_of(inputs) for i in range(len(r.drafts) + 1)]
        return [{*group} for group in zip(*places)]

    def slots_of(self, inputs: DecodeRows) -> set[int]:
        return {self.rows.slots[row - 1] for row in inputs.rows.tolist()}

    def owned(self, inputs: DecodeRows) -> Owned:
        return Owned(self.runner.pools, self.pages_of(inputs), self.slots_of(inputs))

    def touched(self, inputs: DecodeRows) -> dict[str, set[int]]:
        """Entries that a step of these rows may change. Padding leaves no trace."""
        rows, pages = {*inputs.rows.tolist()}, self.pages_of(inputs)
        groups = self.runner.pools.kv.tensor_groups
        of_rows = ("ring start", "ring length", "ring_values", "ring_keys", "ring_gates", "intermediate_ssm")
        return (
            {f"KV tensor {i}": pages[group] for i, group in enumerate(groups)}
            | dict.fromkeys(("conv", "temporal"), self.slots_of(inputs))
            | dict.fromkeys(of_rows, rows)
        )


def make_twin(path: Path, tokens: int, **config: Any) -> Twin:
    """Rows whose state rings have many lengths, some about to be folded."""
    rows = Rows(path, LENGTHS, cuda_graph_max_bs=16, **config)
    for row in range(1, len(LENGTHS) + 1):
        for _ in range(row):
            rows.decode(row)
    return Twin(rows, tokens)


def check_all(path: Path, tokens: int, **config: Any) -> None:
    twin = make_twin(path, tokens, **config)
    pairs = [(bucket, real) for bucket in (16, 8, 4, 2, 1) for real in range(1, bucket + 1)]
    for bucket, real in pairs:
        twin.check(bucket, real)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "state_mode"), DECODING)
def test_decode(name: str, state_mode: str, dtype: str, checkpoints: CheckpointStore) -> None:
    check_all(checkpoints[name].path, 1, state_mode=state_mode, dtype=dtype)


@pytest.mark.parametrize(("name", "state_mode"), VERIFYING)
def test_verify(name: str, state_mode: str, checkpoints: CheckpointStore) -> None:
    check_all(checkpoints[name].path, 4, speculative=SpeculativeConfig(num_draft_tokens=3, state_mode=state_mode))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "state_mode"), DECODING)
@torch.inference_mode()
def test_a_thousand_replays_are_alike(name: str, state_mode: str, dtype: str, checkpoints: CheckpointStore) -> None:
    """Kernels of a step that start before the one in front has ended would read what it has not written yet."""
    twin = make_twin(checkpoints[name].path, 1, state_mode=state_mode, dtype=dtype)
    inputs = twin.inputs(list(range(1, 14)))
    different = torch.zeros((), dtype=torch.int64, device=twin.runner.device)
    first = twin.graphs.replay(inputs).clone()
    for _ in range(1000):
        twin.restore()
        different += (twin.graphs.replay(inputs) != first).any()
    assert first.isfinite().all() and not different


def test_garbage_outlives_a_capture() -> None:
    """A graph that becomes garbage while another is captured, as that of an engine let go, is not destroyed then."""
    x = torch.zeros(4, device=DEVICE)
    add: Any = lambda: x.add_(1)  # noqa: E731
    old: list[Any] = [CudaGraphRecorder(torch.device("cuda"))(add) for _ in range(2)]
    kept: list[list[int]] = []

    def step() -> None:
        cycle = [old.pop()]
        cycle.append(cycle)
        del cycle
        kept.extend([] for _ in range(10 * gc.get_threshold()[0]))  # enough for a collection
        x.add_(1)

    replay = CudaGraphRecorder(torch.device("cuda"))(step)
    assert gc.isenabled() and not old
    x.zero_()
    replay()
    assert x.tolist() == [1.0] * 4
