"""How long a step with prompts may take, and when it is scheduled."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.engine.core.step_cost import REPAY, SHORTER, ChunkBudget, PromptWork, StepCost, StepWork
from hybridrt.engine.request.sample_request import Request
from hybridrt.runtime.step.pack_padded import Bucket, StateSaves
from hybridrt.runtime.step.plan import DecodeRows, StepPlan

# The part of a bound that is left free for errors of the prediction: MARGIN_ERRORS median errors, at
# most MAX_MARGIN.
MARGIN_ERRORS, MAX_MARGIN = 2, 0.1
# A step takes at most F / (F - 1) times as long as its decode rows alone if prompts get 1/F of its
# time: then a prompt takes F times as long as without decode rows. With a number of milliseconds
# F is NUMBER_FACTOR, without one AUTO_FACTOR.
NUMBER_FACTOR, AUTO_FACTOR = 11.0, 4 / 3
# Without a number of milliseconds, a step may take longer if much work waits: a share of that work,
# up to MOST_STEPS times its decode rows alone and MOST_SECONDS. With a smaller share the rest of a prompt is cut
# into chunks that are slower for each token; with all of that work, three short prompts at once make a long step.
WORK_SHARE, MOST_STEPS, MOST_SECONDS = 1 / 2, 20, 0.075
# With more waiting work they may take DEEP_SHARE of it, up to DEEP_SECONDS: longer steps compute more
# prompt tokens a second, and the longest wait depends on that rate. A step without a graph is taken only if its launch
# fits, too, and that took 70 to 190 ms in a server (Falcon-H1-7B on an H200: benchmarks/log/serving.md, "The mix on a
# GPU, step by step").
DEEP_SHARE, DEEP_SECONDS = 1 / 10, 0.0935
# Without a number of milliseconds, a longer chunk is taken if all that waits is then computed SAVED seconds sooner,
# or if it computes 1 / LEAST_SHORTER times as many tokens a second. It never is for less than SHORTER says.
SAVED, LEAST_SHORTER = 0.01, 0.93
# While one client floods and another one is active, a step takes at most this much longer than its
# decode rows alone: a prompt of the other client waits for a step or two. More time would compute
# long prompts of the flood faster (0.024: 13%), and first tokens of the other client 1.3 to 2 times later.
SHARED_SECONDS = 0.016
# Deep in a prompt a few tokens take longer than that already: a chunk then takes this many times as long, instead of
# REPAY times (benchmarks/log/serving.md, "Floods of long prompts").
SHARED_REPAY = 1.5
# With a number of milliseconds, more seconds of waiting work raise the bound in proportion. Otherwise
# a full server would answer fewer requests than without a bound.
LATE_SECONDS, LATE_FACTOR = 0.25, 2.0
# Short prompts that pass earlier ones get PASSING_SHARE of all prompt tokens. Steps without such
# prompts save the share for later ones, up to MOST_PASSING tokens: the longest prompt that may pass.
# With AUTO_FACTOR it doubles the time of what waits.
PASSING_SHARE, MOST_PASSING = 1 / 3, 2048
_LATE_STEPS = 8  # late steps that are observed as one
# A step without a graph that ends within this share of its time after its launch has waited for the launch: the
# device computes most kernels as soon as they come.
LAUNCH_SHARE = 0.05
# The next step is scheduled this lead before the running one ends: all but one of the latest _LAUNCHES steps were
# scheduled and launched in that time, of those with prompts and of those without. Those without a graph count, too:
# they come in a row, and the device would be idle. Feedback from steps that ended before the next launch would not do:
# next to a server's threads a step of a few decode rows is often shorter than the launch of the next one, whatever the
# lead, and then no step would be put off.
_LEAD, _MIN_LEAD, _MAX_LEAD, _LAUNCHES = 0.004, 0.001, 0.1, 16


class TrafficPolicy:
    """Decides how long steps may take: prompts get shorter chunks in steps with decode rows.

    The host does not see the end of a step that samples nothing or ended before it was read: its
    work is observed together with the next step that is waited for.

    Args:
        seconds: between tokens; None: by the work that waits.
        max_ttft_factor: how many times longer prompts may take than without decode rows. It goes
            before `seconds`. None: NUMBER_FACTOR or AUTO_FACTOR.
        cost: None: one without graphs for prompts.
        weights: shares of clients in prompt computation; 1 for others.
        clock: seconds, as `RequestMetrics.arrival_time` has them.

    Attributes:
        backlog: predicted seconds of all prompts that are not computed, without decode rows.
        passing: tokens of short prompts that may pass earlier ones.
    """

    def __init__(
        self,
        seconds: float | None = None,
        *,
        max_ttft_factor: float | None = None,
        cost: StepCost | None = None,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds, self.cost, self.weights, self.clock = seconds, cost or StepCost(), weights or {}, clock
        self._factor = max_ttft_factor or (AUTO_FACTOR if seconds is None else NUMBER_FACTOR)
        self._least = self._factor / (self._factor - 1)
        self.backlog, self.passing = 0.0, MOST_PASSING
        self._last_end = self._last_read = 0.0
        self._unseen: list[StepWork] = []  # launched before the next awaited one
        self._unseen_start = 0.0
        self._end_is_late = False  # `_last_end` was seen too late
        # Seconds of scheduling and launching, of steps without prompts and with them.
        self._hosts = tuple(deque[float]([_LEAD], maxlen=_LAUNCHES) for _ in range(2))
        self._launches = deque[tuple[float, float]](maxlen=_LATE_STEPS)  # start and end, of steps without a graph

    @classmethod
    def from_config(
        cls, config: EngineConfig, device: torch.device, buckets: Iterable[Bucket],
        saves: StateSaves = StateSaves.AT_CHUNKS,
    ) -> "TrafficPolicy | None":  # fmt: skip
        """The policy of `EngineConfig.target_itl_ms`; None if there is none. `buckets` and `saves`: those of
        the captured graphs of steps with prompts.
        """
        asked = config.target_itl_ms
        if asked is None or (asked == "auto" and device.type == "cpu"):
            return None
        seconds = None if asked == "auto" else float(asked) / 1e3
        return cls(
            seconds, max_ttft_factor=config.max_ttft_factor, cost=StepCost(buckets, saves),
            weights=config.client_weights,
        )  # fmt: skip

    def budget(
        self, tokens: int, decode: DecodeRows, waiting: PromptWork | None = None, *, flooded: bool = False
    ) -> ChunkBudget:
        """The budget of a step with these decode rows and at most `tokens` prompt tokens.

        Args:
            waiting: all that is not computed; None: any number of tokens, in no time.
            flooded: a client that does not flood may come while another one does.
        """
        if not len(decode) and not flooded:
            return ChunkBudget(tokens)
        pending = 0.0
        if waiting is not None:  # a graph with room for more is as slow as if it were full
            tokens, pending = min(tokens, waiting.tokens), self.prompt_seconds(waiting)
        work = StepWork.from_plan(StepPlan(decode=decode))
        alone, most = self.cost.predict(work) if len(decode) else 0.0, 0.0 if self.seconds else most_seconds(pending)
        shorter = SHORTER if self.seconds else min(max(1 - SAVED / max(pending, SAVED), LEAST_SHORTER), SHORTER)
        repay, bound = SHARED_REPAY if flooded else REPAY, self.bound(alone or 0.0, pending, flooded)
        return ChunkBudget(tokens, self.cost, bound, work, most, shorter, repay)

    def bound(self, alone: float, pending: float, flooded: bool = False) -> float:
        """The seconds in which a step shall end. `alone`: what it would take without prompts. `pending`: predicted
        seconds of the prompts that wait. `flooded` as for `budget`."""
        if self.seconds is not None:
            late = min(max(pending / LATE_SECONDS, 1.0), LATE_FACTOR)
            return max(self.seconds * late * (1 - self._margin), self._least * alone)
        if flooded:
            return alone + SHARED_SECONDS
        most = min(alone + WORK_SHARE * pending, MOST_STEPS * alone, most_seconds(pending))
        return max(self._least * alone, most)

    def prompt_seconds(self, work: PromptWork) -> float:
        """Predicted seconds of prompts without decode rows."""
        return self.cost.prompt_seconds(work)

    @property
    def wait_seconds(self) -> float:
        """Predicted seconds until all prompts that are there are computed, next to short prompts that pass them.
        Without a target in milliseconds also next to decode rows, as many as `max_ttft_factor` allows; with one, what
        they take is not known here. Any thread may ask.
        """
        return self.backlog * (self._factor if self.seconds is None else 1.0) / (1 - PASSING_SHARE)

    def note_passing(self, left: int, tokens: int) -> None:
        """A step was made. `tokens`: its prompt tokens. `left`: what it has not used of `passing`."""
        self.passing = min(left + math.ceil(PASSING_SHARE * tokens), MOST_PASSING)

    def waited(self, request: Request) -> float:
        """Seconds since a request arrived."""
        return self.clock() - request.metrics.arrival_time

    def ratio(self, waited: float, work: PromptWork) -> float:
        """The response ratio of a prompt."""
        return 1 + waited / self.prompt_seconds(work)

    def spare_seconds(self, work: StepWork, planned: float) -> float:
        """How long scheduling of the next step can be put off while this one runs as the last one:
        more prompts can join then. 0 if its end is unknown. `planned`: when its scheduling ended, by `clock`.
        """
        seconds = self.cost.predict(work)
        if seconds is None or self._unseen:
            return 0.0
        end = max(planned, self._last_read) + seconds * (1 - self._margin)
        return max(end - self._lead - self.clock(), 0.0)

    @property
    def _lead(self) -> float:
        return min(max([_MIN_LEAD, *(sorted(hosts)[-2:][0] for hosts in self._hosts)]), _MAX_LEAD)

    @property
    def _margin(self) -> float:
        return min(MARGIN_ERRORS * (self.cost.error or 0.0), MAX_MARGIN)

    def note_launch(self, work: StepWork, asked: float, planned: float) -> None:
        """A step was launched just now. `asked`: when its scheduling began, `planned`: when it ended, by `clock`."""
        now = self.clock()
        self._hosts[work.prompt_tokens > 0].append(now - asked)
        if not self.cost.has_graph(work):
            self._launches.append((planned, now))
            self.cost.note_launch(now - planned)

    def ended(self, work: StepWork, planned: float, gained: int, late: bool = False, read: float | None = None) -> None:
        """Observes a step that was read. Call it in launch order.

        Args:
            planned: when its scheduling ended, by `clock`.
            read: when its result was read, likewise; None: now. The host may have needed milliseconds for its tokens
                since, and the next step has run.
            gained: tokens of all its rows; 0: it was not waited for, or failed.
            late: it had ended before it was read, because the launch of the next one took longer.
                Its end would be seen too late, and the next step would seem to need no time.
        """
        if not self._unseen:
            self._unseen_start = planned
        self._unseen.append(work)
        if not gained or (late and len(self._unseen) < _LATE_STEPS):
            return
        now, works = self.clock(), self._unseen
        self._last_read = now if read is None else read
        start = max(self._unseen_start, self._last_end)
        # Between the ends of steps the host's time for tokens cancels out. A step that was launched later has an end of
        # its own. Without a graph it keeps the host until the device has nearly finished, and that time adds.
        own = start == self._unseen_start and all([self.cost.has_graph(work) for work in works])
        end = self._last_read if own else now
        too_short = self._end_is_late and not late  # it began before that end was seen
        self._last_end, self._unseen, self._end_is_late = now, [], late
        if end > start and not too_short:
            self.cost.observe(works, end - start, at_most=self._waited(works, planned, end - start, late))

    def _waited(self, works: Iterable[StepWork], planned: float, seconds: float, late: bool) -> bool:
        """Whether the device waited for launches of steps without a graph, in `seconds` until now. Without any graph
        of prompts (on a CPU a launch computes the step) each takes as long as its launch."""
        if not self.cost.graphs or all([self.cost.has_graph(work) for work in works]):
            return False
        launch_end = dict(self._launches).get(planned, -math.inf)
        return late or self.clock() - launch_end <= LAUNCH_SHARE * seconds


def most_seconds(pending: float) -> float:
    """The most seconds of a step, without a number of milliseconds. `pending`: of the work that waits."""
    return min(max(MOST_SECONDS, DEEP_SHARE * pending), DEEP_SECONDS)
