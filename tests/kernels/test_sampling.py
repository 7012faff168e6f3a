"""Random numbers, filters and draws against loops written from their definitions."""

import math
from itertools import product

import pytest
import torch

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.sampling.sampling import (
    MIN_TEMPERATURE,
    STREAM_TOKEN,
    Penalties,
    filtered_logits,
    greedy,
    sample,
    token_logprobs,
)
from tests.support.flat import flat
from tests.support.levels import sweep
from tests.support.uniform import uniform

pytestmark = pytest.mark.usefixtures("provider")
MASK = 2**64 - 1


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def slow_uniform(seed, index, stream, token):
    gamma = 0x9E3779B97F4A7C15
    key = mix((mix((seed + (stream + 1) * gamma) & MASK) + index * gamma) & MASK)
    return (mix((key + (token + 1) * gamma) & MASK) >> 1) / 2**63


def test_splitmix64_s_published_outputs():
    """The first outputs of SplitMix64 seeded with 1234567, as its reference implementation prints them."""
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniform_is_the_function_of_its_keys():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    indices, ids = torch.tensor([0, 5, 7, 2**40, 1]), torch.tensor([0, 1, 130_047])
    for stream in (0, 3):
        got = uniform(seeds, indices, stream, ids)
        expected = [
            [slow_uniform(seed & MASK, index, stream, token) for token in ids.tolist()]
            for seed, index in zip(seeds.tolist(), indices.tolist(), strict=True)
        ]
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-6, atol=0)
    alone = uniform(seeds[2:3], indices[2:3], 3, ids)
    assert torch.equal(alone[0], got[2])


def test_uniform_reaches_neither_end():
    gamma_inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)
    key = mix(mix(0x9E3779B97F4A7C15))
    for bits, expected in ((0, 2.0**-64), (MASK, 1 - 2.0**-24)):
        token = ((unmix(bits) - key) * gamma_inverse - 1) & MASK
        zero, ids = torch.zeros(1, dtype=torch.int64), torch.tensor([token - 2**64 if token >= 2**63 else token])
        assert float(uniform(zero, zero, 0, ids)) == expected


def unmix(z):
    z ^= (z >> 31) ^ (z >> 62)
    z = (z * pow(0x94D049BB133111EB, -1, 2**64)) & MASK
    z ^= (z >> 27) ^ (z >> 54)
    z = (z * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & MASK
    return z ^ (z >> 30) ^ (z >> 60)


def test_uniform_is_uniform_open_and_uncorrelated():
    values = uniform.reference(torch.arange(100), torch.zeros(100, dtype=torch.int64), 0, torch.arange(1000))
    assert 0 < float(values.min()) < 1e-4 and 1 - 1e-4 < float(values.max()) < 1
    counts = torch.histc(values, 50, 0, 1)
    assert chi_square(counts, torch.full((50,), 2000.0)) < chi_square_limit(49)
    for shifted in (values.roll(1, 0), values.roll(1, 1)):
        correlation = torch.corrcoef(torch.stack((values.flatten(), shifted.flatten())))[0, 1]
        assert abs(float(correlation)) < 0.015


def chi_square(observed, expected):
    return float(((observed - expected) ** 2 / expected).sum())


def chi_square_limit(freedom):
    """The 1 - 1e-5 quantile (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


def slow_filter(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The surviving tokens' probabilities {token: p}, by definition; assumes no ties."""
    weights = {i: math.exp(x / temperature) for i, x in enumerate(logits) if x > -math.inf}
    order = sorted(weights, key=lambda i: -weights[i])
    order = order[: top_k or None]
    if top_p < 1:
        total, mass, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            if mass < top_p * total or not kept:
                kept.append(i)
            mass += weights[i]
        order = kept
    order = [i for i in order if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in order)
    return {i: weights[i] / total for i in order}


SETTINGS = [
    {},
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"top_k": 7, "top_p": 0.8},
    {"top_k": 2, "min_p": 0.01},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.15},
]


def batch_settings(settings):
    """One row per setting, every row of its own kind."""
    return {
        "top_k": torch.tensor([s.get("top_k", 0) for s in settings], dtype=torch.int32),
        "top_p": torch.tensor([s.get("top_p", 1.0) for s in settings]),
        "min_p": torch.tensor([s.get("min_p", 0.0) for s in settings]),
    }


def check_filtered(filtered, logits, temperature, setting):
    expected = slow_filter(logits.tolist(), temperature, **setting)
    assert set(torch.isfinite(filtered).nonzero().flatten().tolist()) == set(expected)
    probabilities = filtered.softmax(-1)
    for token, probability in expected.items():
        assert float(probabilities[token]) == pytest.approx(probability, rel=1e-4)


@pytest.mark.parametrize("vocabulary", [10, 37])
def test_filters_in_a_mixed_batch_and_alone(vocabulary):
    torch.manual_seed(0)
    logits = torch.randn(len(SETTINGS), vocabulary) * 2
    temperature = torch.linspace(0.5, 2, len(SETTINGS))
    filtered = flat(filtered_logits, logits, temperature=temperature, **batch_settings(SETTINGS))
    for b, setting in enumerate(SETTINGS):
        check_filtered(filtered[b], logits[b], float(temperature[b]), setting)
        row = slice(b, b + 1)
        alone = {name: tensor for name, tensor in batch_settings([setting]).items() if name in setting}
        torch.testing.assert_close(
            flat(filtered_logits, logits[row], temperature=temperature[row], **alone), filtered[row]
        )


def test_ties_at_a_threshold_are_kept():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    one = torch.ones(1)
    for keyword in ({"top_k": torch.tensor([2], dtype=torch.int32)}, {"top_p": torch.tensor([0.5])}):
        kept = flat(filtered_logits, logits, temperature=one, **keyword).isfinite()[0]
        assert kept.tolist() == [False, True, True, True, True, False]


def kept_by_definition(row, top_k, top_p):
    """Which entries stay, in float64, and by how much the last mass that counted missed or passed its share."""
    order = row.sort(descending=True).values
    if top_k:
        order = order[order >= order[top_k - 1]]
    mass = (order - order[0]).exp().cumsum(0)
    share = top_p * mass[-1]
    reached = int((mass < share).sum()) if top_p < 1 else len(order) - 1
    threshold = order[min(reached, len(order) - 1)]
    return row >= threshold, float(((mass - share) / mass[-1]).abs().min()) if top_p < 1 else 1.0


def spread_logits(shape, n):
    """Rows that are flat, peaked, far apart, equal, mostly forbidden, and further apart than any histogram reaches."""
    logits = torch.randn(n)
    rows = {
        "flat": logits, "sharp": logits * 12, "huge": logits * 1e4, "tiny": logits * 1e-4,
        "peak": logits + 40 * (torch.arange(n) == n // 3), "equal": torch.zeros(n), "steps": (logits * 2).round(),
        "forbidden": logits.masked_fill(logits < 1.5, -torch.inf),
        "two groups": logits - 20 * (torch.arange(n) % 7 > 0),
        "far below": torch.where(torch.arange(n) == n // 2, 14.0, logits / 10),
    }  # fmt: skip
    return rows[shape]


SHAPES = ["flat", "sharp", "peak", "equal", "steps", "forbidden", "two groups", "far below", "huge", "tiny"]


@pytest.mark.parametrize("shape", sweep(SHAPES, 3))
def test_filters_by_definition_on_rows_of_every_shape(shape, monkeypatch):
    from hybridrt.kernels.sampling import sampling_filters_triton, sampling_triton

    monkeypatch.setattr(sampling_triton, "BLOCK", 512)
    monkeypatch.setattr(sampling_filters_triton, "LIST_BLOCK", 128)
    torch.manual_seed(SHAPES.index(shape))
    pairs = [(k, p) for k in (0, 20, 700) for p in (1.0, 0.3003, 0.9002, 0.9999)] + [(1, 0.9), (0, 0.0)]
    logits = torch.stack([spread_logits(shape, 1500) for _ in pairs])
    filtered = flat(
        filtered_logits,
        logits,
        temperature=torch.ones(len(pairs)),
        top_k=torch.tensor([k for k, _ in pairs], dtype=torch.int32),
        top_p=torch.tensor([p for _, p in pairs]),
    )
    compared = 0
    for row, got, (top_k, top_p) in zip(logits, filtered, pairs, strict=True):
        kept, margin = kept_by_definition(row.double(), top_k, top_p)
        if margin > 1e-5 or top_p == 0:
            compared += 1
            assert torch.equal(got, torch.where(kept, row, -torch.inf)), (top_k, top_p)
    assert compared > len(pairs) / 2


def test_top_p_of_one_keeps_tokens_too_unlikely_to_move_the_sum():
    logits = torch.tensor([[0.0, -20.0], [0.0, -20.0]])
    kept = flat(filtered_logits, logits, temperature=torch.ones(2), top_p=torch.tensor([1.0, 0.99])).isfinite()
    assert kept.tolist() == [[True, True], [True, False]]


def test_penalties():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    penalties = Penalties(
        repetition=torch.tensor([1.25, 1.0]),
        presence=torch.tensor([0.5, 0.0]),
        frequency=torch.tensor([0.25, 0.0]),
        output_counts=torch.tensor([[0, 2, 1, 0, 0], [3, 0, 0, 0, 0]], dtype=torch.int32),
        prompt_mask=torch.tensor([[True, False, True, False, False], [True, True, False, False, False]]),
    )
    got = flat(filtered_logits, logits, temperature=torch.tensor([0.5, 0.0]), penalties=penalties)
    expected = [2 / 1.25, -2 * 1.25 - 2 * 0.25 - 0.5, 1 / 1.25 - 0.25 - 0.5, 0.5, 3.0]
    torch.testing.assert_close(got[0], torch.tensor(expected) / 0.5)
    torch.testing.assert_close(got[1], torch.ones(5))


def bitmask_of(allowed, vocabulary):
    words = torch.zeros(-(-vocabulary // 32), dtype=torch.int64)
    for token in allowed:
        words[token // 32] |= 1 << (token % 32)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def test_bitmask_forbids_in_every_tail():
    torch.manual_seed(0)
    logits = torch.randn(2, 70)
    allowed = [[3, 31, 32, 63, 69], list(range(70))]
    bitmask = torch.stack([bitmask_of(tokens, 70) for tokens in allowed])
    filtered = flat(filtered_logits, logits, temperature=torch.ones(2), bitmask=bitmask)
    assert filtered[0].isfinite().nonzero().flatten().tolist() == allowed[0]
    assert torch.equal(filtered[1], logits[1])
    expected = [max(tokens, key=lambda i, b=b: float(logits[b, i])) for b, tokens in enumerate(allowed)]
    assert greedy(logits, bitmask).tolist() == expected
    keys = torch.tensor([1, 2])
    assert (
        flat(sample, logits, temperature=torch.zeros(2), seeds=keys, indices=keys, bitmask=bitmask).tolist() == expected
    )


def test_greedy_takes_the_first_of_equals():
    assert greedy(torch.tensor([[0.0, 2.0, 2.0], [-torch.inf, -torch.inf, -1.0]])).tolist() == [1, 2]


@pytest.mark.parametrize("setting", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.5}])
def test_a_temperature_too_small_for_float32_is_greedy(setting):
    """Logits over 1e-45 are infinite: infinite ones, and their differences, are no draw."""
    torch.manual_seed(0)
    temperature = torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 0.99e-5, 1e-5, 3e38])
    rows = len(temperature)
    logits = torch.randn(rows, 130).mul(20).index_fill(1, torch.tensor([77]), 100.0)
    logits[:, 5] = -1e30
    penalties = Penalties(
        repetition=torch.full((rows,), 0.01), presence=torch.zeros(rows), frequency=torch.zeros(rows),
        output_counts=torch.zeros(rows, 130, dtype=torch.int32), prompt_mask=torch.ones(rows, 130, dtype=torch.bool),
    )  # fmt: skip
    arguments = {"temperature": temperature, **batch_settings([setting] * rows)}
    for more in ({}, {"penalties": penalties}):
        filtered = flat(filtered_logits, logits, **arguments, **more)
        assert not filtered.isnan().any() and not (filtered == torch.inf).any()
        assert filtered[:-1].argmax(-1).tolist() == [77] * (rows - 1)
        tokens = flat(sample, logits, seeds=torch.arange(rows), indices=torch.arange(rows), **arguments, **more)
        assert tokens[:-1].tolist() == [77] * (rows - 1) and int(tokens[-1]) in range(130)


@pytest.mark.parametrize("below", [0.0, 1e-46, 1e-45, 1e-38, 9e-6])
def test_rows_of_a_tiny_temperature_draw_what_greedy_takes(below):
    torch.manual_seed(1)
    logits = torch.randn(8, 200)  # close neighbours: noise would change some of them
    keys = torch.arange(8)
    drawn = flat(sample, logits, temperature=torch.full((8,), below), seeds=keys, indices=keys)
    assert torch.equal(drawn, greedy(logits))


def test_the_requests_and_the_kernels_agree_on_what_is_greedy():
    assert SamplingParams(temperature=0.99 * MIN_TEMPERATURE).greedy
    assert not SamplingParams(temperature=MIN_TEMPERATURE).greedy


@pytest.mark.parametrize("setting", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(setting):
    torch.manual_seed(0)
    draws, logits = 20_000, torch.randn(12) * 1.5
    rows = torch.arange(draws)
    tokens = flat(
        sample.reference,
        logits.expand(draws, -1),
        temperature=torch.full((draws,), 0.8),
        seeds=rows // 200,
        indices=rows % 200,
        **{name: tensor.expand(draws) for name, tensor in batch_settings([setting]).items()},
    )
    probabilities = slow_filter(logits.tolist(), 0.8, **setting)
    counts = torch.bincount(tokens, minlength=12)
    assert int(counts.sum()) == sum(int(counts[token]) for token in probabilities)
    observed = counts[list(probabilities)].float()
    expected = torch.tensor(list(probabilities.values())) * draws
    assert chi_square(observed, expected) < chi_square_limit(len(probabilities) - 1)


def test_a_draw_depends_on_its_keys_and_not_on_the_batch():
    torch.manual_seed(0)
    logits, seeds, indices = torch.randn(6, 50), torch.arange(6) * 7, torch.arange(6)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.3, 0.0, 1.0])
    together = flat(sample, logits, temperature=temperature, seeds=seeds, indices=indices)
    order = torch.tensor([4, 2, 0, 5, 3, 1])
    shuffled = flat(sample, logits[order], temperature=temperature[order], seeds=seeds[order], indices=indices[order])
    assert torch.equal(shuffled, together[order])
    assert together[1] == logits[1].argmax() and together[4] == logits[4].argmax()
    even = torch.zeros(1, 50)
    drawn = {
        int(flat(sample, even, temperature=torch.ones(1), seeds=torch.tensor([seed]), indices=torch.tensor([index])))
        for seed, index in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2)]
    }
    assert len(drawn) > 2


def test_the_draw_is_gumbel_max_over_the_token_stream():
    logits = torch.tensor([[0.3, -0.2, 0.9, 0.1]])
    for index in range(20):
        noisy = [
            float(logits[0, token]) - math.log(-math.log1p(-slow_uniform(5, index, STREAM_TOKEN, token)))
            for token in range(4)
        ]
        got = flat(sample, logits, temperature=torch.ones(1), seeds=torch.tensor([5]), indices=torch.tensor([index]))
        assert int(got) == max(range(4), key=noisy.__getitem__)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a vocabulary takes many of them, in several programs."""
    from hybridrt.kernels.sampling import sampling_triton

    monkeypatch.setattr(sampling_triton, "BLOCK", 64)
    monkeypatch.setattr(sampling_triton, "multiprocessors", lambda device: 8)


def test_the_same_draws_over_many_blocks(small_blocks):
    """The statistics above are of the plain-torch draws: every other implementation makes the same ones."""
    torch.manual_seed(0)
    settings = [{}, *SETTINGS[-2:], {"top_k": 50}, {"top_p": 0.99}, {"min_p": 1e-3}]
    batch = len(settings)
    logits = torch.randn(batch, 303) * 3
    temperature, keys = torch.linspace(0.4, 1.5, batch), torch.arange(batch)
    temperature[4] = 0
    arguments = {"temperature": temperature, **batch_settings(settings)}
    torch.testing.assert_close(
        flat(filtered_logits, logits, **arguments), flat(filtered_logits.reference, logits, **arguments)
    )
    for chosen in ({"temperature": temperature}, arguments):
        got = flat(sample, logits, seeds=keys, indices=keys + 1, **chosen)
        assert torch.equal(got, flat(sample.reference, logits, seeds=keys, indices=keys + 1, **chosen))
    bitmask = torch.randint(-(2**31), 2**31, (batch, 10), dtype=torch.int64).int()
    assert torch.equal(greedy(logits.half(), bitmask), greedy.reference(logits.half(), bitmask))
    ids = torch.arange(0, 303, 7)
    assert torch.equal(uniform(keys, keys + 1, 2, ids), uniform.reference(keys, keys + 1, 2, ids))


@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_greedy_ties_across_blocks(small_blocks, monkeypatch, multiprocessors):
    from hybridrt.kernels.sampling import sampling_triton

    monkeypatch.setattr(sampling_triton, "multiprocessors", lambda device: multiprocessors)
    logits = torch.zeros(2, 300)
    logits[0, [70, 130, 290]] = 1.0
    logits[1] = -torch.inf
    out = torch.full((2,), 7)
    assert greedy(logits).tolist() == [70, -1]  # nothing of the second row is allowed
    assert greedy(logits, None, out) is out and out.tolist() == [70, -1]


FILTERS = {"top_k": torch.tensor([3], dtype=torch.int32), "top_p": torch.tensor([0.8]), "min_p": torch.tensor([0.1])}


@pytest.mark.parametrize(
    ("multiprocessors", "value", "filters"),
    sweep(product([1, 8], [torch.nan, torch.inf, -torch.inf], [(), ("top_k",), ("top_k", "top_p"), ("min_p",)]), 7),
)
def test_logits_that_are_not_finite_give_no_token(small_blocks, monkeypatch, multiprocessors, value, filters):
    """A NaN or infinity anywhere; -infinity only everywhere. The row next to it draws what it draws alone."""
    from hybridrt.kernels.sampling import sampling_triton

    monkeypatch.setattr(sampling_triton, "multiprocessors", lambda device: multiprocessors)
    torch.manual_seed(0)
    logits = torch.randn(3, 300)
    logits[2, ::2] = -torch.inf
    sound = logits.clone()
    logits[1, slice(None) if value == -torch.inf else 200] = value
    assert greedy(logits).tolist() == [int(sound[0].argmax()), -1, int(sound[2].argmax())]
    for temperature in (0.0, 1.0):
        arguments = {"temperature": torch.full((3,), temperature), "seeds": torch.arange(3), "indices": torch.arange(3)}
        arguments |= {name: FILTERS[name].expand(3).contiguous() for name in filters}
        drawn = flat(sample, logits, **arguments)
        assert drawn[1] == -1 and drawn[[0, 2]].tolist() == flat(sample, sound, **arguments)[[0, 2]].tolist()
    if value != -torch.inf:
        assert token_logprobs(logits, torch.tensor([[1], [-1], [1]]), 2)[0][[0, 2]].isfinite().all()


def test_a_tiny_uniform_wins_only_as_much_as_it_should():
    """u = 2^-40 is worth 27.7 in the logits; rounding 1 - u to 1 would make it worth any difference."""
    gamma, index = 0x9E3779B97F4A7C15, 3
    key = (unmix(1 << 24) - gamma) & MASK  # what token 0 gets its bits from
    seed = (unmix((unmix(key) - index * gamma) & MASK) - gamma) & MASK
    seeds = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    assert float(uniform(seeds, torch.tensor([index]), STREAM_TOKEN, torch.tensor([0]))) == 2.0**-40
    for advantage, token in ((20.0, 0), (40.0, 1)):
        logits = torch.tensor([[0.0, advantage]])
        got = flat(sample, logits, temperature=torch.ones(1), seeds=seeds, indices=torch.tensor([index]))
        assert int(got) == token


def test_token_logprobs():
    torch.manual_seed(0)
    logits = torch.randn(3, 9).bfloat16()
    tokens = torch.tensor([[4, 1], [0, 0], [8, 3]])
    logprob, top_ids, top_logprobs = token_logprobs(logits, tokens, 2)
    for b in range(3):
        row = logits[b].double().tolist()
        log_total = math.log(sum(map(math.exp, row)))
        assert logprob[b].tolist() == pytest.approx([row[token] - log_total for token in tokens[b]], rel=1e-5)
        best = sorted(row, reverse=True)[:2]
        assert [row[i] for i in top_ids[b].tolist()] == best
        torch.testing.assert_close(top_logprobs[b], torch.tensor([value - log_total for value in best]))
    assert token_logprobs(logits, tokens, 0)[1].shape == (3, 0)
