"""Requests with biases, allowed tokens and least lengths: alone, together, and with drafts."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.base.errors import RequestError
from hybridrt.runtime.step.sampling_table import any_allowed
from tests.kernels.test_token_rules import Ruled


@pytest.fixture(scope="module")
def path() -> Path:
    from hybridrt.runtime.load.model_path import resolve_model_path

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


@pytest.mark.parametrize("drafter", ["draft", pytest.param("ngram", marks=pytest.mark.soak)])
@pytest.mark.slow
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
        with pytest.raises(RequestError, match="allowed_token_ids and min_tokens forbid every first token"):
            llm.engine.prepare("x", SamplingParams(min_tokens=2, allowed_token_ids=[0]))
        for name, value in (("logit_bias", {10**6: 1}), ("allowed_token_ids", [10**6])):
            with pytest.raises(RequestError, match=f"{name} holds 1000000"):
                llm.engine.prepare("x", SamplingParams(**{name: value}))  # type: ignore[arg-type]


def test_whether_any_token_may_follow() -> None:
    """As a loop over the request's own lists says; the random masks leave two tokens."""
    rng, seen = random.Random(1), set[bool]()
    for _ in range(2000):
        ruled = Ruled(rng, 40)
        output, left = rng.choices(range(12), k=rng.randrange(6)), rng.sample(range(12), 2)
        bits = np.zeros(64, np.uint8)
        bits[left] = 1
        mask = np.packbits(bits, bitorder="little").view(np.int32)
        want = bool((ruled.apply(torch.zeros(40), output)[left] > -math.inf).any())
        assert any_allowed(ruled.rules, mask, output) == want
        seen.add(want)
    assert seen == {False, True}
    assert any_allowed(None, None, ()) and not any_allowed(None, np.zeros(2, np.int32), ())
