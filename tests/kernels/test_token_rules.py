"""Allowed ids, bad words, min_tokens and biases against a loop over a request's own lists."""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt.base.errors import RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.core.packed import map_arrays
from hybridrt.kernels.sampling.token_rules import DrawLines, apply_token_rules
from hybridrt.runtime.sampling.sampler import RULES, RowRequirements, Sampler, Verification, used_parts
from hybridrt.runtime.step.plan import Admission
from hybridrt.runtime.step.sampling_table import HISTORY, MAX_RULES, SamplingTable, make_rules
from tests.support.levels import sweep

pytestmark = pytest.mark.usefixtures("provider")
ROWS, STOP = 5, (3, 7)


class Ruled:
    """A request with random rules, and what they come to."""

    def __init__(self, rng: random.Random, vocab: int) -> None:
        self.vocab = vocab
        tokens = range(min(vocab, 12))  # few, so that prefixes occur

        def word() -> list[int]:
            return rng.choices(tokens, k=rng.choice((1, 2, 3, 4)))

        self.words = [word() for _ in range(rng.choice((0, 3, 9)))]
        bias = {rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(rng.choice((0, 1, 6)))}
        allowed = rng.sample(range(vocab), vocab // 2) if rng.random() < 0.4 else None
        self.params = SamplingParams(
            temperature=0, min_tokens=rng.choice((0, 0, 2, 7)), logit_bias=bias, allowed_token_ids=allowed,
            bad_words=["word"] * len(self.words),
        )  # fmt: skip
        self.rules = make_rules(self.params, STOP, self.words, vocab)

    def admission(self, row: int, output: Sequence[int]) -> Admission:
        return Admission.from_prompt(row, row, [1, 2], self.params, 0, self.rules, output)

    def apply(self, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """Logits [V] of the token after `output`."""
        params, x = self.params, logits.float().tolist()
        for token, bias in (params.logit_bias or {}).items():
            x[token] += bias
        forbidden = set(STOP) if len(output) < params.min_tokens else set()
        if params.allowed_token_ids is not None:
            forbidden |= set(range(self.vocab)) - set(params.allowed_token_ids)
        for *prefix, last in self.words:
            if len(prefix) <= len(output) and list(output[len(output) - len(prefix) :]) == prefix:
                forbidden.add(last)
        return torch.tensor([-math.inf if token in forbidden else value for token, value in enumerate(x)])


def admit(table: SamplingTable, admissions: Sequence[Admission]) -> None:
    arrays = map_arrays(torch.from_numpy, SamplingTable.pack(admissions))
    table.enter_rows(torch.tensor([a.row for a in admissions]), arrays)


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(*values, dtype=torch.int32)


@pytest.mark.parametrize("vocab", [40, 5000])
@pytest.mark.parametrize("seed", sweep(range(6), 3))
def test_rules_are_those_of_the_request(vocab: int, seed: int) -> None:
    rng, table = random.Random(seed), SamplingTable(ROWS, vocab, torch.device("cpu"))
    for _ in range(3):  # new tenants of the same rows; the last one's rules must be gone
        requests = {row: Ruled(rng, vocab) for row in rng.sample(range(1, ROWS + 1), 4)}
        outputs = {row: rng.choices(range(12), k=rng.choice((0, 1, 4, HISTORY + 9))) for row in requests}
        paths = {row: rng.choices(range(12), k=rng.choice((0, 1, 3))) for row in requests}
        for row, request in requests.items():
            longest = max(request.words, key=len, default=[])
            if 1 < len(longest) <= 4:  # its prefix stands before the draw, the last tokens of it in the path
                paths[row] = longest[1:-1]
                outputs[row].append(longest[0])
        admit(table, [request.admission(row, outputs[row]) for row, request in requests.items()])
        rows, width = list(requests), 3
        logits = torch.randn(len(rows), vocab).bfloat16()
        known = int32([len(outputs[row]) for row in rows])
        indices = int32([len(outputs[row]) + len(paths[row]) for row in rows])
        path = int32([paths[row] + [5] * (width - len(paths[row])) for row in rows])
        got = apply_token_rules(logits, table.rules, DrawLines(int32(rows), indices, known, path))
        for line, row in enumerate(rows):
            want = requests[row].apply(logits[line], outputs[row] + paths[row])
            torch.testing.assert_close(got[line], want, rtol=0, atol=1e-5)


def test_a_row_without_rules_keeps_its_logits_beside_one_with_rules() -> None:
    table, logits = SamplingTable(2, 40, torch.device("cpu")), torch.randn(2, 40)
    logits[0, 5] = math.nan
    forbidding = SamplingParams(allowed_token_ids=[6], bad_words=["x"])
    first = Admission.from_prompt(1, 1, [1], forbidding, 0, make_rules(forbidding, (), [[6]], 40))
    second = Admission.from_prompt(2, 2, [1], SamplingParams(), 0)
    admit(table, [first, second])
    zeros = torch.zeros(2, dtype=torch.int32)
    got = apply_token_rules(logits, table.rules, DrawLines(int32([2, 1]), zeros, zeros, zeros[:, None][:, :0]))
    assert torch.equal(got[0], logits[0]) or got[0].isnan().tolist() == logits[0].isnan().tolist()
    assert got[1].isneginf().all()
    admit(table, [Admission.from_prompt(1, 1, [1], SamplingParams(), 0)])
    got = apply_token_rules(logits, table.rules, DrawLines(int32([2, 1]), zeros, zeros, zeros[:, None][:, :0]))
    assert torch.equal(got[1], logits[1])


def test_what_is_forbidden_may_be_nan() -> None:
    """Only allowed logits decide whether a line is finite."""
    table, logits = SamplingTable(1, 40, torch.device("cpu")), torch.zeros(1, 40)
    logits[0, 3], logits[0, 7] = math.nan, math.inf
    params = SamplingParams(temperature=0, min_tokens=1, max_tokens=9)
    admit(table, [Admission.from_prompt(1, 1, [1], params, 0, make_rules(params, STOP, [], 40))])
    token = Sampler(table)(logits, int32([1]), int32([0]), used_parts([params]))
    assert token.tolist() == [0]
    assert Sampler(table)(logits, int32([1]), int32([1]), used_parts([params])).tolist() == [-1]


def test_rules_that_hold_no_more_cost_nothing() -> None:
    required, rows = RowRequirements(2), np.array([1, 2])
    least, biased = SamplingParams(min_tokens=3), SamplingParams(logit_bias={1: 1.0})
    for row, params in ((1, least), (2, SamplingParams())):
        required.note_admissions([Admission.from_prompt(row, row, [1], params, 0, make_rules(params, STOP, [], 40))])
    assert [required.required_by_rows(rows, np.array([i, 0]))[0] & RULES > 0 for i in (2, 3)] == [True, False]
    required.note_admissions([Admission.from_prompt(2, 2, [1], biased, 0, make_rules(biased, STOP, [], 40))])
    assert required.required_by_rows(rows, np.array([3, 900]))[0] & RULES


def alone(request: Ruled, logits: Sequence[torch.Tensor], output: Sequence[int]) -> list[int]:
    """Greedy tokens after an output, one after the other."""
    output, start = list(output), len(output)
    for line in logits:
        output.append(int(request.apply(line, output).argmax()))
    return output[start:]


@pytest.mark.parametrize("seed", sweep(range(8), 8, 2))
def test_tokens_one_at_a_time_remember_those_before(seed: int) -> None:
    rng, table = random.Random(seed), SamplingTable(ROWS, 40, torch.device("cpu"))
    requests = [Ruled(rng, 40) for _ in range(ROWS)]
    rows, steps = list(range(1, ROWS + 1)), HISTORY + 5
    admit(table, [request.admission(row, []) for row, request in zip(rows, requests)])
    parts, sampler = used_parts([request.params for request in requests]), Sampler(table)
    logits = torch.randn(steps, ROWS, 40)
    logits[:, :, 12:] -= 2  # of tokens that no word holds
    index = int32(rows)
    drawn = torch.stack([sampler(logits[i], index, index * 0 + i, parts) for i in range(steps)])
    for line, request in enumerate(requests):
        assert drawn[:, line].tolist() == alone(request, logits[:, line], [])


@pytest.mark.parametrize("tree", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", sweep(range(8), 8, 2))
def test_verified_drafts_keep_what_single_steps_draw(tree: bool, seed: int) -> None:
    """Each step's logits depend on the output index alone, so that right drafts are known. Even seeds go on from an
    output, past what is kept of it; odd ones begin."""
    torch.manual_seed(seed)
    end = 40 if seed % 2 else HISTORY + 16
    rng, table = random.Random(seed), SamplingTable(ROWS, 40, torch.device("cpu"))
    requests = [Ruled(rng, 40) for _ in range(ROWS)]
    rows, width = list(range(1, ROWS + 1)), 4
    parts, sampler = used_parts([request.params for request in requests]), Sampler(table)
    logits = torch.randn(end + 10, ROWS, 40)
    logits[:, :, 12:] -= 2
    want = [alone(request, logits[:, line], []) for line, request in enumerate(requests)]
    outputs = [output[: end - 40] for output in want]
    admit(table, [request.admission(row, output) for row, request, output in zip(rows, requests, outputs)])
    last = torch.zeros(ROWS + 1, dtype=torch.int32)
    while min(map(len, outputs)) < end:
        known = int32([len(output) for output in outputs])
        drafts, parents, depths = [], [], []
        for line, output in enumerate(outputs):
            right = want[line][len(output) : len(output) + 2]
            wrong = (right[0] + 1) % 40
            # The right path is 0 -> 1 -> 3 in a tree, whose node 2 is another child of the root.
            drafts.append([right[0], wrong, right[1]] if tree else [*right, rng.randrange(12)])
            parents.append([-1, 0, 0, 1] if tree else [-1, 0, 1, 2])
            depths.append([0, 1, 1, 2] if tree else [0, 1, 2, 3])
        lines = int32(depths) + known[:, None]
        mask = torch.zeros(ROWS, width, width, dtype=torch.bool)
        for node in range(width):
            at = node
            while at >= 0:
                mask[:, node, at], at = True, parents[0][at]
        of_lines = torch.stack([logits[lines[r].long(), r] for r in range(ROWS)]).view(ROWS * width, 40)
        trees = (int32(parents), mask) if tree else ()
        drawn = Verification(int32(rows), known, lines + 11, int32(drafts), int32([3] * ROWS), last, *trees)
        kept = sampler.verify(of_lines, drawn, parts)
        for line, (tokens, count) in enumerate(zip(kept.tokens.tolist(), kept.counts.tolist())):
            assert count >= 3
            outputs[line] += tokens[:count]
    for line, output in enumerate(outputs):
        assert output[:end] == want[line][:end]


@pytest.mark.parametrize("known", [[], [4], [4, 9]])
def test_drafts_that_run_ahead_follow_the_rules_too(known: list[int]) -> None:
    """A word's first tokens may be output, drafts, or some of each."""
    params, word = SamplingParams(temperature=0, bad_words=["word"]), [4, 9, 2]
    table, parts = SamplingTable(1, 40, torch.device("cpu")), used_parts([params])
    admit(table, [Admission.from_prompt(1, 1, [1, 2], params, 0, make_rules(params, STOP, [word], 40), [3, *known])])
    drafted = torch.empty(1, 0, dtype=torch.int64)
    for step, token in enumerate([4, 9, 2][len(known) :]):
        logits = torch.zeros(1, 40)
        logits[0, token], logits[0, 30] = 5, 3
        drawn = Sampler(table).draft(logits, int32([1]), int32([1 + len(known) + step]), parts, drafted)
        drafted = torch.cat((drafted, drawn[:, None]), 1)
    assert [*known, *drafted[0].tolist()] == [4, 9, 30]


def test_too_many_rules_are_refused_by_the_field_that_brings_them() -> None:
    biases = {token: 1.0 for token in range(1024)}
    stops = range(MAX_RULES)
    with pytest.raises(RequestError) as info:
        make_rules(SamplingParams(min_tokens=1, logit_bias=biases), stops, [], 4096)
    assert info.value.field == "logit_bias"
    with pytest.raises(RequestError) as info:
        make_rules(SamplingParams(min_tokens=1), range(MAX_RULES + 1), [], 4096)
    assert info.value.field == "min_tokens"
    word = list(range(HISTORY + 1))
    assert make_rules(SamplingParams(bad_words=["a"]), (), [word], 4096) is not None
    for words in ([[*word, 1]], [word] * (MAX_RULES // HISTORY + 1)):
        with pytest.raises(RequestError) as info:
            make_rules(SamplingParams(bad_words=["a"]), (), words, 4096)
        assert info.value.field == "bad_words"
