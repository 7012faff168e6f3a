"""A model in this process, as `hybridrt chat` sees it."""

from collections.abc import Generator
from contextlib import closing
from typing import Any

from hybridrt.cli.conversation import Piece, Totals, Turn
from hybridrt.cli.generate import timings
from hybridrt.engine.llm import LLM
from hybridrt.engine.tokenizer import encode_prompt
from hybridrt.errors import RequestError
from hybridrt.runtime.interrupts import Interrupts
from hybridrt.sampling_params import SamplingParams


class LocalModel:
    """Answers conversations with an LLM.

    Args:
        template: Jinja text that replaces the model's chat template; None keeps that.

    Raises:
        RequestError: the model has no tokenizer.
    """

    def __init__(self, name: str, llm: LLM, params: SamplingParams, template: str | None) -> None:
        if llm.tokenizer is None:
            raise RequestError("this model has no tokenizer, so it cannot chat; use hybridrt generate --token-ids")
        self.name = name
        self._llm, self._tokenizer, self._params, self._template = llm, llm.tokenizer, params, template

    def answer(self, turns: list[Turn]) -> Generator[Piece | Totals, None, None]:
        """As ChatModel.answer. Ctrl-C is taken between two steps."""
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        text = self._tokenizer.render_chat(messages, self._template, add_generation_prompt=True)
        tokens = encode_prompt(self._tokenizer, text, self._llm.plan.max_model_len - 1, bare=True)
        stream: Any = self._llm.stream(tokens, self._params)
        with Interrupts() as interrupts, closing(stream) as deltas:
            for delta in deltas:
                yield Piece(delta.text)
                interrupts.check()
        found = timings(delta.metrics)
        counts = (found["output_tokens"], found["prompt_tokens"], found["cached_tokens"])
        yield Totals(*counts, found["tokens_per_second"])
