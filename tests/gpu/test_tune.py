"""Choices measured on this GPU: trials of real sizes run, and a launch with the result computes the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybridrt.kernels.attention.paged_attention_triton import Decode
from hybridrt.kernels.core.launch_choice import LAUNCHES
from hybridrt.kernels.delta_rule.delta_rule_triton import Pass
from hybridrt.kernels.dense.linear import LibraryProduct
from hybridrt.kernels.dense.skinny_linear import Product
from hybridrt.kernels.dense.skinny_linear_triton import TiledProduct
from hybridrt.kernels.mamba.mamba2_scan_triton import Scan
from hybridrt.runtime.tune.bench_process import BenchProcess
from hybridrt.runtime.tune.measure import measure
from hybridrt.runtime.tune.trial import error_of
from hybridrt.runtime.tune.tune import TRIALS
from tests.gpu.rig import PRODUCTION

pytestmark = PRODUCTION
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def process() -> Iterator[BenchProcess]:
    """A candidate that faults ends this process's use of the GPU, and not that of later tests."""
    own = BenchProcess(torch.device("cuda", 0))
    yield own
    own.end()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("skinny_linear", TiledProduct(4096, 3072, 1, BF16)),
        ("skinny_linear", TiledProduct(4096, 3072, 32, BF16)),
        ("product of few tokens", Product(4096, 3072, 64, BF16, "silu_and_mul")),
        ("product of a library", LibraryProduct(3072, 12288, 288, BF16)),
        ("attention_decode", Decode(8, 1, 12, 2, 128, 0, 4096, 0, False, BF16)),
        ("attention_decode", Decode(2, 1, 32, 1, 512, 64, 4096, 0, False, BF16)),
        ("chunk_gated_delta_rule: pass", Pass(2, 32, 16, 128, 128, 64, False, BF16)),
        ("chunk_gated_delta_rule: pass", Pass(1, 32, 32, 128, 128, 64, True, BF16)),
        ("mamba2_chunk_scan: outputs", Scan(512, 24, 1, 128, 256, 256, BF16)),
        ("mamba2_chunk_scan: gains", Scan(2048, 24, 1, 128, 256, 256, BF16)),
    ],
)
@torch.no_grad()
def test_a_measurement(name: str, shape: Any, process: BenchProcess) -> None:
    device, launch = torch.device("cuda", 0), LAUNCHES[name]
    found = measure(launch, shape, device, process.bench(name, shape, {}))
    assert 1e-6 < found.seconds <= found.built_in_seconds < 1.0
    reasons = [f"{refused.values}: {refused.why}" for refused in found.refused]
    assert found.candidates > len(reasons), reasons
    assert not [why for why in reasons if "CUDA error" in why or "process" in why], "it faulted"
    trial = TRIALS[name](shape, device)
    with launch.trying(shape, device, found.values):
        assert error_of(trial.outputs(), trial.reference()) < 2 * torch.finfo(BF16).eps
