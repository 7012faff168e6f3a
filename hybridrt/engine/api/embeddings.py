"""Texts as vectors: sums of hidden states to embeddings."""

from typing import Any

import numpy as np

from hybridrt.base.errors import RequestError
from hybridrt.base.sampling_params import SamplingParams

_SMALL = 1e-12  # of a vector's length, as in torch.nn.functional.normalize


def pooling_params(pooling: str, **fields: Any) -> SamplingParams:
    """Parameters of a request that pools its prompt, with further `fields`. It draws one token,
    which is dropped. RequestError if there is no such pooling."""
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling, **fields)


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """RequestError for a number of dimensions that the model does not have."""
    if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= hidden_size):
        text = f"dimensions is {dimensions}; it must be an integer from 1 to {hidden_size}, or None"
        raise RequestError(text, "dimensions")


def embedding(
    pooled: bytes | None, tokens: int, pooling: str, *, dimensions: int | None, normalize: bool
) -> np.ndarray:
    """The embedding [dimensions] float32 of a prompt.

    Args:
        pooled: the sum of its hidden states in float32.
        tokens: its length.
        dimensions: the first so many; None: all. They are cut before the vector is normalised.
    """
    assert pooled is not None, "the request pools"
    found = np.frombuffer(pooled, np.float32) / np.float32(tokens if pooling == "mean" else 1)
    found = found[:dimensions]
    return found / max(float(np.linalg.norm(found)), _SMALL) if normalize else found
