"""The protocol of drafters, what they propose, and the length that a request's drafts have earned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridrt.errors import EngineError
from hybridrt.mem_cache.allocator import Slot
from hybridrt.sampling_params import SamplingParams


class DraftRequest(Protocol):
    """What a drafter sees of a request; its identity is the object's.

    Attributes:
        row: of the target's pools; None while the request does not run.
        computed: tokens with KV and state in the target.
    """

    prompt: list[int]
    output: list[int]
    params: SamplingParams
    seed: int
    row: Slot | None
    computed: int

    @property
    def end_page(self) -> int:
        """Pages of the target's KV are lent up to this one."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """None while the request runs."""
        ...

    @property
    def tokens(self) -> list[int]:
        """Prompt, then output."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a request's last known one: a chain, or the nodes of a tree.

    Attributes:
        parents: None for a chain; of a tree, the index of each token's parent among (last known, *tokens). A parent
            comes before its children.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None

    def __post_init__(self) -> None:
        parents = self.parents
        if parents is not None and (
            len(parents) != len(self.tokens) or any(not 0 <= p <= i for i, p in enumerate(parents))
        ):
            raise EngineError(
                f"{len(self.tokens)} drafts with parents {list(parents)}: each needs one that precedes it"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Most drafts that can stay."""
        depths = [0]
        for parent in range(len(self)) if self.parents is None else self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)

    def first(self, most: int) -> "Draft":
        """The first `most` tokens."""
        if len(self) <= most:
            return self
        return Draft(self.tokens[:most], None if self.parents is None else self.parents[:most])


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses continuations that a decode step verifies."""

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
        """For each request at most `most` tokens (0 or more) to follow its last known one."""
        ...


@dataclass(slots=True)
class _Earned:
    """How long a request's drafts may be, and what was proposed when it had `known` output tokens."""

    request: DraftRequest
    length: int
    known: int
    depth: int = 0


class AdaptiveDrafter:
    """Stops paying for drafts that keep failing.

    A request starts with the whole length. A step that keeps no draft halves it, down to none; one that keeps as many
    as could stay doubles it. At none, every `patience` tokens one draft is tried again.

    Args:
        inner: who proposes; what it proposes too much is cut.
        num_draft_tokens: most drafts of a step.
    """

    def __init__(self, inner: Drafter, num_draft_tokens: int, patience: int = 16) -> None:
        self.inner, self.longest, self.patience = inner, num_draft_tokens, patience
        self._earned: dict[int, _Earned] = {}

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
        self._forget_finished()
        lengths = [self._length(r) for r in requests]
        allowed = [min(n, length) for n, length in zip(most, lengths)]
        asked = [i for i, n in enumerate(allowed) if n > 0]
        drafts = [NO_DRAFT for _ in requests]
        for i, draft in zip(asked, self.inner.propose([requests[i] for i in asked], [allowed[i] for i in asked])):
            drafts[i] = draft.first(allowed[i])
        for request, length, draft in zip(requests, lengths, drafts):
            self._earned[id(request)] = _Earned(request, length, len(request.output), draft.depth)
        return drafts

    def _length(self, request: DraftRequest) -> int:
        """The length that the last step's outcome leaves."""
        last = self._earned.get(id(request)) or _Earned(request, self.longest, len(request.output))
        length, gained = last.length, len(request.output) - last.known
        if last.depth and gained == 1:
            length //= 2
        elif last.depth and gained > last.depth:
            length = min(length * 2, self.longest)
        if length == 0 and len(request.output) % self.patience == 0:
            return 1
        return length

    def _forget_finished(self) -> None:
        done = [key for key, earned in self._earned.items() if earned.request.finish_reason is not None]
        for key in done:
            del self._earned[key]
