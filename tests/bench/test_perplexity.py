"""Perplexity of token ids, compared with transformers' loss."""

from math import exp

import pytest
import torch

from hybridrt import LLM
from hybridrt.base.errors import RequestError
from hybridrt.bench.perplexity import perplexity
from tests.support.checkpoints import CheckpointStore


def test_each_token_but_the_first_of_a_window_counts_once(checkpoints: CheckpointStore) -> None:
    checkpoint = checkpoints["falcon-plain"]
    tokens = torch.randint(3, 100, (43,), generator=torch.Generator().manual_seed(5)).tolist()
    losses = []
    for at in (0, 14, 28):  # a last window of one token says nothing
        ids = torch.tensor([tokens[at : at + 14]])
        with torch.no_grad():
            logits = checkpoint.model(ids, use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    with LLM(str(checkpoint.path), device="cpu") as llm:
        assert perplexity(llm, tokens, window=14) == pytest.approx(exp(float(torch.cat(losses).mean())), rel=1e-4)
        with pytest.raises(RequestError, match="has 1 tokens; perplexity needs two"):
            perplexity(llm, tokens[:1])
