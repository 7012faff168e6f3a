"""One server over the built-in model for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from hybridrt.base.errors import EngineError
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.api.llm import LLM
from tests.support.http_server import Served, serving


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The first layer of the built-in model, loaded once."""
    from tests.support.one_layer import write_first_layer

    path = write_first_layer(tmp_path_factory.mktemp("server") / "embedded")
    with LLM(str(path), device="cpu", max_running_requests=32, max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="session")
def _server(embedded: LLM) -> Iterator[Served]:
    with serving(embedded) as served:
        yield served


@pytest.fixture
def broken_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams whose engine fails at once."""

    async def fail(deltas: DeltaStream) -> None:
        raise EngineError("the device is gone")

    monkeypatch.setattr(DeltaStream, "__anext__", fail)


@pytest.fixture
def served(_server: Served) -> Iterator[Served]:
    """The server; after the test nothing is left of its requests."""
    yield _server
    _server.wait_until_idle()
