"""The names of a request's prompt: its token ids are made as the replica will make them."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hybridrt.base.errors import HybridrtError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.chat import Chat
from hybridrt.engine.text.tokenizer import HFTokenizer, encode_prompt, load_tokenizer
from hybridrt.fleet.prefix_mirror import PrefixNames, names_of
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.server.anthropic.message_protocol import MessageRequest
from hybridrt.server.anthropic.messages import as_chat
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.protocol import ChatRequest
from hybridrt.server.openai.chat import conversation_of

MAX_TOKENS = 2**20
SECONDS = 0.5  # that tokenising may take; then the request goes where there is room
WAITING = 64  # prompts that may wait for a thread
log = logging.getLogger("hybridrt.router")
Body = dict[str, Any]


class PromptNames:
    """Tokenises prompts in threads.

    Args:
        tokenizer: directory of the model. None: only prompts of token ids are known.

    Raises:
        CheckpointError: it has no tokenizer that can be read.
    """

    def __init__(self, tokenizer: str | None, config: ServerConfig) -> None:
        self._tokenizer: HFTokenizer | None = None if tokenizer is None else load_tokenizer(tokenizer)
        self._chat: Chat | None = None
        if self._tokenizer is not None and (config.chat_template or self._tokenizer.hf.chat_template):
            self._chat = Chat(
                self._tokenizer,
                template=config.chat_template,
                tool_parser=config.tool_parser,
                reasoning_parser=config.reasoning_parser,
            )
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="hybridrt-names")
        self._waiting = 0

    async def of_request(self, path: str, body: Body) -> PrefixNames:
        """Names of the first prompt of a body; those of no tokens if it cannot be tokenised in
        time."""
        key = CacheKey(salt) if isinstance(salt := body.get("cache_salt"), str) else CacheKey()
        if self._waiting >= WAITING:
            return names_of([], key)
        self._waiting += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._names, path, body, key)
        work.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(SECONDS):
                return await asyncio.shield(work)
        except TimeoutError:
            return names_of([], key)

    def _ended(self, work: "asyncio.Future[PrefixNames]") -> None:
        self._waiting -= 1
        work.cancelled() or work.exception()  # a late one has no reader

    def _names(self, path: str, body: Body, key: CacheKey) -> PrefixNames:
        """What is wrong with a body is the replica's to say."""
        try:
            names = names_of(self._tokens(path, body), key)
            _ = names.blocks  # hashed here, and not in the event loop
            return names
        except (HybridrtError, ValueError, TypeError, OverflowError) as e:
            log.debug("a prompt is not tokenised: %s", e)
            return names_of([], key)

    def _tokens(self, path: str, body: Body) -> list[int]:
        if path == "/v1/completions":
            return self._prompt_tokens(body.get("prompt"))
        if path == "/v1/chat/completions":
            return self._chat_tokens(body)
        if path == "/v1/messages" and self._chat is not None:
            message = MessageRequest.model_validate(body)
            return self._conversation(as_chat("messages", message, self._chat.reasoning is not None))
        return []

    def _prompt_tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return prompt[:MAX_TOKENS]
        if self._tokenizer is None or not isinstance(prompt, str):
            return []
        return encode_prompt(self._tokenizer, prompt, MAX_TOKENS)

    def _chat_tokens(self, body: Body) -> list[int]:
        return [] if self._chat is None else self._conversation(ChatRequest.model_validate(body))

    def _conversation(self, body: ChatRequest) -> list[int]:
        assert self._chat is not None and self._tokenizer is not None
        tokenizer = self._tokenizer
        prompt = self._chat.prompt(
            conversation_of(body),
            SamplingParams(),
            lambda text: encode_prompt(tokenizer, text, MAX_TOKENS, bare=True),
        )
        return prompt.tokens
