"""The Ray Serve application: answers, streams, and what it refuses. Needs the extra `ray`."""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from hybridrt.base.errors import ConfigError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.channel.keys import FLEET_VARIABLE
from hybridrt.engine.api.llm import LLM
from hybridrt.runtime.load.model_path import resolve_model_path

ray = pytest.importorskip("ray", reason="it comes with the extra ray")
serve = pytest.importorskip("ray.serve", reason="it comes with the extra ray")
from hybridrt.fleet.ray import app  # noqa: E402

BODY = {"prompt": "def read_lines(path):", "max_tokens": 12, "temperature": 0}
ENGINE = json.dumps({"max_running_requests": 4, "max_model_len": 256})


@contextmanager
def running(**arguments: object) -> Iterator[str]:
    """An application; its address."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Devices that are only counted: engines are on the CPU.
    ray.init(num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 18765})
        serve.run(app({"model": "embedded", "cpus": "0.1", "engine": ENGINE, **arguments}))
        yield "http://127.0.0.1:18765"
    finally:
        serve.shutdown()
        ray.shutdown()


def asked(client: httpx.Client) -> str:
    text: str = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_answers_are_the_offline_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the router, which follows the events of both replicas; one that is killed is replaced."""
    monkeypatch.setenv(FLEET_VARIABLE, key := secrets.token_hex(32))
    with LLM(str(resolve_model_path("embedded")), device="cpu", max_running_requests=4, max_model_len=256) as llm:
        expected = llm.generate(BODY["prompt"], SamplingParams(max_tokens=12, temperature=0))[0].text
    with (
        running(gpus="0", min_replicas="2", max_replicas="2") as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        until(lambda: sum(" 1.0" in line for line in lines(client, "hybridrt_router_replica_ready{")) == 2)
        for _ in range(8):
            assert asked(client) == expected
        text = client.post("/v1/completions", json=BODY | {"stream": True}).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == expected and len(events) > 3
        assert client.post("/v1/completions", json=BODY | {"max_tokens": -1}).status_code == 400
        assert client.get("/ready").status_code == 200
        facts = client.get("/fleet/replicas", headers={"Authorization": f"Bearer {key}"}).json()
        assert [fact["ready"] for fact in facts] == [True, True]
        assert client.get("/fleet/replicas").status_code == 401
        # The second answer comes from the replica whose events have told of the first.
        long = BODY | {
            "prompt": "def parse(text):\n    return [line.split(',') for line in text.splitlines() if line]\n" * 2
        }
        until(lambda: client.post("/v1/completions", json=long).is_success and prefix_tokens(client) > 0)


def lines(client: httpx.Client, begin: str) -> list[str]:
    return [line for line in client.get("/metrics").text.splitlines() if line.startswith(begin)]


def prefix_tokens(client: httpx.Client) -> float:
    return float(lines(client, "hybridrt_router_prefix_tokens_total")[0].split()[-1])


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.slow
def test_the_ranks_of_a_replica_have_a_placement_group() -> None:
    engine = json.dumps({"max_running_requests": 4, "max_model_len": 256, "device": "cpu"})
    with running(gpus="2", max_replicas="1", engine=engine) as url, httpx.Client(base_url=url, timeout=120) as client:
        until(lambda: client.get("/ready").status_code == 200)
        assert len(asked(client)) > 5
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
        assert [(group["strategy"], list(group["bundles"].values())) for group in groups] == [
            ("STRICT_PACK", [{"CPU": 0.1, "GPU": 2.0}])
        ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"modle": "x"},
        {"gpus": "-1"},
        {"min_replicas": 0},
        {"engine": "no"},
        {"cpus": "many"},
        {"target_waiting": 0},
        {"engine": '{"max_model_length": 5}'},
        {"engine": '{"model": "y"}'},
    ],
)
def test_wrong_arguments(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        app({"model": "embedded", **wrong})
