"""OpenAI's own clients, sync and async, streaming and not: every answer is what `LLM.generate` gives for its seed."""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.conversation import read_conversation
from hybridrt.engine.request.outputs import RequestOutput
from tests.support.http_server import Served
from tests.support.lazily import lazily

if TYPE_CHECKING:
    import openai
else:
    openai = lazily("openai")

PROMPT = "def main():\n"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def offline(served: Served, prompt: Any, **params: Any) -> RequestOutput:
    """The same request without a server."""
    defaults = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 16}
    return served.llm.generate(prompt, SamplingParams(**{**defaults, **params}))[0]


def chat_ids(served: Served, messages: list[Any] = MESSAGES) -> list[int]:
    assert served.llm.tokenizer is not None
    text = served.service.chat.render(read_conversation(messages))
    return served.llm.tokenizer.encode_bare(text)


def test_completions(served: Served) -> None:
    got = served.client().completions.create(model="tested", prompt=PROMPT, seed=7, n=3, max_tokens=20)
    want = offline(served, PROMPT, seed=7, n=3, max_tokens=20)
    assert [c.text for c in got.choices] == [o.text for o in want.outputs]
    assert [c.finish_reason for c in got.choices] == [o.finish_reason for o in want.outputs]
    assert [c.index for c in got.choices] == [0, 1, 2]
    assert got.object == "text_completion" and got.model == "tested" and got.id.startswith("cmpl-")
    assert got.usage is not None and got.usage.prompt_tokens == len(want.prompt_token_ids)
    assert got.usage.completion_tokens == sum(len(o.token_ids) for o in want.outputs)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


def test_completions_default_to_16_tokens_and_the_models_sampling(served: Served) -> None:
    got = served.client().completions.create(model="tested", prompt=PROMPT, seed=3)
    assert got.choices[0].text == offline(served, PROMPT, seed=3).text


@pytest.mark.parametrize("kind", ["texts", "ids", "lists of ids"])
def test_several_prompts_and_token_ids(kind: str, served: Served) -> None:
    prompts: Any = {"texts": [PROMPT, "import "], "ids": [5, 6, 7], "lists of ids": [[5, 6, 7], [8]]}[kind]
    got = served.client().completions.create(model="tested", prompt=prompts, seed=7, n=2)
    each = [prompts] if kind == "ids" else prompts
    want = [o.text for prompt in each for o in offline(served, prompt, seed=7, n=2).outputs]
    assert [c.text for c in got.choices] == want


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "import "]])
def test_completion_streams(prompt: Any, served: Served) -> None:
    stream = served.client().completions.create(
        model="tested", prompt=prompt, seed=7, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
            continue
        assert chunk.usage is None and len(chunk.choices) == 1
        choice = chunk.choices[0]
        assert choice.index not in reasons, "a chunk after the last one"
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    prompts = [prompt] if isinstance(prompt, str) else prompt
    want = [o for p in prompts for o in offline(served, p, seed=7, n=2).outputs]
    assert [texts[i] for i in range(len(want))] == [o.text for o in want]
    assert [reasons[i] for i in range(len(want))] == [o.finish_reason for o in want]
    assert usage is not None and usage.completion_tokens == sum(len(o.token_ids) for o in want)


def test_usage_with_every_chunk(served: Served) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = served.client().completions.create(
        model="tested", prompt=[5, 6], seed=7, stream=True, stream_options=options, extra_body={"ignore_eos": True}
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts) and counts[-1] == 16 and len(counts) > 2


def test_echo(served: Served) -> None:
    client = served.client()
    want = offline(served, PROMPT, seed=7).text
    assert client.completions.create(model="tested", prompt=PROMPT, seed=7, echo=True).choices[0].text == PROMPT + want
    stream = client.completions.create(model="tested", prompt=PROMPT, seed=7, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == PROMPT + want
    ids = served.llm.tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    assert client.completions.create(model="tested", prompt=ids, seed=7, echo=True).choices[0].text == PROMPT + want
    (choice,) = client.completions.create(model="tested", prompt=[0, *ids], seed=7, echo=True, logprobs=0).choices
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens).startswith(choice.text), "special tokens are shown, as offsets count them"
    assert choice.text.startswith(served.llm.tokenizer.hf.convert_ids_to_tokens(0) + PROMPT)  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(stream: bool, served: Served) -> None:
    want = offline(served, PROMPT, seed=7, logprobs=2)
    got: Any = served.client().completions.create(model="tested", prompt=PROMPT, seed=7, logprobs=2, stream=stream)
    parts = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
    text = "".join(part.text for part in parts)
    tokens = [t for part in parts for t in part.logprobs.tokens]
    values = [v for part in parts for v in part.logprobs.token_logprobs]
    offsets = [o for part in parts for o in part.logprobs.text_offset]
    tops = [top for part in parts for top in part.logprobs.top_logprobs]
    assert want.logprobs is not None and text == want.text
    assert values == pytest.approx([each[t] for t, each in zip(want.token_ids, want.logprobs)], abs=1e-4)
    assert "".join(tokens).startswith(text) and len(tokens) == len(want.token_ids)
    assert all(text[o:].startswith(t) or o + len(t) > len(text) for o, t in zip(offsets, tokens))
    assert all(2 <= len(top) <= 3 for top in tops)


@pytest.mark.parametrize("stream", [False, True])
def test_chat(stream: bool, served: Served) -> None:
    want = offline(served, chat_ids(served), seed=5, n=2, max_tokens=12)
    got: Any = served.client().chat.completions.create(
        model="tested", messages=MESSAGES, seed=5, n=2, max_completion_tokens=12, stream=stream
    )
    if not stream:
        assert [c.message.content for c in got.choices] == [o.text for o in want.outputs]
        assert all(c.message.role == "assistant" for c in got.choices)
        assert got.object == "chat.completion" and got.usage.prompt_tokens == len(want.prompt_token_ids)
        assert 0 <= got.usage.prompt_tokens_details.cached_tokens < got.usage.prompt_tokens
        return
    texts = {0: "", 1: ""}
    reasons = {}
    for i, chunk in enumerate(got):
        (choice,) = chunk.choices
        assert (choice.delta.role == "assistant") == (i < 2), "the role comes first, and once"
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
        assert chunk.object == "chat.completion.chunk"
    assert [texts[0], texts[1]] == [o.text for o in want.outputs]
    assert [reasons[0], reasons[1]] == [o.finish_reason for o in want.outputs]


def test_chat_logprobs(served: Served) -> None:
    got = served.client().chat.completions.create(
        model="tested", messages=MESSAGES, seed=5, max_tokens=8, logprobs=True, top_logprobs=2
    )
    want = offline(served, chat_ids(served), seed=5, max_tokens=8, logprobs=2)
    content = got.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and want.logprobs is not None
    for entry, token, found in zip(content, want.token_ids, want.logprobs, strict=True):
        assert entry.logprob == pytest.approx(found[token], abs=1e-4)
        assert bytes(entry.bytes or ()).decode(errors="replace") == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(max(found.values()), abs=1e-4)
    spelled = b"".join(bytes(entry.bytes or ()) for entry in content).decode(errors="replace")
    assert spelled.startswith(want.text)


def test_chat_takes_parts_template_variables_and_all_the_room_there_is(served: Served) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    got = served.client().chat.completions.create(
        model="tested",
        messages=parts,
        seed=5,
        extra_body={"chat_template_kwargs": {"greeting": "Hi"}, "ignore_eos": True},
    )
    ids = served.llm.tokenizer.encode_bare("# user: a\nb\nHi# assistant:")  # type: ignore[union-attr]
    want = offline(served, ids, seed=5, max_tokens=None, ignore_eos=True)
    assert got.choices[0].message.content == want.text and got.choices[0].finish_reason == "length"
    assert got.usage is not None and got.usage.total_tokens == 256


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text(stream: bool, served: Served) -> None:
    whole = offline(served, PROMPT, seed=7, max_tokens=40).text
    stop = whole[10:14]
    got: Any = served.client().completions.create(
        model="tested", prompt=PROMPT, seed=7, max_tokens=40, stop=[stop, "never seen"], stream=stream
    )
    parts = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
    assert "".join(part.text for part in parts) == whole[: whole.index(stop)]
    assert parts[-1].finish_reason == "stop"


def test_fields_beyond_openais(served: Served) -> None:
    extra = {
        "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "stop_token_ids": [11], "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    got = served.client().completions.create(
        model="tested", prompt=PROMPT, seed=9, presence_penalty=0.1, frequency_penalty=0.2, extra_body=extra
    )
    del extra["return_token_ids"]
    want = offline(served, PROMPT, seed=9, presence_penalty=0.1, frequency_penalty=0.2, **extra)
    assert got.choices[0].text == want.text and got.choices[0].token_ids == want.token_ids  # type: ignore[attr-defined]


def test_the_async_client(served: Served) -> None:
    async def streamed(client: "openai.AsyncOpenAI", seed: int) -> str:
        stream = await client.completions.create(model="tested", prompt=PROMPT, seed=seed, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def whole(client: "openai.AsyncOpenAI", seed: int) -> str:
        return (await client.completions.create(model="tested", prompt=PROMPT, seed=seed)).choices[0].text

    async def main() -> list[str]:
        async with served.async_client() as client:
            return await asyncio.gather(*((streamed if i % 2 else whole)(client, i) for i in range(12)))

    assert asyncio.run(main()) == [offline(served, PROMPT, seed=i).text for i in range(12)]


def test_models(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tested"]
    assert client.models.retrieve("tested").owned_by == "hybridrt"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as info:
        client.completions.create(model="other", prompt=PROMPT)
    assert info.value.param == "model" and info.value.code == "model_not_found"
