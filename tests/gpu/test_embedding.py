"""The examples over hybridrt.embedding on a GPU, with real graphs: the tokens of LLM, in both state modes."""

from typing import Any

import pytest

from examples import embed_backends, foreign_engine
from hybridrt import LLM, EngineConfig, SamplingParams
from hybridrt.runtime.replay.graph_runner import CudaGraphRecorder
from tests.gpu.rig import DEVICE, PRODUCTION

pytestmark = PRODUCTION
SHARED = list(range(100, 132))
PROMPTS = [[*SHARED, 5, 6, 7], [11], [*SHARED, *range(20, 60)], [*SHARED, 3], [60, 61, 62]]


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_the_examples_give_the_engines_tokens(mode: str) -> None:
    sizes: dict[str, Any] = {"max_running_requests": 3, "max_model_len": 128, "chunked_prefill_size": 48}
    sizes |= {"device": str(DEVICE), "dtype": "float32", "state_mode": mode}
    config = EngineConfig("embedded", **sizes)
    with LLM("embedded", **sizes) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    expected = [output.token_ids for output in outputs]
    loop = embed_backends.Loop(config, 2**28, 40, shared=len(SHARED))
    assert isinstance(loop.graphs._graphs.recorder, CudaGraphRecorder)
    assert loop.generate(PROMPTS) == expected
    engine = foreign_engine.ForeignEngine(config, 2**28, num_blocks=12)
    assert engine.generate(PROMPTS, 40) == expected
    assert engine.preempted
