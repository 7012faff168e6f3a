"""Images over every way in: the tokens and answers of all are those of LLM.chat; what is refused names its part."""

import asyncio
import base64
import io
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hybridrt import LLM, SamplingParams
from hybridrt.base.errors import ConfigError, RequestError
from hybridrt.bench.http_load import Target, run_load
from hybridrt.bench.workload import WorkloadConfig, make_work
from hybridrt.engine.api.async_llm import MAX_PATCH_BYTES
from hybridrt.engine.api.lanes import THREADS
from hybridrt.images.jobs import Job
from hybridrt.server.core.api_keys import ApiKey
from tests.images.test_decode import mutated, seeds
from tests.support.checkpoints import CheckpointStore
from tests.support.http_server import WAIT, Served, serving
from tests.support.pictures import noise, png
from tests.support.seeing_llm import PAD, write_seeing

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
DATA, OTHER = png(1, 60, 40), png(2, 60, 40)
TOOL = {"type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "c"}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{b64(data)}"


def chat_parts(*parts: bytes | str) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": uri(part)}}
        for part in parts
    ]


def response_parts(*parts: bytes | str) -> list[dict[str, Any]]:
    return [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", "image_url": uri(part)}
        for part in parts
    ]


def message_blocks(*parts: bytes | str) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(part)}}
        for part in parts
    ]


FOUR = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
PARTS = ("look", DATA, "and", OTHER, "now")


@pytest.fixture(scope="module")
def seeing(checkpoints: CheckpointStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_seeing(checkpoints["qwen35-seeing_tied"].path, tmp_path_factory.mktemp("seeing") / "model", patch=4)
    with LLM(str(path), device="cpu", max_running_requests=4, max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def served(seeing: LLM) -> Iterator[Served]:
    with serving(seeing, chat_template=None) as found:
        yield found


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    } | more


def test_all_ways_have_the_tokens_of_the_same_prompt(seeing: LLM, served: Served) -> None:
    (said,) = seeing.chat([{"role": "user", "content": chat_parts(*PARTS)}], GREEDY)
    wanted, prompt = said.output.token_ids, said.output.prompt_token_ids
    image = seeing.tokenizer.encode_bare(PAD)  # type: ignore[union-attr]
    assert prompt.count(image[0]) == 2 * 5 * 8

    text = "<|im_start|>user\nlook{0}and{0}now<|im_end|>\n<|im_start|>assistant\n"
    text = text.format(f"<|vision_start|>{PAD}<|vision_end|>")
    (same,) = seeing.generate({"prompt": text, "images": [DATA, Image.open(io.BytesIO(OTHER))]}, GREEDY)
    assert (same.prompt_token_ids, same.token_ids) == (prompt, wanted)
    (swapped,) = seeing.generate({"prompt": text, "images": [OTHER, noise(1, 60, 40)]}, GREEDY)
    assert swapped.prompt_token_ids == prompt

    body = chat(chat_parts(*PARTS), return_token_ids=True)
    answer = served.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["token_ids"] == wanted and answer["usage"]["prompt_tokens"] == len(prompt)
    items = [{"role": "user", "content": response_parts(*PARTS)}]
    body = {"input": items, "max_output_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = served.post("/v1/responses", body).json()
    assert answer["usage"]["input_tokens"] == len(prompt)
    assert "".join(part["text"] for item in answer["output"] for part in item["content"]) == said.content
    turns = [{"role": "user", "content": message_blocks(*PARTS)}]
    answer = served.post(
        "/v1/messages", {"messages": turns, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    ).json()
    usage = answer["usage"]
    assert usage["input_tokens"] + (usage["cache_read_input_tokens"] or 0) == len(prompt)
    assert "".join(block["text"] for block in answer["content"]) == said.content
    assert served.post("/v1/messages/count_tokens", {"messages": turns}).json() == {"input_tokens": len(prompt)}
    found = served.post("/tokenize", {"messages": [{"role": "user", "content": chat_parts(*PARTS)}]}).json()
    assert found["tokens"] == prompt


def test_a_load_has_images(served: Served) -> None:
    load = WorkloadConfig(requests=3, images=2, image_size="60x40", prompt_tokens=4, output_tokens=3, fixed=True)
    work = make_work(load)
    assert len({image for each in work for image in each.images}) == 6 and work == make_work(load)
    timings = asyncio.run(run_load(Target(served.url, "tested"), work, None)).timings
    assert [timing.error for timing in timings] == [None] * 3
    assert [timing.output_tokens for timing in timings] == [3] * 3
    assert all(len(timing.gains) <= 4 for timing in timings), "the first chunk has no token"


@pytest.mark.parametrize("count", [40, pytest.param(10_000, marks=pytest.mark.soak)])
def test_random_files_are_answered_or_refused(served: Served, count: int) -> None:
    rng, given, seen = random.Random(count), seeds(), set[int]()
    reader = served.llm.image_reader
    assert reader is not None
    reader.pool.start()
    before = [child.process.pid for child in reader.pool._children if child.process]
    with served.http() as client:
        for _ in range(count):
            body = chat(chat_parts(mutated(rng.choice(given), rng), "look")) | {"max_tokens": 1}
            seen.add(client.post("/v1/chat/completions", json=body).status_code)
    assert seen == {200, 400}
    assert [child.process.pid for child in reader.pool._children if child.process] == before, "no process is lost"


def test_results_of_tools_hold_images(served: Served) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [TOOL]}
    asked = {"role": "user", "content": "go"}
    message = {"role": "tool", "tool_call_id": "c", "content": chat_parts(DATA, "ok")}
    wanted = served.post("/tokenize", {"messages": [asked, call, message]}).json()["count"]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": message_blocks(DATA, "ok")}
    turns = [asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert served.post("/v1/messages/count_tokens", {"messages": turns}).json()["input_tokens"] == wanted
    items = [asked, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    items += [{"type": "function_call_output", "call_id": "c", "output": response_parts(DATA, "ok")}]
    answer = served.post("/v1/responses", {"input": items, "max_output_tokens": 1, "temperature": 0}).json()
    assert answer["usage"]["input_tokens"] == wanted


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "video_url", "video_url": {"url": "x"}}, "video"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "file", "file": {}}, "file"),
        ({"type": "image_embeds", "image_embeds": "x"}, "image_embeds"),
        ({"type": "hologram"}, "hologram"),
        ({"type": "image_url"}, "it must be a"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "scheme file:"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "--allow-image-url"),
        ({"type": "image_url", "image_url": {"url": uri(DATA[:99])}}, "cannot be read"),
        ({"type": "text", "text": f"a {PAD}"}, "stands for an image"),
    ],
    ids=range(10),
)
def test_a_refusal_names_the_part(served: Served, part: dict[str, Any], text: str) -> None:
    answer = served.post("/v1/chat/completions", chat([{"type": "text", "text": "look"}, part]))
    error = answer.json()["error"]
    assert answer.status_code == 400 and text in error["message"]
    assert text == "stands for an image" or error["param"].startswith("messages.0.content.1")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"type": "file", "file_id": "x"}, "'file'"),
        ({"type": "base64", "media_type": "image/png"}, "data"),
        ({"type": "base64", "media_type": "image/tiff", "data": b64(DATA)}, "media_type"),
        ({"type": "base64", "media_type": "image/png", "data": uri(DATA)}, "base64"),
        ({"type": "url", "url": "http://localhost/a.png"}, "never fetched"),
    ],
)
def test_a_refused_source_is_named(served: Served, source: dict[str, Any], text: str) -> None:
    blocks = [{"type": "image", "source": source}]
    answer = served.post("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": blocks}]})
    assert answer.status_code == 400 and text in answer.json()["error"]["message"]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": message_blocks(DATA)}]
    answer = served.post("/v1/messages", {"max_tokens": 4, "messages": turns})
    assert answer.status_code == 400 and "assistant" in answer.json()["error"]["message"]


@pytest.mark.parametrize("instructions", [{}, {"instructions": "be kind"}])
def test_a_refusal_names_the_item_of_a_response(served: Served, instructions: dict[str, Any]) -> None:
    def refused(*items: Any) -> tuple[str, str]:
        answer = served.post("/v1/responses", instructions | {"input": list(items), "max_output_tokens": 4})
        assert answer.status_code == 400
        return answer.json()["error"]["param"], answer.json()["error"]["message"]

    broken = response_parts("look", DATA[:99])
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    question = {"role": "user", "content": "a"}
    output = {"type": "function_call_output", "call_id": "c", "output": broken}
    for items, place in (
        ([{"role": "user", "content": broken}], "input.0.content.1.image_url"),
        ([question, {"type": "reasoning", "summary": []}, call, output], "input.3.output.1.image_url"),
    ):
        field, text = refused(*items)
        assert field == place and text.startswith(f"{place}: the image cannot be read")
    field, text = refused(question, {"role": "user", "content": [{"type": "input_audio"}]})
    assert field == "input.1.content.0" and text.startswith(f"{field}: audio")


@pytest.mark.parametrize("system", [{}, {"system": "be kind"}])
def test_a_refusal_names_the_block_of_a_message(served: Served, system: dict[str, Any]) -> None:
    broken = message_blocks("look", DATA[:99])
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": broken}
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [use]}]
    for turns, place in (
        ([{"role": "user", "content": broken}], "messages.0.content.1.source"),
        ([*asked, {"role": "user", "content": [result]}], "messages.2.content.0.content.1.source"),
        (
            [*asked, {"role": "user", "content": [result | {"content": "b"}, *broken]}],
            "messages.2.content.2.source",
        ),
    ):
        for path, more in (("/v1/messages", {"max_tokens": 4}), ("/v1/messages/count_tokens", {})):
            error = served.post(path, system | more | {"messages": turns}).json()["error"]
            assert error["message"].startswith(f"{place}: the image cannot be read")


def test_patches_of_other_requests_may_fill_the_memory(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = served.llm.image_reader
    assert reader is not None and reader.most_held == MAX_PATCH_BYTES
    monkeypatch.setattr(reader, "most_held", -1)
    answer = served.post("/v1/chat/completions", chat(chat_parts(DATA)))
    assert answer.status_code == 429 and "bytes of patches" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
def test_slow_pictures_of_one_key_delay_no_other(seeing: LLM, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """It has more prompts than it may have threads."""
    reader = seeing.image_reader
    assert reader is not None
    begun, release, decode, slow = threading.Event(), threading.Event(), reader.pool.decode, png(7, 60, 40)

    def held(job: Job) -> tuple[np.ndarray, bytes]:
        if job.data == b64(slow).encode():
            begun.set()
            assert release.wait(WAIT)
        return decode(job)

    monkeypatch.setattr(reader.pool, "decode", held)
    with serving(seeing, chat_template=None, api_keys=(ApiKey("one"), ApiKey("two"))) as served:
        ask = partial(served.post, "/tokenize", {"messages": [{"role": "user", "content": chat_parts(slow)}]})
        with ThreadPoolExecutor(2 * THREADS["images"]) as others:
            waiting = [others.submit(ask, headers={"x-api-key": "one"}) for _ in range(THREADS["images"])]
            try:
                assert begun.wait(WAIT)
                body = _bodies(DATA)[path]
                quick = others.submit(served.post, path, body, headers={"x-api-key": "two"})
                assert quick.result(WAIT).status_code == 200
                assert not any(each.done() for each in waiting)
            finally:
                release.set()
            assert {each.result(WAIT).status_code for each in waiting} == {200}


def _bodies(image: bytes) -> dict[str, dict[str, Any]]:
    """A picture for each endpoint."""
    chats = chat(chat_parts(image))
    turns = [{"role": "user", "content": message_blocks(image)}]
    return {
        "/v1/chat/completions": chats, "/tokenize": {"messages": chats["messages"]},
        "/v1/responses": {"input": [{"role": "user", "content": response_parts(image)}], "max_output_tokens": 1},
        "/v1/messages": {"messages": turns, "max_tokens": 1},
    }  # fmt: skip


def test_placeholders_are_the_images_of_a_prompt(seeing: LLM) -> None:
    with pytest.raises(RequestError, match=r"2 image placeholders .* and 1 images"):
        seeing.chat([{"role": "user", "content": chat_parts(DATA, f"a {PAD}")}], GREEDY)
    with pytest.raises(RequestError, match="role system"):
        seeing.chat([{"role": "system", "content": chat_parts(DATA)}, {"role": "user", "content": "a"}], GREEDY)
    with pytest.raises(RequestError, match="0 image placeholders"):
        seeing.generate({"prompt": "a", "images": [DATA]}, GREEDY)
    with pytest.raises(RequestError, match=r"images.0: the image cannot be read"):
        seeing.generate({"prompt": PAD, "images": [b"x"]}, GREEDY)
    with pytest.raises(RequestError, match="images is b"):
        seeing.generate({"prompt": PAD, "images": DATA}, GREEDY)
    with pytest.raises(RequestError, match="prompt, a text, alone"):
        seeing.generate({"prompt_token_ids": [1], "images": [DATA]}, GREEDY)
    many = np.zeros((64, 64, 3), np.uint8)
    with pytest.raises(RequestError, match="send fewer or smaller images"):
        seeing.chat([{"role": "user", "content": [{"type": "image", "image": many}] * 5}], GREEDY)


def test_too_many_images_are_refused_before_a_template_sees_them(seeing: LLM) -> None:
    """This one would be refused, too: it writes no images."""
    parts = [{"type": "image", "image": np.zeros((1, 1, 3), np.uint8)}] * 129
    with pytest.raises(RequestError, match="129 images; at most 128") as caught:
        seeing.chat([{"role": "user", "content": parts}], GREEDY, chat_template="{{ messages[0].content }}")
    assert caught.value.field == "messages"


def test_a_model_without_a_tower_refuses_images(embedded: LLM) -> None:
    with pytest.raises(RequestError, match=r"^messages.0.content.0.image_url.url: this model reads text alone"):
        embedded.chat(
            [{"role": "user", "content": chat_parts(DATA)}], GREEDY, chat_template="{{ messages[0].content }}"
        )
    with pytest.raises(RequestError, match="this model reads text alone"):
        embedded.generate([{"prompt": "a", "images": [DATA]}], GREEDY)


def test_hosts_of_images_are_names() -> None:
    from hybridrt.server.core.config import ServerConfig

    with pytest.raises(ConfigError, match="allowed image host"):
        ServerConfig(allow_image_urls=("https://example.org",))
