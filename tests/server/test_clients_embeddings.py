"""/v1/embeddings with OpenAI's client, against `LLM.embed`."""

import base64
import math
import threading
from typing import Any

import numpy as np
import pytest

from hybridrt.server.openai import embeddings
from tests.support.http_server import Served, serving

TEXTS = ["def main():", "import os", "x"]


@pytest.mark.parametrize("form", ["float", "base64", None])
@pytest.mark.parametrize(("pooling", "dimensions"), [("last", None), ("mean", 7)])
def test_embeddings_of_a_client(form: Any, pooling: str, dimensions: int | None, served: Served) -> None:
    options: dict[str, Any] = {"dimensions": dimensions} if dimensions else {}
    options |= {"encoding_format": form} if form else {}  # the client's own default is base64
    got = served.client().embeddings.create(model="tested", input=TEXTS, extra_body={"pooling": pooling}, **options)
    want = served.llm.embed(TEXTS, pooling=pooling, dimensions=dimensions)
    found = [each.embedding for each in got.data]
    if form == "base64":
        found = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in found]  # type: ignore[arg-type]
    assert np.allclose(found, want, atol=1e-5) and [each.index for each in got.data] == [0, 1, 2]
    assert served.llm.tokenizer is not None
    tokens = sum(len(served.llm.tokenizer.encode(text)) for text in TEXTS)
    assert (got.usage.prompt_tokens, got.usage.total_tokens) == (tokens, tokens)
    assert all(math.isclose(math.hypot(*vector), 1, abs_tol=1e-4) for vector in found)


def test_token_ids_are_inputs(served: Served) -> None:
    want = served.llm.embed([[5, 6], [7]])
    for given in ([[5, 6], [7]], [5, 6]):
        got = served.client().embeddings.create(model="tested", input=given)  # type: ignore[arg-type]
        assert np.allclose([each.embedding for each in got.data], want[: len(got.data)], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"), ({"input": ""}, "input"), ({"input": "x" * 5000}, "input"),
        ({"input": None}, "input"),
        ({"dimensions": 0}, "dimensions"), ({"dimensions": 257}, "dimensions"), ({"dimensions": True}, "dimensions"),
        ({"pooling": "max"}, "pooling"), ({"encoding_format": "int8"}, "encoding_format"),
        ({"input": [[5], [10**9]]}, "input"), ({"input": ["x"] * 1025}, "input"), ({"messages": [5]}, "messages"),
    ],
)  # fmt: skip
def test_wrong_requests_name_their_field(body: dict[str, Any], param: str, served: Served) -> None:
    answer = served.post("/v1/embeddings", {"input": "x"} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split(".")[0] == param, answer.text


def test_the_size_of_an_answer_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 512)
    assert served.post("/v1/embeddings", {"input": ["x"] * 2}).status_code == 200
    assert served.post("/v1/embeddings", {"input": ["x"] * 3}).json()["error"]["param"] == "input"
    cut = {"input": ["x"] * 3, "dimensions": 8}  # the engine holds whole vectors
    assert served.post("/v1/embeddings", cut).status_code == 400


def test_an_embedding_is_aborted_by_its_own_key(served: Served) -> None:
    found: list[Any] = []
    body, mine = {"input": "x", "request_id": "e"}, {"x-api-key": "mine"}
    with serving(served.llm, api_keys=("mine", "yours")) as locked:
        ask = threading.Thread(target=lambda: found.append(locked.post("/v1/embeddings", body, headers=mine)))
        with locked.llm.engine.turns:
            ask.start()
            while not locked.service.llm.unfinished:
                threading.Event().wait(0.001)
            for key, aborted in (("yours", False), ("mine", True)):
                answer = locked.post("/abort", {"request_id": "e"}, headers={"x-api-key": key})
                assert answer.json() == {"aborted": aborted}
        ask.join(60)
        assert found[0].status_code == 400 and found[0].json()["error"]["code"] == "aborted"
