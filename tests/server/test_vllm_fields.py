"""What clients of vLLM send and read beyond OpenAI's fields."""

import asyncio
import json
from typing import Any

import pytest

from hybridrt.base.sampling_params import SamplingParams
from tests.server.test_concurrency import address, request
from tests.server.test_openai_client import PROMPT, chat_ids, offline
from tests.support.http_server import Served

ASK: dict[str, Any] = {"prompt": PROMPT, "seed": 7, "max_tokens": 20}
USER = [{"role": "user", "content": "Hello"}]
G = 40  # a token of the built-in model, whose text is G


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("given", "stopped_by"),
    [
        ({"stop": ["never", "GG", "GGG"]}, "GG"),
        ({"stop": ["GG"], "include_stop_str_in_output": True}, "GG"),
        ({"stop_token_ids": [G]}, G),
        ({"max_tokens": 3}, None),
        ({"allowed_token_ids": [0]}, None),  # the end-of-sequence token
    ],
)
def test_what_has_stopped_a_choice(given: dict[str, Any], stopped_by: Any, served: Served) -> None:
    asked = {"seed": 1, "max_tokens": 9, "allowed_token_ids": [G], **given}
    assert served.llm.generate(PROMPT, SamplingParams(**asked))[0].stop_reason == stopped_by
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": USER})):
        (choice,) = served.post(path, body | asked).json()["choices"]
        (*_, last) = chunks(served.post(path, body | asked | {"stream": True}).text)
        for each in (choice, last["choices"][0]):
            assert each["stop_reason"] == stopped_by
            assert each["finish_reason"] == ("length" if "max_tokens" in given else "stop")


@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_echo_alone(logprobs: int | None, served: Served) -> None:
    """The scores of a prompt and nothing else; OpenAI's API and vLLM's give them for max_tokens 0."""
    scored = served.post("/v1/completions", ASK | {"echo": True, "logprobs": logprobs}).json()
    asked = ASK | {"echo": True, "max_tokens": 0, "logprobs": logprobs, "n": 1 if logprobs else 2}
    got = served.post("/v1/completions", asked | {"return_token_ids": True}).json()
    tokens = len(offline(served, PROMPT).prompt_token_ids)
    for choice in got["choices"]:
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT, "length", [])
        if logprobs:
            lists = scored["choices"][0]["logprobs"]
            assert choice["logprobs"] == {name: values[:tokens] for name, values in lists.items()}
    assert got["usage"]["completion_tokens"] == 0
    parts = [c["choices"][0] for c in chunks(served.post("/v1/completions", asked | {"stream": True}).text)]
    assert "".join(part["text"] for part in parts) == PROMPT * asked["n"] and parts[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_prompts(stream: bool, served: Served) -> None:
    """A choice of a completion has them; in a stream, its first chunk. A chat has them next to its choices."""
    prompts, asked = [[5, 6, 7], [8]], {"max_tokens": 3, "n": 2, "return_token_ids": True, "stream": stream}
    answer = served.post("/v1/completions", {"prompt": prompts, "ignore_eos": True, **asked})
    found: dict[int, list[list[int]]] = {}
    for part in chunks(answer.text) if stream else [answer.json()]:
        for choice in part["choices"]:
            if "prompt_token_ids" in choice:
                found.setdefault(choice["index"], []).append(choice["prompt_token_ids"])
    assert found == {index: [prompts[index // 2]] for index in range(4)}
    answer = served.post("/v1/chat/completions", {"messages": USER, **asked})
    told = [part for part in (chunks(answer.text) if stream else [answer.json()]) if "prompt_token_ids" in part]
    assert [part["prompt_token_ids"] for part in told] == [chat_ids(served, USER)]
    assert not stream or told[0]["choices"][0]["delta"]["role"] == "assistant"


def test_numbers_of_tokens_for_their_text(served: Served) -> None:
    """Offsets are still those of the text, and prompt_logprobs have it."""
    asked = ASK | {"echo": True, "logprobs": 2, "return_token_ids": True}
    plain, numbers = (
        served.post("/v1/completions", asked | {"return_tokens_as_token_ids": each}).json()["choices"][0]
        for each in (False, True)
    )
    ids = [f"token_id:{token}" for token in numbers["prompt_token_ids"] + numbers["token_ids"]]
    assert numbers["logprobs"]["tokens"] == ids != plain["logprobs"]["tokens"]
    assert numbers["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert all(token in top for token, top in zip(ids[1:], numbers["logprobs"]["top_logprobs"][1:]))
    asked = {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    choice = served.post("/v1/chat/completions", asked | {"return_tokens_as_token_ids": True}).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert entries[0]["top_logprobs"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize("most", [None, 0, 3])
def test_as_many_likeliest_tokens_as_were_asked_for(most: int | None, served: Served) -> None:
    """Also where the token that was drawn is none of them."""
    asked = {"messages": USER, "max_tokens": 8, "seed": 1, "temperature": 2.0, "ignore_eos": True, "logprobs": True}
    content = served.post("/v1/chat/completions", asked | {"top_logprobs": most}).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert [len(entry["top_logprobs"]) for entry in content] == [most or 0] * 8
    tops = [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in content]
    assert most != 3 or any((e["token"], e["logprob"]) not in top for e, top in zip(content, tops)), "try another seed"


@pytest.mark.parametrize(("given", "seed"), [(-5, 2**63 - 5), (-(2**63), 0)])
def test_negative_seeds(given: int, seed: int, served: Served) -> None:
    text = served.post("/v1/completions", ASK | {"seed": given}).json()["choices"][0]["text"]
    assert text == offline(served, PROMPT, seed=seed, max_tokens=20).text


def test_the_seed_minus_one_is_none(served: Served) -> None:
    texts = {served.post("/v1/completions", ASK | {"seed": -1}).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


def test_prompts_without_special_tokens(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text: [0, *self.encode_bare(text)])
    bare = tokenizer.encode_bare(PROMPT)
    for given, want in (({}, [0, *bare]), ({"add_special_tokens": False}, bare)):
        body = ASK | {"return_token_ids": True, **given}
        assert served.post("/v1/completions", body).json()["choices"][0]["prompt_token_ids"] == want
    cut = ASK | {"return_token_ids": True, "add_special_tokens": False, "prompt": PROMPT * 200}
    assert served.post("/v1/completions", cut).json()["error"]["code"] == "context_length_exceeded"
    got = served.post("/v1/completions", cut | {"truncate_prompt_tokens": 3}).json()["choices"][0]
    assert got["prompt_token_ids"] == tokenizer.encode_bare(PROMPT * 200)[-3:]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_embeds", "AAAA"), ("truncation_side", "right"), ("watermarking", True),
        ("repetition_detection", {"max_pattern_size": 3}), ("logits_processors", ["x"]), ("use_beam_search", True),
        ("modalities", ["text", "audio"]), ("regex", "a+"), ("ebnf", "root ::= 'a'"), ("json_schema", "{}"),
        ("stop_regex", "a+"), ("no_stop_trim", True), ("custom_logit_processor", "x"), ("lora_path", "x"),
    ],
)  # fmt: skip
def test_what_would_change_the_output_is_refused_by_name(name: str, value: Any, served: Served) -> None:
    """Fields of vLLM and of SGLang."""
    error = served.post("/v1/completions", ASK | {name: value}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported")


def test_what_changes_nothing_is_taken(served: Served) -> None:
    neutral = {
        "length_penalty": 1.0, "modalities": ["text"], "truncation_side": "left", "prompt_embeds": None, "model": "",
        "spaces_between_special_tokens": True, "service_tier": "auto", "metadata": {"a": "b"}, "store": True,
        "kv_transfer_params": None, "vllm_xargs": {}, "stream_options": {}, "regex": None, "lora_path": None,
    }  # fmt: skip
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", {"messages": USER, "max_tokens": 1})):
        answer = served.post(path, body | neutral)
        assert answer.status_code == 200 and answer.json()["model"] == "tested", answer.text


def test_defaults_of_vllm_are_taken(served: Served) -> None:
    """Clients that send every field of vLLM's requests send these."""
    chat = {"messages": USER, "max_tokens": 1, "logprobs": False, "top_logprobs": 0}
    assert served.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"] is None
    options = {"include_usage": None, "continuous_usage_stats": None}
    answer = served.post("/v1/chat/completions", chat | {"stream": True, "stream_options": options})
    assert answer.status_code == 200 and all("usage" not in chunk for chunk in chunks(answer.text))


def test_one_prompt_of_several_is_aborted_alone(served: Served) -> None:
    body = {"prompt": [[5], [6]], "max_tokens": 40, "ignore_eos": True, "request_id": "two", "return_token_ids": True}

    async def main() -> dict[str, Any]:
        with served.llm.engine.turns:
            asked = asyncio.create_task(asyncio.to_thread(served.post, "/v1/completions", body))
            while served.service.llm.unfinished < 2:
                await asyncio.sleep(0.001)
            aborted = await asyncio.to_thread(served.post, "/abort", {"request_id": "cmpl-two-1"})
        assert aborted.json() == {"aborted": True}
        return dict((await asked).json())

    first, second = asyncio.run(main())["choices"]
    assert (first["finish_reason"], len(first["token_ids"]), second["finish_reason"]) == ("length", 40, "abort")


def test_the_time_to_the_first_token_is_seen_while_a_stream_runs(served: Served) -> None:
    from tests.server.test_operations import metrics

    async def main() -> None:
        before = metrics(served)
        reader, writer = await asyncio.open_connection(*address(served))
        writer.write(request(1, max_tokens=200))
        await reader.readuntil(b"token_ids")
        gained = {name: value - before[name] for name, value in (await asyncio.to_thread(metrics, served)).items()}
        writer.close()
        assert gained["vllm:time_to_first_token_seconds_count"] == 1 and gained["vllm:prompt_tokens_total"] == 3
        assert gained["vllm:e2e_request_latency_seconds_count"] == 0

    asyncio.run(main())
