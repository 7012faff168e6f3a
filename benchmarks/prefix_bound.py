"""How many prompt tokens a clairvoyant prefix cache could have saved, with the memory that there was.

What is bounded. Requests are admitted, have computed their prompts and end at known moments, the 3 n *events* of a run
of n requests. What a prompt holds can be shared once the whole prompt has been computed. A request that
is admitted may skip the first L tokens of its prompt (L < its length) if the cache holds a state after exactly these
tokens and all of their whole KV pages. A state can be made at any position of a text while the text runs, for nothing.
At every moment, cached states and one slot for each running request are at most S; cached pages and the distinct whole
pages of running requests' prompts are at most P.

The linear program. Take a request j, admitted at event A_j, and a length L. Whoever computed these L tokens last before
A_j ended at some event F, and had moved on from them at some event G: the event after that of its whole prompt, if
they are within the prompt, else F, at which its own slot may become the cache's. If j skips L tokens, a state after
them stood in a slot of the cache from G to A_j at least: before, a request might make the state anew, and after G no
request does. So j has options k = 1, 2, ...: lengths L_k with their events F_k and G_k. Of those with the same F and no
earlier G there are three: the longest, the longest that needs one page fewer, and the longest that needs none of their
pages. (These pages have one price, and all but the last save as many tokens, so no length between is worth more.)
Page p of the prompt likewise was kept since the end of the last request that had it: since F_m for the pages between
L_(m-1) and L_m, of which there are n_m. Two requests never count one state or page at one moment: the intervals of the
same tokens lie between consecutive requests that have them. With y_jk = 1 if j takes option k:

    maximise    sum of L_k y_jk
    subject to  sum over k of y_jk <= 1                                            for each j
                sum of y_jk with G_k <= e <= A_j              <= C_e               for each event e
                sum of n_m y_jk with m <= k, F_m <= e < A_j   <= P_e               for each event e

where C_e and P_e are what running requests leave of S and P right after event e. (The state is in its slot while j,
which reads it and writes its own, is admitted; the pages are then j's. Between two events of a request that decodes it
moves on by a token at least.) Every cache obeys these constraints, so the optimum bounds its hits.

The bound. For any prices u_e >= 0 of a slot and w_e >= 0 of a page, weak duality gives

    optimum <= sum over j of max(0, max over k of L_k - cost_jk(u, w)) + sum over e of u_e C_e + w_e P_e,

with cost_jk the price of option k's slot and pages. `bound` descends along the prices, and returns the least value that
it has seen: each is a bound, however well the descent has gone. Without the page constraint the program is a flow
problem, whose optimum is whole; so its dual, too, is that of the best choice of states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

ROUNDS = 1_000
ENDED, COMPUTED, ADMITTED = range(3)


@dataclass(frozen=True)
class Served:
    """A request that has run.

    Attributes:
        tokens: [n] int32, prompt and answer.
        prompt: how many of them are the prompt.
        admitted, computed, ended: moments, in any unit: it was admitted, its prompt had been computed, it ended.
        kept: False of one that was retracted, and is counted as if it held nothing while it ran.
        salt: shares nothing with other salts.
    """

    tokens: np.ndarray
    prompt: int
    admitted: float
    computed: float
    ended: float
    kept: bool = True
    salt: str | None = None


@dataclass(eq=False)
class _Node:
    """An edge of the tree of all texts. `ready`: a request has computed it; `last`: the latest end event of the
    requests so far that have it; `passed`: the latest event from which on one of them holds no state after it;
    `running`: how many running requests' prompts have it."""

    tokens: np.ndarray
    start: int
    children: "dict[int, _Node]" = field(default_factory=dict)
    ready: bool = False
    last: int = -1
    passed: int = -1
    running: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Program:
    """The linear program. Options are padded with lengths of 0; K of each request, E events.

    Attributes:
        lengths: [n, K] float32, L_k.
        since: [n, K] int64, F_k, at most A_j.
        passed: [n, K] int64, G_k, at most A_j.
        pages: [n, K] float32, n_k.
        at: [n] int64, A_j.
        slots, free: [E] float32, C_e and P_e.
    """

    lengths: torch.Tensor
    since: torch.Tensor
    passed: torch.Tensor
    pages: torch.Tensor
    at: torch.Tensor
    slots: torch.Tensor
    free: torch.Tensor

    @property
    def unlimited(self) -> int:
        """Tokens that could be skipped with unlimited memory: those in common with any earlier request."""
        return int(self.lengths.double().amax(1).sum()) if self.lengths.numel() else 0


def program(served: Sequence[Served], page_size: int, num_slots: int, num_pages: int) -> Program:
    """The linear program of a run.

    Args:
        page_size: 0 for a model without attention layers.
        num_slots: S; 0 for a model without recurrent layers, where whole pages are skipped.
        num_pages: P.
    """
    moments = ((r.ended, r.computed, r.admitted) for r in served)
    events = sorted((moment, kind, i) for i, three in enumerate(moments) for kind, moment in enumerate(three))
    place = {(kind, i): e for e, (_, kind, i) in enumerate(events)}
    roots = {r.salt: _Node(np.empty(0, np.int32), 0) for r in served}
    paths = _paths(served, roots)
    unit = 1 if num_slots else max(page_size, 1)
    slots, free = np.zeros(len(events)), np.zeros(len(events))
    options, running, used = list[list[_Option]](), 0, 0
    for e, (_, kind, i) in enumerate(events):
        path = paths[i]
        prompt = [node for node in path if node.end <= served[i].prompt]
        if kind == ADMITTED:
            found = _options(path, e, (served[i].prompt - 1) // unit * unit, unit)
            options.append(_with_fewer_pages(found, page_size) if page_size and unit == 1 else found)
        _mark(path if kind != COMPUTED else prompt, place[ENDED, i], computed=kind != ADMITTED)
        _pass(path, served[i], place[COMPUTED, i] + 1, place[ENDED, i])
        change = (-1, 0, 1)[kind] if served[i].kept else 0
        held = _hold(prompt, change, page_size) if change else 0
        running, used = running + change, used + held
        slots[e], free[e] = num_slots - running, num_pages - used
    at = [e for e, (_, kind, _) in enumerate(events) if kind == ADMITTED]
    return _padded(options, at, page_size, slots if num_slots else None, free if page_size else None)


def bound(problem: Program, rounds: int = ROUNDS) -> int:
    """Tokens that no cache exceeds, by descent along the prices (Adam on the dual, whose maxima are smoothed less and
    less)."""
    best = float(problem.unlimited)
    if not best:
        return 0
    events = len(problem.slots)
    span = float((problem.at[:, None] - problem.since + 1).double().mean())
    scale = torch.tensor([float(problem.lengths.max()) / span, _page_worth(problem) / span])[:, None]
    prices = torch.zeros(2, events, requires_grad=True)
    descent = torch.optim.Adam([prices], lr=0.05)
    for i in range(rounds):
        heat = float(problem.lengths.max()) * 0.1 * 0.002 ** (i / rounds)
        descent.param_groups[0]["lr"] = 0.1 * 0.01 ** (i / rounds)
        descent.zero_grad()
        smooth, exact = _dual(problem, prices * scale, heat)
        best = min(best, float(exact))
        smooth.backward()
        descent.step()
        with torch.no_grad():
            prices.clamp_(min=0)
    return int(best + 1e-3 + 1e-6 * best)


def _page_worth(problem: Program) -> float:
    """Tokens that a page saves."""
    return float(problem.lengths.max() / problem.pages.sum(1).max().clamp(min=1))


def _dual(problem: Program, prices: torch.Tensor, heat: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The dual's value with maxima smoothed by `heat` tokens, and without."""
    prices = prices.double()
    until = torch.nn.functional.pad(prices.cumsum(1), (1, 0))  # [2, E + 1]: what the events before cost
    at = problem.at[:, None]
    slot = until[0][at + 1] - until[0][problem.passed]
    page = ((until[1][at] - until[1][problem.since]) * problem.pages).cumsum(1)
    gain = torch.where(problem.lengths > 0, problem.lengths - slot - page, -torch.inf)
    gain = torch.nn.functional.pad(gain, (1, 0))
    memory = (prices[0] * problem.slots + prices[1] * problem.free).sum()
    return heat * torch.logsumexp(gain / heat, 1).sum() + memory, gain.detach().amax(1).sum() + memory.detach()


def _paths(served: Sequence[Served], roots: dict[str | None, _Node]) -> list[list[_Node]]:
    """The nodes of each text, once all texts and the ends of all prompts are in the tree."""
    for request in served:
        for end in (request.prompt, len(request.tokens)):
            _insert(roots[request.salt], request.tokens[:end])
    return [_insert(roots[request.salt], request.tokens) for request in served]


def _insert(node: _Node, tokens: np.ndarray) -> list[_Node]:
    path = list[_Node]()
    while node.end < len(tokens):
        first = int(tokens[node.end])
        child = node.children.get(first)
        if child is None:
            child = node.children[first] = _Node(tokens[node.end :], node.end)
        rest = tokens[child.start : child.end]
        differ = np.flatnonzero(child.tokens[: len(rest)] != rest)
        same = int(differ[0]) if len(differ) else len(rest)
        if same < len(child.tokens):
            upper = node.children[first] = _Node(child.tokens[:same], child.start)
            child.tokens, child.start = child.tokens[same:], upper.end
            upper.children[int(child.tokens[0])] = child
            child = upper
        path.append(child)
        node = child
    return path


class _Option(NamedTuple):
    """A length, the event since which its last tokens run no longer, and that since which no request's own slot can
    hold the state after it."""

    length: int
    since: int
    passed: int


def _options(path: Sequence[_Node], event: int, limit: int, unit: int) -> list[_Option]:
    """The shortest first."""
    options = list[_Option]()
    for node in path:
        if node.last < 0:
            break
        length = min(node.end, limit) // unit * unit
        if length > (options[-1].length if options else 0):
            option = _Option(length, min(node.last, event), min(node.passed, event))
            if options and options[-1].since == option.since and options[-1].passed <= option.passed:
                options.pop()
            options.append(option)
    return options


def _with_fewer_pages(options: Sequence[_Option], page_size: int) -> list[_Option]:
    """And for each option the longest ones that need no page more than the option before it, and one page fewer than
    itself. The lengths between cost as much for each page and save as much: the best is at an end."""
    found, before = list[_Option](), 0
    for option in options:
        ends = {(before // page_size + 1) * page_size - 1, option.length // page_size * page_size - 1}
        found += [option._replace(length=end) for end in sorted(ends) if before < end < option.length]
        found.append(option)
        before = option.length
    return found


def _mark(nodes: Sequence[_Node], end: int, computed: bool) -> None:
    """A request that ends at event `end` has these nodes: it has computed them, or begins to run."""
    for node in nodes:
        node.ready |= computed
        if node.ready:
            node.last = max(node.last, end)


def _pass(path: Sequence[_Node], request: Served, computed: int, ended: int) -> None:
    """A request has moved on from the states within its prompt once the prompt is computed; from that after the whole
    prompt, too, unless its answer is one token, whose state is not computed. One that was retracted computes its prompt
    again, until it ends."""
    for node in path:
        within = request.kept and node.end < request.prompt + (len(request.tokens) > request.prompt + 1)
        node.passed = max(node.passed, computed if within else ended)


def _hold(nodes: Sequence[_Node], change: int, page_size: int) -> int:
    """One request more or fewer that runs with these tokens; by how many the distinct pages change."""
    pages = 0
    for node in nodes:
        if page_size and node.running + max(change, 0) == 1:
            pages += change * (node.end // page_size - node.start // page_size)
        node.running += change
    return pages


def _padded(
    options: Sequence[Sequence[_Option]], at: Sequence[int], page_size: int, slots: np.ndarray | None,
    free: np.ndarray | None,
) -> Program:  # fmt: skip
    shape = len(options), max(map(len, options), default=0)
    lengths, pages = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    since, passed = (np.broadcast_to(np.array(at, np.int64)[:, None], shape).copy() for _ in range(2))
    for j, found in enumerate(options):
        before = 0
        for k, (length, start, moved) in enumerate(found):
            lengths[j, k], since[j, k], passed[j, k] = length, start, moved
            if page_size:
                pages[j, k] = length // page_size - before // page_size
            before = length
    plenty = np.full(3 * len(options), 1e12)  # a request has three events
    limits = [torch.from_numpy((plenty if limit is None else limit).astype(np.float32)) for limit in (slots, free)]
    options_of = torch.from_numpy(lengths), torch.from_numpy(since), torch.from_numpy(passed), torch.from_numpy(pages)
    return Program(*options_of, torch.tensor(at), *limits)
