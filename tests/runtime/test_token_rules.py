"""Biases, allowed tokens and least lengths: the operation against loops, tables of rows, whole requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.errors import RequestError
from hybridrt.kernels.sampling import LogitBiases, biased_logits
from hybridrt.runtime.sampler import Filters, Sampler, SamplingTable
from hybridrt.runtime.step import Admission

VOCAB = 70  # no multiple of 32


@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize("entries", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biased_logits(entries: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 1000, generator=generator).to(dtype)
    before = logits.clone()
    ids = torch.stack([torch.randperm(1000, generator=generator)[:entries] for _ in range(3)]).int()
    values = torch.randn(3, entries, generator=generator)
    values[:, ::3] = -torch.inf
    until = torch.randint(0, 6, (3, entries), generator=generator, dtype=torch.int32)
    indices = torch.tensor([0, 3, 9], dtype=torch.int32)
    got = biased_logits(logits, LogitBiases(ids, values, until), indices)
    want = before.float().clone()
    for b in range(3):
        for k in range(entries):
            if indices[b] < until[b, k]:
                want[b, ids[b, k]] += values[b, k]
    assert got.dtype == torch.float32 and torch.equal(got, want) and torch.equal(logits, before)


@pytest.mark.usefixtures("provider")
def test_a_token_that_is_ruled_out_twice() -> None:
    ids = torch.tensor([[2, 2, 2]], dtype=torch.int32)
    biases = LogitBiases(ids, torch.tensor([[5.0, -torch.inf, -torch.inf]]), torch.full((1, 3), 9, dtype=torch.int32))
    assert biased_logits(torch.zeros(1, 4), biases, torch.zeros(1, dtype=torch.int64))[0].tolist() == [
        0,
        0,
        -torch.inf,
        0,
    ]


def table_of(*params: SamplingParams, rows: int = 4, table: SamplingTable | None = None) -> SamplingTable:
    table = table or SamplingTable(rows, VOCAB, torch.device("cpu"))
    admissions = [Admission(i + 1, i + 1, (1, 2), 2, p, 5 + i) for i, p in enumerate(params)]
    sections = {name: torch.from_numpy(np.array(part)) for name, part in SamplingTable.pack(admissions).items()}
    table.admit(torch.arange(1, len(params) + 1), sections)
    return table


def draw(table: SamplingTable, params: Sequence[SamplingParams], index: int, logits: torch.Tensor) -> list[int]:
    rows = torch.arange(1, len(params) + 1, dtype=torch.int32)
    tokens: list[int] = Sampler(table)(logits, rows, torch.full((len(params),), index), Filters.of(params)).tolist()
    return tokens


@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_keep_their_own_rules(temperature: float) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 33] = 50
    params = [
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, logit_bias={33: -100, 69: 100}),
        SamplingParams(temperature=temperature, allowed_token_ids=[31, 32]),
        SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=[33], logit_bias={5: 60, 6: 20}),
    ]
    table = table_of(*params)
    for index in range(6):
        free, biased, restricted, least = draw(table, params, index, logits.clone())
        assert (free, biased) == (33, 69) and restricted in (31, 32)
        assert least == 5, "the bias stays, whatever the length"
    logits[:, 5] = -200
    assert [draw(table, params, index, logits.clone())[3] for index in range(5)] == [6, 6, 6, 33, 33]


def test_a_row_s_rules_end_with_its_request() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 33] = 50
    ruled = SamplingParams(temperature=0.0, logit_bias={33: -100, 7: 100}, allowed_token_ids=[7, 8])
    table = table_of(ruled, SamplingParams(temperature=0.0))
    after = [SamplingParams(temperature=0.0), ruled]
    table_of(*after, table=table)
    assert draw(table, after, 0, logits) == [33, 7]
    other = [
        SamplingParams(temperature=0.0, logit_bias={9: 100}),
        SamplingParams(temperature=0.0, allowed_token_ids=[40]),
    ]
    table_of(*other, table=table)
    assert draw(table, other, 0, logits) == [9, 40]


def test_what_no_row_asks_for_costs_nothing() -> None:
    plain = Filters.of([SamplingParams(temperature=0.0)])
    assert plain.plain and not (plain.biases or plain.restricted)
    assert Filters.of([SamplingParams(temperature=0.0, min_tokens=3)]).plain, "nothing would end the output"
    for change in ({"logit_bias": {3: 1.0}}, {"allowed_token_ids": [3]}, {"min_tokens": 2, "stop_token_ids": [3]}):
        assert not Filters.of([SamplingParams(temperature=0.0, **change)]).plain  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 6}, "min_tokens is 6; it must be an integer from 0 to max_tokens, 5"),
        ({"logit_bias": {1: 101}}, "logit_bias is 101"),
        ({"logit_bias": {-1: 1}}, "logit_bias is -1"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias is nan"),
        ({"logit_bias": [(1, 1), (1, 2)]}, "one bias a token"),
        ({"logit_bias": [1]}, "logit_bias is"),
        ({"logit_bias": "5"}, "logit_bias is '5'"),
        ({"logit_bias": {i: 1 for i in range(1025)}}, "more than 1024"),
        ({"allowed_token_ids": []}, "at least one token id"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids is 1.5"),
    ],
)
def test_values_that_cannot_be(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text) as info:
        SamplingParams(**{"max_tokens": 5, **change})
    assert info.value.field == next(iter(change))


@pytest.fixture(scope="module")
def path() -> Path:
    from hybridrt.runtime.build import resolve_model_path

    return resolve_model_path("embedded")


PROMPTS = ["def main():\n    ", "for i in range(10):\n    print(i)\nfor i in range(", "import os\nimport ", "a = "]


def run(llm: LLM) -> list[list[int]]:
    """Tokens of four requests with rules, which do what they say, alone and together."""
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    plain = [SamplingParams(temperature=i % 2, seed=i, **common) for i in range(4)]
    free = [o.token_ids for o in llm.generate(PROMPTS, plain)]
    allowed = sorted({*free[2][::2], 5, 6, 7})
    ruled = [
        plain[0],
        SamplingParams(temperature=1, seed=1, logit_bias=dict.fromkeys(free[1][:4], -100), **common),
        SamplingParams(temperature=0, seed=2, allowed_token_ids=allowed, **common),
        SamplingParams(temperature=1, seed=3, min_tokens=9, stop_token_ids=free[3], max_tokens=24),
    ]
    together = [o.token_ids for o in llm.generate(PROMPTS, ruled)]
    assert together == [llm.generate(p, q)[0].token_ids for p, q in zip(PROMPTS, ruled)], "neighbours change nothing"
    assert together[0] == free[0] and together[1] != free[1] and not {*together[1]} & {*free[1][:4]}
    assert {*together[2]} <= {*allowed}
    assert not {*together[3][:9]} & {*free[3]} and len(together[3]) > 9
    return together


@pytest.fixture(scope="module")
def without_drafts(path: Path) -> list[list[int]]:
    with LLM(str(path), device="cpu", max_running_requests=4, max_model_len=128) as llm:
        return run(llm)


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_drafts_change_no_token_of_requests_with_rules(
    drafter: str, path: Path, without_drafts: list[list[int]]
) -> None:
    model = {"draft_model": "embedded_draft"} if drafter == "draft" else {}
    config = SpeculativeConfig(method=drafter, num_draft_tokens=3, **model)  # type: ignore[arg-type]
    with LLM(str(path), device="cpu", max_running_requests=4, max_model_len=128, speculative=config) as llm:
        assert run(llm) == without_drafts


def test_min_tokens_looks_for_no_stop_string_before(path: Path) -> None:
    with LLM(str(path), device="cpu", max_running_requests=2, max_model_len=128) as llm:
        whole = llm.generate("def main():", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))[0]
        assert whole.text.count("\n") > 2
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop="\n", min_tokens=12)
        got = llm.generate("def main():", params)[0]
        assert len(got.token_ids) > 12 and got.finish_reason == "stop" and whole.text.startswith(got.text)
        with pytest.raises(RequestError, match="nothing but tokens that end the output"):
            llm.engine.prepare("x", SamplingParams(min_tokens=2, allowed_token_ids=[0]))
        for name, value in (("logit_bias", {10**6: 1}), ("allowed_token_ids", [10**6])):
            with pytest.raises(RequestError, match=f"{name} holds 1000000"):
                llm.engine.prepare("x", SamplingParams(**{name: value}))  # type: ignore[arg-type]
