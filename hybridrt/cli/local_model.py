"""The model of `hybridrt chat` in this process."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrt.base.errors import RequestError
from hybridrt.base.interrupts import Interrupts
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.events import Content, Reasoning
from hybridrt.cli.conversation import AnswerPiece, ConversationMessage, Totals, decoded, encoded
from hybridrt.cli.generate import timings
from hybridrt.engine.api.llm import LLM


class LocalModel:
    """Answers conversations with an LLM, in the form that `chat` takes."""

    def __init__(self, name: str, llm: LLM, params: SamplingParams, chat: Chat) -> None:
        self.name = name
        self._llm, self._params, self._chat = llm, params, chat

    def answer(self, messages: list[ConversationMessage]) -> Generator[AnswerPiece | Totals, None, None]:
        """See ChatModel.answer. Ctrl-C is taken between two steps."""
        stream: Any = self._llm.stream_chat([message.to_dict() for message in messages], self._params, chat=self._chat)
        with Interrupts() as interrupts, closing(stream) as deltas:
            for delta in deltas:
                content = "".join(event.text for event in delta.events if isinstance(event, Content))
                reasoning = "".join(event.text for event in delta.events if isinstance(event, Reasoning))
                yield AnswerPiece(content, reasoning)
                interrupts.raise_if_interrupted()
        found = timings(delta.metrics)
        counts = (found["output_tokens"], found["prompt_tokens"], found["cached_tokens"])
        yield Totals(*counts, found["tokens_per_second"])

    def save_session(self, file: Path, messages: list[ConversationMessage]) -> None:
        if file.exists():
            raise RequestError(f"{file} exists; choose another name, or remove it")
        if not messages:
            raise RequestError("nothing was said yet, so there are no states to save: say something first")
        dicts = [message.to_dict() for message in messages]
        talk = read_conversation(dicts, add_generation_prompt=False)
        found = self._chat.prompt(talk, self._params)
        prompt: Any = {"prompt_token_ids": found.tokens, "spans": found.spans} if found.spans else found.tokens
        self._llm.save_session(file, prompt, note=encoded(messages).decode())

    def load_session(self, file: Path) -> list[ConversationMessage]:
        session = self._llm.load_session(file)
        messages = decoded(session.note, file)
        self._params = replace(self._params, cache_salt=session.cache_salt or None)
        return messages
