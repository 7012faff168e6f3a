import pytest
import torch

from benchmarks.bench_kernels import OPS, linears
from hybridrt.hf_config import read_model_config
from tests.checkpoints import falcon, nemotron, qwen
from tests.tiny import write_tiny


@pytest.mark.parametrize("make", [falcon(), nemotron("M*-ME"), qwen()], ids=["falcon", "nemotron", "qwen"])
def test_every_case_computes_what_its_baseline_does(make, tmp_path):
    config = read_model_config(write_tiny(tmp_path, make, tokenizer=False))
    for op, cases in OPS.items():
        found = list(cases(config, 2, "cpu"))
        assert found, op
        for case in found:
            ours = case.run(case.copies - 1)
            ours = ours[0] if isinstance(ours, tuple) else ours
            torch.testing.assert_close(ours, case.baseline(case.copies - 1), rtol=0.02, atol=0.02)
            assert case.bytes > 0


def test_linears_of_a_model_with_their_norms_and_activations(tmp_path):
    found = linears(read_model_config(write_tiny(tmp_path, nemotron("M*-"), tokenizer=False)))
    kinds = {name: key[2:] for key, name in found.items()}
    assert kinds["in_proj"] == kinds["qkv"] == (True, None) and kinds["up"] == (True, "relu2")
    assert kinds["out_proj"] == kinds["head"] == (False, None)
