"""Experts that benchmarks force to be picked uniformly."""

import sys

import pytest
import torch

from benchmarks import bench_offline
from benchmarks.uniform_experts import ROUTERS, pick_uniformly
from hybridrt.kernels.dense.moe import GroupedChoice, SoftmaxChoice
from hybridrt.layers import moe


def test_tokens_of_equal_logits_touch_as_many_experts_as_the_floor_assumes(monkeypatch):
    """Of 128 experts 64 tokens that pick 4 each are expected to touch 111."""
    for name in ROUTERS:
        monkeypatch.setattr(moe, name, getattr(moe, name))  # so that they are put back
    pick_uniformly(64)
    logits, correction = torch.zeros(64, 128), torch.zeros(128)
    chosen = [
        moe.router_softmax(logits, SoftmaxChoice(4, True))[1],
        moe.router_sigmoid_grouped(logits, correction, GroupedChoice(4, 1, 1, True, 1.0))[1],
    ]
    assert all(abs(len(ids.unique()) - 111) <= 6 for ids in chosen)
    assert moe.router_softmax(logits[:8], SoftmaxChoice(4, True))[1].equal(chosen[0][:8])
    with pytest.raises(ValueError, match="65 tokens"):
        moe.router_softmax(torch.zeros(65, 128), SoftmaxChoice(4, True))


@pytest.mark.parametrize("option", ["--tp", "--dp"])
def test_other_processes_do_not_pick_uniformly(monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["bench_offline", "model", "--uniform-experts", option, "2"])
    with pytest.raises(SystemExit):
        bench_offline.parse()
    assert "--uniform-experts is for one GPU" in capsys.readouterr().err
