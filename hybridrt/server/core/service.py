"""The parts that endpoints share: the model, its names, and the way from a body to a running request."""

import math
import time
import uuid
from asyncio import Task
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, Protocol
from weakref import WeakValueDictionary

from starlette.types import Scope

from hybridrt.base.errors import CheckpointError, RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.version import __version__
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import Conversation
from hybridrt.engine.api.async_llm import AsyncLLM, DeltaStream
from hybridrt.engine.api.chats import PreparedChat, check_characters, is_large_chat
from hybridrt.engine.api.lanes import LONG_CHARACTERS, lane_of
from hybridrt.engine.request.intake import PreparedPrompt
from hybridrt.engine.text.tokenizer import HFTokenizer, encode_prompt
from hybridrt.images.fetch import Fetcher
from hybridrt.server.core.answer_size import EntryRoom, check_output, check_repeated, prompt_entries
from hybridrt.server.core.bodies import SMALL, body_bytes
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.protocol import Sampling
from hybridrt.server.core.request_fields import refuse_fields
from hybridrt.server.core.response_store import ResponseStore
from hybridrt.server.core.structured import structured_outputs
from hybridrt.server.core.token_text import TokenNumbers, TokenText
from hybridrt.server.wire.errors import APIError

SAMPLING_FIELDS = {f.name for f in fields(SamplingParams)} & set(Sampling.model_fields) - {"structured_outputs"}
ID_PREFIXES = ("cmpl-", "chatcmpl-", "resp_", "msg_", "embd-")
KEPT_TEMPLATES = 16  # of requests
WAIT_SHARE = 0.5  # of `request_timeout` that a request may wait for others; the rest is for its answer
RECORD = "hybridrt.record"
OWNER = "hybridrt.owner"  # where a request's scope keeps which key has sent it
CLIENT = "hybridrt.client"  # and which client the key stands for


class RequestBody(Protocol):
    """Fields that the body of every request has."""

    @property
    def model(self) -> str | None: ...
    @property
    def stream(self) -> bool | None: ...
    @property
    def request_id(self) -> str | None: ...
    @property
    def return_token_ids(self) -> bool | None: ...


@dataclass
class Service:
    """A model that is served.

    Attributes:
        ready: the model is warm, and the server is not shutting down.
        running: answers of /v1/responses that have not ended, by owner and id.
        responses: those that have ended and are kept.
        unwatched: tasks of those that nobody waits for.
        cache_readers: of the events of the prefix cache.
        model: a digest of the model, for routers; "": it is not known.
        transfer_port: where a prefill worker listens for decode workers; None: this is none.
        created: when the server began, in seconds since 1970.
    """

    llm: AsyncLLM
    config: ServerConfig
    ready: bool = False
    cache_readers: int = 0
    model: str = ""
    transfer_port: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    entry_room: EntryRoom = field(default_factory=EntryRoom)
    running: WeakValueDictionary[str, Any] = field(default_factory=WeakValueDictionary)
    unwatched: set[Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._foreign = OrderedDict[str, Chat]()
        self.responses = ResponseStore(self.config.max_stored_responses, self.config.max_stored_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model in requests. An answer has the name that was asked for."""
        return self.config.served_model_names or (self.llm.llm.config.model,)

    @cached_property
    def fingerprint(self) -> str:
        """Tells settings apart with which a seed may give another output."""
        settings = f"{self.llm.llm.config!r} {self.llm.llm.device} {__version__}"
        return f"hybridrt-{__version__}-{sha256(settings.encode()).hexdigest()[:8]}"

    @cached_property
    def token_text(self) -> TokenText:
        return TokenText(self.llm.llm.tokenizer)

    @cached_property
    def token_numbers(self) -> TokenText:
        return TokenNumbers(self.llm.llm.tokenizer)

    @property
    def tokenizer(self) -> HFTokenizer:
        """Raises APIError where the model has none."""
        if self.llm.llm.tokenizer is None:
            raise APIError(400, "this model has no tokenizer: send token ids to /v1/completions")
        return self.llm.llm.tokenizer

    @property
    def chat(self) -> Chat:
        """The model's way to chat. Raises APIError where it has no tokenizer."""
        assert self.tokenizer is not None
        return self.llm.llm.chats(self.config.chat_template, self.config.tool_parser, self.config.reasoning_parser)

    def chat_with(self, template: str | None) -> Chat:
        """The model's way to chat, with a template of a request.

        Raises:
            APIError: requests may not bring one here.
        """
        if template is None:
            return self.chat
        if not self.config.request_chat_templates:
            text = "chat_template is off: start the server with --chat-template, or with --request-chat-templates"
            raise APIError(400, text, "chat_template", "unsupported")
        if template not in self._foreign:
            parsers = {"tool_parser": self.config.tool_parser, "reasoning_parser": self.config.reasoning_parser}
            images = self.llm.llm.image_reader
            self._foreign[template] = Chat(self.tokenizer, template=template, foreign=True, images=images, **parsers)
        self._foreign.move_to_end(template)
        while len(self._foreign) > KEPT_TEMPLATES:
            self._foreign.popitem(last=False)
        return self._foreign[template]

    async def start_renderer(self) -> None:
        """Starts the processes for chat templates and images, and tries the model's template, so
        that the first chat need not wait."""
        tokenizer = self.llm.llm.tokenizer
        if isinstance(tokenizer, HFTokenizer) and (self.config.chat_template or tokenizer.hf.chat_template):
            await self.llm.in_thread(self.chat.examine)
        if (images := self.llm.llm.image_reader) is not None:
            if self.config.allow_image_urls:
                images.fetch = Fetcher(self.config.allow_image_urls)
            await self.llm.in_thread(images.pool.start)

    async def prepare_chat(
        self, conversation: Conversation, params: SamplingParams, template: str | None
    ) -> PreparedChat:
        """A conversation as the engine takes it.

        Raises:
            APIError: the model has no tokenizer, or a request may not bring a `template`.
            RequestError, MemoryBudgetError: it cannot be taken, or the template fails on it.
        """
        try:
            return await self.llm.prepare_chat(conversation, params, self.chat_with(template))
        except CheckpointError as e:
            raise RequestError(str(e), "messages") from e

    async def off_loop(self, scope: Scope, work: Callable[[], Any]) -> Any:
        """Runs work in another thread if the body is long."""
        length = body_bytes(scope)
        return work() if length <= SMALL else await self.llm.in_thread(work, lane=lane_of(length))

    async def render_chat(self, conversation: Conversation, template: str | None = None) -> str:
        """A conversation in the chat template. Raises as `prepare_chat`."""
        most = (self.llm.llm.plan.max_model_len - 1) * self.tokenizer.characters_per_token
        chat = self.chat_with(template)

        def checked() -> str:  # not on the event loop: there may be many parts
            check_characters(conversation, most)
            return chat.render(conversation)

        lane = "template" if chat.foreign else lane_of(LONG_CHARACTERS if is_large_chat(conversation) else 0)
        try:
            text: str = await self.llm.in_thread(checked, lane=lane, client=conversation.client)
        except CheckpointError as e:
            raise RequestError(str(e), "messages") from e
        return text

    async def chat_tokens(self, conversation: Conversation, template: str | None = None) -> list[int]:
        """Token ids of a conversation, those of its images included. Raises as `prepare_chat`."""
        if conversation.images:
            prepared = await self.prepare_chat(conversation, SamplingParams(max_tokens=1), template)
            return prepared.prompt.tokens
        return await self.encode(await self.render_chat(conversation, template), bare=True)

    def submit(
        self, prompts: list[PreparedPrompt], prefix: str, body: RequestBody, scope: Scope, forms: int = 1
    ) -> tuple[str, DeltaStream]:
        """Starts requests. Returns the `id` of their answer, which /abort takes, and their deltas.
        `forms` as in `prompt_entries`.

        Raises:
            APIError: the answer would be too large, or would come too late.
            others: the errors of `AsyncLLM.submit`; QueueFullError also for too many
                log-probabilities of prompts.
        """
        entries = prompt_entries(prompts, forms)
        check_output(prompts)
        if body.return_token_ids:
            check_repeated([len(p.tokens) for p in prompts], prompts[0].params.n, "token ids", "return_token_ids")
        self.entry_room.check_room(entries)
        self._check_wait()
        name = f"{prefix}{body.request_id or uuid.uuid4().hex}"
        record(scope, id=name)
        try:
            owner, client = owner_of(scope), client_of(scope)
            deltas = self.llm.submit(prompts, owner + name, stream=bool(body.stream), client=client)
        except RequestError as e:
            if e.field == "request_id":
                text = f"the request id {name!r} is in use; choose another one, or none"
                raise APIError(400, text, "request_id") from e
            raise
        self.entry_room.hold(deltas, entries)
        return name, deltas

    def _check_wait(self) -> None:
        """APIError if a request would wait too long to be answered in time."""
        seconds, most = self.llm.llm.engine.wait_seconds(), WAIT_SHARE * self.config.request_timeout
        if seconds > most:
            text = f"a request waits about {seconds:.0f} seconds now; at most {most:g} leave time to answer it"
            retry = {"Retry-After": str(math.ceil(seconds - most))}
            raise APIError(429, f"{text}; send it again later", code="overloaded", headers=retry)

    async def encode(self, text: str, *, bare: bool, truncated: bool = False) -> list[int]:
        """Token ids of a text. `bare` and `truncated` as in `encode_prompt`.

        Raises:
            APIError: the model has no tokenizer.
            RequestError: the text is too long, or no Unicode text.
        """
        longest = self.llm.llm.plan.max_model_len - 1
        work = partial(encode_prompt, self.tokenizer, text, longest, bare=bare, truncated=truncated)
        found: list[int] = await self.llm.in_thread(work, lane=lane_of(len(text)))
        return found

    def check_model(self, name: str | None) -> None:
        """APIError for another model's name. A request may leave it out, or empty."""
        if name and name not in self.names:
            raise APIError(404, f"there is no model {name!r}; there is {self.names[0]!r}", "model", "model_not_found")

    def problem(self) -> str | None:
        """Why the engine cannot work; None while it can."""
        if self.llm.failure is not None:
            return str(self.llm.failure)
        if self.llm.stalled > self.config.step_timeout:
            return f"a step of the engine has not ended for {self.llm.stalled:.0f} seconds"
        return None

    def sampling_params(self, body: Sampling, **changes: Any) -> SamplingParams:
        """The model's defaults with the body's fields and `changes`.

        Raises:
            RequestError: a value is out of range.
        """
        given = {name: getattr(body, name) for name in SAMPLING_FIELDS}
        given["structured_outputs"] = structured_outputs(body)
        given["seed"] = _seed(body.seed)
        given = {name: value for name, value in given.items() if value is not None}
        return replace(self.llm.llm.default_sampling_params, **{**given, **changes})

    def check_count(self, prompts: int, params: SamplingParams, field: str = "prompt") -> None:
        """APIError for more prompts or samples than one request may have, or than may ever run and
        wait."""
        if prompts > self.config.max_prompts:
            raise APIError(400, f"{prompts} prompts; at most {self.config.max_prompts} at a time", field)
        most = min(self.config.max_samples, self.llm.llm.plan.num_rows + self.config.max_waiting)
        if prompts * params.n > most:
            text = f"{prompts} prompts with n = {params.n} samples each; at most {most} in all"
            raise APIError(400, text, "n" if params.n > 1 else field)


def _seed(seed: int | None) -> int | None:
    """Maps negative seeds as vLLM does; -1 is none."""
    if seed is None or not -(2**63) <= seed < 0:
        return seed
    return None if seed == -1 else seed + 2**63


def owner_of(scope: Scope) -> str:
    """What the names of a client's requests and responses begin with on the server: different for
    each API key, and empty without keys."""
    found: str = scope.get(OWNER, "")
    return found


def client_of(scope: Scope) -> str:
    """For whom the key of a request stands; empty without keys."""
    found: str = scope.get(CLIENT, "")
    return found


def record(scope: Scope, **facts: Any) -> None:
    """Adds to what the access log says of a request."""
    scope.setdefault(RECORD, {}).update(facts)


def check_body(form: str, body: Sampling) -> None:
    """APIError for a field that the form refuses (request_fields.py), and for stream options
    without a stream."""
    if body.stream_options is not None and body.stream_options.model_fields_set and not body.stream:
        raise APIError(400, "stream_options goes with stream: set stream to true", "stream_options")
    refuse_fields(form, body)
