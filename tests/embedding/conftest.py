"""Tiny models with random weights, made once for each test file."""

from collections.abc import Callable
from typing import Any

import pytest

from hybridrt.embedding import EngineConfig, LoadedModel, load
from tests.support.checkpoints import Make, falcon
from tests.support.embedded import LENGTH, PAGE, ROWS, Models
from tests.support.tiny import write_tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny models with random weights, by what they are made of."""
    found: dict[Any, LoadedModel] = {}

    def model(make: Callable[[], Make] = falcon, **options: Any) -> LoadedModel:
        key = (make, str(options))
        if key not in found:
            path = write_tiny(tmp_path_factory.mktemp("model"), make(), tokenizer=False)
            sizes: dict[str, Any] = {"max_running_requests": ROWS, "max_model_len": LENGTH, "page_size": PAGE}
            found[key] = load(EngineConfig(str(path), load_format="dummy", device="cpu", **sizes, **options))
        return found[key]

    return model
