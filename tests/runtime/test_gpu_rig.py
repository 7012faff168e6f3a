"""What the tests on a GPU are driven by, on a CPU: a machine without a GPU notices when it breaks."""

import pytest

from tests.gpu import rig
from tests.models.test_models_parity import requests
from tests.support.checkpoints import CheckpointStore
from tests.support.session import check_sample


@pytest.mark.parametrize("graphs", [False, True])
def test_the_rig_of_the_gpu_tests_runs_on_a_cpu(
    graphs: bool, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs, tokens are drawn without the sampler, as on a GPU."""
    monkeypatch.setattr(rig, "DEVICE", "cpu")
    checkpoint = checkpoints["falcon-plain"]
    session = rig.GpuSession(checkpoint.path)
    if graphs:
        session.runner.capture()
    for sample in session.run(requests(3, 17, steps=6), chunk=9):
        check_sample(checkpoint, sample, "falcon")
