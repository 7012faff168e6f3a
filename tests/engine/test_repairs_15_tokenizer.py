"""A tokenizer that fails within its library in Rust: a typed error wherever it is called, and the engine goes on."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridrt import LLM, AsyncLLM, CheckpointError, EngineError, SamplingParams
from hybridrt.base.errors import is_failure
from hybridrt.engine.text.tokenizer import HFTokenizer, load_tokenizer
from hybridrt.server.core.token_text import TokenText
from tests.support.tiny import write_tiny

PATTERN = "(?=(a+)+c)"  # Oniguruma gives it up at 41 characters, and its binding panics
BAD = "a" * 41
FEW = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(
        tmp_path_factory.mktemp("model"), chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    file.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), load_format="dummy", device="cpu", max_model_len=256, max_running_requests=4) as llm:
        yield llm


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(BAD, FEW),
        lambda llm: llm.stream(BAD, FEW),
        lambda llm: llm.chat([{"role": "user", "content": BAD}], FEW),
        lambda llm: llm.stream_chat([{"role": "user", "content": BAD}], FEW),
        lambda llm: llm.generate("b", SamplingParams(max_tokens=2, bad_words=[BAD])),
        lambda llm: llm.save_session("unused", BAD),
        lambda llm: llm.engine.add_request(BAD, FEW),
    ],
    ids=["generate", "stream", "chat", "stream_chat", "bad_words", "save_session", "add_request"],
)
def test_a_text_that_breaks_the_tokenizer_is_a_typed_error(llm: LLM, call: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer fails .*retry-limit.*token ids"):
        call(llm)
    assert len(llm.generate("b", FEW)[0].token_ids) == 3


def test_tasks_get_the_same_error(llm: LLM) -> None:
    async def run(text: str) -> int:
        return len((await server.complete(text, FEW)).token_ids)

    with AsyncLLM(llm) as server:
        for text in (BAD, BAD + "b" * 110):
            with pytest.raises(CheckpointError, match="tokenizer fails"):
                asyncio.run(run(text))
        assert asyncio.run(run("b")) == 3


class Broken:
    """A tokenizer of transformers in which every call panics, or is interrupted."""

    def __init__(self, error: BaseException) -> None:
        self._error, self.added_tokens_decoder = error, dict[int, str]()

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise self._error

    encode = decode = convert_ids_to_tokens = get_vocab = _fail


PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
CALLS: dict[str, Any] = {
    "encode": lambda t: t.encode("x"),
    "encode_bare": lambda t: t.encode_bare("x"),
    "decode": lambda t: t.decode([1]),
    "piece": lambda t: t.piece(1),
    "characters_per_token": lambda t: t.characters_per_token,
    "spelled": lambda t: TokenText(t).spelled(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_method_gives_typed_errors_and_lets_interrupts_pass(name: str) -> None:
    with pytest.raises(CheckpointError, match="PanicException: called `unwrap`"):
        CALLS[name](HFTokenizer(Broken(PANIC("called `unwrap`"))))
    for error in (KeyboardInterrupt(), asyncio.CancelledError()):
        assert not is_failure(error)
        with pytest.raises(type(error)):
            CALLS[name](HFTokenizer(Broken(error)))


def test_loading_may_panic(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", Broken(PANIC("index out of range"))._fail)
    with pytest.raises(CheckpointError, match=r"cannot be loaded .*index out of range"):
        load_tokenizer(model)


def test_text_that_cannot_be_made_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that panics in a step must not end the engine's thread."""
    with monkeypatch.context() as patch:
        patch.setattr(llm.tokenizer, "_plain", False)
        patch.setattr(llm.tokenizer, "hf", Broken(PANIC("boom")))
        with pytest.raises((EngineError, CheckpointError), match="boom"):
            llm.generate([[5, 6, 7]], FEW)
    assert len(llm.generate([[5, 6, 7]], FEW)[0].token_ids) == 3
