"""An LLM whose model says what a script says: a byte a token, but for tags that are tokens of their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridrt.base.engine_config import EngineConfig
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.core import load_engine as load_module
from hybridrt.engine.text.tokenizer import HFTokenizer
from hybridrt.mem_cache.pools.host_plan import NO_HOST_PLAN
from hybridrt.mem_cache.pools.memory_plan import PageGroup
from hybridrt.mem_cache.pools.page_groups import PageDemand
from tests.support.mock_executor import MockExecutor, Tenant

END = "<|im_end|>"
SPECIAL = (END, "<|tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|pad|>")
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # tokens, and not special
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ message.tool_calls | default('') }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def byte_tokenizer(more: Sequence[str] = ()) -> HFTokenizer:
    """Every byte is a token, in the order of tokenizers' byte alphabet; then the tags, and `more` of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in SPECIAL])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (*WORDS, *more)])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|pad|>")
    hf.chat_template = TEMPLATE
    return HFTokenizer(hf)


class MockRunner(MockExecutor):
    """What LLM expects of a model runner, over an executor without a model."""

    device = torch.device("cpu")

    def __init__(self, config: EngineConfig, tokenizer: HFTokenizer) -> None:
        vocab = len(tokenizer.hf)
        super().__init__(num_rows=8, num_slots=16, num_pages=4096, page_size=16, vocab=vocab)
        self.end = tokenizer.hf.convert_tokens_to_ids(END)
        self.model_path = config.model
        self.model_config = SimpleNamespace(
            vocab_size=vocab, eos_token_ids=(self.end,), image_tokens={}, vision=None, mrope=False
        )
        self.memory_plan = SimpleNamespace(
            slabs=None,
            num_rows=8,
            num_slots=16,
            num_pages=4096,
            page_size=16,
            groups=(PageGroup(PageDemand(16), 4096, 0),),
            max_model_len=8192,
            host=NO_HOST_PLAN,
        )
        self.pools = SimpleNamespace(req_to_token=SimpleNamespace(mamba_pool=None))


R = TypeVar("R", bound=MockRunner)


class ScriptedRunner(MockRunner):
    """Every sample's tokens are those of `script`, then the end; others where a grammar forbids them."""

    def __init__(self, config: EngineConfig, tokenizer: HFTokenizer) -> None:
        super().__init__(config, tokenizer)
        self.script: list[int] = []

    def draw(self, tenant: Tenant) -> int:
        tenant.last = (self.script[tenant.outputs :] or [self.end])[0]
        tenant.outputs += 1
        return tenant.last


class Scripted:
    """The LLM, and `say`, which sets what it says next."""

    def __init__(self, llm: LLM, runner: ScriptedRunner, tokenizer: HFTokenizer) -> None:
        self.llm, self._runner, self._tokenizer = llm, runner, tokenizer

    def say(self, text: str) -> Sequence[int]:
        """Every sample from here on is this text. Returns its tokens."""
        self._runner.script = self._tokenizer.encode_bare(text)
        return self._runner.script


@contextmanager
def scripted() -> Iterator[Scripted]:
    """An LLM that says what it is told."""
    with mocked(ScriptedRunner) as (llm, runner, tokenizer):
        yield Scripted(llm, runner, tokenizer)


@contextmanager
def mocked(kind: type[R]) -> Iterator[tuple[LLM, R, HFTokenizer]]:
    """An LLM over such a runner, the runner, and its tokenizer."""
    tokenizer = byte_tokenizer()
    runners: list[R] = []

    def build(config: EngineConfig, **options: Any) -> R:
        runners.append(kind(config, tokenizer))
        return runners[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "ModelRunner", build)
        patch.setattr(load_module, "load_tokenizer", lambda path: tokenizer)
        llm = LLM("somewhere")
    with llm:
        yield llm, runners[0], tokenizer
