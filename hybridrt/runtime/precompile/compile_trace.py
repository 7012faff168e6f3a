"""Finds the kernels that a configuration launches, by running its steps on a pretended GPU.

A specialisation depends on dtypes, constants, which pointers and integers are divisible by 16, and
which integers are 1. So the pools are planned and cut as in the real run, and steps of the same
sizes run.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from triton.runtime.jit import JITFunction

from hybridrt.base.device import GPUFacts
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.spans import EncoderInput, Span, mrope_positions
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.core.launch_choice import use_tuned
from hybridrt.kernels.core.slots import NO_SLOT, OWN_SLOT
from hybridrt.layers.linear import finish
from hybridrt.layers.quant.pieces import set_multipliers
from hybridrt.mem_cache.pools.page_groups import in_every_group
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.recurrent.backends import backend_class, resolve_attention_name, resolve_prefill_name
from hybridrt.runtime.load.build_model import empty_model, weight_bytes
from hybridrt.runtime.load.fit import plan_ahead
from hybridrt.runtime.load.kept_state import keeps_prefixes, kv_layers
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.runtime import Runtime
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.load.tuned_choices import load_tuned
from hybridrt.runtime.precompile.pretend_gpu import CUDA, pretended
from hybridrt.runtime.precompile.replaced import replaced
from hybridrt.runtime.run.kv_scales import measuring_step
from hybridrt.runtime.run.probe import probe
from hybridrt.runtime.run.span_encoder import SpanEncoder
from hybridrt.runtime.run.step_runner import StepRunner
from hybridrt.runtime.sampling.sampler import EVERY_DRAW
from hybridrt.runtime.step.plan import (
    Admission,
    DecodeRow,
    DecodeRows,
    EncoderTask,
    ExtendRow,
    PageCopy,
    PageWrite,
    SpanRows,
    StepPlan,
)
from hybridrt.runtime.step.sampling_table import make_rules

PROMPTS = (1, 8, 15, 16, 32, 40, 100, 128, 256, 512)  # products of quantised weights have other tiles at some of them
EAGER = (1000, 4096)  # prompts without a graph: attention has tiles of its own at some sizes
IMAGES = (3, 16)  # their tokens
_SAVE = 16
_NamedStep = tuple[str, Callable[[], Any]]  # for messages, and what runs it


class Kernel(NamedTuple):
    """A kernel to compile.

    Attributes:
        module, name: place of the Triton function.
        specialisation: argument types, constants and options, as Triton's JSON.
    """

    module: str
    name: str
    specialisation: str


class TraceGroup(TPGroup):
    """The first of several ranks, whose collectives exchange nothing."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], self.size * x.shape[-1]))

    def minimum(self, value: int) -> int:
        return value


@dataclass(frozen=True)
class _Address:
    """A tensor as Triton sees it. Without memory a tensor begins at address 0, a view at its
    offset; real allocations begin at multiples of 512."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset


@contextmanager
def noted(note: Callable[[Kernel], None]) -> Iterator[None]:
    """Within it, launching an uncompiled kernel only notes it, each specialisation once."""
    found: set[Kernel] = set()
    launched: set[Any] = set()
    run = JITFunction.run

    def hook(**given: Any) -> bool:
        function = given["fn"]
        kernel = Kernel(function.module, function.name, given["compile"]["specialization_data"])
        if kernel not in found:
            found.add(kernel)
            note(kernel)
        return True  # nothing is compiled

    def note_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():  # the pretended GPU would answer
            addresses, named = tuple(map(_address, args)), {name: _address(value) for name, value in kwargs.items()}
        launch = (self.fn, *map(_hashable, addresses), *((name, _hashable(value)) for name, value in named.items()))
        if launch not in launched:  # layers launch alike; Triton takes a millisecond
            launched.add(launch)
            run(self, *addresses, grid=grid, warmup=True, **named)

    with replaced(JITFunction, run=note_instead), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = hook
        yield


def _address(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Address(value.dtype, int(value.storage_offset()) * value.element_size())
    return value


def _hashable(value: Any) -> Any:
    """Equal values of different types are different arguments."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def trace(
    config: EngineConfig, gpu: GPUFacts, note: Callable[[Kernel], None], started: Callable[[], None] = lambda: None
) -> list[str]:
    """Notes the kernels of a run in the order of their first use.

    Args:
        started: called after the kernels of the start: up to the first greedy token of prompts
            without a cached prefix.

    Returns:
        The steps that failed here and why: they may launch kernels that were not noted.
    """
    with pretended(gpu), noted(note), torch.inference_mode():
        use_tuned(CUDA, load_tuned(gpu, CUDA).choices)
        runner, largest = _runners(config)
        with runner.model.shortened():
            steps: list[_NamedStep] = [("the largest prefill", largest)]
            if runner.target.kv_codes is not None and config.kv_scales == "auto":
                steps.append(("the prompt for KV scales", partial(_measure_scales, runner)))
            if config.cuda_graph:
                steps.append(("graphs", runner.capture))
            if runner.model_config.vision is not None:
                runner.encoder = SpanEncoder(runner.model, config.encoder_cache_tokens, 0, runner.staging)
            make = _Plans(runner)
            problems = _run_all([*steps, *_first_steps(make)])
            started()
            return problems + _run_all(_further_steps(make))


def _run_all(steps: Iterable[_NamedStep]) -> list[str]:
    """Runs steps. Returns those that failed, and why."""
    problems = []
    for name, step in steps:
        try:
            step()
        except Exception as e:  # it only costs time at the start
            problems.append(f"{name}: {described(e)}")
    return problems


def described(error: Exception) -> str:
    """An error in one line, with the place where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text} ({last.filename}, line {last.lineno}, in {last.name})"


def _runners(config: EngineConfig) -> tuple[StepRunner, Callable[[], Any]]:
    _, target = load_target(config, TraceGroup(size=config.tp_size))
    config = _own_kernels(config, target)
    model = empty_model(config, target, target.device).eval()
    if config.load_format != "dummy":
        set_multipliers(model.all_targets())
    finish(model)
    plan = plan_ahead(config, target, weight_bytes(model))
    small, largest = probe(config, target)
    runtimes = [Runtime.allocate(config, target, model, each) for each in (plan, small)]
    return StepRunner(runtimes[0]), lambda: StepRunner(runtimes[1]).launch(largest)


def _measure_scales(runner: StepRunner) -> None:
    measuring, step = measuring_step(runner.config, runner.target, runner.model)
    measuring.launch(step)


def _own_kernels(config: EngineConfig, target: RunTarget) -> EngineConfig:
    names = {
        "attention_backend": resolve_attention_name(config.attention_backend, target.device),
        "prefill_attention_backend": resolve_prefill_name(config, target.device, kv_layers(config, target)),
    }
    own = {key: name if backend_class(name).provider in (None, "triton") else "triton" for key, name in names.items()}
    return replace(config, **own)  # type: ignore[arg-type]


def _first_steps(make: "_Plans") -> Iterator[_NamedStep]:
    """Steps by name: prompts of several lengths, and one more greedy token."""
    greedy = SamplingParams(temperature=0.0)
    for tokens in make.lengths:
        yield f"prompts of {tokens} tokens", partial(make.run, make.prompts([tokens], greedy))
    yield "several prompts", partial(make.run, make.prompts([16] * min(2, make.plan.num_rows), greedy))
    yield "a decode step", partial(make.decode, 1, greedy)


def _further_steps(make: "_Plans") -> Iterator[_NamedStep]:
    greedy, rows = SamplingParams(temperature=0.0), sorted({1, min(2, make.plan.num_rows), make.plan.num_rows})
    for tokens in make.lengths:
        yield f"{tokens} tokens that leave a state", partial(make.run, make.saving(tokens, greedy))
        yield f"{tokens} tokens after others", partial(make.run, make.after_others(tokens, greedy))
    for tokens in sorted({min(n, make.lengths[-1]) for n in EAGER}):
        yield f"{tokens} tokens without a graph", partial(make.run, replace(make.prompts([tokens], greedy), eager=True))
    yield "a donation", partial(make.run, StepPlan(moves=[StateMove(1, 1, 1, When.FIRST)]))
    if make.recurrent and keeps_prefixes(make.runner.config, make.runner.model_config):
        move = StateMove(1, 1, make.plan.num_slots, When.BEFORE_ROWS)
        yield "a state within an answer", partial(make.run, StepPlan(moves=[move]))
    if make.runner.encoder is not None:
        for tokens in sorted({min(n, make.lengths[-1], make.runner.config.encoder_cache_tokens) for n in IMAGES}):
            yield f"an image of {tokens} tokens", partial(make.run, make.image(tokens, greedy))
    for i, draw in enumerate(EVERY_DRAW):
        for n in rows:
            yield f"draws {i}, {n} rows", partial(make.decode, n, SamplingParams(**draw))
        yield f"draws {i} with masks", partial(make.decode, 1, SamplingParams(**draw), constrained=True)


class _Plans:
    """Slots and pages are arbitrary: nothing is computed."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner, self.plan = runner, runner.memory_plan
        self.recurrent = runner.pools.req_to_token.mamba_pool is not None
        chunk = min(runner.config.chunked_prefill_size, self.plan.max_model_len - 1)
        self.lengths = sorted({min(n, chunk) for n in (*PROMPTS, chunk)})
        self._ticket = 0  # of the latest encoder task

    def run(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self.runner.launch(plan)

    def prompts(self, lengths: Sequence[int], params: SamplingParams) -> StepPlan:
        rows = range(1, len(lengths) + 1)
        return StepPlan(
            admissions=[self._admission(row, n, params) for row, n in zip(rows, lengths)],
            page_writes=[PageWrite(row, 0, self._pages(n)) for row, n in zip(rows, lengths) if self.plan.num_pages],
            extend=[ExtendRow(row, 0, [0] * n, 0, True) for row, n in zip(rows, lengths)],
        )

    def saving(self, tokens: int, params: SamplingParams) -> StepPlan | None:
        """Returns None if the prompt has no place on the grid of saves."""
        runner, at = self.runner, (tokens - 1) // _SAVE * _SAVE
        if not (at and self.recurrent and keeps_prefixes(runner.config, runner.model_config)):
            return None
        plan = self.prompts([tokens], params)
        plan.extend = [ExtendRow(1, 0, [0] * tokens, 0, True, saves=[(at, self.plan.num_slots)])]
        return plan

    def after_others(self, tokens: int, params: SamplingParams) -> StepPlan | None:
        runner = self.runner
        if not keeps_prefixes(runner.config, runner.model_config) or tokens + _SAVE >= self.plan.max_model_len:
            return None
        plan = self.prompts([tokens + _SAVE], params)
        slot = self.plan.num_slots if self.recurrent else OWN_SLOT
        plan.extend = [ExtendRow(1, _SAVE, [0] * tokens, 0, True, read_state_slot=slot)]
        one = np.ones(len(self.plan.groups), np.int32)
        plan.page_copies = [PageCopy(one, 2 * one)] if self.plan.num_pages > 1 else []
        return plan

    def image(self, tokens: int, params: SamplingParams) -> StepPlan:
        """A prompt of one image, a row of tokens."""
        config, spec = self.runner.model_config, self.runner.model_config.vision
        assert spec is not None, "its runner has an encoder"
        patches = np.zeros((tokens * spec.merge**2, spec.patch_numbers), spec.patch_dtype)
        given, rows = EncoderInput(patches, (spec.merge, tokens * spec.merge)), np.arange(tokens, dtype=np.int32)
        span = Span(0, tokens, b"", (1, tokens), given)
        plan = self.prompts([tokens], params)
        mrope = mrope_positions([span], 0, tokens) if config.mrope else None
        seen = SpanRows(rows, rows)
        plan.extend = [ExtendRow(1, 0, [0] * tokens, 0, True, embeddings=seen, mrope=mrope)]
        self._ticket += 1
        plan.encode, plan.after_encoder = [EncoderTask(self._ticket, given, rows)], self._ticket
        return plan

    def decode(self, rows: int, params: SamplingParams, constrained: bool = False) -> None:
        """Appends prompts, then a decode step of all rows, with drafts if there are any."""
        runner = self.runner
        runner.launch(self.prompts([_SAVE] * rows, params))
        drafts = [0] * (runner.config.num_verify_tokens - 1)
        lines = [DecodeRow(row, _SAVE, 1, drafts) for row in range(1, rows + 1)]
        plan = StepPlan(decode=DecodeRows.from_rows(lines), constrained=[0] if constrained else [])
        step = runner.launch(plan)
        if constrained:
            words = -(-runner.model_config.vocab_size // 32)
            step.sample(np.zeros((1 + len(drafts), words), np.int32))

    def _admission(self, row: int, tokens: int, params: SamplingParams) -> Admission:
        rules = make_rules(params, (), (), self.runner.model_config.vocab_size)
        return Admission.from_prompt(row, row if self.recurrent else NO_SLOT, [0] * tokens, params, 0, rules)

    def _pages(self, tokens: int) -> np.ndarray:
        pages = np.arange(1, 1 - -tokens // self.plan.page_size, dtype=np.int32)
        return in_every_group(pages, len(self.plan.groups))
