"""What verification draws: the distribution of plain sampling, with any drafter."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.request.sample_request import derive_seed
from hybridrt.kernels.core.packed import map_arrays
from hybridrt.kernels.sampling.acceptance import accept_chain
from hybridrt.kernels.sampling.sampling import sample
from hybridrt.runtime.sampling.sampler import Sampler, Verification, used_parts
from hybridrt.runtime.step.plan import Admission
from hybridrt.runtime.step.sampling_table import SamplingTable
from hybridrt.speculative.draft_model import DraftModelDrafter
from hybridrt.speculative.drafter import AdaptiveDrafter, Drafter
from hybridrt.speculative.method import make_drafter
from hybridrt.speculative.ngram import NgramDrafter
from tests.support.checkpoints import falcon, nemotron, write
from tests.support.flat import flat
from tests.support.levels import drawn
from tests.support.mtp_oracle import write_with_head
from tests.support.speculation import Ask, AtRandom, Rig

VOCAB = 5
DRAWS = 20_000
PROMPT = [3, 4, 3, 4, 1, 3, 4]
FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 4, "min_p": 0.05},
    {"temperature": 1.2, "top_p": 0.85},
    {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.5, "top_p": 0.95},
]
CASES = [
    ("ngram", "intermediate", 0), ("same", "replay", 1), ("other", "intermediate", 2), ("random", "replay", 3),
    ("mtp", "replay", 3),
]  # fmt: skip


def probabilities(logits: Tensor, seen: Sequence[int], output: Sequence[int], params: SamplingParams) -> list[float]:
    """The distribution of one draw from `logits` [vocab], from the definitions: penalties, temperature, top-k, top-p,
    min-p, one after the other."""
    scores = logits.tolist()
    for token in {*seen, *output}:
        scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    p = (torch.tensor(scores).double() / params.temperature).softmax(0)
    if params.top_k > 0:
        p[p < p.sort(descending=True).values[params.top_k - 1]] = 0
        p /= p.sum()
    kept, mass = torch.zeros_like(p), 0.0
    for token in p.argsort(descending=True).tolist():
        if mass < params.top_p:
            kept[token] = p[token]
        mass += p[token].item()
    p = kept / kept.sum()
    p[p < params.min_p * p.max()] = 0
    return (p / p.sum()).tolist()


@torch.no_grad()
def joint(model: Any, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of the output tokens 1, 2 and 3, whatever token 0 is."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(4):
        outputs = list(product(range(VOCAB), repeat=length))
        logits = model(torch.tensor([PROMPT + list(o) for o in outputs]), use_cache=False).logits[:, -1].float()
        for output, line in zip(outputs, logits):
            before = found.pop(output, 0.0)
            for token, p in enumerate(probabilities(line, PROMPT, output, params)):
                found[*output, token] = before * p
    result: dict[tuple[int, ...], float] = {}
    for output, p in found.items():
        result[output[1:]] = result.get(output[1:], 0.0) + p
    return result


def chi_square(counts: dict[tuple[int, ...], int], wanted: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """The statistic, outcomes expected fewer than 8 times taken together, and its quantile at 0.9999 (Wilson and
    Hilferty 1931)."""
    total = sum(counts.values())
    rare = [o for o, p in wanted.items() if p * total < 8]
    cells = [(counts.get(o, 0), p * total) for o, p in wanted.items() if o not in rare]
    if (expected := sum(wanted[o] for o in rare) * total) >= 8:
        cells.append((sum(counts.get(o, 0) for o in rare), expected))
    k = len(cells) - 1
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return statistic, k * (1 - 2 / (9 * k) + 3.72 * (2 / (9 * k)) ** 0.5) ** 3


@dataclass(frozen=True)
class Models:
    """A tiny model as transformers has it, its checkpoint, one with other weights, and one with a prediction head."""

    oracle: Any
    path: Path
    other: Path
    oracle_with_head: Any
    with_head: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root, make = tmp_path_factory.mktemp("models"), falcon(vocab_size=VOCAB, num_hidden_layers=1)
    write(make, root / "b", seed=1)
    head = nemotron("M", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*", vocab_size=VOCAB)
    return Models(write(make, root / "a"), root / "a", root / "b", write_with_head(head, root / "c"), root / "c")


def rig_and_drafter(models: Models, method: str, mode: str) -> tuple[Rig, Drafter]:
    draft = {"same": models.path, "other": models.other}.get(method)
    spec: dict[str, Any] = {"method": "draft", "draft_model": str(draft)} if draft else {}
    if method == "mtp":
        rig = Rig(models.with_head, mode=mode, drafts=3, rows=500, method="mtp")
        return rig, make_drafter(rig.runner)
    rig = Rig(models.path, mode=mode, drafts=3, rows=500, **spec)
    inner: Drafter = DraftModelDrafter(rig.config, rig.runner.memory_plan, VOCAB) if draft else (
        NgramDrafter(shortest=1) if method == "ngram" else AtRandom(VOCAB)
    )  # fmt: skip
    return rig, AdaptiveDrafter(inner, 3, patience=1)


@pytest.mark.parametrize(
    ("method", "mode", "filters", "draws"), drawn(CASES, 5, DRAWS // 8, DRAWS // 8, DRAWS * 5 // 2, thin=3)
)
def test_joint_distribution_of_three_tokens(method: str, mode: str, filters: int, draws: int, models: Models) -> None:
    common: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "n": 500, **FILTERS[filters]}
    params = [SamplingParams(seed=i, **common) for i in range(draws // 500)]
    rig, drafter = rig_and_drafter(models, method, mode)
    outputs = rig.run([Ask(PROMPT, p) for p in params], drafter)
    counts: dict[tuple[int, ...], int] = {}
    for output in outputs.values():
        tokens = tuple(output.token_ids[1:4])
        counts[tokens] = counts.get(tokens, 0) + 1
    oracle = models.oracle_with_head if method == "mtp" else models.oracle
    statistic, limit = chi_square(counts, joint(oracle, params[0]))
    assert statistic < limit
    assert rig.counters.accepted > draws / 10, "drafts were kept often enough to show"


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_target_itself_drafts_what_it_will_draw(filters: dict[str, Any], models: Models) -> None:
    """With the target's weights, filters, penalties and random numbers every draft stays."""
    rig, drafter = rig_and_drafter(models, "same", "replay")
    rig.run([Ask(PROMPT, SamplingParams(seed=i, max_tokens=40, ignore_eos=True, **filters)) for i in range(8)], drafter)
    assert rig.counters.accepted == rig.counters.proposed > 200


@pytest.mark.parametrize("filters", FILTERS[:3], ids=str)
@pytest.mark.parametrize("apart", [0.0, 0.3, 1.0, 3.0])
def test_two_models_draw_alike_as_often_as_the_coupling_promises(apart: float, filters: dict[str, Any]) -> None:
    """With the same random numbers draws from p and q agree with a probability from (1 - d) / (1 + d), d being their
    total variation (Daliri et al. 2025), up to 1 - d, which nothing exceeds."""
    generator, n = torch.Generator().manual_seed(int(10 * apart)), DRAWS
    target = torch.randn(12, generator=generator) * 1.5
    draft = target + apart * torch.randn(12, generator=generator)
    params = SamplingParams(**filters)
    drawn, laws = [], []
    for logits in (target, draft):
        one = torch.ones(n)
        drawn.append(flat(
            sample, logits.expand(n, -1), temperature=one * params.temperature, seeds=torch.arange(n),
            indices=torch.zeros(n).long(), top_k=(one * params.top_k).int() if params.top_k > 0 else None,
            top_p=one * params.top_p, min_p=one * params.min_p,
        ))  # fmt: skip
        laws.append(torch.tensor(probabilities(logits, (), (), params)))
    d = (laws[0] - laws[1]).abs().sum().item() / 2
    alike = (drawn[0] == drawn[1]).float().mean().item()
    noise = 4 * 0.5 / n**0.5
    assert (1 - d) / (1 + d) - noise <= alike <= 1 - d + noise
    if not apart:
        assert alike == 1.0


def test_chi_square_notices_a_small_bias(models: Models) -> None:
    """The limit is no formality: one token in ten taken for its neighbour is beyond it."""
    params = SamplingParams(temperature=1.0)
    wanted = joint(models.oracle, params)
    generator = torch.Generator().manual_seed(0)
    outcomes = list(wanted)
    for share, beyond in ((0.0, False), (0.1, True)):
        p = torch.tensor([(1 - share) * wanted[o] + share * wanted[*o[:2], (o[2] + 1) % VOCAB] for o in outcomes])
        counts = torch.multinomial(p, DRAWS // 2, replacement=True, generator=generator).bincount(
            minlength=len(outcomes)
        )
        statistic, limit = chi_square(dict(zip(outcomes, counts.tolist())), wanted)
        assert (statistic > limit) == beyond


@pytest.mark.usefixtures("provider")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_accept_chain_counts_leading_hits(data: st.DataObject) -> None:
    """And leaves each row the draw after the last input that stays."""
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 16))
    few = st.integers(0, 1)
    drawn = [[data.draw(few) for _ in range(width)] for _ in range(rows)]
    drafts = [[data.draw(few) for _ in range(width - 1)] for _ in range(rows)]
    counts = [data.draw(st.integers(0, width - 1)) for _ in range(rows)]
    places = data.draw(st.permutations(range(1, 6)))[:rows]
    last = torch.full((6,), -7, dtype=torch.int32)
    inputs = (torch.tensor(drafts).int(), torch.tensor(counts).int(), torch.tensor(places).int())
    got = accept_chain(torch.tensor(drawn), *inputs, last)
    assert got.dtype == torch.int32
    wanted = {place: own[n - 1] for place, own, n in zip(places, drawn, got.tolist())}
    assert last.tolist() == [wanted.get(i, -7) for i in range(6)]
    for accepted, own, guess, count in zip(got.tolist(), drawn, drafts, counts):
        kept = 0
        while kept < count and own[kept] == guess[kept]:
            kept += 1
        assert accepted == 1 + kept


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_verify_draws_what_sampling_step_by_step_draws(data: st.DataObject) -> None:
    """One verification of T inputs against T plain draws, fed the tokens that the verification kept: penalties see the
    drafts before a draw, and count what was kept alone."""
    rows, width, vocab = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 6)), 9
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(rows, width, vocab, generator=generator) * 2
    kinds = [*FILTERS, {"temperature": 0.0, "presence_penalty": 2.0}]
    params = [SamplingParams(seed=i, **data.draw(st.sampled_from(kinds))) for i in range(rows)]
    prompts = [[data.draw(st.integers(0, vocab - 1)) for _ in range(3)] for _ in range(rows)]
    index = torch.arange(1, rows + 1, dtype=torch.int32)
    tables = [_table(params, prompts, vocab) for _ in range(2)]
    start = data.draw(st.integers(0, 5))

    plain = torch.stack([
        Sampler(tables[0])(logits[:, t], index, torch.full((rows,), start + t).int(), used_parts(params))
        for t in range(width)
    ], 1)  # fmt: skip
    good = [data.draw(st.integers(0, width - 1)) for _ in range(rows)]
    drafts = torch.stack([(p[:-1] + (torch.arange(width - 1) >= g)) % vocab for p, g in zip(plain, good)]).int()
    counts = torch.full((rows,), width - 1).int()
    positions = (start + 7 + torch.arange(width)).repeat(rows, 1).int()
    last = torch.zeros(rows + 1, dtype=torch.int32)
    step = Verification(index, torch.full((rows,), start).int(), positions, drafts, counts, last)
    kept = Sampler(tables[1]).verify(logits.flatten(0, 1), step, used_parts(params))
    tokens, accepted = kept.tokens, kept.counts
    assert accepted.tolist() == [1 + g for g in good]
    for row, (got, want, kept) in enumerate(zip(tokens, plain, accepted.tolist())):
        assert got[:kept].tolist() == want[:kept].tolist()
        if params[row].uses_penalties:
            wanted = want[:kept].bincount(minlength=vocab)
            assert torch.equal(tables[1].output_counts[row + 1].long(), wanted)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_drafts_are_drawn_as_sampling_step_by_step_draws(data: st.DataObject) -> None:
    """From the target's logits a drafter that runs ahead draws what the target would, penalties for its own drafts
    included, and leaves no count."""
    rows, width, vocab = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), 9
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(rows, width, vocab, generator=generator) * 2
    kinds = [*FILTERS, {"temperature": 0.0, "presence_penalty": 2.0}, {"temperature": 0.0}]
    params = [SamplingParams(seed=i, **data.draw(st.sampled_from(kinds))) for i in range(rows)]
    index, parts = torch.arange(1, rows + 1, dtype=torch.int32), used_parts(params)
    tables = [_table(params, [[1, 2]] * rows, vocab) for _ in range(2)]
    drafts = torch.empty(rows, 0, dtype=torch.int64)
    for t in range(width):
        places = torch.full((rows,), t).int()
        plain = Sampler(tables[0])(logits[:, t], index, places, parts)
        drawn = Sampler(tables[1]).draft(logits[:, t], index, places, parts, drafts)
        assert torch.equal(drawn, plain)
        drafts = torch.cat((drafts, drawn[:, None]), 1)
    assert not tables[1].output_counts.any()


def _table(params: Sequence[SamplingParams], prompts: Sequence[list[int]], vocab: int) -> SamplingTable:
    """Rows 1, 2, ... with these parameters; nothing generated yet."""
    table = SamplingTable(len(params), vocab, torch.device("cpu"))
    admissions = [
        Admission.from_prompt(i + 1, 0, p, s, derive_seed(7, i)) for i, (s, p) in enumerate(zip(params, prompts))
    ]
    arrays = map_arrays(torch.from_numpy, SamplingTable.pack(admissions))
    table.enter_rows(torch.arange(1, len(params) + 1), arrays)
    return table
