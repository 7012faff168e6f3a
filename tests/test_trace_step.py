"""How many functions a reader of one prompt's steps enters (scripts/trace_step.py)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridrt.kernels.core.chunk_plan import exp_of
from hybridrt.kernels.core.slots import pad_mask
from scripts.trace_step import Trace, called_lengths, percentile

ROOT = Path(__file__).parents[1]
# Reached today, and at most two per cent. Lower them with every change that makes the way shorter.
MOST = {
    "calls": 1460,
    "files": 52,  # a scheduled step and the policy of prompts have their own
    "switches": 860,  # Ctrl-C has a file of its own, without torch: a chat with a server starts at once
    "lines of the functions called, p90": 21,
    "lines of all functions, p90": 20,
}


@pytest.mark.slow
def test_the_way_of_a_prompt_does_not_grow() -> None:
    command = [sys.executable, "scripts/trace_step.py"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for value, name in (line.split(maxsplit=1) for line in printed.splitlines())}
    assert found.keys() == MOST.keys()
    assert {name: value for name, value in found.items() if value > MOST[name]} == {}


def test_calls_files_and_switches_are_counted() -> None:
    trace, slots = Trace(), torch.tensor([0, -1])
    sys.setprofile(trace.record)
    pad_mask(slots, 1)
    pad_mask(slots, 1)
    exp_of(slots)
    pad_mask(slots, 1)
    sys.setprofile(None)
    calls = {code.co_name: count for code, count in trace.calls.items()}
    assert calls == {"pad_mask": 3, "exp_of": 1}
    assert (len(trace.files), trace.switches) == (2, 3)
    assert sorted(called_lengths(trace)) == [3, 3]
    assert percentile(iter(range(11))) == 9
