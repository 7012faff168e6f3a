"""Text with speculation equals text without it, token for token, whatever arrives, ends, is retracted or proposed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.request.sample_request import derive_seed
from hybridrt.speculative.draft_model import DraftModelDrafter
from hybridrt.speculative.drafter import AdaptiveDrafter, Draft, Drafter, DraftRequest
from hybridrt.speculative.mtp import MTPDrafter
from hybridrt.speculative.ngram import NgramDrafter
from tests.support.checkpoints import CASES, VOCAB, falcon, falcon_mamba, jamba, lfm2, nemotron, swa_ssm, write
from tests.support.levels import drawn
from tests.support.mtp_oracle import write_with_head
from tests.support.newer_checkpoints import minimax, zamba2
from tests.support.speculation import Ask, Rig, Script, Scripted, assert_same, sample_seed, shifted

# How the state rolls back, and most drafts at one place: 1 makes chains, more makes trees.
MODES = (("intermediate", 1), ("replay", 1), ("intermediate", 3))
MAKERS = {
    "mamba2": falcon(num_hidden_layers=1),
    "gdn": CASES["qwen-dense_by_number"],
    "attention": CASES["nemotron-attention_alone"],
    "mamba1": jamba(num_hidden_layers=2, attn_layer_period=2, num_experts=1),
    "attention-free": falcon_mamba(num_hidden_layers=1),
    "short conv": lfm2(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    "shared blocks": zamba2(layers_block_type=["hybrid"] * 2, num_hidden_layers=2, use_shared_attention_adapter=True),
    "lightning": minimax(
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=1,
        num_experts_per_tok=1,
    ),
    "history": swa_ssm(num_hidden_layers=2, history_mode=["prefix_sum", "enabled"]),
    "mamba2 with a head": nemotron("M*", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*-"),
}
WITH_HEADS = {"mamba2": "mamba2 with a head", "gdn": "gdn"}
# What drafts for a model, apart from itself: its own kind with other weights, a model without recurrent layers or one
# without attention.
OTHERS = {
    "mamba2": ("mamba2", 1), "gdn": ("attention", 0), "mamba1": ("attention-free", 0), "attention-free": ("mamba1", 0),
    "history": ("history", 1), "short conv": ("short conv", 1),
    "shared blocks": ("shared blocks", 1), "lightning": ("lightning", 1),
}  # fmt: skip
REPLAYING = ("mamba2", "gdn", "short conv", "shared blocks", "lightning")
WAYS = [(name, *mode) for name in OTHERS for mode in MODES if mode[0] != "replay" or name in REPLAYING]
WAYS.remove(("shared blocks", "intermediate", 1))  # the states are those of "mamba2"
METHODS = ("ngram", "same", "other", "mtp", "scripted")
# Drafters matter least to the models of one mode: a script may propose whatever they do.
HISTORIES = [
    (*way, method) for way in WAYS for method in METHODS
    if way[0] in ("mamba2", "gdn") or method == "scripted" or (way[2] == 1 and method in ("ngram", "other"))
]  # fmt: skip


class Rigs:
    """Each kind of rig built once: hypothesis runs many histories through it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = cache(self._path)
        self.plain = cache(lambda name: Rig(self.path(name), rows=10))
        self.rig = cache(self._rig)

    def _path(self, name: str, seed: int = 0) -> Path:
        path = self.root / f"{name}-{seed}"
        writer = write_with_head if name in WITH_HEADS.values() else write
        writer(MAKERS[name], path, seed=seed)
        return path

    def _rig(
        self, name: str, mode: str, drafts: int, graphs: bool, pages: int | None, method: str = "ngram", topk: int = 1
    ) -> Rig:
        draft_model = self.path(name) if method == "same" else self.path(*OTHERS[name]) if method == "other" else None
        spec: dict[str, Any] = {"method": "draft", "draft_model": str(draft_model)} if draft_model else {}
        if method == "mtp":
            spec = {"method": "mtp"}
        return Rig(self.path(name), mode=mode, drafts=drafts, graphs=graphs, pages=pages, topk=topk, **spec)


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Rigs:
    return Rigs(tmp_path_factory.mktemp("models"))


@cache
def draft_model(rig: Rig) -> DraftModelDrafter:
    return DraftModelDrafter(rig.config, rig.runner.memory_plan, VOCAB)


def make_mtp(rig: Rig) -> MTPDrafter:
    assert rig.config.speculative is not None
    return MTPDrafter(
        (rig.split or rig.runner).draft, rig.config.speculative.num_draft_tokens, rig.config.speculative.topk
    )


def make_drafter(rig: Rig, method: str, futures: dict[int, list[int]]) -> Drafter:
    assert rig.config.speculative is not None
    drafts, topk = rig.config.speculative.num_draft_tokens, rig.config.speculative.topk
    inner: Drafter = (
        Scripted(futures, SCRIPTS[method], trees=topk > 1) if method in SCRIPTS else NgramDrafter(topk=topk)
    )
    if method in ("same", "other"):
        inner = draft_model(rig)
    if rig.runner.drafter is not None:
        inner = make_mtp(rig)
    return AdaptiveDrafter(inner, drafts, patience=5)


def right_until(coming: list[int], good: int) -> list[int]:
    return [t if i < good else shifted(t) for i, t in enumerate(coming)]


def at_random(coming: list[int], request: DraftRequest) -> list[int]:
    h = derive_seed(request.seed, len(request.output))
    return right_until(coming, h % (len(coming) + 1))[: h // 64 % (len(coming) + 1)]


SCRIPTS: dict[str, Script] = {
    "right": lambda coming, _: coming,
    "wrong": lambda coming, _: right_until(coming, 0),
    "wrong at last": lambda coming, _: right_until(coming, len(coming) - 1),
    "random": at_random,
    "in bursts": lambda coming, request: coming if len(request.output) // 6 % 2 else [],
    "too long": lambda coming, _: [*coming, *coming],
    "padding tokens": lambda coming, _: [0] * len(coming),
}

filters = st.sampled_from([
    {"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.02},
    {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 0.5}, {"temperature": 1.0, "repetition_penalty": 0.6},
])  # fmt: skip


@st.composite
def asks(draw: st.DrawFn, most: int = 5, longest: int = 30) -> list[Ask]:
    """Requests: repeating or random prompts, some that stop early, come late, are aborted or ask for more."""
    found = []
    for i in range(draw(st.integers(1, most), "requests")):
        unit = draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=7), "prompt")
        fields: dict[str, Any] = draw(filters, "filters")
        params = SamplingParams(
            max_tokens=draw(st.integers(1, longest), "max_tokens"), seed=100 * i + draw(st.integers(0, 9), "seed"),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=6), "stop")),
            n=draw(st.sampled_from([1, 1, 1, 2]), "n"), logprobs=draw(st.sampled_from([None, None, 2]), "logprobs"),
            ignore_eos=True, **fields,
        )  # fmt: skip
        prompt = unit * draw(st.integers(1, 4), "times")
        abort = draw(st.sampled_from([None, None, None, 2, 7]), "abort after")
        found.append(Ask(prompt, params, draw(st.integers(0, 8), "arrival"), abort))
    return found


chunks = st.sampled_from([2, 5, 11, 8192])


def check(
    rigs: Rigs, name: str, rig: Rig, method: str, requests: Sequence[Ask], chunk: int, overlap: bool = False
) -> None:
    futures = rigs.plain(name).futures(requests)
    by_seed = {sample_seed(requests[int(i)], k): output.token_ids for (i, k), output in futures.items()}
    found = rig.run(requests, make_drafter(rig, method, by_seed), chunk, overlap)
    assert_same(requests, found, futures)


@pytest.mark.parametrize(("name", "mode", "topk", "method", "examples"), drawn(HISTORIES, 28, 4, 2, 25, thin=7))
def test_any_history(name: str, mode: str, topk: int, method: str, examples: int, rigs: Rigs) -> None:
    """Closures for graphs, pages for all or for little more than one, steps launched ahead: everything at once."""
    kind = WITH_HEADS[name] if method == "mtp" else name

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(
        requests=asks(),
        drafts=st.sampled_from([1, 4, 7]),
        chunk=chunks,
        graphs=st.booleans(),
        overlap=st.booleans(),
        pages=st.sampled_from([None, None, 0]),
        script=st.sampled_from(sorted(SCRIPTS)) if method == "scripted" else st.just(method),
    )
    def play(
        requests: list[Ask], drafts: int, chunk: int, graphs: bool, overlap: bool, pages: int | None, script: str
    ) -> None:
        rig = rigs.rig(kind, mode, drafts, graphs, pages, method, topk)
        check(rigs, kind, rig, script, requests, chunk, overlap)

    play()


@dataclass
class Repeated(Drafter):
    """Asks twice."""

    inner: Drafter
    asked: int = 0

    def begin_request(self, request: DraftRequest) -> None:
        self.inner.begin_request(request)

    def end_request(self, request: DraftRequest) -> None:
        self.inner.end_request(request)

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        first = self.inner.propose(requests, max_drafts)
        assert first == self.inner.propose(requests, max_drafts)
        self.asked += len(first)
        return first


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("method", ["ngram", "same", "mtp"])
def test_a_drafter_proposes_the_same_again(method: str, graphs: bool, rigs: Rigs) -> None:
    """Drafts of a request are dropped, for example because no page is left. It then proposes again with no new
    token."""
    rig = rigs.rig("gdn", "replay", 4, graphs, None, method)
    inner: Drafter = NgramDrafter() if method == "ngram" else draft_model(rig) if method == "same" else make_mtp(rig)
    drafter = Repeated(inner)
    prompts = ([5, 6, 7, 5, 6, 7], [40], [9, 9, 9])
    asks = [Ask(list(p), SamplingParams(max_tokens=24, temperature=0.0, seed=i)) for i, p in enumerate(prompts)]
    assert_same(asks, rig.run(asks, AdaptiveDrafter(drafter, 4)), rigs.plain("gdn").futures(asks))
    assert drafter.asked > 10


TIGHT = [way for way in WAYS if way[0] in ("mamba2", "gdn", "history") or way == ("mamba1", "intermediate", 1)]


@pytest.mark.parametrize(("name", "mode", "topk", "examples"), drawn(TIGHT, 14, 3, 2, 25, thin=4))
def test_retraction(name: str, mode: str, topk: int, examples: int, rigs: Rigs) -> None:
    """KV for one long request and a little: requests are thrown out and come back with their output."""
    retractions = 0

    methods = st.sampled_from(["ngram", "same", "random", "in bursts", *["mtp"] * (name in WITH_HEADS)])
    # What hypothesis draws depends on the modules that other tests have imported: these are thrown out in any case.
    crowd = [Ask([5 + i, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, seed=i)) for i in range(3)]

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @example(requests=crowd, chunk=16, method="ngram", overlap=True)
    @given(requests=asks(longest=60), chunk=chunks, method=methods, overlap=st.booleans())
    def play(requests: list[Ask], chunk: int, method: str, overlap: bool) -> None:
        nonlocal retractions
        kind = WITH_HEADS[name] if method == "mtp" else name
        long = [replace(a, params=replace(a.params, max_tokens=60, stop_token_ids=(), n=1)) for a in requests]
        rig = rigs.rig(kind, mode, 4, False, 5, method, topk)
        check(rigs, kind, rig, method, long, chunk, overlap)
        retractions += rig.counters.retractions

    play()
    assert retractions > examples // 4
