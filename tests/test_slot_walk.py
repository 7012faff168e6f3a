"""A state slot on its way from admission to the kernels has one name.

Programs are traced while an engine runs one request, whose slot has a number that nothing else in the step has. So
what holds that number is the slot, or an array of slots.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.entries import Handle
from tests.support.checkpoints import Make, falcon, jamba, nemotron, qwen
from tests.support.newer_checkpoints import kimi, minimax
from tests.support.tiny import write_tiny

ROOT = Path(__file__).parents[1]
FOLDERS = tuple(f"{ROOT / folder}{os.sep}" for folder in ("hybridrt", "models", "mem_cache"))
SLOT = 97  # above all token ids, positions and lengths of the test
NAME = re.compile(r"([a-z]+_)*state_slots?")  # a word in front says whose slot it is, or what is done to it
PROMPT = [5] * 12  # drafts are found in it, and are right
ANSWER = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, allowed_token_ids=[5])
CHAIN = {"speculative": SpeculativeConfig("ngram", num_draft_tokens=2, state_mode="intermediate")}
REPLAY = {"speculative": SpeculativeConfig("ngram", num_draft_tokens=2, state_mode="replay")}
# Where a slot is one of many numbers that are all treated alike: entries of pools, and checks that are told its name.
NUMBERS = (
    "mem_cache/pools/entries.py",
    "mem_cache/pools/slabs.py",
    "attention/checks.py",
)
KERNELS = "kernels/"
COLUMNS = "column", "part"  # one after the other, all columns of a step


class Station(NamedTuple):
    """A file where the slot was seen, and the name of what held it; of a kernel that is given it, the kernel's own."""

    file: str
    name: str


class SlotProbe:
    """Traces all lines of this package outside kernels. Each call gives a station for each name that holds the slot: a
    local variable, or a field of a record that the call is given or returns."""

    def __init__(self) -> None:
        self.stations: list[Station] = []
        self._seen: dict[FrameType, set[str]] = {}

    def __enter__(self) -> "SlotProbe":
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self._seen.clear()

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        file, given, caller = frame.f_code.co_filename, dict(frame.f_locals), frame.f_back
        if not file.startswith(FOLDERS) or _short(file).startswith(NUMBERS):
            return None
        assert caller is not None
        if _short(file).startswith(KERNELS):
            tensors = (*given.values(), *given.get("args", ()))
            if KERNELS not in caller.f_code.co_filename and (any(map(_holds, tensors)) or any(_names(given, depth=5))):
                self._note(frame, [getattr(given.get("self"), "name", frame.f_code.co_name)])
            return None
        handed = [name for name, value in given.items() if _holds(value)]
        if handed and caller.f_code.co_filename.startswith(FOLDERS):
            self._note(caller, [name for name in handed if NAME.fullmatch(name)])
        self._note(frame, handed)
        self._note(frame, [name for value in given.values() for name in _names(value)])
        return self._within

    def _within(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        self._note(frame, [name for name, value in frame.f_locals.items() if _holds(value)])
        if event == "return":
            self._note(frame, _names(arg))
        return self._within

    def _note(self, frame: FrameType, names: Iterable[str]) -> None:
        seen = self._seen.setdefault(frame, set())
        for name in names:
            if name not in seen:
                seen.add(name)
                self.stations.append(Station(_short(frame.f_code.co_filename), name))


def _holds(value: object) -> bool:
    """Whether a value is the slot, or an array of slots with it."""
    if isinstance(value, Handle):
        return value.index == SLOT
    if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "i" and bool(np.isin(value, (0, -1, SLOT)).all() and (value == SLOT).any())
    return type(value) is int and value == SLOT


def _names(value: object, depth: int = 3) -> Iterator[str]:
    """The names of the fields of a record, and of its records, that hold the slot. Requests are left out: they own it,
    and go everywhere."""
    if depth == 0 or isinstance(value, Request):
        return
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        for part in value:
            yield from _names(part, depth - 1)
        return
    for name, part in _parts(value).items():
        if _holds(part):
            yield name
        yield from _names(part, depth - 1)


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, type):
        return {}
    if isinstance(value, dict):
        return {name: part for name, part in value.items() if isinstance(name, str)}
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return value._asdict() if hasattr(value, "_fields") else {}


def _short(file: str) -> str:
    return str(Path(file).relative_to(ROOT)).removeprefix("hybridrt/")


def lend(tmp_path: Path, make: Make, **options: Any) -> LLM:
    """An engine whose next request is given the state slot SLOT."""
    llm = LLM(
        str(write_tiny(tmp_path, make, tokenizer=False)), load_format="dummy", device="cpu", max_running_requests=2,
        max_model_len=64, cache_slots=SLOT + 20, **options,
    )  # fmt: skip
    slots = llm.engine._coordinator.slots
    while slots.alloc_one().index < SLOT - 1:
        pass
    return llm


def walked(llm: LLM, prompt: list[int]) -> list[Station]:
    """Where the slot is seen while a prompt is answered, up to the last kernel that is given it."""
    with SlotProbe() as probe:
        llm.generate([prompt], ANSWER)
    last = max(i for i, station in enumerate(probe.stations) if station.file.startswith(KERNELS))
    return probe.stations[: last + 1]


def check_walk(stations: list[Station]) -> None:
    for file, name in stations:
        if not file.startswith(KERNELS) and name not in COLUMNS:
            assert NAME.fullmatch(name), f"{file} calls the state slot {name}"


def kernels(stations: list[Station]) -> set[str]:
    return {station.name for station in stations if station.file.startswith(KERNELS)}


@pytest.mark.parametrize(
    ("make", "options", "given"),
    [
        (falcon(), {}, {"mamba2_chunk_scan", "pool_rows"}),
        pytest.param(
            falcon(), {"mamba_ssm_dtype": "bfloat16"}, {"mamba2_chunk_scan", "mamba2_decode"}, marks=pytest.mark.slow
        ),
        (nemotron("M*-ME"), CHAIN, {"mamba2_chunk_scan", "mamba2_decode", "commit_intermediate"}),
        (qwen(), REPLAY, {"chunk_gated_delta_rule", "gdn_decode", "advance_ring"}),
        (jamba(), {}, {"selective_scan", "mamba1_update"}),
        pytest.param(kimi(), {}, {"chunk_gated_delta_rule", "gdn_decode"}, marks=pytest.mark.slow),
        pytest.param(minimax(), {}, {"mamba2_chunk_scan", "pool_rows"}, marks=pytest.mark.slow),
    ],
    ids=["falcon", "bfloat16", "nemotron", "qwen", "jamba", "kimi", "minimax"],
)
def test_a_state_slot_from_admission_to_the_kernels(
    make: Make, options: dict[str, Any], given: set[str], tmp_path: Path
) -> None:
    stations = walked(lend(tmp_path, make, **options), PROMPT)
    check_walk(stations)
    assert {"clear_slots", "enter_rows", "fill_decode_metadata"} | given <= kernels(stations)


@pytest.mark.parametrize("make", [nemotron("M*-ME"), qwen()], ids=["nemotron", "qwen"])
def test_a_cached_state_s_slot_from_the_schedule_to_the_kernels(make: Make, tmp_path: Path) -> None:
    llm = lend(tmp_path, make)
    answer = llm.generate([PROMPT], ANSWER)[0].token_ids
    llm.generate([[7]], ANSWER)  # in its first step the cache takes the slot
    stations = walked(llm, [*PROMPT, *answer, 9])
    first = next(i for i, station in enumerate(stations) if station == ("engine/core/scheduler.py", "read_state_slot"))
    check_walk(stations[first:])
