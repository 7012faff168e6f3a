"""The Ray Serve application: answers, streams, and what it refuses. Needs the extra `ray`."""

import json
import os
from collections.abc import Iterator

import httpx
import pytest

from hybridrt.base.errors import ConfigError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM
from hybridrt.runtime.load.build import resolve_model_path

ray = pytest.importorskip("ray", reason="it comes with the extra ray")
serve = pytest.importorskip("ray.serve", reason="it comes with the extra ray")
from hybridrt.fleet.ray import app  # noqa: E402

BODY = {"prompt": "def read_lines(path):", "max_tokens": 12, "temperature": 0}
ENGINE = json.dumps({"max_running_requests": 4, "max_model_len": 256})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    port = 18765
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    made = app(
        {"model": "embedded", "gpus": "0", "cpus": "0.1", "min_replicas": "2", "max_replicas": "2", "engine": ENGINE}
    )
    serve.run(made)
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.mark.slow
def test_answers_are_the_offline_ones(url: str) -> None:
    with LLM(str(resolve_model_path("embedded")), device="cpu", max_running_requests=4, max_model_len=256) as llm:
        expected = llm.generate(BODY["prompt"], SamplingParams(max_tokens=12, temperature=0))[0].text
    with httpx.Client(base_url=url, timeout=120) as client:
        for _ in range(8):
            assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == expected
        text = client.post("/v1/completions", json=BODY | {"stream": True}).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == expected and len(events) > 3
        assert client.post("/v1/completions", json=BODY | {"max_tokens": -1}).status_code == 400
        assert client.get("/ready").status_code == 200
    assert len(serve.status().applications["default"].deployments["hybridrt"].replica_states) == 1


@pytest.mark.parametrize(
    "wrong", [{"modle": "x"}, {"gpus": "-1"}, {"min_replicas": 0}, {"engine": "no"}, {"cpus": "many"}]
)
def test_wrong_arguments(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        app({"model": "embedded", **wrong})
