"""Once each kind of step has run, no other batch size or length makes Triton compile: that would be a stall of a second
in the middle of serving."""

import random

import pytest

from hybridrt import LLM, SamplingParams
from tests.gpu.rig import DEVICE, FAMILIES, PRODUCTION
from tests.support.checkpoints import VOCAB, CheckpointStore

pytestmark = PRODUCTION
ROWS = 24


@pytest.mark.parametrize("name", FAMILIES)
def test_later_requests_compile_nothing(name: str, checkpoints: CheckpointStore, compiled: list[str]) -> None:
    draw = random.Random(3)
    llm = LLM(
        str(checkpoints[name].path), device=DEVICE, dtype="bfloat16", max_model_len=128, max_running_requests=ROWS,
        chunked_prefill_size=64,
    )  # fmt: skip

    def serve(*lengths: int) -> None:
        """Prompts of these lengths at once; every third is sampled."""
        prompts = [[draw.randrange(3, VOCAB) for _ in range(n)] for n in lengths]
        params = [
            SamplingParams(max_tokens=draw.randint(3, 12), temperature=float(i % 3 == 2), top_p=0.9, ignore_eos=True)
            for i in range(len(lengths))
        ]
        llm.generate(prompts, params)

    for lengths in ([1], [2, 2], [9] * 4, [33], [60, 7, 1], [3] * ROWS, [50] * ROWS):
        serve(*lengths)
    assert DEVICE == "cpu" or compiled
    compiled.clear()
    for count in [*range(1, ROWS + 1), 2 * ROWS]:
        serve(*(draw.choice((1, 2, 5, 16, 17, 30, 64, 65, 90)) for _ in range(count)))
    assert not compiled, f"{len(compiled)} times: {sorted(set(compiled))}"
