"""A runner of four rows, three of which hold a prompt."""

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import Admission, ExtendRow, PageWrite, StepPlan
from tests.support.page_sets import page_sets

PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5], [11])
GREEDY = SamplingParams(temperature=0.0)


def prefilled(config: EngineConfig, graphs: bool = False) -> ModelRunner:
    """Rows 1, 2 and 3 hold PROMPTS and the token after each. `graphs`: it has some although its device is a CPU."""
    runner = ModelRunner(config)
    if graphs:
        runner.capture()
    rows = list(enumerate(PROMPTS, 1))
    plan = StepPlan(
        [Admission.from_prompt(row, row, prompt, GREEDY, row) for row, prompt in rows],
        [PageWrite(row, 0, page_sets([2 * row - 1, 2 * row])) for row, _ in rows],
        extend=[ExtendRow(row, 0, prompt, 0, True) for row, prompt in rows],
    )
    runner.launch(plan).result()
    return runner
