"""Rank 0 of a tensor-parallel run: sends every step to the other ranks, then runs it."""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from hybridrt.base.device import gpu_count, resolve_device
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, DeviceError
from hybridrt.base.interrupts import Interrupts
from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.moe import experts_of
from hybridrt.parallel.expert_ranks import ExpertPlace, expert_split
from hybridrt.parallel.follower import serve
from hybridrt.parallel.messages import encode
from hybridrt.parallel.rank_start import rank_device, start_ranks, torchrun_place, torchrun_ranks
from hybridrt.parallel.ranks import Ranks
from hybridrt.parallel.tasks import DraftTask, DropTask, JoinTask, MaskTask, PrefixCopy
from hybridrt.parallel.torchrun import world
from hybridrt.runtime.load.build_model import empty_model
from hybridrt.runtime.load.draft_needs import DraftRow
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.start_kernels import StartAhead
from hybridrt.runtime.run.launched_step import LaunchedStep
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.run.prefix_copy import PrefixPlaces, Tensors
from hybridrt.runtime.step.plan import StepHandle, StepPlan, StepResult

POLL_S = 20e-6
T = TypeVar("T")


class TensorParallelExecutor:
    """The executor of a model that is split over `config.tp_size` ranks.

    On the host the ranks exchange only the plan of a step, some hundred bytes of integers: each
    packs, copies and launches it, and draws the same tokens. A draw is a function of the gathered
    logits, which are the same bits everywhere, and of the request's seed.

    Under torchrun, ranks above 0 never leave this constructor: they serve rank 0, then end their
    process.

    Args:
        ranks: those to lead, which outlive this executor; None uses torchrun's or starts some.
        ahead: that of ModelRunner, also on ranks that are started here.
        experts: where replicas meet that share experts; None: this one has its own.
        meanwhile: called once, before the ranks meet; while they start, if they are started here.

    Raises:
        ConfigError, DeviceError: the model or the machine cannot be split so; nothing was started.
        RankError: a rank was lost; the text names it.

    Attributes:
        ranks: the other ranks.
        runner: rank 0's part.
    """

    def __init__(
        self, config: EngineConfig, *, progress: bool = False, ranks: Ranks | None = None,
        ahead: StartAhead | None = None, experts: ExpertPlace | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        kind = check_split(config)
        started = ranks is None and world() is None
        if not started:
            meanwhile()
        self.ranks = ranks or _find_ranks(config.tp_size, kind, ahead, meanwhile)
        comm = self.ranks.comm
        try:
            self.ranks.start_service(config, experts)
        except BaseException:
            if started:  # others may serve another LLM, which goes on
                self.ranks.close()
            raise
        try:
            with self.ranks.together():
                config = replace(config, device=str(comm.device))
                replicas = None if experts is None else experts.connect(config, 0, comm.device)
                tp = TPGroup(0, comm.size, comm, replicas)
                self.runner = ModelRunner(config, tp=tp, progress=progress, ahead=ahead)
        except BaseException:
            _end(self.ranks, lambda: None, started)
            raise
        self.ranks.loading = False
        self._finalizer = weakref.finalize(self, _end, self.ranks, self.runner.drop_graphs, started)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Calls ModelRunner.launch on all ranks. Ctrl-C is raised before or after it: ranks that
        stop within a step cannot go on."""
        self.runner.check_sampled()
        return _SplitStep(self.on_all((plan,), lambda: self.runner.launch(plan)), self)

    def draft(self, rows: Sequence[DraftRow], steps: int, topk: int = 1) -> StepHandle:
        """Calls ModelRunner.draft on all ranks."""
        task = DraftTask(rows, steps, topk)
        return _SplitStep(self.on_all((task,), lambda: self.runner.draft(rows, steps, topk)), self)

    def join(self) -> bool:
        """Calls ModelRunner.join on all ranks."""
        return self.on_all((JoinTask(),), self.runner.join)

    def drop_last(self) -> None:
        """Calls ModelRunner.drop_last on all ranks."""
        self.runner.drop_last()  # also where the others are lost
        self.on_all((DropTask(),), lambda: None)

    def copied(self, ticket: int) -> bool:
        """Whether a host copy of a launched plan has ended on rank 0. On other ranks it may still
        run."""
        return self.runner.copied(ticket)

    def encoded(self, ticket: int) -> bool:
        """Whether steps may read what an encoder task of a launched plan makes: on all ranks alike."""
        return self.runner.encoded(ticket)

    def read_prefix(self, prefix: PrefixPlaces) -> dict[str, torch.Tensor]:
        """Calls ModelRunner.read_prefix on all ranks."""
        return self.on_all((PrefixCopy(prefix, write=False),), lambda: self.runner.read_prefix(prefix))

    def write_prefix(self, prefix: PrefixPlaces, data: Tensors) -> None:
        """Calls ModelRunner.write_prefix on all ranks."""
        self.on_all((PrefixCopy(prefix, write=True),), lambda: self.runner.write_prefix(prefix, data))

    def on_all(self, tasks: Iterable[object], here: Callable[[], T]) -> T:
        """Sends tasks (hybridrt.parallel.messages) to the other ranks, which run them between two
        steps. Then does rank 0's part."""
        messages = [encode(task) for task in tasks]
        with Interrupts(), self.ranks.together():
            for message in messages:
                self.ranks.send(message)
            return here()

    def close(self) -> None:
        """Lets the other ranks go. May be repeated."""
        self._finalizer()


class _SplitStep:
    """A step of all ranks: RankError instead of waiting for a lost one."""

    def __init__(self, step: StepHandle, split: TensorParallelExecutor) -> None:
        self._step, self._split = step, split

    @property
    def needs_masks(self) -> bool:
        return self._step.needs_masks

    def sample(self, masks: np.ndarray) -> None:
        assert isinstance(self._step, LaunchedStep)
        self._step.check_masks(masks)
        self._split.on_all((MaskTask.from_masks(masks),), lambda: self._step.sample(masks))

    def drop(self) -> None:
        if self._step.needs_masks:
            self._step.drop()  # also where the others are lost
            self._split.on_all((DropTask(),), lambda: None)

    def ready(self) -> bool:
        return self._step.ready()

    def result(self) -> StepResult:
        while not self._step.ready():
            self._split.ranks.check_alive()
            time.sleep(POLL_S)
        self._split.ranks.check_alive()  # stopped kernels look finished
        return self._step.result()


def check_split(config: EngineConfig) -> str:
    """The kind of the ranks' devices, "cpu" or "cuda". Allocates nothing.

    Raises:
        ConfigError: the model cannot be cut into `tp_size` shards, or has no experts to share.
        DeviceError: fewer GPUs than ranks.
    """
    device = resolve_device(config.device)
    if config.device.startswith("cuda:"):
        raise ConfigError(
            f'device is {config.device!r} and tp_size is {config.tp_size}; with device="cuda" each rank '
            "takes the GPU of its own number"
        )
    if device.type == "cuda" and (count := gpu_count()) < config.tp_size:
        raise DeviceError(f"tp_size is {config.tp_size}, but torch sees {count} CUDA devices; lower tp_size")
    check_shards(config)
    return device.type


def check_shards(config: EngineConfig) -> None:
    """ConfigError if the model cannot be cut into `tp_size` shards, or has no experts to share."""
    _, target = load_target(config, expert_split(config))
    model = empty_model(config, target, torch.device("meta"))
    if config.expert_parallel and not experts_of(model):
        raise ConfigError(f"expert_parallel is on, and {target.model_config.architecture} has no experts; leave it out")


def check_world(tp_size: int) -> None:
    """ConfigError if torchrun started this process, but not `tp_size` processes."""
    started = world()
    if started is not None and started.size != tp_size:
        raise ConfigError(
            f"torchrun started {started.size} processes (WORLD_SIZE) and tp_size is {tp_size}: pass "
            f"tp_size={started.size}, or start {tp_size}"
        )


def _find_ranks(size: int, kind: str, ahead: StartAhead | None, meanwhile: Callable[[], object]) -> Ranks:
    """On a rank above 0, serves and then ends the process."""
    here = world()
    if here is None:
        return start_ranks(size, kind, ahead, meanwhile)
    if here.rank > 0:
        device = rank_device(kind, here.local_rank)
        raise SystemExit(serve(torchrun_place(here), here.rank, size, device, ahead))
    return torchrun_ranks(here, kind)


def _end(ranks: Ranks, drop_graphs: Callable[[], None], started: bool) -> None:
    if not ranks.here:
        return  # a forked child has copies
    drop_graphs()  # NCCL waits for its graphs
    ranks.end_service()
    if started:
        ranks.close()
