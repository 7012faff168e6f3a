"""Predicts the seconds of a step, from costs fitted to earlier steps, and the prompt tokens that fit in a time."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import mul
from statistics import median
from typing import NamedTuple

import numpy as np

from hybridrt.runtime.step.pack_padded import Bucket, StateSaves
from hybridrt.runtime.step.plan import StepPlan

# Numbers of tokens from which one more may cost more: a step of few takes the time to read all
# weights.
_KNOTS = (0, 64, 256, 1024)
_KINDS = ("decode", "prefill", "mixed")
_OF_KIND = {kind: tuple(float(kind == other) for other in _KINDS) for kind in _KINDS}
_DECAY = 0.98  # weight after each later step of its kind
_RIDGE = 1e-6  # ridge of normalised features: makes the fit unique
_ENOUGH, _FIT_EVERY, _REMEMBERED, _LAUNCHES = 8, 32, 128, 16  # steps
_SURPRISE = 0.1  # relative error of a prediction after which the costs are fitted at once
# Steps of few tokens without a graph take the time of their launches, which says nothing of what tokens cost.
LEAST_EAGER = 2 / 3
# What a step without a graph is predicted to take, of what its device needs by the costs: costs that fell to where
# chunks grow err.
_EAGER_MARGIN = 1.02
# What a step is taken to need, if all that is known is that it needs no more than the time of its launch: of the
# predicted time, but at least so much of the known one.
_FALL, _LEAST = 0.9, 0.1


class PromptWork(NamedTuple):
    """Tokens of prompts, and pairs of a query and a key that it sees."""

    tokens: int = 0
    pairs: int = 0

    @classmethod
    def between(cls, start: int, end: int) -> "PromptWork":
        """The work of a chunk of one prompt: its tokens `start` to `end`."""
        return cls(end - start, (end * (end + 1) - start * (start + 1)) // 2)

    def __add__(self, other: "PromptWork") -> "PromptWork":  # type: ignore[override]
        return PromptWork(self.tokens + other.tokens, self.pairs + other.pairs)

    def __sub__(self, other: "PromptWork") -> "PromptWork":
        return PromptWork(self.tokens - other.tokens, self.pairs - other.pairs)


class StepWork(NamedTuple):
    """The numbers of a step that predict its time.

    Attributes:
        decode_tokens: decode rows and their drafts.
        decode_context: tokens before the decode rows, summed over rows.
        prompt_rows, prompt_tokens: chunks of prompts, and their tokens.
        prompt_context: tokens before the middles of chunks, summed over chunks.
        prompt_pairs: pairs of a query and a key that it sees, of all chunks.
        saves: states that are saved within a chunk, in the row with the most.
        eager: no graph runs it, even if one could.
    """

    decode_tokens: int = 0
    decode_context: int = 0
    prompt_rows: int = 0
    prompt_tokens: int = 0
    prompt_context: int = 0
    prompt_pairs: int = 0
    saves: int = 0
    eager: bool = False

    @classmethod
    def from_plan(cls, plan: StepPlan) -> "StepWork":
        decode = plan.decode
        work = cls(len(decode) + len(decode.drafts), int(decode.computed.sum()), eager=plan.runs_eagerly)
        for row in plan.extend:
            work = work.with_chunk(row.computed, len(row.tokens), len(row.saves))
        return work

    def with_chunk(self, start: int, tokens: int, saves: int = 0) -> "StepWork":
        """The same step with one more chunk: `tokens` after the first `start` of a prompt; it saves
        so many states.
        """
        pairs = tokens * start + tokens * (tokens + 1) // 2
        return StepWork(
            self.decode_tokens, self.decode_context, self.prompt_rows + 1, self.prompt_tokens + tokens,
            self.prompt_context + start + tokens // 2, self.prompt_pairs + pairs, max(self.saves, saves), self.eager,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        return "mixed" if self.decode_tokens and self.prompt_tokens else "decode" if self.decode_tokens else "prefill"

    def features(self, tokens: int) -> list[float]:
        """The numbers of the linear model: constants of the step's kind, tokens above each knot, decode
        tokens and their context, prompts, pairs of prompt tokens, saved states. `tokens`: all tokens of the
        step, with padding."""
        return [
            *_of_size(self.kind, tokens), self.decode_tokens, self.decode_context, self.prompt_rows, self.prompt_pairs,
            self.saves,
        ]  # fmt: skip


@lru_cache(4096)  # most steps are as large as a graph
def _of_size(kind: str, tokens: int) -> tuple[float, ...]:
    return *_OF_KIND[kind], *[max(tokens - knot, 0) for knot in _KNOTS]


_TOKENS, _PAIRS = slice(len(_KINDS), len(_KINDS) + len(_KNOTS)), len(_KINDS) + len(_KNOTS) + 3
_OF_GRAPHS = 5  # features that depend on whether a graph runs the step
_SIZE = len(StepWork().features(0)) + _OF_GRAPHS


class StepCost:
    """A model of the seconds of steps: linear in `StepWork.features` with costs that are not
    negative, so more work is never predicted to be faster.

    The costs minimise the squared relative error of past steps, so one slow step (a kernel was
    compiled) has little effect. Only newer steps of the same kind reduce the weight of older ones:
    many decode steps do not make the costs of prompts forgotten.

    A graph's time is that of its full bucket, so a step counts its bucket's tokens. Its few tokens
    use a part of the device for attention, so context and pairs have further costs there. The graph with the
    most prompt tokens has a further constant: its time is not on the line of the others, where products
    begin another round of the multiprocessors, and a chunk is chosen by differences of a few percent. A step
    without a graph has a constant of its own, and counts at least LEAST_EAGER of the largest graph's tokens.
    It takes at least as long as all but one of the latest launches of such steps (`note_launch`): next
    to a server's threads that is often longer than the device needs, and it varies. What the device
    would need is not seen then, so the costs of such steps fall until it is. Each state that a prompt
    saves beyond those of a graph needs another launch of the recurrent layers.

    Args:
        buckets: sizes of the graphs of steps with prompts. Empty: no such step runs as a graph.
        saves: how they save states.

    Attributes:
        graph_tokens: prompt tokens of the largest graph; 0 without graphs.
        max_prompt_tokens: prompt tokens of the largest step that has run.
    """

    def __init__(self, buckets: Iterable[Bucket] = (), saves: StateSaves = StateSaves.AT_CHUNKS) -> None:
        self.saves = saves
        self.max_prompt_tokens = 0
        self._buckets = sorted(buckets, key=sum)
        # The same with their most prompts: a step compares some 30 sizes a dozen times.
        self._sizes = [(each.tokens, each.decode_rows, each.prompts, each) for each in self._buckets]
        self.graph_tokens = max((bucket.tokens for bucket in self._buckets), default=0)
        self._least_eager = round(LEAST_EAGER * sum(self._buckets[-1])) if self._buckets else 0
        self._costs: list[float] | None = None
        # Before steps have run, prompts are compared by tokens and pairs of a 7B model on a large GPU.
        self._token_seconds, self._pair_seconds = 2.5e-5, 5e-10
        self._squares = np.zeros((len(_KINDS), _SIZE, _SIZE))
        self._moments = np.zeros((len(_KINDS), _SIZE))
        self._count = 0
        self._errors: deque[float] = deque(maxlen=_REMEMBERED)
        self._launches: deque[float] = deque(maxlen=_LAUNCHES)
        self._launch = 0.0

    def predict(self, work: StepWork) -> float | None:
        """Seconds of a step; None before enough steps have run."""
        return None if self._costs is None else self._best(work)[0]

    def takes_graph(self, work: StepWork) -> bool:
        """Whether a graph shall run a step with prompts: one could, and it would not be GRAPH_GAIN times as slow as the
        step without one. Deep in a context graphs may compute attention more slowly."""
        return (self._bucket(work) if self._costs is None else self._best(work)[1]) is not None

    def _best(self, work: StepWork) -> tuple[float, Bucket | None]:
        """Seconds of a step as it shall run, and the bucket of its graph."""
        bucket = self._bucket(work)
        seconds = self._seconds(work, bucket)
        if bucket is not None and 0 < GRAPH_GAIN * self._launch < seconds:  # 0: no launch is known
            eager = self._seconds(work, None)
            if GRAPH_GAIN * eager < seconds:
                return eager, None
        return seconds, bucket

    def _seconds(self, work: StepWork, bucket: Bucket | None) -> float:
        device = self._device_seconds(work, bucket)
        return device if bucket or not work.prompt_tokens else max(_EAGER_MARGIN * device, self._launch)

    def _device_seconds(self, work: StepWork, bucket: Bucket | None) -> float:
        """What the device needs for a step; no bound before enough have run."""
        return math.inf if self._costs is None else sum(map(mul, self._costs, self._features(work, bucket)))

    def note_launch(self, seconds: float) -> None:
        """The host has launched a step without a graph. `seconds`: how long that took."""
        self._launches.append(seconds)
        self._launch = sorted(self._launches)[-2:][0]

    @property
    def graphs(self) -> bool:
        """Whether there are graphs of steps with prompts."""
        return bool(self._buckets)

    def has_graph(self, work: StepWork) -> bool:
        """Whether a graph has room for a step with prompts. Decode rows alone count as such. Of what the runner refuses
        besides, this does not know prompts with log-probabilities or poolings and very long contexts."""
        return not work.prompt_tokens or self._bucket(work) is not None

    def observe(self, works: Sequence[StepWork], seconds: float, *, at_most: bool = False) -> None:
        """Fits the costs to steps that together took `seconds` (more than 0).

        Args:
            at_most: the device needs no more, and may need less: it waited for the launch. Then costs fall a
                little with each step, so that chunks grow until the device needs longer than the launch.
        """
        if at_most:
            device = sum([self._device_seconds(work, self._bucket(work)) for work in works])
            seconds, error = min(seconds, max(_FALL * device, _LEAST * seconds)), 0.0
        else:
            error = self._note_error(works, seconds)
        self.max_prompt_tokens = max(self.max_prompt_tokens, *(work.prompt_tokens for work in works))
        parts = np.array([self._features(work, self._bucket(work)) for work in works])
        kind, features = _KINDS.index(works[-1].kind), parts.sum(0) / seconds
        self._squares[kind] = _DECAY * self._squares[kind] + np.outer(features, features)
        self._moments[kind] = _DECAY * self._moments[kind] + features
        self._count += 1
        due = self._count < _FIT_EVERY or self._count % _FIT_EVERY == 0 or error > _SURPRISE
        due |= not all([self.has_graph(work) for work in works])  # they are long: a fit takes 0.3 ms of the host
        if self._count >= _ENOUGH and due:
            self._costs = _nonnegative_costs(self._squares.sum(0), self._moments.sum(0)).tolist()
            self._token_seconds, self._pair_seconds = sum(self._costs[_TOKENS]), self._costs[_PAIRS]

    def prompt_seconds(self, work: PromptWork) -> float:
        """Seconds of prompts in large steps without decode rows. Above 0."""
        return max(work.tokens * self._token_seconds + work.pairs * self._pair_seconds, 1e-6)

    def fills(self, work: StepWork) -> list[int]:
        """Tokens of one more chunk that fill the possible graphs of the step, ascending. Such a
        chunk takes little longer than a shorter one that does not fit the next smaller graph.
        """
        rows, prompts, found = work.decode_tokens, work.prompt_rows + 1, [work.prompt_tokens]
        for tokens, most_rows, most_prompts, _ in self._sizes:  # the first one with room runs a step
            if tokens > found[-1] and rows <= most_rows and prompts <= most_prompts:
                found.append(tokens)
        return [tokens - work.prompt_tokens for tokens in found[1:]]

    @property
    def error(self) -> float | None:
        """Median relative error of the last predictions, each made before its step was observed;
        None without one.
        """
        return median(self._errors) if self._errors else None

    def _features(self, work: StepWork, bucket: Bucket | None) -> list[float]:
        """`bucket`: of the step."""
        tokens = work.decode_tokens + work.prompt_tokens
        if bucket is not None:
            largest = float(bucket.tokens == self.graph_tokens)
            return [*work.features(sum(bucket)), 0.0, work.prompt_context, work.prompt_pairs, 0.0, largest]
        more = max(work.saves - self.saves.most, 0)
        if not work.prompt_tokens or not self._buckets:
            return [*work.features(tokens), 0.0, 0.0, 0.0, more, 0.0]
        return [*work.features(max(tokens, self._least_eager)), 1.0, 0.0, 0.0, more, 0.0]

    def _bucket(self, work: StepWork) -> Bucket | None:
        """The bucket of the graph that runs a step with prompts; None: it runs without one."""
        tokens, rows, prompts = work.prompt_tokens, work.decode_tokens, work.prompt_rows
        if not tokens or work.eager or work.saves > self.saves.most:
            return None
        for most_tokens, most_rows, most_prompts, bucket in self._sizes:  # as Bucket.has_room
            if tokens <= most_tokens and rows <= most_rows and prompts <= most_prompts:
                return bucket
        return None

    def _note_error(self, works: Sequence[StepWork], seconds: float) -> float:
        """The relative error of the prediction; 0 without one."""
        if self._costs is None:
            return 0.0
        predicted = sum([self._seconds(work, self._bucket(work)) for work in works])
        self._errors.append(abs(predicted - seconds) / seconds)
        return self._errors[-1]


def _nonnegative_costs(squares: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises x^T squares x / 2 - moments^T x (Lawson & Hanson 1974, chapter 23).
    Features that no step had cost nothing."""
    scale = np.sqrt(squares.diagonal())
    seen = scale > 0
    scale = np.where(seen, scale, 1.0)
    squares, moments = squares / np.outer(scale, scale), moments / scale
    squares[np.diag_indices_from(squares)] += _RIDGE
    found, free = np.zeros(len(moments)), np.zeros(len(moments), bool)
    for _ in range(3 * len(moments)):
        slope = np.where(free | ~seen, -np.inf, moments - squares @ found)
        if slope.max() <= 1e-9 * max(moments.max(), 1e-300):
            break
        free[slope.argmax()] = True
        found, free = _solve_free(squares, moments, found, free)
    return found / scale


def _solve_free(
    squares: np.ndarray, moments: np.ndarray, found: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Unknowns that would become negative on the way are fixed."""
    while True:
        target = np.zeros_like(found)
        target[free] = np.linalg.solve(squares[np.ix_(free, free)], moments[free])
        negative = free & (target <= 0)
        if not negative.any():
            return target, free
        step = (found[negative] / (found[negative] - target[negative])).min()
        found = found + step * (target - found)
        free = free & (found > 1e-12 * max(found.max(), 1e-300))
        found = np.where(free, found, 0.0)


# A shorter chunk with a graph is taken instead of a longer one without, if it computes at least this
# many times as many tokens a second. The factor is above 1 because predictions err, and because fewer
# long steps end a prompt sooner. A step that a graph could run runs without one if that takes this many times less.
GRAPH_GAIN = 1.1
# A shorter chunk is taken if its graph computes this many times as many tokens a second as the longest one's, or more:
# a little is not worth longer steps, and may be an error of the costs.
SHORTER = 0.97
# The whole rest of a prompt is taken if that is faster than two steps and takes at most this many times the seconds of
# the bound and of the first of the two.
REST_SECONDS = 1.6
LEAST_TOKENS = 16  # allowed whatever a step's predicted time
REPAY = 2.0  # the time of a chunk compared with that of one of LEAST_TOKENS


class ChunkBudget:
    """Prompt tokens that a step may still get.

    Args:
        tokens: the most that the step may get.
        cost: predicts the step's time; None: the step has no bound of time.
        seconds: in this time the step shall end; with the whole rest of a prompt it may take REST_SECONDS times as
            long, and at most `most`.
        work: present work of the step.
        most: seconds that the step may take instead, if its first chunk would need much of `seconds`
            even with few tokens, as after a long context.
        shorter: in place of SHORTER.
        repay: in place of REPAY.
    """

    def __init__(
        self,
        tokens: int,
        cost: StepCost | None = None,
        seconds: float = 0.0,
        work: StepWork | None = None,
        most: float = 0.0,
        shorter: float = SHORTER,
        repay: float = REPAY,
    ) -> None:
        self._tokens, self._cost, self._seconds, self._work = tokens, cost, seconds, work or StepWork()
        self._most, self._shorter, self._repay = most, shorter, repay
        self._rooms: dict[int, int] = {}  # tokens by start, until the step has another chunk

    def room(self, start: int = 0, rest: int = 0) -> int:
        """Tokens of the next chunk, after the first `start` of its prompt. `rest`: those that the prompt has left, if
        one chunk can have them all; else 0."""
        if self._cost is None or self._tokens <= 0:
            return max(self._tokens, 0)
        if start not in self._rooms:
            self._rooms[start] = self._find_room(start)
        room = self._rooms[start]
        is_first = self._most and not self._work.prompt_tokens  # chunk of the step, without a number of milliseconds
        return rest if is_first and room < rest <= self._most_known() and self._finishes(start, room, rest) else room

    def _find_room(self, start: int) -> int:
        assert self._cost is not None
        least = min(LEAST_TOKENS - self._work.prompt_tokens, self._tokens)
        return max(least, self._in_time(start, max(self._most_known(), 0)), 0)

    def _most_known(self) -> int:
        """Tokens of a chunk, at most: the fit says nothing about steps far larger than the largest one."""
        assert self._cost is not None
        return min(2 * self._cost.max_prompt_tokens - self._work.prompt_tokens, self._tokens)

    def spend_tokens(self, start: int, tokens: int) -> None:
        """Adds a chunk of `tokens` to the step, after the first `start` of its prompt."""
        self._tokens -= tokens
        if tokens and self._cost is not None:
            self._work = self._work.with_chunk(start, tokens)
            self._rooms.clear()

    def _in_time(self, start: int, max_tokens: int) -> int:
        """Returns at most `max_tokens`: of the longest chunk that ends in time and shorter ones that fill a
        graph, the one with which the step computes the most tokens a second. A longer graph may be slower
        for each token, and then decode rows would wait longer for nothing (SHORTER). The step may be the fastest
        without a chunk (0): if one more prompt would need a larger graph.
        """
        assert self._cost is not None
        fills = [fill for fill in self._cost.fills(self._work) if fill < max_tokens]
        found = self._longest_in_time(start, fills, max_tokens)
        graph = self._cost.takes_graph(self._work.with_chunk(start, found))
        best = self._rate(start, found) * (self._shorter if graph else GRAPH_GAIN)
        for tokens in reversed([0, *(fill for fill in fills if fill < found)]):
            if (rate := self._rate(start, tokens)) > best:
                found, best = tokens, rate
        return found

    def _finishes(self, start: int, tokens: int, rest: int) -> bool:
        """Whether a step with a graph takes the whole `rest` of a prompt sooner than this step `tokens` of it, and
        another one what is left. Else the last step of many prompts would have a few tokens, next to all decode rows.
        """
        assert self._cost is not None
        chunks = (start, rest), (start, tokens), (start + tokens, rest - tokens)
        works = [self._work.with_chunk(first, length, saves=1) for first, length in chunks]
        whole, now, then = (self._cost.predict(work) for work in works)
        if whole is None or now is None or then is None or not self._cost.takes_graph(works[0]):
            return False
        return whole < now + then and whole <= min(REST_SECONDS * min(now, self._bound(start)), self._most)

    def _longest_in_time(self, start: int, fills: list[int], max_tokens: int) -> int:
        """`fills`: what fills graphs, below `max_tokens`."""
        bound, ends = self._bound(start), [0, *fills, max_tokens]

        def late(tokens: int) -> bool:
            return not self._ends_in_time(start, tokens, bound)

        # Most often a prompt or two wait, and all of them fit. If the step has no graph then, a part of them that has
        # one may take up to GRAPH_GAIN times as long.
        if not late(max_tokens):
            return max_tokens
        if fills and not late(fills[-1] + 1):
            return bisect_left(range(max_tokens + 1), True, lo=fills[-1] + 2, key=late) - 1
        found = bisect_left(ends, True, lo=1, key=late)
        low = ends[found - 1]
        if found == len(ends) or late(low + 1):
            return low
        return bisect_left(range(ends[found]), True, lo=low + 1, key=late) - 1

    def _rate(self, start: int, tokens: int) -> float:
        """Prompt tokens a second of a step as long as this one with the chunk. All its tokens are taken to be
        as deep in a context as the chunk: else a step would seem faster without chunks of deep prompts, or with
        one more of a prompt that begins. The host launches a step without a graph, which may take longer than
        the device needs: then a shorter chunk with a graph is faster.
        """
        assert self._cost is not None
        total, rows = self._work.prompt_tokens + tokens, self._work.prompt_rows - (tokens == 0)
        work = StepWork(self._work.decode_tokens, self._work.decode_context, rows).with_chunk(start, total, saves=1)
        seconds = self._cost.predict(work)
        return total / seconds if seconds else math.inf

    def _bound(self, start: int) -> float:
        """Seconds of a step with a chunk after `start` tokens."""
        assert self._cost is not None
        if self._work.prompt_tokens or self._most <= self._seconds:
            return self._seconds
        alone, least = self._cost.predict(self._work), self._cost.predict(self._work.with_chunk(start, LEAST_TOKENS))
        if alone is None or least is None:
            return self._seconds
        return max(self._seconds, min(alone + self._repay * (least - alone), self._most))

    def _ends_in_time(self, start: int, tokens: int, bound: float) -> bool:
        assert self._cost is not None
        seconds = self._cost.predict(self._work.with_chunk(start, tokens, saves=1))
        return seconds is not None and seconds <= bound
