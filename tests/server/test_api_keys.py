"""API keys: where they come from, the clients that they stand for, and the weights of clients."""

from pathlib import Path
from typing import Any

import pytest

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.core.engine import Engine
from hybridrt.server.core.api_keys import ApiKey, client_names, client_weights, read_api_keys
from hybridrt.server.core.config import ServerConfig
from tests.server.test_errors import COMPLETION
from tests.support.fake_llm import make
from tests.support.http_server import serving


def test_keys_come_from_the_command_line_a_file_or_a_variable(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    monkeypatch.setenv("HYBRIDRT_API_KEY", "three")
    assert read_api_keys(["zero"], None) == (ApiKey("zero"),)
    assert read_api_keys(None, str(file)) == (ApiKey("one"), ApiKey("two"))
    assert read_api_keys(None, None) == (ApiKey("three"),)
    monkeypatch.delenv("HYBRIDRT_API_KEY")
    assert read_api_keys(None, None) == ()
    file.write_text("\n")
    for keys, name, text in (
        (None, str(file), "holds none"),
        (None, "/nowhere", "cannot be read"),
        (["a"], "b", "twice"),
    ):
        with pytest.raises(ConfigError, match=text):
            read_api_keys(keys, name)
    for blank in ("", " \n"):
        monkeypatch.setenv("HYBRIDRT_API_KEY", blank)
        assert read_api_keys(["zero"], None) == (ApiKey("zero"),)
        with pytest.raises(ConfigError, match="HYBRIDRT_API_KEY is set and holds no key"):
            read_api_keys(None, None)
    for config in (ServerConfig(api_keys=("one-key",)), ServerConfig(api_keys=(ApiKey("one-key", "web"),))):
        assert "one-key" not in f"{config!r} {config.keys!r}", "a key is not shown"


def test_a_line_of_the_file_may_name_a_client_and_its_weight(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k1 client=web weight=2\n\nk2 client=web\n k3\nk4 weight=0.5\n")
    keys = read_api_keys(None, str(file))
    assert keys == (ApiKey("k1", "web", 2.0), ApiKey("k2", "web"), ApiKey("k3"), ApiKey("k4", None, 0.5))
    assert client_names(keys) == ["web", "web", "key/2", "key/3"]
    assert client_weights(keys) == {"web": 2.0, "key/3": 0.5}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("secret two", "other words than its key"),
        ("secret client=a client=b", "other words"),
        ("secret share=2", "other words"),
        ("secret client=a/b", "client 'a/b'"),
        ("secret weight=much", "weight is no number"),
        ("secret weight=nan", "weight nan"),
        ("secret weight=0", "weight 0 of an API key must be from 0.001 to 1000"),
        ("sécret", "not ASCII"),
    ],
)
def test_lines_that_are_no_keys(line: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"good\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as error:
        read_api_keys(None, str(file))
    assert text in str(error.value) and "cret" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ((ApiKey("a", "web", 1.0), ApiKey("b", "web", 2.0)), "client web has the weights 1 and 2"),
        ((ApiKey("a", "web"), ApiKey("a", "other")), "for two clients"),
    ],
)
def test_keys_that_contradict_each_other(keys: tuple[ApiKey, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ServerConfig(api_keys=keys)


def noted_clients(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Clients of the requests that engines get."""
    found, submit = list[str](), Engine.submit

    def noting(self: Engine, *arguments: Any, client: str = "", **options: Any) -> str:
        found.append(client)
        return submit(self, *arguments, client=client, **options)

    monkeypatch.setattr(Engine, "submit", noting)
    return found


def test_requests_belong_to_the_clients_of_their_keys(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    found = noted_clients(monkeypatch)
    with serving(embedded, api_keys=(ApiKey("a", "web", 2.0), ApiKey("b", "web"), "c")) as served:
        found.clear()  # the warm-up's
        for key in "abc":
            answer = served.post("/v1/completions", COMPLETION, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
        served.wait_until_idle()
    assert found == ["web", "web", "key/2"]
    with serving(embedded) as served:
        found.clear()
        assert served.post("/v1/completions", COMPLETION).status_code == 200
        served.wait_until_idle()
    assert found == [""]


def test_clients_of_an_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, client_weights={"web": 2.0}, target_itl_ms=1e3)
    found, params = noted_clients(monkeypatch), SamplingParams(max_tokens=1)
    assert llm.engine.policy is not None and llm.engine.policy.weights == {"web": 2.0}
    llm.generate([[1, 2], [3]], params, client="web")
    list(llm.stream([1, 2], params, client="batch"))
    llm.generate([1, 2], params)
    assert found == ["web", "web", "batch", ""]
    for client in (None, "x" * 1025):
        with pytest.raises(RequestError, match="client is"):
            llm.generate([1, 2], params, client=client)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="client is"):
            llm.stream([1, 2], params, client=client)  # type: ignore[arg-type]
    for weights in ({"web": 0.0}, {1: 1.0}, [("web", 1.0)], {"web": float("nan")}):
        with pytest.raises(ConfigError, match="client_weights"):
            EngineConfig("x", client_weights=weights)  # type: ignore[arg-type]
