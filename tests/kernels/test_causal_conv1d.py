import pytest
import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.records import ConvState, ConvWeights, IntermediateStates
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen, conv_window
from tests.support.levels import sweep
from tests.support.mamba2_oracle import changed_rows, close, conv_loop, int32, poisoned, same_bytes
from tests.support.tree_paths import ancestry

pytestmark = pytest.mark.usefixtures("provider")
C = 10
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


class Requests:
    """Raw inputs of requests from position 0, of which `computed[b]` stand in the ring and the rest are new."""

    def __init__(
        self, computed: list[int], new: list[int], taps: int = 4, width: int = 8, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(sum(computed) + 31 * sum(new) + taps)
        self.computed, self.new, self.taps, self.width = computed, new, taps, width
        self.history = [torch.randn(c + n, C).to(dtype) for c, n in zip(computed, new, strict=True)]
        self.weight, self.bias = torch.randn(C, taps).to(dtype), torch.randn(C).to(dtype)
        self.weights = ConvWeights(self.weight, self.bias)
        self.conv = poisoned(40, C, width, dtype=dtype)

    def fill(self, slots: list[int]) -> None:
        for slot, done, history in zip(slots, self.computed, self.history, strict=True):
            if slot >= 0:
                for p in range(max(0, done - self.taps + 1), done):
                    self.conv[slot, :, p % self.width] = history[p]

    def packed(self, spare: int = 0) -> tuple[Tensor, Tensor]:
        """New tokens as a column slice of a wider tensor, with `spare` NaN tokens after them; query_start_loc."""
        x = torch.cat([h[c:] for h, c in zip(self.history, self.computed, strict=True)])
        wide = torch.full((len(x) + spare, C + 6), torch.nan, dtype=x.dtype)
        wide[: len(x), 3 : 3 + C] = x
        return wide[:, 3 : 3 + C], int32(0, *torch.tensor(self.new).cumsum(0).tolist())

    def expected(self, row: int, silu: bool = True, bias: bool = True) -> Tensor:
        out = conv_loop(self.history[row], self.weight, self.bias if bias else None, silu)
        return out[self.computed[row] :]

    def tail(self, row: int) -> Tensor:
        """The last K - 1 raw inputs [C, K-1], zeros before position 0."""
        padded = torch.cat([torch.zeros(self.taps - 1, C, dtype=self.conv.dtype), self.history[row]])
        return padded[len(padded) - self.taps + 1 :].t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("taps", "width"), sweep([(2, 2), (3, 4), (4, 4), (1, 1), (1, 4), (4, 16), (7, 8)], 4))
@pytest.mark.parametrize("separate", [False, True])
def test_varlen_equals_loop(dtype: torch.dtype, taps: int, width: int, separate: bool) -> None:
    requests = Requests([0, 1, 2, 9, 1000, 3, 0, 6], [1, 2, 63, 3, 17, 1, 5, 0], taps, width, dtype)
    read = [7, 39, 3, 11, 20, 38, 2, 30]
    write = [8, 37, 4, 12, 21, 36, 1, 29] if separate else read
    requests.fill(read)
    before = requests.conv.clone()
    x, query_start_loc = requests.packed(spare=2)
    state = ConvState(requests.conv, int32(*read), int32(*write), int32(*requests.computed))
    out = causal_conv1d_varlen(x, requests.weights, state, query_start_loc)
    assert out.dtype == dtype and not out[-2:].any()
    ends = int32(*(c + n for c, n in zip(requests.computed, requests.new, strict=True)))
    windows = conv_window(requests.conv, int32(*write), ends, taps)
    for row in range(len(read)):
        if requests.new[row]:
            close(out[query_start_loc[row] : query_start_loc[row + 1]], requests.expected(row), TOLERANCE[dtype])
        assert same_bytes(windows[row], requests.tail(row))
    written = write if separate else write[:-1]
    assert changed_rows(before, requests.conv) == set(written if taps > 1 else ())


def test_varlen_padding_rows_leave_no_trace() -> None:
    requests = Requests([4, 0, 2], [3, 2, 5])
    requests.history[1][:] = torch.nan
    slots = [5, -1, 30]
    requests.fill(slots)
    before = requests.conv.clone()
    x, query_start_loc = requests.packed()
    state = ConvState(requests.conv, int32(*slots), int32(*slots), int32(*requests.computed))
    out = causal_conv1d_varlen(x, ConvWeights(requests.weight, activation=None), state, query_start_loc)
    assert not out[3:5].any()
    close(out[:3], requests.expected(0, silu=False, bias=False), 1e-6)
    close(out[5:], requests.expected(2, silu=False, bias=False), 1e-6)
    assert changed_rows(before, requests.conv) == {5, 30}


def test_varlen_without_tokens() -> None:
    requests = Requests([3], [0])
    before = requests.conv.clone()
    x, query_start_loc = requests.packed()
    state = ConvState(requests.conv, int32(2), int32(2), int32(3))
    out = causal_conv1d_varlen(x, requests.weights, state, query_start_loc)
    assert out.shape == (0, C) and same_bytes(before, requests.conv)


@pytest.mark.parametrize("taps", [2, 4, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 10])
def test_varlen_sums_have_the_same_bits_however_a_prompt_is_cut(size: int, taps: int) -> None:
    requests = Requests([0], [11], taps)
    x, _ = requests.packed()
    weights = ConvWeights(requests.weight, requests.bias, activation=None)  # vectors are not cut where rows are
    whole, *parts = [
        causal_conv1d_varlen(
            part, weights, ConvState(requests.conv, int32(slot), int32(slot), int32(start)), int32(0, len(part))
        )
        for slot, part, start in [(8, x, 0), *((9, x[i : i + size], i) for i in range(0, 11, size))]
    ]
    close(whole, requests.expected(0, silu=False), 1e-6)
    assert same_bytes(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", sweep([1, 2, 5], 2))
@pytest.mark.parametrize("separate", [False, True])
def test_update_equals_loop(dtype: torch.dtype, tokens: int, separate: bool) -> None:
    requests = Requests([0, 1, 2, 7, 1000], [tokens] * 5, dtype=dtype)
    read = [7, 39, 3, 11, 20]
    write = [8, 37, 4, 12, 21] if separate else read
    requests.fill(read)
    before = requests.conv.clone()
    x, _ = requests.packed()
    state = ConvState(requests.conv, int32(*read), int32(*write), int32(*requests.computed))
    out = causal_conv1d_update(x.unflatten(0, (5, tokens)), requests.weights, state)
    ends = int32(*(c + tokens for c in requests.computed))
    for row in range(5):
        close(out[row], requests.expected(row), TOLERANCE[dtype])
        assert same_bytes(conv_window(requests.conv, int32(*write), ends, 4)[row], requests.tail(row))
    assert changed_rows(before, requests.conv) == set(write)


@pytest.mark.parametrize("accepted", range(1, 6))
def test_update_rolls_back_by_position(accepted: int) -> None:
    """After a verify of 5 tokens of which some are rejected, the next step sees the accepted ones alone."""
    requests = Requests([6], [9])
    requests.fill([4])
    x, _ = requests.packed()
    wrong = torch.cat([x[:accepted], torch.full((5 - accepted, C), 99.0)])[None]
    ring = requests.conv, int32(4), int32(4)
    first = causal_conv1d_update(wrong, requests.weights, ConvState(*ring, int32(6)))
    second = causal_conv1d_update(x[accepted:][None, :4], requests.weights, ConvState(*ring, int32(6 + accepted)))
    expected = requests.expected(0)
    close(torch.cat([first[0, :accepted], second[0]]), expected[: accepted + 4], 1e-6)


def test_update_padding_rows_leave_no_trace() -> None:
    requests = Requests([4, 0, 2], [2, 2, 2])
    requests.history[1][:] = torch.nan
    slots = int32(5, -1, 30)
    requests.fill(slots.tolist())
    before, windows = requests.conv.clone(), poisoned(5, 2, C, 3)
    windows_before = windows.clone()
    x, _ = requests.packed()
    state = ConvState(requests.conv, slots, slots, int32(*requests.computed))
    chain = IntermediateStates(windows, int32(4, 3, 1), torch.tensor([[-1, 0]] * 3, dtype=torch.int32))
    of_tree = causal_conv1d_update(x.unflatten(0, (3, 2)), requests.weights, state, chain)
    assert changed_rows(before, requests.conv) == set()
    out = causal_conv1d_update(x.unflatten(0, (3, 2)), requests.weights, state)
    assert not out[1].any() and not out.isnan().any()
    close(of_tree, out, 1e-6)
    assert changed_rows(before, requests.conv) == {5, 30}
    assert changed_rows(windows_before, windows) == {1, 4}
    assert same_bytes(windows[4, 1], requests.tail(0)) and same_bytes(windows[1, 1], requests.tail(2))
    with pytest.raises(ConfigError, match="predecessors alone"):
        causal_conv1d_update(x.unflatten(0, (3, 2)), requests.weights, state, chain._replace(predecessors=None))


@pytest.mark.parametrize("start", [0, 1, 7])
def test_tree_follows_ancestors(start: int) -> None:
    parents = int32(-1, 0, 0, 2, 1, 4, -1)
    nodes = len(parents)
    requests = Requests([start], [nodes])
    requests.fill([4])
    before, windows = requests.conv.clone(), poisoned(3, nodes, C, 3)
    x, _ = requests.packed()
    state = ConvState(requests.conv, int32(4), int32(4), int32(start))
    out = causal_conv1d_update(x[None], requests.weights, state, IntermediateStates(windows, int32(2), parents[None]))
    for node in range(nodes):
        path = ancestry(parents, node)
        branch = torch.cat([requests.history[0][:start], x[path]])
        close(out[0, node], conv_loop(branch, requests.weight, requests.bias)[-1], 1e-6)
        padded = torch.cat([torch.zeros(3, C), branch])
        assert same_bytes(windows[2, node], padded[-3:].t())
    assert same_bytes(before, requests.conv)


@pytest.mark.parametrize(("width", "tokens"), [(4, 2), (6, 1)])
def test_narrow_ring_is_refused_before_anything_is_written(width: int, tokens: int) -> None:
    conv = torch.zeros(3, C, width)
    with pytest.raises(ConfigError, match=f"{width} columns"):
        state = ConvState(conv, int32(1), int32(1), int32(0))
        causal_conv1d_update(torch.ones(1, tokens, C), ConvWeights(torch.ones(C, 4)), state)
    assert not conv.any()
