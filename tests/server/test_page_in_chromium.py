"""The page at `/` in a real browser whose network is cut: it reaches the server and nothing else."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hybridrt.engine.api.llm import LLM
from tests.support.checkpoints import CheckpointStore
from tests.support.chromium import Chromium, chromium, find_chromium
from tests.support.http_server import Served, serving
from tests.support.pictures import png
from tests.support.seeing_llm import write_seeing

pytestmark = pytest.mark.slow
IDLE = "document.getElementById('stop').disabled"
ROOM = "[document.documentElement.scrollWidth, innerWidth, at('log').scrollWidth <= at('log').clientWidth]"
TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "maxLength": 6}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    path = find_chromium()
    if path is None:
        pytest.skip("neither Chromium nor Chrome is installed")
    with chromium(path, tmp_path_factory.mktemp("chromium")) as found:
        yield found


def set_field(browser: Chromium, name: str, value: str) -> None:
    browser.value(f"document.getElementById('{name}').value = {json.dumps(value)}")


def focus(browser: Chromium, name: str) -> None:
    browser.value(f"document.getElementById('{name}').focus()")


def send(browser: Chromium, text: str) -> None:
    """Types a message, and waits until its answer has ended."""
    focus(browser, "text")
    browser.write(text)
    browser.press("Enter")
    browser.until(IDLE)


def turns(browser: Chromium) -> list[list[str]]:
    """Of each turn in the log, its class and the texts of its paragraphs, without the figures of answers."""
    found: list[list[str]] = browser.value(
        "[...document.querySelectorAll('#log article')].map(turn => [turn.className, "
        "...[...turn.querySelectorAll('p:not(.figures-of-answer)')].map(p => p.textContent)])"
    )
    return found


def bodies(browser: Chromium) -> list[dict[str, Any]]:
    return [json.loads(request["postData"]) for request in browser.requests() if request["method"] == "POST"]


def test_a_conversation_streams_and_the_engine_is_live(browser: Chromium, served: Served) -> None:
    browser.open(f"{served.url}/")
    set_field(browser, "most", "12")
    send(browser, "<b>one</b>\ntwo")
    send(browser, "three")
    (_, asked), (kind, answer), (_, again), (_, last) = turns(browser)
    assert (asked, again, kind) == ("<b>one</b>\ntwo", "three", "model") and answer and last
    assert browser.value("document.querySelector('#log b')") is None
    assert bodies(browser)[1]["messages"] == [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": again},
    ]
    figures = browser.value("document.querySelector('.figures-of-answer').textContent")
    assert "answer 12 tokens" in figures and "ended by length" in figures

    browser.until("document.querySelectorAll('#tree rect').length > 2 && before.tokens.output >= 24")
    assert browser.text("model") == "tested" and browser.text("state") == "live"
    # Of a later look: the last token may be counted before its row is free.
    browser.until(f"document.getElementById('running').textContent === '0 of {served.llm.plan.num_rows}'")
    counters = served.llm.engine.counters()
    for name, cached in (("slots", counters.cached_slots), ("kv", counters.cached_pages)):  # of the next look
        browser.until(f"document.getElementById('{name}').textContent.startsWith('0 in use, {cached} cached')")
    assert (
        browser.text("step").endswith(" ms") and browser.value("document.querySelectorAll('#steps rect').length") > 12
    )
    assert browser.value("document.querySelectorAll('#tree circle').length") > 0

    assert {request["url"].startswith(served.url) for request in browser.requests()} == {True}
    assert browser.problems() == []


def test_rows_are_shown_while_they_run(browser: Chromium, served: Served) -> None:
    browser.open(f"{served.url}/")
    body = {"prompt": ["import os, sys", "class A:"], "n": 2, "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(served.post, "/v1/completions", body | {"request_id": "long"})
        while not going.done():
            if browser.value("document.querySelectorAll('#row-list tr').length") == 4:
                break
        shown = browser.value("[...document.querySelectorAll('#row-list tr')].map(r => r.textContent)")
        assert len(shown) == 4 and all("decode" in row and "of 200" in row for row in shown)
        assert browser.text("running").startswith("4 of ")
        served.post("/abort", {"request_id": "long"})
    browser.until("document.getElementById('rows-text').textContent === 'No request runs.'")


def test_a_key_is_asked_for_where_one_is_needed(browser: Chromium, embedded: LLM) -> None:
    with serving(embedded, api_keys=("good-key",)) as served:
        browser.open(f"{served.url}/")
        set_field(browser, "most", "4")
        browser.until("document.getElementById('state').textContent.includes('API key')")
        send(browser, "hello")
        assert turns(browser)[1][1].startswith("a valid API key is needed") and "dropped" in turns(browser)[1][0]
        assert browser.value("document.activeElement.id") == "key"
        browser.write("good-key")
        browser.until("document.getElementById('state').textContent === 'live'")
        focus(browser, "text")
        browser.press("Enter")  # the message has come back
        browser.until(IDLE)
        assert [kind for kind, *_ in turns(browser)] == ["user dropped", "model dropped", "user", "model"]
        assert bodies(browser)[1]["messages"] == [{"role": "user", "content": "hello"}]


def test_a_stopped_turn_is_not_part_of_the_conversation(browser: Chromium, served: Served) -> None:
    browser.open(f"{served.url}/")
    set_field(browser, "most", "200")
    focus(browser, "text")
    browser.write("go on")
    browser.press("Enter")
    browser.until("document.querySelector('.assistant') !== null")
    browser.press("Escape")
    browser.until(IDLE)
    assert turns(browser)[1][-1] == "Stopped. This turn is not part of the conversation."
    assert browser.value("document.getElementById('text').value") == "go on"
    set_field(browser, "text", "")
    set_field(browser, "most", "2")
    set_field(browser, "tools", "[oops")
    send(browser, "again")
    assert turns(browser)[3][1].startswith("The tools are no JSON")
    set_field(browser, "tools", "")
    browser.press("Enter")
    browser.until(IDLE)
    assert bodies(browser)[-1]["messages"] == [{"role": "user", "content": "again"}]
    focus(browser, "clear")
    browser.press("Enter")
    assert turns(browser) == []


def test_results_of_calls_are_sent_back(browser: Chromium, embedded: LLM) -> None:
    with serving(embedded, chat_template=None) as served:
        browser.open(f"{served.url}/")
        fields = {"tools": json.dumps([TOOL]), "choice": "required", "most": "120", "temperature": "0"}
        for name, value in fields.items():
            set_field(browser, name, value)
        send(browser, "the time?")
        shown = browser.value("document.querySelector('.call code').textContent")
        assert shown.startswith("now({") and '"zone"' in shown
        assert browser.value("document.activeElement.closest('.call') !== null")
        set_field(browser, "choice", "none")
        browser.write("12:30")
        browser.press("Enter")
        browser.until(IDLE)
        first, second = bodies(browser)
        assert first["tools"] == [TOOL] and first["tool_choice"] == "required" and first["temperature"] == 0
        call, result = second["messages"][1:]
        assert json.loads(call["tool_calls"][0]["function"]["arguments"]).keys() == {"zone"}
        assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "12:30"}
        assert turns(browser)[-1][0] == "model" and browser.problems() == []


def test_images_are_sent_where_the_model_sees(
    browser: Chromium, served: Served, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    browser.open(f"{served.url}/")
    browser.until("document.getElementById('state').textContent === 'live'")
    assert browser.value("document.getElementById('attach').disabled"), "this model sees none"
    picture = tmp_path / "picture.png"
    picture.write_bytes(png(1, 60, 40))
    path = write_seeing(checkpoints["qwen35-seeing_tied"].path, tmp_path / "model", patch=4)
    with (
        LLM(str(path), device="cpu", max_running_requests=4, max_model_len=256) as llm,
        serving(llm, chat_template=None) as seeing,
    ):
        browser.open(f"{seeing.url}/")
        browser.until("!document.getElementById('attach').disabled")
        set_field(browser, "most", "2")
        field = browser.call("Runtime.evaluate", expression="document.getElementById('file')")["result"]["objectId"]
        browser.call("DOM.setFileInputFiles", files=[str(picture)], objectId=field)
        browser.until("document.querySelectorAll('#images img').length === 1")
        send(browser, "look")
        assert browser.value("document.querySelector('#log img').naturalWidth") == 60, "its policy lets it be shown"
        image, text = bodies(browser)[0]["messages"][0]["content"]
        assert image["image_url"]["url"].startswith("data:image/png;base64,") and text["text"] == "look"
        assert turns(browser)[1][0] == "model" and browser.problems() == []


def test_replicas_have_no_rows_to_show(browser: Chromium, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(served.llm.engine), "view", lambda self: None)
    browser.open(f"{served.url}/")
    browser.until("document.getElementById('state').textContent === 'live'")
    assert browser.text("rows-text") == "Replicas keep their rows." and browser.text("running").startswith("0 of ")
    assert browser.text("tree-text") == "Replicas keep their trees." and browser.problems() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_nothing_is_wider_than_the_window(browser: Chromium, served: Served, width: int, dark: bool) -> None:
    browser.open(f"{served.url}/", width)
    browser.resize(width, 844, dark)
    browser.value("addText(addTurn('user', 'You'), '', 'x'.repeat(500))")
    browser.until("document.getElementById('state').textContent === 'live'")
    whole, seen, fits = browser.value(ROOM)
    assert whole == seen == width and fits
    channels = browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(channels) < 3 * 128) is dark


def test_it_can_be_used_without_a_mouse_and_without_sight(browser: Chromium, served: Served) -> None:
    browser.open(f"{served.url}/")
    browser.value("document.getElementById('settings').open = true")
    focus(browser, "text")
    order = []
    for _ in range(9):
        browser.press("Tab")
        order.append(browser.value("document.activeElement.id || document.activeElement.tagName"))
    assert order == ["send", "clear", "SUMMARY", "key", "most", "temperature", "choice", "system", "tools"]
    nodes = [node for node in browser.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    roles = {"button", "textbox", "spinbutton", "combobox", "log", "image", "region", "article"}
    found = [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes]
    assert {("log", "Conversation"), ("button", "Send"), ("textbox", "Message"), ("textbox", "API key")} <= {*found}
    assert [each for each in found if each[0] in roles and not each[1]] == []


def test_the_policy_holds(browser: Chromium, served: Served) -> None:
    browser.open(f"{served.url}/")
    for attempt in (
        "fetch('http://127.0.0.1:9/')",
        "new Promise((_, no) => { const image = new Image(); image.onerror = no; image.src = 'http://127.0.0.1:9/'; })",
        "Promise.resolve().then(() => { document.body.innerHTML = '<b>x</b>'; })",
        "Promise.resolve().then(() => eval('1'))",
    ):
        assert browser.value(f"{attempt}.then(() => 'done', () => 'refused')") == "refused", attempt
    asked = {request["url"].removeprefix(served.url) for request in browser.requests()}
    assert asked <= {"/", "/engine", "http://127.0.0.1:9/"}


def test_the_ends_of_events_and_the_lanes_of_the_tree(browser: Chromium, served: Served) -> None:
    browser.open(f"{served.url}/")
    assert browser.value("takeEvents('data: a\\r\\n\\r\\n: no\\n\\ndata: b\\ndata: c\\n\\ndata: d')") == [
        ["a", "b\nc"], "data: d",
    ]  # fmt: skip
    # Node 1 and 3 are below node 0, and node 4 below node 3; node 2 is another text.
    assert browser.value("lanes([-1, 0, -1, 0, 3].map(parent => ({parent})))") == [[0, 0, 2, 1, 1], 3]
