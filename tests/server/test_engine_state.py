"""`GET /engine`: counts of one moment, made once for all readers, without what clients have sent."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from hybridrt.engine.api.llm import LLM
from hybridrt.server.core import engine_state
from hybridrt.server.core.engine_state import EngineState
from tests.support.http_server import Served, serving

SECRET = "a secret sentence that nobody else may see"


def read(served: Served, **headers: str) -> dict[str, Any]:
    answer = httpx.get(f"{served.url}/engine", headers=headers)
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    return json.loads(answer.content)


def test_it_has_the_figures_of_the_engine(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_state, "MADE_SECONDS", 0.0)
    before = read(served)
    served.post("/v1/completions", {"prompt": "import os", "max_tokens": 5, "ignore_eos": True})
    served.wait_until_idle()
    now, counters = read(served), served.llm.engine.counters()
    assert now["tokens"]["output"] == before["tokens"]["output"] + 5
    assert now["seconds"] > before["seconds"]
    steps, old = now["view"]["steps"], before["view"]["steps"]
    assert steps["total"] == old["total"] + 5 and steps["prompt_tokens"][-5:] == [
        now["tokens"]["computed"] - before["tokens"]["computed"], 0, 0, 0, 0,
    ]  # fmt: skip
    assert steps["decode_rows"][-5:] == [0, 1, 1, 1, 1] and min(steps["milliseconds"][-5:]) > 0
    plan = served.llm.plan
    assert (now["running"], now["waiting"], now["rows"]) == (0, 0, plan.num_rows)
    slots, pages = now["state_slots"], now["kv_pages"]
    assert slots == {"total": plan.num_slots, "used": 0, "cached": counters.cached_slots, "free": counters.free_slots}
    assert pages == {
        "total": counters.total_pages, "used": 0, "cached": counters.cached_pages, "free": counters.free_pages,
    }  # fmt: skip
    assert now["prefix_cache"]["asked"] == counters.cache_asked and now["view"]["rows"] == []
    assert now["view"]["nodes_total"] == len(list(served.llm.engine.prefixes.tree.nodes()))
    assert now["about"]["model"] == "tested" and now["about"]["sees_images"] is False


def test_it_shows_rows_that_run(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_state, "MADE_SECONDS", 0.0)
    body = {"prompt": [list(range(40))] * 2, "max_tokens": 200, "ignore_eos": True, "request_id": "rows"}
    thread = threading.Thread(target=served.post, args=("/v1/completions", body))
    thread.start()
    while True:
        now = read(served)
        if len(now["view"]["rows"]) == 2 and all(row["output"] for row in now["view"]["rows"]):
            break
        assert thread.is_alive(), "no answer has shown both"
    served.post("/abort", {"request_id": "rows"})
    thread.join()
    for row in now["view"]["rows"]:
        assert (
            row["prompt"] == 40 and row["most"] == 200 and row["computed"] == 39 + row["output"] and row["pages"] >= 3
        )
    assert len({(row["row"], row["slot"]) for row in now["view"]["rows"]}) == 2
    assert now["running"] == 2 == now["state_slots"]["used"] and now["kv_pages"]["used"] >= 4


def test_it_has_nothing_that_clients_have_sent(embedded: LLM) -> None:
    with serving(embedded, api_keys=("key-one", "key-two")) as served:
        assert httpx.get(f"{served.url}/engine").status_code == 401
        headers = {"Authorization": "Bearer key-one"}
        body = {"prompt": SECRET, "max_tokens": 2, "request_id": "secret-name", "cache_salt": "secret-salt"}
        assert served.post("/v1/completions", body, headers=headers).status_code == 200
        text = httpx.get(f"{served.url}/engine", headers={"Authorization": "Bearer key-two"}).text
        for word in ("sentence", "nobody", "secret-name", "secret-salt", "key-one"):
            assert word not in text
        assert {type(value) for node in json.loads(text)["view"]["nodes"] for value in node.values()} <= {int, bool}


def test_many_readers_share_one_answer(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a reader that leaves does not stop it."""
    made = []

    async def run(served: Served) -> None:
        state = EngineState(served.service)
        encoded = state._encoded
        monkeypatch.setattr(state, "_encoded", lambda: made.append(1) or encoded())
        first = asyncio.create_task(state.read())
        others = [asyncio.create_task(state.read()) for _ in range(20)]
        await asyncio.sleep(0)
        first.cancel()
        answers = {await other for other in others} | {await state.read()}
        assert len(answers) == 1 and len(made) == 1
        state._made -= engine_state.MADE_SECONDS
        assert await state.read() not in answers and len(made) == 2

    with serving(embedded) as served:
        asyncio.run(run(served))


def test_it_answers_as_health_does_once_the_engine_has_failed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(served.service), "problem", lambda self: "the engine has failed")
    answer = httpx.get(f"{served.url}/engine")
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "the engine has failed"


def test_replicas_give_sums_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ReplicatedEngine.view` is None."""
    monkeypatch.setattr(engine_state, "MADE_SECONDS", 0.0)
    monkeypatch.setattr(type(served.llm.engine), "view", lambda self: None)
    now, counters = read(served), served.llm.engine.counters()
    assert now["view"] is None
    pages = now["kv_pages"]
    assert pages["used"] == counters.total_pages - pages["cached"] - pages["free"] and pages["total"] > 0
