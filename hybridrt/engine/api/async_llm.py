"""AsyncLLM: an LLM for asyncio, whose requests are asynchronous iterators."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from hybridrt.base.config_json import check_fields, integer, number
from hybridrt.base.errors import ConfigError, EngineError, RequestError, UnavailableError
from hybridrt.base.errors_foreign import ASYNC_LLM_ATTRIBUTES, CALLS, knows_names, no_attribute
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.chat import Chat
from hybridrt.chat.constraints import asks_for_grammar
from hybridrt.chat.conversation import Conversation, read_conversation
from hybridrt.engine.api.chats import (
    ChatDelta,
    ChatOutput,
    ChatReader,
    Messages,
    PreparedChat,
    is_large_chat,
    read_output,
)
from hybridrt.engine.api.delta_stream import DeltaStream as DeltaStream
from hybridrt.engine.api.engine_loop import EngineLoop, StepMessage
from hybridrt.engine.api.image_prompts import takes_time
from hybridrt.engine.api.lanes import INLINE, Lane, Lanes, in_parts, is_quick, lane_of, size_of
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.request.intake import LatestParams, PreparedPrompt, check_client, check_name, check_prepared
from hybridrt.engine.request.outputs import Delta, RequestOutput, whole_output
from hybridrt.engine.request.prompts import Prompt

_DRAIN_CHECK_SECONDS = 0.05
MAX_PATCH_BYTES = 2**31  # of images of all requests that have not ended
_PUBLIC = {
    "abort", "abort_all", "chat", "close", "complete", "create", "drain", "failure", "generate", "llm", "prepare",
    "prepare_all", "stream_chat", "submit", "unfinished",
}  # fmt: skip


class AsyncLLM:
    """Serves an LLM to the tasks of one event loop. `close`, `with` or `async with` frees the
    memory.

    The constructor blocks for seconds to minutes; within an event loop, `await
    AsyncLLM.create(...)` loads in another thread. In a forked process, calls raise
    UnavailableError.

    Args:
        model: the first argument of `LLM`, or an LLM. `close` does not close an LLM that was
            passed, and other threads may go on calling its `generate` and `stream`.
        max_waiting: samples that may wait in addition to those that run; more are refused with
            QueueFullError, and so are images if those of other requests fill MAX_PATCH_BYTES.
        options: further arguments of `LLM`, if `model` is not an LLM.

    Raises:
        ConfigError: an argument cannot be used; and what `LLM` raises.

    Attributes:
        llm: the LLM underneath.
        watchers: called in the event loop with every StepMessage.
        draining: no further request is accepted.
    """

    def __init__(self, model: str | PathLike[str] | LLM, *, max_waiting: int = 4096, **options: Any) -> None:
        check_fields({"max_waiting": max_waiting}, {"max_waiting": integer(0, 2**31 - 1)})
        self._owned = not isinstance(model, LLM)
        if isinstance(model, LLM):
            _check_no_options(options)
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.watchers: list[Callable[[StepMessage], None]] = []
        self._streams: WeakValueDictionary[str, DeltaStream] = WeakValueDictionary()
        self._left: dict[str, int] = {}  # by request, how many samples have not handed out their last delta
        self._names = count()
        self.draining = False
        self._error_of_all: UnavailableError | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        self._lanes = Lanes(self.llm.config.client_weights)
        if self.llm.image_reader is not None:
            self.llm.image_reader.most_held = MAX_PATCH_BYTES
        self._loop = EngineLoop(self.llm.engine, self._deliver, self.llm.plan.num_rows + max_waiting)

    @classmethod
    async def create(cls, model: str | PathLike[str] | LLM, *, max_waiting: int = 4096, **options: Any) -> "AsyncLLM":
        """Calls the constructor in another thread. If the task is cancelled, the new object is
        closed as soon as it is complete.
        """
        pool = ThreadPoolExecutor(1, thread_name_prefix="hybridrt-build")
        building = pool.submit(partial(cls, model, max_waiting=max_waiting, **options))
        pool.shutdown(wait=False)
        try:
            return await asyncio.wrap_future(building)
        except asyncio.CancelledError:
            building.add_done_callback(_close_built)
            raise

    @property
    def failure(self) -> UnavailableError | None:
        """Why the engine takes no more requests; None while it does."""
        return self._loop.error

    @property
    def unfinished(self) -> int:
        """Samples that have not ended, running or waiting."""
        return self._loop.unfinished

    @property
    def stalled(self) -> float:
        """Seconds since the engine's present step began; 0 between steps."""
        return self._loop.stalled

    async def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, *, client: str = ""
    ) -> PreparedPrompt:
        """Checks and tokenises a prompt; a long text, or one with a grammar or images, in another thread.
        `params` None: the model's defaults. `client`: for whom; clients share the processes that read
        images. Raises as `Engine.prepare`.
        """
        (prepared,) = await self.prepare_all([prompt], params, client=client)
        return prepared

    async def prepare_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, *, client: str = ""
    ) -> list[PreparedPrompt]:
        """`prepare` for several prompts with the same parameters, some at a time, so that others
        are prepared in between.
        """
        check_client(client)
        params = self.llm.default_sampling_params if params is None else params
        sizes = list(map(size_of, prompts))
        compiles = isinstance(params, SamplingParams) and params.structured_outputs is not None
        sees = any(map(takes_time, prompts))
        inline = sum(sizes) <= INLINE and is_quick(params) and not sees
        lane: Lane = "images" if sees else "compile" if compiles else lane_of(sum(sizes))
        latest, found = LatestParams(), list[PreparedPrompt]()
        for start, end in in_parts(sizes):
            work = partial(self._prepare_some, prompts[start:end], params, latest, client)
            found += work() if inline else await self.in_thread(work, lane=lane, client=client)
        return found

    def _prepare_some(
        self, prompts: Sequence[Prompt], params: SamplingParams, latest: LatestParams, client: str
    ) -> list[PreparedPrompt]:
        return [self.llm.engine.intake.prepare(each, params, latest) for each in self.llm.with_spans(prompts, client)]

    async def in_thread(self, work: Callable[..., Any], *arguments: Any, lane: Lane = "text", client: str = "") -> Any:
        """Runs work (tokenising, a chat template) in a thread of a lane, so that the event loop
        goes on. `client`: for whom.
        """
        self._loop.check_process()
        return await asyncio.wrap_future(self._lanes.submit(lane, partial(work, *arguments), client))

    def submit(
        self,
        prepared: PreparedPrompt | Sequence[PreparedPrompt],
        name: str | None = None,
        *,
        stream: bool = True,
        client: str = "",
    ) -> DeltaStream:
        """Starts one request, or several for one reader.

        Args:
            name: the request's id; several requests get the ids name-0, name-1, … None: a new id.
            stream: False: one delta a sample, at its end.
            client: for whom: with `target_itl_ms`, clients share prompt computation fairly.

        Raises (no request has then started):
            QueueFullError: too many samples wait already.
            RequestError: an argument is of the wrong kind, or the name is taken.
            UnavailableError: the engine has failed, or the server is shutting down.
            EngineError: a second event loop, while the first one has requests.
        """
        if self.draining:
            raise UnavailableError("the server is shutting down; send the request to another one")
        name = f"async-{next(self._names)}" if name is None else name
        check_client(client)
        batch = _named(prepared, name)
        self._enter(asyncio.get_running_loop())
        # If a reader has gone, a new request of its id would get its last deltas.
        for taken in (known for known in (name, *batch) if known in self._streams or known in self._left):
            raise RequestError(f"request id {taken!r} is in use; pass another one, or None to get one", "request_id")
        deltas = DeltaStream(self._loop)
        try:
            self._loop.submit(batch, stream=stream, client=client)
            for request_id, prompt in batch.items():
                deltas.requests[request_id] = prompt
                self._left[request_id] = prompt.params.n
                deltas.running += prompt.params.n
        except Exception:
            deltas.close()
            raise
        self._streams |= dict.fromkeys((name, *batch), deltas)
        return deltas

    def _enter(self, events: asyncio.AbstractEventLoop) -> None:
        """Ends requests of a closed one."""
        if events is self._events:
            return
        if self._events is not None and self._events.is_closed():
            for stream in list(self._streams.values()):
                stream.close()
            self._streams.clear()
        if self._streams:
            raise EngineError("an AsyncLLM serves one event loop at a time: end the requests of the other one first")
        self._left.clear()  # an earlier loop's messages are lost
        self._events = events

    @knows_names("generate", CALLS)
    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, client: str = ""
    ) -> AsyncIterator[Delta]:
        """Yields deltas as they arrive; with n > 1 those of the samples interleave. If the
        iteration ends early, the request is aborted. `client` as for `submit`.

        Raises:
            RequestError, MemoryBudgetError, QueueFullError, UnavailableError: at the first delta.
            EngineError: the request failed.
        """
        deltas = self.submit(await self.prepare(prompt, params, client=client), client=client)
        try:
            async for delta in deltas:
                await self._spell_out(delta)
                yield delta
        finally:
            deltas.close()

    @knows_names("complete", CALLS)
    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, *, client: str = ""
    ) -> RequestOutput:
        """The whole output; with n > 1 `.outputs` has all samples. Raises as `generate`. Cancelling
        the task aborts the request. `client` as for `submit`.
        """
        return await self._complete(await self.prepare(prompt, params, client=client), client)

    async def _complete(self, prepared: PreparedPrompt, client: str = "") -> RequestOutput:
        deltas = self.submit(prepared, stream=False, client=client)
        try:
            ended = {(delta.request_id, delta.index): delta async for delta in deltas}
        finally:
            deltas.close()
        for delta in ended.values():
            await self._spell_out(delta)
        ((request_id, _),) = deltas.requests.items()
        return whole_output(request_id, prepared.tokens, prepared.params.n, ended)

    async def _spell_out(self, delta: Delta) -> None:
        if delta.prompt_scores is not None:
            await self.in_thread(delta.spell_out)

    async def prepare_chat(self, conversation: Conversation, params: SamplingParams, chat: Chat) -> PreparedChat:
        """Checks and tokenises a conversation in another thread. Raises what `LLM.chat` raises
        first.
        """
        compiles = params.structured_outputs is not None or asks_for_grammar(conversation)
        compiles = compiles or any(tool.grammar is not None for tool in conversation.offered)
        lane: Lane = "compile" if compiles else "text"
        if is_large_chat(conversation):
            lane = "long text"  # must not wait among small grammars
        if chat.foreign:
            lane = "template"
        if conversation.images:
            lane = "images"
        client = conversation.client
        return await self.in_thread(self.llm.prepare_chat, conversation, params, chat, lane=lane, client=client)

    async def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        chat: Chat | None = None,
        **options: Any,
    ) -> AsyncIterator[ChatDelta]:
        """Streams an answer (see `LLM.stream_chat`). If the iteration ends early, the request is
        aborted."""
        params = self.llm.chat_sampling_params(params)
        prepared = await self.prepare_chat(read_conversation(messages, **options), params, chat or self.llm.chats())
        deltas, reader = self.submit(prepared.prompt), ChatReader(prepared)
        try:
            async for delta in deltas:
                yield reader.read(delta)
        finally:
            deltas.close()

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        chat: Chat | None = None,
        **options: Any,
    ) -> ChatOutput:
        """The whole answer to one conversation, as `LLM.chat` gives it; with n > 1 `.outputs` has
        all samples.
        """
        params = self.llm.chat_sampling_params(params)
        prepared = await self.prepare_chat(read_conversation(messages, **options), params, chat or self.llm.chats())
        return read_output(prepared, await self._complete(prepared.prompt))

    def abort(self, name: str) -> bool:
        """Ends the requests of a name, or the one with this id, with reason "abort". False if none
        runs.
        """
        check_name(name)
        stream = self._streams.get(name)
        if stream is None or not stream.running:
            return False
        if name in stream.requests:
            self._loop.abort(name)
        else:
            stream.abort()
        return True

    def stream_of(self, request_id: str) -> DeltaStream | None:
        """The stream that reads a running request; None if there is none of this id. RequestError if it is no id."""
        check_name(request_id)
        return self._streams.get(request_id)

    def abort_all(self, error: UnavailableError | None = None) -> None:
        """Ends all requests. `error`: their readers get it, and not an answer that looks whole; no
        request may follow.
        """
        self._error_of_all = error
        for stream in self._streams.values():
            stream.abort()

    async def drain(self, timeout: float) -> bool:
        """Refuses new requests and waits up to `timeout` seconds for those that run. True if all
        have ended.
        """
        self._loop.check_process()
        _check_seconds(timeout)
        self.draining = True
        deadline = asyncio.get_running_loop().time() + timeout
        while self.unfinished and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_DRAIN_CHECK_SECONDS)
        return not self.unfinished

    def close(self, timeout: float | None = None) -> bool:
        """Aborts all requests and ends the engine's thread. Closes the LLM if it was made here.

        Returns:
            False if a step has not ended within `timeout` seconds; the LLM is then not closed.
        """
        if timeout is not None:
            _check_seconds(timeout)
        self.draining = True
        if not self._loop.close(timeout):
            return False
        self._lanes.close()
        if self._owned:
            self.llm.close()
        return True

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)  # waits for the end of a step

    if not TYPE_CHECKING:  # a type checker still finds misspelt names

        def __getattr__(self, name):
            raise no_attribute(self, name, ASYNC_LLM_ATTRIBUTES)

    def __dir__(self) -> list[str]:
        """The other public names are the server's."""
        return sorted({*object.__dir__(self)} & {*dir(object), *_PUBLIC})

    def _deliver(self, message: StepMessage) -> None:
        """Runs in the engine's thread. If the event loop is closed, no reader is left: aborts the
        requests.
        """
        assert self._events is not None, "a request was submitted there"
        try:
            self._events.call_soon_threadsafe(self._hand_out, message)
        except RuntimeError:
            for delta in message.deltas:
                self._loop.abort(delta.request_id)

    def _hand_out(self, message: StepMessage) -> None:
        # First tokens come first. They are last in a step.
        for delta in reversed(message.deltas):
            if delta.finish_reason == "abort":
                delta.error = delta.error or self._error_of_all
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)
            if delta.finish_reason is not None:
                left = self._left.pop(delta.request_id, 1) - 1
                if left:
                    self._left[delta.request_id] = left
        message.handed_out.set()
        for watch in self.watchers:
            watch(message)


def _named(prepared: PreparedPrompt | Sequence[PreparedPrompt], name: str) -> dict[str, PreparedPrompt]:
    """Raises RequestError if one is no request, or the name is invalid."""
    check_name(name)
    if isinstance(prepared, Sequence):
        batch = {f"{name}-{i}": prompt for i, prompt in enumerate(prepared)}
    else:
        batch = {name: prepared}
    for request_id, prompt in batch.items():
        check_name(request_id)
        check_prepared(prompt)
    return batch


def _check_seconds(timeout: object) -> None:
    check_fields({"timeout": timeout}, {"timeout": number(0, 1e9)})


def _check_no_options(options: dict[str, Any]) -> None:
    for name in options:
        raise ConfigError(f"{name} is an option of the LLM, which was passed as it is: build that one with it")


def _close_built(building: "Future[AsyncLLM]") -> None:
    if not building.cancelled() and building.exception() is None:
        building.result().close()
