"""A rank that is killed or stopped in the start of two GPUs: rank 0 names it, waits for no kernel and goes on."""

import pytest
import torch

from hybridrt import LLM
from hybridrt.base.errors import RankError
from tests.gpu.rig import GPU
from tests.runtime.test_tensor_parallel_faults import KILLED, STEPS, STOPPED, Spoil, spoil  # noqa: F401
from tests.support.checkpoints import CheckpointStore
from tests.support.session import greedy

pytestmark = [*GPU, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

STEPS |= {
    "boxes": "hybridrt.collectives.peer_memory:PeerMemory.connect",
    "NCCL": "hybridrt.collectives.groups:Communicator._sum",  # its connections are made in the first one
    "the first step": "hybridrt.runtime.run.step_runner:StepRunner.launch",
}


@pytest.mark.parametrize("fault", [KILLED, STOPPED])
@pytest.mark.parametrize("step", ["connecting", "joining gloo", "boxes", "NCCL", "loading", "the first step"])
def test_a_lost_rank_is_named(step: str, fault: int, spoil: Spoil, checkpoints: CheckpointStore) -> None:  # noqa: F811
    path = str(checkpoints["falcon-split"].path)
    processes = spoil(step, fault)
    with pytest.raises(RankError, match="tensor-parallel rank 1 "):
        LLM(path, device="cuda", dtype="float32", tp_size=2, max_model_len=128, max_running_requests=2)
    assert None not in [process.poll() for process in processes]
    torch.cuda.synchronize()
    with LLM(path, device="cuda", dtype="float32", max_model_len=128, max_running_requests=2) as llm:
        assert llm.generate([[5, 6, 7]], greedy(4))
