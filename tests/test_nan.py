"""What one request computes, NaN included, stays with it: scratch stays finite, and nothing masked is multiplied in."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrt.base.errors import EngineError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.request.sample_request import derive_seed
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.speculative.drafter import AdaptiveDrafter, Draft, Drafter, DraftRequest
from hybridrt.speculative.ngram import NgramDrafter
from tests.support.checkpoints import VOCAB, falcon, falcon_mamba, jamba, lfm2_moe, nemotron, qwen, swa_ssm, write
from tests.support.levels import drawn, sweep
from tests.support.samples import Sample, Samples
from tests.support.speculation import Ask, Rig

BAD = 0  # its embedding is NaN; it is never sampled
LATE = range(118, VOCAB)  # so are theirs, and they are sampled: a request that has been well computes NaN from there on
UNTIED = {"tie_word_embeddings": False}  # of a tied model the token's logit would be NaN for every request
MAKERS = {
    "mamba2": falcon(num_hidden_layers=1, **UNTIED),
    "moe": nemotron("M*E", **UNTIED),
    "gdn": qwen(**UNTIED),
    "mamba1": jamba(num_hidden_layers=2, attn_layer_period=2, num_experts=1, **UNTIED),
    "attention-free": falcon_mamba(num_hidden_layers=1, **UNTIED),
    "short conv": lfm2_moe(**UNTIED),
    "history": swa_ssm(num_hidden_layers=2, history_mode=["prefix_sum", "enabled"], **UNTIED),
}
WAYS = [
    (name, mode, drafts, topk)
    for name in MAKERS
    for mode, drafts, topk in (
        ("classic", 0, 1), ("replay", 0, 1), ("replay", 4, 1), ("intermediate", 4, 1), ("intermediate", 6, 3),
    )
    if mode != "replay" or name in ("mamba2", "moe", "gdn")
]  # fmt: skip
# With graphs or without them, in small chunks and large ones: two of the four, in turns.
PAIRED = [(*way, bool(k), (3, 8192)[(i + k) % 2]) for i, way in enumerate(WAYS) for k in (0, 1)]
LEFT = [(*way, bool(k), (8192, 3)[(i + k) % 2]) for i, way in enumerate(WAYS) for k in (0, 1)]


class Rigs:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.path, self._rig = cache(self._path), cache(self._make)
        self._alone = dict[tuple[str, str], Sample]()

    def alone(self, name: str, asks: Sequence[Ask]) -> list[Sample]:
        """Of each request alone, without drafts. The same request is run once: many modes are compared with it."""
        found = []
        for one in asks:
            key = name, repr((one.prompt, one.params))
            if key not in self._alone:
                rig = self.rig(name, "classic", 0, 1, False)
                clean(rig)
                (self._alone[key],) = play(rig, [Ask(one.prompt, one.params)])
            found.append(self._alone[key])
        return found

    def rig(self, name: str, mode: str, drafts: int, topk: int, graphs: bool, late: bool = True) -> Rig:
        """With BAD and, if `late`, LATE tokens that give NaN."""
        rig, sound = self._rig(name, mode, drafts, topk, graphs)
        model: Any = rig.runner.model
        with torch.no_grad():
            model.embed.weight.copy_(sound)
            model.embed.weight[[BAD, *LATE] if late else [BAD]] = torch.nan
        return rig

    def _path(self, name: str) -> Path:
        write(MAKERS[name], self.root / name)
        return self.root / name

    def _make(self, name: str, mode: str, drafts: int, topk: int, graphs: bool) -> tuple[Rig, Tensor]:
        spec: dict[str, Any] = {"topk": topk} if drafts else {}
        rig = Rig(self.path(name), mode=mode, drafts=drafts, graphs=graphs, **spec)
        model: Any = rig.runner.model
        logits = model.logits
        model.logits = lambda hidden: logits(hidden).index_fill_(1, torch.tensor([BAD]), -1e9)
        return rig, model.embed.weight.detach().clone()


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Rigs:
    return Rigs(tmp_path_factory.mktemp("models"))


class Anything(Drafter):
    """Proposes any tokens that do not give NaN, few or many; bushy trees where `trees`."""

    def __init__(self, trees: bool) -> None:
        self.trees = trees

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        return [self._draft(request, n) for request, n in zip(requests, max_drafts, strict=True)]

    def _draft(self, request: DraftRequest, most: int) -> Draft:
        h = derive_seed(request.seed, len(request.output))
        chain = [3 + derive_seed(h, i) % (LATE.start - 3) for i in range(h % (most + 1))]
        if not self.trees:
            return Draft(chain)
        return Draft(chain, [derive_seed(h, -i) % (i + 1) for i in range(len(chain))])


def play(
    rig: Rig, asks: Sequence[Ask], chunk: int = 8192, overlap: bool = False, ngrams: bool = False, watch: bool = True
) -> list[Sample]:
    """The last output of each request; a request may fail. With `watch`, scratch is finite after every step."""
    drafter: Drafter | None = None
    if spec := rig.config.speculative:
        inner: Drafter = NgramDrafter(topk=spec.topk) if ngrams else Anything(spec.topk > 1)
        drafter = AdaptiveDrafter(inner, spec.num_draft_tokens, patience=1000)
    engine = rig.engine(drafter, chunk, overlap)
    found = Samples()
    steps = 0
    while engine.has_unfinished() or steps <= max(a.arrival for a in asks):
        for i, ask in enumerate(asks):
            if ask.arrival == steps:
                engine.add_request(ask.prompt, ask.params, str(i))
        found.add(engine.step() if engine.has_unfinished() else ())
        rig.coordinator.check()
        if watch:
            assert_scratch_is_finite(rig)
        steps += 1
    assert rig.coordinator.rows.num_free == rig.coordinator.rows.total
    return [found[str(i), 0] for i in range(len(asks))]


def tensors(pools: Pools) -> Iterator[tuple[str, Tensor]]:
    """All of them with scratch at entry 0 of the first dimension."""
    for n, cache_ in enumerate(pools.kv.tensors):
        yield from ((f"KV tensor {n} of layer {i}", layer) for i, layer in enumerate(cache_))
    mamba = pools.req_to_token.mamba_pool
    for i in mamba.layer_ids if mamba is not None else ():
        for name, tensor in vars(mamba.layer_cache(i)).items():  # type: ignore[union-attr]
            if tensor is not None:
                yield f"{name} of layer {i}", tensor


def assert_scratch_is_finite(rig: Rig) -> None:
    bad = [name for name, tensor in tensors(rig.runner.pools) if not tensor[0].isfinite().all()]
    assert not bad, f"not finite in scratch: {bad}"
    assert rig.runner.sampling_table.floats[:, 0].isfinite().all()


def clean(rig: Rig) -> None:
    for _, tensor in tensors(rig.runner.pools):
        tensor.zero_()


def failed(output: Sample) -> bool:
    """Whether it ended because of NaN; no other failure is known."""
    if output.error is None:
        return False
    assert output.finish_reason == "abort" and isinstance(output.error, EngineError), output.error
    assert "not finite" in str(output.error), output.error
    return True


def ask(prompt: Sequence[int], seed: int, max_tokens: int = 12, arrival: int = 0, **params: Any) -> Ask:
    fields = {"temperature": 0.0, **params}
    return Ask(list(prompt), SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **fields), arrival)


def healthy() -> list[Ask]:
    return [
        ask([5, 6, 7, 5, 6, 7, 5, 6], 1, 14, logprobs=2),
        ask([9, 8, 7, 6, 5], 2, 10, temperature=0.9, top_k=20),
        ask([11, 12] * 9, 3, 12, arrival=2, logprobs=2),
        ask([40], 4, 9, arrival=4, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.2),
    ]


def assert_same(got: Sequence[Sample], want: Sequence[Sample]) -> None:
    ends = [[(out.token_ids, out.finish_reason, failed(out)) for out in outputs] for outputs in (got, want)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("name", "mode", "drafts", "topk", "graphs", "chunk"),
    sweep(PAIRED + LEFT, 17, len(PAIRED), thin=7),
)
def test_nothing_reads_what_no_request_of_its_own_wrote(
    name: str, mode: str, drafts: int, topk: int, graphs: bool, chunk: int, rigs: Rigs
) -> None:
    """All pools full of NaN, scratch, tails of pages and ends of rings included, give the bits that zeros give."""
    rig = rigs.rig(name, mode, drafts, topk, graphs, late=False)
    clean(rig)
    want = play(rig, healthy(), chunk, overlap=True)
    assert not any(map(failed, want))
    for _, tensor in tensors(rig.runner.pools):
        tensor.fill_(torch.nan)
    rig.runner.pools.req_to_token.tables[1:] = -(2**30)
    got = play(rig, healthy(), chunk, overlap=True, watch=False)
    clean(rig)
    assert_same(got, want)
    assert [out.logprobs for out in got] == [out.logprobs for out in want], "not the same bits"


@pytest.mark.parametrize(
    ("name", "mode", "drafts", "topk", "graphs"),
    sweep([(*way, bool(i % 2)) for first in (0, 1) for i, way in enumerate(WAYS, first)], 9, len(WAYS), thin=7),
)
def test_nan_stays_with_its_request(name: str, mode: str, drafts: int, topk: int, graphs: bool, rigs: Rigs) -> None:
    """Before, next to and after requests that compute NaN, in rows, slots and pages that they have left."""
    rig, want = rigs.rig(name, mode, drafts, topk, graphs), rigs.alone(name, healthy())
    clean(rig)
    poisoned = [
        ask([5, BAD, 7, 8], 91), ask([20, 21, 20, 21, 20, BAD], 92, arrival=3), ask([BAD], 93, arrival=6, logprobs=3),
        *(ask([7, 5, i], 94 + i, 30, i, temperature=1.5) for i in range(1, 6)),
    ]  # fmt: skip
    for _ in range(2):
        got = play(rig, [*healthy(), *poisoned], 5, overlap=True)
        assert_same(got[:4], want)
        assert [(failed(out), out.token_ids) for out in got[4:7]] == [(True, [])] * 3
        assert any(failed(out) and len(out.token_ids) > 1 for out in got[7:])


@st.composite
def histories(draw: st.DrawFn) -> list[Ask]:
    """Requests with a NaN token anywhere in some prompts."""
    found = []
    for i in range(draw(st.integers(2, 6), "requests")):
        prompt = draw(st.lists(st.integers(3, LATE.start - 1), min_size=1, max_size=6), "prompt")
        prompt *= draw(st.integers(1, 3), "times")
        if draw(st.booleans(), "bad"):
            prompt.insert(draw(st.integers(0, len(prompt)), "place"), BAD)
        params = draw(st.sampled_from([{}, {"temperature": 0.9}, {"temperature": 0.8, "repetition_penalty": 1.3}]))
        found.append(ask(prompt, i, draw(st.integers(1, 12)), draw(st.integers(0, 6), "arrival"), **params))
    return found


@pytest.mark.parametrize(
    ("name", "mode", "drafts", "topk", "examples"),
    drawn([w for w in WAYS if w[0] in ("mamba2", "gdn", "history")], 4, 3, 3, 40, thin=2),
)
def test_neighbours_of_a_nan_token_are_as_if_alone(
    name: str, mode: str, drafts: int, topk: int, examples: int, rigs: Rigs
) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(asks=histories(), chunk=st.sampled_from([2, 5, 8192]), choices=st.tuples(*[st.booleans()] * 3))
    def history(asks: list[Ask], chunk: int, choices: tuple[bool, ...]) -> None:
        graphs, overlap, ngrams = choices
        rig = rigs.rig(name, mode, drafts, topk, graphs)
        got = play(rig, asks, chunk, overlap, ngrams)
        assert_same(got, rigs.alone(name, asks))
        assert all(failed(output) for output, one in zip(got, asks, strict=True) if BAD in one.prompt)

    history()


@pytest.mark.parametrize("provider", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("name", "mode", "drafts"),
    [("mamba2", "replay", 2), pytest.param("mamba1", "intermediate", 2, marks=pytest.mark.slow)],
)
def test_triton_kernels_keep_nan_apart(name: str, mode: str, drafts: int, provider: str, tmp_path: Path) -> None:
    """Both of the above, short, with the kernels of a GPU under the interpreter."""
    rig = Rigs(tmp_path).rig(name, mode, drafts, 1, False, late=False)
    sound = [ask([5, 6, 7, 5], 1, 3), ask([9], 2, 2, arrival=1)]
    clean(rig)
    want = play(rig, sound, 3)
    for _, tensor in tensors(rig.runner.pools):
        tensor.fill_(torch.nan)
    assert_same(play(rig, sound, 3, watch=False), want)
    clean(rig)
    got = play(rig, [*sound, ask([5, BAD, 3], 3)], 5)
    assert_same(got[:2], want)
    assert failed(got[2])
