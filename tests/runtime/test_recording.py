"""Recorded operations against the operations themselves."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from hybridrt.runtime.replay.recording import Recording

MOST = 1 << 20


def record(recording: Recording, step: Callable[[], torch.Tensor]) -> torch.Tensor:
    with recording:
        return step()


class Step:
    """One of many sorts of operations; its inputs stand in `x` and `index`, and it changes `state`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x, self.index = torch.randn(3, 8), torch.tensor([2], dtype=torch.int32)
        self.state, self.place, self.weight = torch.zeros(4, 8), torch.empty(3, 16), torch.randn(16, 8)
        self.recording: Recording | None = None
        self.calls = 0

    def __call__(self) -> torch.Tensor:
        h = F.linear(self.x, self.weight)  # made of others
        first, second = h.split(8, dim=-1)  # views
        torch.mul(h, 2.0, out=self.place)
        self.state.index_add_(0, self.index, first[:1])
        self.state[1:].mul_(0.5)
        values, best = second.topk(2, -1)  # several results
        copied = self.x.t().contiguous()
        looked = self.recording.call_again(self.look) if self.recording else self.look()
        total_bits = (self.x.int() << 1).sum()  # its method returns what it cannot do
        scratch = h.new_empty(3, 8).copy_(second)
        total = torch.cat((scratch, first, looked.expand(3, 8)), -1).sum(-1, keepdim=True) + total_bits
        return F.silu(total + values + best + copied[:2].t() + self.place[:, :2])

    def look(self) -> torch.Tensor:
        """As many rows as the index says."""
        self.calls += 1
        return self.state[: int(self.index)].sum(0)


@torch.inference_mode()
def test_repeats_all_sorts_of_operations() -> None:
    recorded, expected, recording = Step(), Step(), Recording(MOST)
    recorded.recording = recording
    result = record(recording, recorded)
    assert recording.problem is None and recording.bytes > 0
    assert torch.equal(result, expected())
    for i in (3, 1, 2):
        for step in (recorded, expected):
            step.x.copy_(torch.arange(24).view(3, 8) / i)
            step.index.fill_(i)
        recording.repeat()
        assert torch.equal(result, expected())
        assert torch.equal(recorded.state, expected.state)
    assert recorded.calls == expected.calls == 4


@torch.inference_mode()
def test_repeats_no_views() -> None:
    recording, x = Recording(MOST), torch.ones(2, 6)
    record(recording, lambda: x.t().reshape(3, 4)[1:].unflatten(1, (2, 2)).unbind(0)[0] + 1)
    assert len(recording._calls) == 2  # the copy of `reshape`, and the addition


@cache
def twice() -> Callable[[torch.Tensor], torch.Tensor]:
    """Made where it is used: it loads torch's compiler."""

    @torch.library.custom_op("hybridrt_tests::twice", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return double


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (lambda x: x * x[0].item(), "_local_scalar_dense cannot be repeated"),
        (lambda x: x * x.tolist()[0], "cannot be repeated"),
        (lambda x: x * float(x.numpy()[0]), "cannot be repeated"),
        (lambda x: x * 2 if x[0] > 0 else x, "_local_scalar_dense cannot be repeated"),
        (lambda x: twice()(x), "hybridrt_tests::twice cannot be repeated"),
        (lambda x: x.nonzero(), "nonzero cannot be repeated"),
        (lambda x: torch.where(x > 2)[0], "nonzero cannot be repeated"),
        (lambda x: x[x > 2].sum(), "index cannot be repeated"),
        (lambda x: x.masked_select(x > 2), "masked_select cannot be repeated"),
        (lambda x: x.unique(), "_unique2 cannot be repeated"),
        (lambda x: x.repeat_interleave(x.long()), "repeat_interleave cannot be repeated"),
        (lambda x: (x + x.view(3, 1)).t_(), "t_ cannot be repeated"),
        (lambda x: torch.bincount(x.long()), "bincount cannot be repeated"),
        (lambda x: torch.tensor([1.0, 1.0, 1.0]).add_(x), "lift_fresh cannot be repeated"),
        (lambda x: x.new_tensor([1.0, 1.0, 1.0]).add_(x), "lift_fresh cannot be repeated"),
        (lambda x: x.to_mkldnn().to_dense() * 2, "it makes no dense tensors"),
        (lambda x: x.repeat(MOST)[:3] * 2, "take more than 1048576 bytes"),
    ],
)
@torch.inference_mode()
def test_says_what_cannot_be_repeated(step: Callable[[torch.Tensor], torch.Tensor], problem: str) -> None:
    """The step itself runs to its end."""
    recording, x = Recording(MOST), torch.tensor([2.0, 3.0, 4.0])
    assert torch.equal(record(recording, lambda: step(x)), step(x))
    assert recording.problem is not None and problem in recording.problem


@pytest.mark.parametrize("draw", [torch.rand_like, torch.bernoulli, lambda x: x.clone().uniform_(), F.dropout])
@torch.inference_mode()
def test_draws_cannot_be_repeated(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """To record a step draws once: what the generator gives next is as without a recording."""
    recording, x = Recording(MOST), torch.full((8,), 0.5)
    found = []
    for run in (lambda: draw(x), lambda: record(recording, lambda: draw(x))):
        torch.manual_seed(0)
        found.append((run(), torch.rand(1)))
    assert all(map(torch.equal, *found))
    assert recording.problem is not None and "cannot be repeated" in recording.problem


@torch.inference_mode()
def test_repeats_look_ups_by_numbers() -> None:
    """Only masks leave results of unknown size."""
    recording, x, index = Recording(MOST), torch.arange(6.0).view(2, 3), torch.tensor([1, 0])
    mask = torch.tensor([True, False])

    def step() -> torch.Tensor:
        changed = x.clone()
        changed.index_put_((mask,), x[0, 0])
        return changed[index, :, None] + x[:, index].sum()

    result = record(recording, step)
    index.fill_(1)
    mask.fill_(True)
    recording.repeat()
    assert recording.problem is None and torch.equal(result, step())
