"""A small engine around the mock executor, and what its requests must come to."""

from collections.abc import Sequence
from typing import Any

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.request.intake import EngineLimits
from hybridrt.engine.request.outputs import Delta
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.mem_cache.pools.slab_plan import SlabPlan
from tests.support.cache_ledger import check_cache
from tests.support.mock_drafter import MockDrafter
from tests.support.mock_executor import MockExecutor, Windows, tokens_alone
from tests.support.samples import Sample, Samples

VOCAB = 23
EOS = 7


class ByteTokenizer:
    """A token is a byte; ids from 256 on are special."""

    characters_per_token = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_bare = encode

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "".join(f"<{t}>" for t in token_ids if t >= 256)
        return bytes(t for t in token_ids if t < 256).decode(errors="replace") + special


class Rig:
    """An engine, its executor and its pools; `step` checks the ledgers after every step."""

    def __init__(
        self,
        *,
        rows: int = 4,
        slots: int | None = None,
        pages: int = 64,
        page_size: int = 4,
        max_model_len: int = 64,
        chunk: int = 16,
        vocab: int = VOCAB,
        late: int = 0,
        overlap: bool = True,
        drafts: int = 0,
        tokenizer: Any = None,
        seed: int = 0,
        windows: Windows = (None,),
        cache: bool = False,
        grid: int | None = None,
        replay: bool = False,
        host: tuple[int, int] | None = None,
        copy_delay: int = 0,
        slabs: SlabPlan | None = None,
        policy: TrafficPolicy | None = None,
    ) -> None:
        slots = rows if slots is None else slots
        if slabs is not None:  # the page groups share them, instead of `pages` of each
            pages = max((slabs.num_slabs + 1) * share.apart for share in slabs.groups)
            slots = slabs.num_slots
        self.executor = MockExecutor(
            num_rows=rows, num_slots=slots, num_pages=pages, page_size=page_size, vocab=vocab, late=late,
            windows=windows, replay=replay, slabs=slabs,
        )  # fmt: skip
        back = page_size - 1 if cache and not slots else 0
        demands = [PageDemand(page_size, w, chunk, drafts + 1, back if w else 0) for w in windows] if pages else []
        self.pools = CacheCoordinator(rows, slots, [pages] * len(demands), demands, prefix_cache=cache, slabs=slabs)
        self.pools.prefixes.grid = grid or self.pools.prefixes.grid
        self.executor.copy_delay = copy_delay
        if host is not None:  # KV pages and states in main memory
            self.pools.add_tier(*host, self.executor.copied)
        limits = EngineLimits(vocab, max_model_len, chunk, (EOS,))
        self.drafter = drafter = MockDrafter(drafts, vocab, windows, self.executor.has_state) if drafts else None
        self.engine = Engine(
            self.executor, self.pools, limits, tokenizer, overlap=overlap, seed=seed, drafter=drafter, policy=policy
        )
        self.outputs = Samples()

    def add(self, prompt: Sequence[int] | str, request_id: str | None = None, **params: Any) -> str:
        return self.engine.add_request(prompt, SamplingParams(**params), request_id)

    def step(self) -> list[Delta]:
        deltas = self.engine.step()
        self.check()
        for delta in deltas:
            if delta.error is not None and isinstance(delta.error.__cause__, AssertionError):
                raise delta.error.__cause__  # the executor's own checks
        self.outputs.add(deltas)
        return deltas

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.engine.has_unfinished():
                break
            self.step()
        assert not self.engine.has_unfinished(), f"not done after {most} steps: {self.engine.counters()}"
        self.assert_empty()

    def finish(self, prompt: Sequence[int] | str, **params: Any) -> Sample:
        """The output of one request, run to its end."""
        request_id = self.add(prompt, **params)
        self.run()
        return self.outputs[request_id, 0]

    def assert_empty(self) -> None:
        self.check()
        if self.pools.fetches is not None:
            self.pools.fetches.cancel_all()  # those of requests that did not wait for them
        for pool in (self.pools.rows, self.pools.slots, self.pools.pages):
            assert not pool.num_used, f"leaked: {pool}"
        assert self.drafter is None or not self.drafter.begun

    def check(self) -> None:
        """The ledgers, and the cache's against the allocators'."""
        check_cache(self.pools)


def set_computed(request: Request, tokens: int) -> None:
    """As if the launched steps computed so many tokens of a running request."""
    assert request.columns is not None and request.row is not None
    request.columns.computed[request.row.index] = tokens


def expected(
    prompt: Sequence[int], params: SamplingParams, seed: int, max_model_len: int, vocab: int = VOCAB,
    windows: Windows = (None,), has_state: bool = True,
) -> tuple[list[int], str]:  # fmt: skip
    """Tokens and finish reason of a request without stop strings that runs alone."""
    most = max_model_len - len(prompt)
    count = most if params.max_tokens is None else min(most, params.max_tokens)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    tokens = tokens_alone(prompt, seed, count, vocab, windows, has_state)
    end = next((i for i, token in enumerate(tokens) if token in stops), None)
    return (tokens, "length") if end is None else (tokens[: end + 1], "stop")
