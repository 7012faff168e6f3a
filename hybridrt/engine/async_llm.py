"""AsyncLLM: an LLM for asyncio. Its engine runs in a thread of its own, and requests are asynchronous iterators."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

from hybridrt.chat.chat import Chat
from hybridrt.chat.constraints import asks_for_grammar
from hybridrt.chat.conversation import Conversation, read_conversation
from hybridrt.engine.chats import ChatDelta, ChatOutput, ChatReader, Messages, PreparedChat, read_output
from hybridrt.engine.engine_loop import EngineLoop, StepMessage
from hybridrt.engine.grammar_compiler import WAITING
from hybridrt.engine.limits import PreparedPrompt
from hybridrt.engine.llm import LLM
from hybridrt.engine.outputs import Delta, RequestOutput, whole_output
from hybridrt.engine.prompts import Prompt
from hybridrt.errors import EngineError, RequestError, UnavailableError
from hybridrt.sampling_params import SamplingParams

# Tokenising this many characters takes about as long as handing them to another thread.
_INLINE_CHARACTERS = 1000
_DRAIN_CHECK_SECONDS = 0.05
_COMPILING = 16  # threads for requests with grammars, in addition to those that wait for large grammars


class DeltaStream(AsyncIterator[Delta]):
    """The deltas of one or several requests. Deltas of a sample that were not read yet are joined into one. So a slow
    reader needs memory for its output only, and delays no other reader. `close`, or dropping the last reference to the
    stream, aborts the samples that have not ended.

    Attributes:
        requests: each request's prompt tokens and parameters by its id, in order.
        running: samples that have not ended; 0 once the stream is closed.
        arrival: when its requests were submitted, in seconds of `time.monotonic()`.
        take: called with a delta that comes while the reader waits for one. If it returns True, the delta is done with
            and the reader waits on, until all samples have ended: a task of its own need not run for every token. A
            failure always goes to the reader. None: all deltas do.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self.requests: dict[str, PreparedPrompt] = {}
        self.running = 0
        self.arrival = time.monotonic()
        self.take: Callable[[Delta], bool] | None = None
        self._loop = loop
        self._gains: dict[tuple[str, int], Delta] = {}  # by sample
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        """Gives a delta to `take`, or adds it and wakes the reader. Call this in the event loop."""
        if not self.running:
            return
        self.running -= delta.finish_reason is not None
        waiter = None if self._waiter is None or self._waiter.done() else self._waiter
        if waiter is not None and delta.error is None and self.take is not None:
            try:
                taken = self.take(delta)
            except Exception as e:  # it is the reader's, and must not keep other streams from their deltas
                waiter.set_exception(e)
                return
            if taken:
                if not self.running:
                    waiter.set_result(None)
                return
        held = self._gains.setdefault((delta.request_id, delta.index), delta)
        if held is not delta:
            held.extend(delta)
        if waiter is not None:
            waiter.set_result(None)

    async def __anext__(self) -> Delta:
        """The next delta of any sample.

        Raises:
            EngineError: the sample failed.
        """
        while not self._gains:
            if not self.running:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delta = self._gains.pop(next(iter(self._gains)))
        if delta.error is not None:
            raise delta.error
        return delta

    def abort(self) -> None:
        """Ends the stream's requests with reason "abort"."""
        for request_id in self.requests:
            self._loop.abort(request_id)

    def close(self) -> None:
        """Aborts the requests that have not ended. Drops their later deltas."""
        self.take = None  # it may refer to this stream
        if self.running:
            self.running = 0
            self.abort()

    def __del__(self) -> None:
        self.close()


class AsyncLLM:
    """Serves an LLM to the tasks of one event loop. `close` frees the memory.

    Args:
        model: the first argument of `LLM`, or an LLM. `close` does not close an LLM that was passed, and other threads
            may go on calling its `generate` and `stream`.
        max_waiting: samples that may wait in addition to those that run; more are refused with QueueFullError.
        options: further arguments of `LLM`, if `model` is not an LLM.

    Attributes:
        llm: the LLM underneath.
        watchers: called in the event loop with every StepMessage.
        draining: no further request is taken.
    """

    def __init__(self, model: str | LLM, *, max_waiting: int = 4096, **options: Any) -> None:
        self._owned = not isinstance(model, LLM)
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.watchers: list[Callable[[StepMessage], None]] = []
        self._streams: WeakValueDictionary[str, DeltaStream] = WeakValueDictionary()
        self._left: dict[str, int] = {}  # by request: samples whose last delta has not been handed out
        self._names = count()
        self.draining = False
        self._events: asyncio.AbstractEventLoop | None = None
        self._tokenizing = ThreadPoolExecutor(2, thread_name_prefix="hybridrt-tokenize")
        self._compiling = ThreadPoolExecutor(WAITING + _COMPILING, thread_name_prefix="hybridrt-compile")
        self._loop = EngineLoop(self.llm.engine, self._deliver, self.llm.plan.num_rows + max_waiting)

    @property
    def failure(self) -> UnavailableError | None:
        """Why the engine has ended; None while it runs."""
        return self._loop.error

    @property
    def unfinished(self) -> int:
        """Samples that run or wait."""
        return self._loop.unfinished

    @property
    def stalled(self) -> float:
        """Seconds that the engine's present step has taken so far; 0 between steps."""
        return self._loop.stalled

    async def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> PreparedPrompt:
        """Checks a prompt and converts it to tokens; a long text, or one with a grammar to compile, in another thread.
        None: the model's default parameters.

        Raises:
            RequestError, MemoryBudgetError, QueueFullError: as `Engine.prepare`.
        """
        params = self.llm.default_sampling_params if params is None else params
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            return await self.in_thread(self.llm.engine.prepare, prompt, params, compiles=True)
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str) and len(text) > _INLINE_CHARACTERS:
            return await self.in_thread(self.llm.engine.prepare, prompt, params)
        return self.llm.engine.prepare(prompt, params)

    async def in_thread(self, work: Callable[..., Any], *arguments: Any, compiles: bool = False) -> Any:
        """Runs work on text (tokenising, a chat template) in another thread, so that it does not block the event loop.
        Work that `compiles` a grammar has threads of its own."""
        pool = self._compiling if compiles else self._tokenizing
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *arguments))

    def submit(
        self, prepared: PreparedPrompt | Sequence[PreparedPrompt], name: str | None = None, *, stream: bool = True
    ) -> DeltaStream:
        """Starts one request, or several that one reader reads.

        Args:
            name: the request's id; several requests get the ids name-0, name-1, … None: a new id.
            stream: False: one delta a sample, at its end.

        Raises (no request has then started):
            QueueFullError: too many samples wait already.
            RequestError: the name is taken.
            UnavailableError: the engine has failed, or the server is shutting down.
            EngineError: called from a second event loop.
        """
        if self.draining:
            raise UnavailableError("the server is shutting down; send the request to another one")
        events = asyncio.get_running_loop()
        if self._streams and events is not self._events:
            raise EngineError("an AsyncLLM serves one event loop at a time: end the requests of the other one first")
        if events is not self._events:
            self._left.clear()  # messages that an earlier loop has not taken are lost
        self._events = events
        name = f"async-{next(self._names)}" if name is None else name
        if isinstance(prepared, PreparedPrompt):
            batch = {name: prepared}
        else:
            batch = {f"{name}-{i}": prompt for i, prompt in enumerate(prepared)}
        # A request whose reader has gone blocks its id until its last deltas are here: they would go to the new one.
        for taken in (known for known in (name, *batch) if known in self._streams or known in self._left):
            raise RequestError(f"request id {taken!r} is in use; pass another one, or None to get one", "request_id")
        deltas = DeltaStream(self._loop)
        try:
            for request_id, prompt in batch.items():
                self._loop.submit(prompt, request_id, stream=stream)
                deltas.requests[request_id] = prompt
                self._left[request_id] = prompt.params.n
                deltas.running += prompt.params.n
        except Exception:
            deltas.close()
            raise
        self._streams |= dict.fromkeys((name, *batch), deltas)
        return deltas

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Yields deltas as they arrive; with n > 1 those of the samples interleave. If the iteration ends early, the
        request is aborted.

        Raises:
            RequestError, MemoryBudgetError, QueueFullError, UnavailableError: at the first delta.
            EngineError: the request failed.
        """
        deltas = self.submit(await self.prepare(prompt, params))
        try:
            async for delta in deltas:
                yield delta
        finally:
            deltas.close()

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """The whole output; with n > 1 `.outputs` has all samples. Raises what `generate` does; a task that is
        cancelled aborts the request."""
        return await self._complete(await self.prepare(prompt, params))

    async def _complete(self, prepared: PreparedPrompt) -> RequestOutput:
        deltas = self.submit(prepared, stream=False)
        try:
            ended = {(delta.request_id, delta.index): delta async for delta in deltas}
        finally:
            deltas.close()
        ((request_id, _),) = deltas.requests.items()
        return whole_output(request_id, prepared.tokens, prepared.params.n, ended)

    async def prepare_chat(self, conversation: Conversation, params: SamplingParams, chat: Chat) -> PreparedChat:
        """Checks a conversation and converts it to tokens, in another thread. Raises what `LLM.chat` raises first."""
        compiles = params.structured_outputs is not None or asks_for_grammar(conversation)
        prepare = self.llm.prepare_chat
        return await self.in_thread(prepare, conversation, params, chat, compiles=compiles)

    async def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        chat: Chat | None = None,
        **options: Any,
    ) -> AsyncIterator[ChatDelta]:
        """As `LLM.stream_chat`. If the iteration ends early, the request is aborted.

        Raises:
            as `LLM.stream_chat` and `generate`.
        """
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
        """The whole answer to one conversation, as `LLM.chat` gives it; with n > 1 `.outputs` has all samples."""
        params = self.llm.chat_sampling_params(params)
        prepared = await self.prepare_chat(read_conversation(messages, **options), params, chat or self.llm.chats())
        return read_output(prepared, await self._complete(prepared.prompt))

    def abort(self, name: str) -> bool:
        """Ends the requests that were submitted under a name, or the one of them that has this id, with reason "abort".
        False if none of them runs."""
        stream = self._streams.get(name)
        if stream is None or not stream.running:
            return False
        if name in stream.requests:
            self._loop.abort(name)
        else:
            stream.abort()
        return True

    def stream_of(self, request_id: str) -> DeltaStream | None:
        """The stream that a request's deltas go to; None if its reader has gone."""
        return self._streams.get(request_id)

    def abort_all(self) -> None:
        """Ends all requests with reason "abort"."""
        for stream in self._streams.values():
            stream.abort()

    async def drain(self, timeout: float) -> bool:
        """Takes no further requests, and waits up to `timeout` seconds for those that run. True if all have ended."""
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
        self.draining = True
        if not self._loop.close(timeout):
            return False
        self._tokenizing.shutdown(wait=False)
        self._compiling.shutdown(wait=False)
        if self._owned:
            self.llm.close()
        return True

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _deliver(self, message: StepMessage) -> None:
        """Called in the engine's thread. If the event loop is closed, no reader is left: aborts their requests."""
        assert self._events is not None, "a request was submitted there"
        try:
            self._events.call_soon_threadsafe(self._hand_out, message)
        except RuntimeError:
            for delta in message.deltas:
                self._loop.abort(delta.request_id)

    def _hand_out(self, message: StepMessage) -> None:
        # Rows with a prompt are the last ones of a step: first tokens do not wait for all the others.
        for delta in reversed(message.deltas):
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
