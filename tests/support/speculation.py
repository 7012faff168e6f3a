"""Engines that speculate over tiny models, drafters to try them with, and what the output must equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.collectives.groups import TPGroup
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.request.intake import EngineLimits
from hybridrt.engine.request.sample_request import derive_seed
from hybridrt.parallel.ranks import Ranks
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.speculative.drafter import Draft, Drafter, DraftRequest
from tests.support.cache_ledger import check_cache
from tests.support.samples import Sample, Samples

LENGTH = 96
PAGE = 4
HOST_BYTES = 300_000  # of main memory for prefixes
FORGETS = 5
TIE = 1e-4  # of log-probabilities, whose spread is above 1
Key = tuple[str, int]


@dataclass
class Ask:
    """A request: arrives after `arrival` steps, and is aborted after `abort` of them if that is given."""

    prompt: list[int]
    params: SamplingParams
    arrival: int = 0
    abort: int | None = None


class Letters:
    """A token is a letter. Drafts go on after a stop string, which the host alone knows; after a stop token they do
    not."""

    characters_per_token = 1

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 1000 for letter in text]

    encode_bare = encode

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(1000 + token) for token in token_ids)


class Rig:
    """A runner whose engines come and go.

    Args:
        pages: KV pages; None for enough.
        drafts: num_draft_tokens; 0 for plain decoding.
        graphs: on a CPU, run decode and verify steps through closures over poisoned buffers.
        cache_slots: state slots for cached prefixes; None: no prefix cache.
        ranks: split the model over two. The plan then has room for all requests; `lent` is what engines have of it.

    Attributes:
        grid: where prompts leave states; a multiple of PAGE.
        lent: pages and state slots that engines have, where these share no memory.
        hosted: engines keep prefixes in main memory, too, and forget those on the device every few steps.
    """

    def __init__(
        self, path: Path, *, mode: str = "auto", drafts: int = 0, rows: int = 3, pages: int | None = None,
        graphs: bool = False, device: str = "cpu", cache_slots: int | None = None, ranks: Ranks | None = None,
        **spec: Any,
    ) -> None:  # fmt: skip
        speculative = SpeculativeConfig(num_draft_tokens=drafts, state_mode=mode, **spec) if drafts else None
        self.config = EngineConfig(
            str(path), device=device, dtype="float32", max_model_len=LENGTH, max_running_requests=rows, page_size=PAGE,
            speculative=speculative, state_mode="auto" if drafts else mode, prefix_cache=cache_slots is not None,
            host_cache_bytes=0 if cache_slots is None else HOST_BYTES,
            **({"tp_size": 2, "cache_slots": cache_slots} if ranks else {}),
        )  # fmt: skip
        # The longest request fits alone.
        pages = rows * LENGTH // PAGE if pages is None else pages
        self.cached, self.hosted, self.grid = cache_slots is not None, False, PAGE
        self._futures = dict[str, dict[Key, Sample]]()
        spare = cache_slots or 0
        self.split = TensorParallelExecutor(self.config, ranks=ranks) if ranks else None
        if self.split is not None:
            self.runner = self.split.runner
            self.lent = [max(pages, -(-(LENGTH + drafts) // PAGE))], rows + spare
            return
        plan = make_plan(self.config, load_target(self.config, TPGroup())[1], budget_bytes=2**40, cache_slots=spare)
        # A window group has the pages of its least demand and as many as others have beyond that.
        groups = [replace(group, num_pages=max(pages, group.demand.least(LENGTH + drafts))) for group in plan.groups]
        plan = replace(plan, num_rows=rows, groups=tuple(groups))
        self.runner = ModelRunner(self.config, plan=plan)
        self.lent = [group.num_pages for group in groups], plan.num_slots
        if graphs:
            self.runner.capture()

    def engine(self, drafter: Drafter | None = None, chunk: int = 8192, overlap: bool = False) -> Engine:
        plan = self.runner.memory_plan
        demands = [replace(group.demand, step_tokens=chunk) for group in plan.groups]
        pages, slots = self.lent
        head = int(self.runner.drafter is not None)
        shared: dict[str, Any] = {}
        if plan.slabs is not None:  # numbers of pages and slots are those of one memory, all of which engines have
            pages, slots = [group.num_pages for group in plan.groups], plan.num_slots
            shared = {"page_bytes": [group.page_bytes for group in plan.groups], "slabs": plan.slabs}
        pools = plan.num_rows, slots, pages, demands
        self.coordinator = CacheCoordinator(*pools, prefix_cache=self.cached, lookahead=head, **shared)
        self.coordinator.prefixes.grid = self.grid
        if self.hosted:
            self.coordinator.add_tier(plan.host.num_pages, plan.host.num_states, self.runner.copied)
        limits = EngineLimits(self.runner.model_config.vocab_size, LENGTH, chunk)
        executor = self.split or self.runner
        return Engine(executor, self.coordinator, limits, Letters(), overlap=overlap, drafter=drafter)

    def run(
        self, asks: Sequence[Ask], drafter: Drafter | None = None, chunk: int = 8192, overlap: bool = False
    ) -> dict[Key, Sample]:
        """The last output of every sample; the ledgers hold after every step and the counters add up at the end."""
        engine = self.engine(drafter, chunk, overlap)
        found = Samples()
        steps = 0
        while engine.has_unfinished() or steps <= max(a.arrival for a in asks):
            for i, ask in enumerate(asks):
                if ask.arrival == steps:
                    engine.add_request(ask.prompt, ask.params, str(i))
                if ask.abort is not None and ask.arrival + ask.abort == steps:
                    engine.abort(str(i))
            if self.hosted and steps % FORGETS == 0:
                self.coordinator.prefixes.evict(*self.lent)
            deltas = engine.step() if engine.has_unfinished() else []
            assert [delta.error for delta in deltas if delta.error is not None] == []
            found.add(deltas)
            check_cache(self.coordinator)
            steps += 1
            assert steps < 2000
        self.counters = engine.counters()
        if self.coordinator.fetches is not None:
            self.coordinator.fetches.cancel_all()  # those of requests that did not wait for them
        self._assert_done(found)
        return found

    def futures(self, asks: Sequence[Ask]) -> dict[Key, Sample]:
        """The samples of all requests as they would be without speculation, aborts and stops. The same requests are run
        once: many drafters and modes are compared with one model."""
        forever = [Ask(a.prompt, replace(a.params, stop_token_ids=(), stop=())) for a in asks]
        if (key := repr(forever)) not in self._futures:
            self._futures[key] = self.run(forever)
        return self._futures[key]

    def tied(self, ask: Ask, place: int) -> bool:
        """Whether the two likeliest tokens at `place` of a greedy output are as likely as each other, but for rounding:
        which of them comes depends on the shapes of the step's products."""
        params = ask.params
        penalties = params.repetition_penalty - 1.0, params.presence_penalty, params.frequency_penalty
        if params.temperature > 0.0 or any(penalties):
            return False
        alone = self.futures([Ask(ask.prompt, replace(params, logprobs=2, n=1))])["0", 0]
        assert alone.logprobs is not None
        first, second = sorted(alone.logprobs[place].values())[-1:-3:-1]
        return first - second < TIE

    def _assert_done(self, found: dict[Key, Sample]) -> None:
        for pool in (self.coordinator.rows, self.coordinator.slots, self.coordinator.pages):
            if self.coordinator.slabs is None:  # in one memory, what is free depends on who takes it
                assert pool.num_free + pool.num_cached == pool.total, f"leaked: {pool}"
            assert self.cached or not pool.num_cached
        metrics, counters = [o.metrics for o in found.values()], self.counters
        assert counters.output_tokens == sum(m.output_tokens for m in metrics)
        assert counters.proposed == sum(m.proposed for m in metrics)
        assert counters.accepted == sum(m.accepted for m in metrics) <= counters.proposed
        assert counters.target_steps == sum(m.target_steps for m in metrics)
        assert counters.verify_steps == sum(m.verify_steps for m in metrics)
        # A stop inside the accepted run drops the rest.
        assert all(m.output_tokens <= m.target_steps + m.accepted for m in metrics)
        assert counters.retractions == sum(m.retractions for m in metrics)


def sample_seed(ask: Ask, index: int) -> int:
    """The seed that the engine gives sample `index` of a request with a seed."""
    assert ask.params.seed is not None
    return derive_seed(ask.params.seed, index) if index else ask.params.seed


def until_stop(ask: Ask, tokens: list[int]) -> tuple[list[int], str]:
    """What of an output is left, and why it ends, if the request's stop tokens and stop letters count."""
    stops = {*ask.params.stop_token_ids, *Letters().encode("".join(ask.params.stop))}
    end = next((i for i, token in enumerate(tokens) if token in stops), None)
    return (tokens, "length") if end is None else (tokens[: end + 1], "stop")


def assert_same(
    asks: Sequence[Ask],
    found: dict[Key, Sample],
    futures: dict[Key, Sample],
    tied: Callable[[Ask, int], bool] | None = None,
) -> None:
    """Tokens, reasons and log-probabilities of `found` are those of `futures` up to a stop; of an aborted sample, a
    beginning of them.

    Args:
        tied: whether a request's output has a tie at an index; from there on it may differ.
    """
    assert found.keys() == futures.keys()
    for (i, k), got in found.items():
        ask, want = asks[int(i)], futures[i, k]
        place = next((j for j, pair in enumerate(zip(got.token_ids, want.token_ids)) if pair[0] != pair[1]), None)
        if tied is not None and place is not None and tied(ask, place):
            continue
        tokens, reason = until_stop(ask, want.token_ids)
        if got.finish_reason == "abort":
            assert ask.abort is not None
            tokens = tokens[: len(got.token_ids)]
        else:
            assert got.finish_reason == reason
        assert got.token_ids == tokens, f"request {i}, sample {k}"
        assert got.metrics.output_tokens == len(tokens)
        _assert_same_logprobs(got.logprobs, want.logprobs, len(tokens))


def _assert_same_logprobs(got: list[dict[int, float]] | None, want: list[dict[int, float]] | None, count: int) -> None:
    assert (got is None) == (want is None)
    if got is None or want is None:
        return
    assert len(got) == count
    for a, b in zip(got, want[:count], strict=True):
        assert a.keys() == b.keys()
        assert max(abs(a[t] - b[t]) for t in a) < 2e-3


Script = Callable[[list[int], DraftRequest], list[int]]


@dataclass
class Scripted(Drafter):
    """Proposes what `script` makes of the tokens that will really come.

    Args:
        futures: a request's output tokens by its seed.
        trees: hide the chain in a tree.
    """

    futures: dict[int, list[int]]
    script: Script
    trees: bool = False

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        drafts = []
        for request, n in zip(requests, max_drafts, strict=True):
            done = len(request.output)
            coming = self.futures[request.seed][done : done + n]
            chain = self.script(coming, request)
            drafts.append(bushy(chain, request) if self.trees else Draft(chain))
        return drafts


def bushy(chain: Sequence[int], request: DraftRequest) -> Draft:
    """A tree that holds `chain` among nodes of other tokens, some of them on its path and some equal to its own."""
    tokens: list[int] = []
    parents: list[int] = []
    end, h = 0, derive_seed(request.seed, len(request.output))
    for i, token in enumerate(chain):
        h = derive_seed(h, i)
        for k in range(h % 3):
            h = derive_seed(h, k)
            tokens.append(token if h % 5 == 0 else shifted(token, 100 + k))
            parents.append(h // 8 % (len(tokens)))
        tokens.append(token)
        parents.append(end)
        end = len(tokens)
    return Draft(tokens, parents)


def shifted(token: int, vocab: int = 131) -> int:
    return (token + 1) % vocab


@dataclass
class AtRandom(Drafter):
    """Proposes random tokens, as many as it may."""

    vocab: int
    state: int = 0

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        return [Draft([self._next() for _ in range(n)]) for n in max_drafts]

    def _next(self) -> int:
        self.state = derive_seed(self.state, 0)
        return self.state % self.vocab


def first_children(draft: Draft) -> tuple[int, ...]:
    """The chain of a draft: from the root, each node's first child."""
    parents = list(range(len(draft))) if draft.parents is None else list(draft.parents)
    chain, node = [], 0
    while node in parents:
        node = parents.index(node) + 1
        chain.append(draft.tokens[node - 1])
    return tuple(chain)
