"""On a GPU: close gives memory back without the garbage collector, and torch's ambient state reaches no step."""

import gc
from typing import Any

import pytest
import torch

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from tests.gpu.kernel_cases import CONFIGS
from tests.gpu.rig import PRODUCTION

pytestmark = PRODUCTION
SMALL: dict[str, Any] = {"load_format": "dummy", "max_model_len": 256, "max_running_requests": 4}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def allocated() -> int:
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("falcon-h1-0.5b", {}),
        ("falcon-h1-0.5b", {"speculative": SpeculativeConfig("ngram", num_draft_tokens=2)}),
        ("falcon-h1-0.5b", {"cuda_graph": False, "state_mode": "classic"}),
    ],
    ids=["graphs", "drafts", "eager"],
)
def test_close_gives_memory_back_at_once(model: str, options: dict[str, Any]) -> None:
    path = str(CONFIGS / model)
    with LLM(path, **SMALL) as llm:
        llm.generate([[5, 6, 7]], GREEDY)
    gc.collect()
    before = allocated()
    gc.disable()
    try:
        llm = LLM(path, **SMALL, **options)
        llm.generate([[5, 6, 7] * 40, [8, 9]], GREEDY)
        assert allocated() > before + 2**28
        llm.close()
        assert allocated() <= before + 2**20
    finally:
        gc.enable()


def test_ambient_state_reaches_no_step() -> None:
    def answers() -> list[list[int]]:
        with LLM("embedded", max_model_len=256, max_running_requests=4) as llm:
            return [output.token_ids for output in llm.generate(["def f(", "class A:"], GREEDY)]

    want = answers()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cuda", torch.float16), torch.device("cuda"), torch.inference_mode():
            assert answers() == want
            assert torch.are_deterministic_algorithms_enabled() and torch.is_autocast_enabled("cuda")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
