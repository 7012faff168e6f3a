"""A million tokens of context, at small width: the memory plan, the page table, and a prompt in chunks of any size."""

from pathlib import Path

import pytest
import torch

from hybridrt import LLM, SamplingParams
from tests.support.checkpoints import VOCAB, falcon, mamba2, write

MILLION = 2**20


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mamba-2 alone: a prompt's time grows with its length, and no more."""
    path = tmp_path_factory.mktemp("recurrent")
    sizes = {"hidden_size": 8, "num_heads": 4, "head_dim": 4, "n_groups": 1, "state_size": 4, "num_hidden_layers": 1}
    write(mamba2(**sizes, chunk_size=128), path)
    return path


@pytest.mark.soak
def test_a_prompt_of_a_million_tokens_is_the_same_in_chunks_of_any_size(recurrent: Path) -> None:
    prompt = torch.randint(3, VOCAB, (MILLION - 8,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for chunk in (8192, 60_000):
        with LLM(str(recurrent), device="cpu", max_model_len=MILLION, chunked_prefill_size=chunk) as llm:
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=3, temperature=0.0, logprobs=10))
        assert output.metrics.prompt_tokens == MILLION - 8
        found.append([sorted(scores.items()) for scores in output.logprobs or ()])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-4, atol=1e-4)


def test_the_plan_charges_a_million_tokens(tmp_path: Path) -> None:
    write(falcon(max_position_embeddings=2 * MILLION), tmp_path)
    with LLM(str(tmp_path), device="cpu", max_model_len=MILLION, max_running_requests=2, memory_fraction=0.5) as llm:
        plan = llm.plan
        assert plan.max_model_len == MILLION and plan.num_pages * plan.page_size >= MILLION
        table = 2 * 4 * MILLION // plan.page_size  # of two rows, an int32 a page
        assert plan.costs.row * 2 >= table
        assert plan.pool_bytes <= plan.budget_bytes
        assert len(llm.generate([[5] * 300], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
