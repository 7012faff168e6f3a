"""What a GPU can lack: memory while loading, planning or capturing, and bfloat16. Errors say what to change."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hybridrt import LLM, SamplingParams
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import DeviceError, MemoryBudgetError
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.run.step_runner import StepRunner
from tests.gpu.kernel_cases import CONFIGS
from tests.gpu.rig import PRODUCTION

pytestmark = PRODUCTION
MODEL = str(CONFIGS / "falcon-h1-0.5b")
SMALL: dict[str, Any] = {"load_format": "dummy", "max_model_len": 256, "max_running_requests": 4}
LARGE = SMALL | {"max_running_requests": 200}
MIB = 2**20


def held() -> int:
    """Bytes of live tensors, without the workspaces that cuBLAS keeps."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def limit(more: int) -> None:
    """From here on torch gets `more` bytes beyond what it holds."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)


@pytest.fixture(autouse=True)
def _no_limit_afterwards() -> Iterator[None]:
    before = held()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert held() <= before, "what failed must let go of its memory"
    with LLM(MODEL, **SMALL) as llm:  # and the next one works
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))


def limited(after: Callable[..., Any], more: int) -> Callable[..., Any]:
    """The function `after`; memory is short once it has run."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = after(*args, **kwargs)
        limit(more)
        return result

    return call


def test_weights_do_not_fit() -> None:
    limit(100 * MIB)
    with pytest.raises(MemoryBudgetError, match="loading weights: run it on a larger device"):
        LLM(MODEL, **SMALL)


def test_the_fraction_leaves_no_room() -> None:
    with pytest.raises(MemoryBudgetError, match=r"weights need .* use a memory_fraction above 0.001"):
        LLM(MODEL, **SMALL, memory_fraction=0.001)


def test_pools_do_not_fit() -> None:
    limit(1200 * MIB)  # the weights fit
    with pytest.raises(MemoryBudgetError, match="allocating pools: lower memory_fraction"):
        ModelRunner(EngineConfig(MODEL, **LARGE), budget_bytes=100 * 2**30)


@pytest.mark.parametrize("more", [1 * MIB, 20 * MIB])
def test_graphs_do_not_fit(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Already for their buffers, and only for what a step takes."""
    monkeypatch.setattr(StepRunner, "__init__", limited(StepRunner.__init__, more))
    with pytest.raises(MemoryBudgetError, match="capturing graphs: lower memory_fraction or cuda_graph_max_bs"):
        ModelRunner(EngineConfig(MODEL, **LARGE), budget_bytes=30 * 2**30)


def test_a_gpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is bfloat16; float16 is offered and works."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
        with pytest.raises(DeviceError, match='has no bfloat16; pass dtype="float16"'):
            LLM(MODEL, **SMALL)
        with pytest.raises(DeviceError, match='pass mamba_ssm_dtype="float16"'):
            LLM(MODEL, **SMALL, dtype="float16", mamba_ssm_dtype="bfloat16")
        with LLM(MODEL, **SMALL, dtype="float16") as llm:
            out = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0]
    assert len(out.token_ids) == 4


def test_a_device_that_is_not_there() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(DeviceError, match=f"torch sees {count} CUDA devices"):
        LLM(MODEL, **SMALL, device=f"cuda:{count}")
