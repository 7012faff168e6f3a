"""The prediction head as drafter: what it proposes, against a naive head, however its requests are scheduled."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.collectives.groups import TPGroup
from hybridrt.engine.request.sample_request import derive_seed
from hybridrt.models.loading.loader import load_weights
from hybridrt.runtime.load.build_model import empty_model
from hybridrt.runtime.load.load_target import load_target
from hybridrt.speculative.drafter import Draft, Drafter, DraftRequest
from hybridrt.speculative.mtp import MTPDrafter
from tests.support.checkpoints import falcon, nemotron, write
from tests.support.levels import sweep
from tests.support.mtp_oracle import HEAD_KEYS, HEADS, NaiveHead, without_head, write_with_head
from tests.support.samples import Sample
from tests.support.speculation import Ask, Rig, assert_same, bushy, first_children

PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12, 13], [40], [3, 99, 3, 99, 3], [77, 21, 60])
Chain = tuple[tuple[int, ...], tuple[int, ...]]
Outputs = dict[tuple[str, int], Sample]


class Store:
    """Checkpoints with heads, each written once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.naive = cache(self._write)

    def _write(self, name: str) -> NaiveHead:
        path = self.root / name
        return NaiveHead(path, write_with_head(HEADS[name], path))

    def path(self, name: str) -> Path:
        return self.naive(name).path


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("heads"))


def load(path: Path, method: str = "mtp") -> tuple[Any, list[str]]:
    config = EngineConfig(str(path), device="cpu", dtype="float32", speculative=SpeculativeConfig(method))
    model = empty_model(config, load_target(config, TPGroup())[1], torch.device("cpu"))
    with torch.no_grad():
        return model, load_weights(model, path)


@pytest.mark.parametrize("name", HEADS)
def test_every_key_of_the_head_is_used_once(name: str, heads: Store) -> None:
    """What nothing fills stays NaN; without the method they are skipped, and listed."""
    path = heads.path(name)
    keys = set(load_file(path / "model.safetensors"))
    model, skipped = load(path)
    assert skipped == []
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    pieces = [p for target in (model.checkpoint_map() | model.mtp.checkpoint_map()).values() for p in target]
    assert len({piece.name for piece in pieces}) == len(pieces)
    assert set(load(path, "ngram")[1]) == {key for key in keys if key.startswith(HEAD_KEYS)}


def test_a_checkpoint_without_its_head(heads: Store, tmp_path: Path) -> None:
    path = without_head(heads.path("qwen"), tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r'no mtp\.\* weights.*"ngram"'):
        load(path)
    load(path, "ngram")


@pytest.mark.parametrize("name", ["qwen", "nemotron"])
def test_each_key_of_the_head_that_is_missing_or_left_over_is_named(name: str, heads: Store, tmp_path: Path) -> None:
    path = without_head(heads.path(name), tmp_path / "copy")
    whole = load_file(heads.path(name) / "model.safetensors")
    for key in sorted(key for key in whole if key.startswith("mtp."))[::7]:
        save_file({k: t for k, t in whole.items() if k != key}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"1 missing: {key}"):
            load(path)
    save_file({**whole, "mtp.layers.9.norm.weight": torch.ones(32)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"nothing consumes: mtp\.layers\.9"):
        load(path)


@pytest.mark.parametrize("make", [
    falcon(num_hidden_layers=1), nemotron("M-"), nemotron("M-", num_nextn_predict_layers=2),
    nemotron("M-", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="M*"),
])  # fmt: skip
def test_a_model_without_a_head_of_a_known_kind(make: Any, tmp_path: Path) -> None:
    write(make, tmp_path)
    with pytest.raises(ConfigError, match=r'"mtp" needs .* use "ngram" or "draft"'):
        load(tmp_path)


@dataclass
class Watched(Drafter):
    """Lets the head propose, keeps what it proposed, and proposes what is known to come, up to a wrong token, so that
    every number of drafts is accepted; in a tree where the head proposes one."""

    inner: MTPDrafter
    futures: dict[int, list[int]]
    seen: list[Chain] = field(default_factory=list)
    calls: int = 0

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
        proposed = []
        for request, draft in zip(requests, self.inner.propose(requests, most), strict=True):
            self.calls += 1
            self.seen.append(((*request.prompt, *request.output), first_children(draft)))
            coming = self.futures[request.seed][len(request.output) :]
            right = derive_seed(7, self.calls) % (len(draft) + 1)
            chain = [*coming[:right], *((t + 1) % 131 for t in coming[right:])][: len(draft)]
            proposed.append((Draft(chain) if self.inner.topk == 1 else bushy(chain, request)).first(len(draft)))
        return proposed


def watch(rig: Rig, futures: Outputs, drafts: int, topk: int = 1) -> Watched:
    by_seed = {int(i): output.token_ids for (i, _), output in futures.items()}
    return Watched(MTPDrafter(rig.runner.draft, drafts, topk), by_seed)


def watched_run(rig: Rig, asks: list[Ask], drafts: int, topk: int = 1, chunk: int = 8192) -> list[Chain]:
    """Each proposal's tokens and chain; the output is what it is without speculation."""
    futures = Rig(Path(rig.config.model), rows=4).futures(asks)
    watched = watch(rig, futures, drafts, topk)
    assert_same(asks, rig.run(asks, watched, chunk), futures)
    return watched.seen


def greedy_asks(count: int = 40) -> list[Ask]:
    fields: dict[str, Any] = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
    return [Ask(list(p), SamplingParams(seed=i, **fields), arrival=i) for i, p in enumerate(PROMPTS)]


def assert_chains(naive: NaiveHead, seen: list[Chain], drafts: int) -> None:
    """Each proposal is the naive head's greedy chain; of two logits that are a rounding apart, either may win."""
    assert seen and max(len(chain) for _, chain in seen) == drafts
    for tokens, chain in seen:
        if not chain:
            continue
        logits = naive.logits(list(tokens), list(chain[:-1]))
        for draft, line in zip(chain, logits, strict=True):
            assert line[draft] >= line.max() - 1e-3, f"{len(tokens)} tokens, {chain}"


@pytest.mark.parametrize(("mode", "drafts", "graphs", "chunk", "pages"), sweep([
    ("intermediate", 4, False, 8192, None), ("replay", 1, False, 2, None), ("replay", 7, True, 3, None),
    ("intermediate", 15, False, 4, None), ("intermediate", 7, True, 8192, 0), ("replay", 3, False, 5, 0),
], 6, thin=2))  # fmt: skip
@pytest.mark.parametrize("name", ["qwen", pytest.param("nemotron", marks=pytest.mark.soak)])
def test_drafts_are_those_of_the_naive_head(
    name: str, mode: str, drafts: int, graphs: bool, chunk: int, pages: int | None, heads: Store
) -> None:
    """Prompts in chunks next to verify rows, any number of drafts accepted, graphs, pages for little more than one
    request."""
    rig = Rig(heads.path(name), mode=mode, drafts=drafts, graphs=graphs, pages=pages, rows=4, method="mtp")
    seen = watched_run(rig, greedy_asks(), drafts, chunk=chunk)
    assert rig.counters.retractions > 0 or pages is None
    assert rig.counters.accepted > rig.counters.proposed / 4
    assert_chains(heads.naive(name), seen, drafts)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [True, False])
def test_behind_trees_the_head_follows_the_path_that_stays(graphs: bool, heads: Store) -> None:
    rig = Rig(heads.path("qwen"), mode="intermediate", drafts=7, topk=2, graphs=graphs, method="mtp")
    seen = watched_run(rig, greedy_asks(), 7, topk=2, chunk=4)
    assert rig.counters.accepted > rig.counters.proposed / 12
    assert_chains(heads.naive("qwen"), seen, 4)


@pytest.mark.parametrize("name", sweep(HEADS, 3))
def test_heads_of_every_shape(name: str, heads: Store) -> None:
    rig = Rig(heads.path(name), drafts=3, method="mtp")
    assert_chains(heads.naive(name), watched_run(rig, greedy_asks(10), 3), 3)
