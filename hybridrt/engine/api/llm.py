"""LLM: a model with its engine and tokenizer, as `generate`, `stream`, `chat` and `stream_chat`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Never, NoReturn, Unpack, cast, overload

import numpy as np
from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import EngineError
from hybridrt.base.errors_foreign import CALLS, ENGINE, LLM_ATTRIBUTES, knows_names, no_attribute, refuse
from hybridrt.base.interrupts import Interrupts
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.turns import undisturbed
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import ChatOptions, Conversation, read_conversation
from hybridrt.collectives.groups import TPGroup
from hybridrt.engine.api.chats import (
    ChatDelta,
    ChatOutput,
    ChatReader,
    Chats,
    Messages,
    PreparedChat,
    as_conversations,
    prepare_chat,
    read_output,
)
from hybridrt.engine.api.embeddings import check_dimensions, embedding, pooling_params
from hybridrt.engine.api.image_prompts import read_images, with_embeddings
from hybridrt.engine.api.llm_cache import PrefixCacheCalls
from hybridrt.engine.api.sampling_defaults import default_sampling_params
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.core.load_engine import load_engine, read_tokenizer
from hybridrt.engine.replicas.replicated_engine import ReplicatedEngine
from hybridrt.engine.request.intake import PreparedPrompt, check_client
from hybridrt.engine.request.outputs import Delta, DeltaQueue, RequestOutput, whole_output
from hybridrt.engine.request.prompts import Prompt
from hybridrt.engine.text.tokenizer import HFTokenizer
from hybridrt.images.reader import image_reader
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor, check_shards, check_world
from hybridrt.runtime.load.load_target import load_target


class LLM(PrefixCacheCalls):
    """Loads a model and generates with it. `close` (or `with`) gives the memory back.

    Several threads may call `generate`, `stream` and `close`: they take turns, a step each, and
    every step computes for all of them. Ctrl-C is handled between two steps.

    The keyword arguments are the fields of `EngineConfig`. With tp_size > 1 this process is rank 0:
    it starts the others or, under torchrun, leads those that exist. A script runs unchanged under
    torchrun: on other ranks this constructor serves rank 0, then ends the process.

    Raises:
        ConfigError, CheckpointError, BackendError, DeviceError, MemoryBudgetError: the text says
            what to change.
        RankError: a tensor-parallel rank was lost.

    Attributes:
        default_sampling_params: parameters of requests without SamplingParams: the checkpoint's
            generation_config.json, else temperature 1 and the other defaults
            (sampling_defaults.py). To change single fields, pass
            `dataclasses.replace(llm.default_sampling_params, ...)`.
    """

    @knows_names("LLM", ENGINE)
    def __init__(
        self,
        model: str | PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_running_requests: int | None = None,
        memory_fraction: float | None = None,
        page_size: int = 16,
        chunked_prefill_size: int = 8192,
        target_itl_ms: float | Literal["auto"] | None = None,
        max_ttft_factor: float | None = None,
        client_weights: Mapping[str, float] | None = None,
        mamba_ssm_dtype: str = "float32",
        mamba_ssm_rounding: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_scales: str = "auto",
        state_mode: str = "auto",
        attention_backend: str = "auto",
        prefill_attention_backend: str | None = None,
        linear_attn_backend: str = "auto",
        cuda_graph: bool = True,
        cuda_graph_max_bs: int | None = None,
        cuda_graph_prompts: bool = True,
        overlap: bool = True,
        speculative: SpeculativeConfig | None = None,
        images: bool = True,
        prompt_embeds: bool = False,
        tp_size: int = 1,
        expert_parallel: bool = False,
        dp_size: int = 1,
        transfer_bytes: int = 0,
        prefix_cache: bool = True,
        cache_slots: int | None = None,
        host_cache_bytes: int = 0,
        encoder_cache_tokens: int = 16384,
        encoder_host_tokens: int = 0,
        request_log: str | None = None,
        audit_hits: float = 0.0,
        seed: int = 0,
    ) -> None:
        options = dict(locals())  # the fields of EngineConfig
        del options["self"]
        self.config = EngineConfig(**options | ({"model": str(model)} if isinstance(model, PathLike) else {}))
        check_world(tp_size)
        with undisturbed():
            self._load(_shows_bars())

    def _load(self, progress: bool) -> None:
        # What `close` ends: the executor over several ranks, or the replicas; None with one rank.
        self._split: TensorParallelExecutor | None = None
        self._replicas: ReplicatedEngine | None = None
        self._engine: Engine | None
        if self.config.dp_size > 1:
            path = self._load_replicas()
        else:
            loaded = load_engine(self.config, progress)
            runner, self.tokenizer, self._split = loaded.runner, loaded.tokenizer, loaded.split
            self._engine, self.model_config, path = loaded.engine, runner.model_config, runner.model_path
            self.plan, self.device = runner.memory_plan, runner.device
        self.default_sampling_params = default_sampling_params(path)
        hf = self.tokenizer.hf if isinstance(self.tokenizer, HFTokenizer) else None
        self.image_reader = image_reader(Path(path), self.model_config.vision, hf, self.config.client_weights)
        self.chats = Chats(self.tokenizer, self.image_reader)

    def _load_replicas(self) -> Path:
        config = self.config
        self.tokenizer = read_tokenizer(config)
        path, target = load_target(config, TPGroup(size=config.tp_size))
        if config.expert_parallel:
            check_shards(config)
        self.model_config, self.device = target.model_config, target.device
        self._replicas = ReplicatedEngine(config, target.model_config, self.tokenizer)
        self.plan = self._replicas.plan
        self._engine = cast(Engine, self._replicas)  # what is called of it here and by servers
        return path

    @property
    def engine(self) -> Engine:
        """The engine, for callers with a loop of their own. EngineError after `close`."""
        if self._engine is None:
            raise EngineError("this LLM is closed; build a new one")
        self._engine.turns.check_process()
        return self._engine

    @overload
    def generate(
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        client: str = "",
    ) -> list[RequestOutput]: ...

    @overload
    def generate(self, prompts: Sequence[PreparedPrompt], *, client: str = "") -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        client: str = "",
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Sequence[PreparedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        client: str = "",
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Runs all prompts to their end.

        Args:
            prompts: one prompt or several, of any kinds: each a string, token ids (a list, a tuple, or a 1-D integer
                array of numpy or torch), {"prompt": text}, {"prompt": text, "images": [...]},
                {"prompt_token_ids": ids}, or with the option `prompt_embeds` {"prompt_embeds": floats [n, hidden]}.
                What `Engine.prepare` has returned stays as it is, with its own parameters.
            sampling_params: for all prompts, or one each; None is `default_sampling_params`.
            client: for whom they are: with `target_itl_ms`, clients share prompt computation fairly.

        Returns:
            One output a prompt, in order. With n > 1 it is the first sample, and `.outputs` has all n.

        Raises:
            RequestError, MemoryBudgetError: a prompt cannot be taken; none was started.
            UnknownNameError: there is no such argument.
            EngineError: a step failed. As after an interrupt, what else was started is aborted and nothing is leaked.
        """
        for name in unknown:
            refuse("generate", name, CALLS, ("prompts", "sampling_params", "client"))
        check_client(client)
        params = self.default_sampling_params if sampling_params is None else sampling_params
        batch = self.engine.intake.prepare_all(self.with_spans(prompts, client), params)
        ids, ended = self._run(batch, client)
        return [
            whole_output(request_id, prepared.tokens, prepared.params.n, ended)
            for request_id, prepared in zip(ids, batch, strict=True)
        ]

    def _run(self, batch: Sequence[PreparedPrompt], client: str = "") -> tuple[list[str], dict[tuple[str, int], Delta]]:
        """Runs requests to their end. Returns their ids, and the last delta of each sample."""
        engine, queue = self.engine, DeltaQueue()
        total = left = sum([prepared.params.n for prepared in batch])
        ended: dict[tuple[str, int], Delta] = {}
        hidden = len(batch) < 2 or not _shows_bars()
        with Interrupts() as interrupts, tqdm(total=total, disable=hidden, unit="sample", desc="generate") as bar:
            try:
                with engine.turns:
                    ids = [engine.submit(prepared, stream=False, queue=queue, client=client) for prepared in batch]
                while left:
                    with engine.turns:
                        if not queue.moved:
                            engine.run_step()
                        deltas = queue.take_deltas()
                        left -= len(deltas)
                        if not left:
                            engine.finish_launched()
                    for delta in deltas:
                        if delta.error is not None:
                            raise delta.error
                        ended[delta.request_id, delta.index] = delta
                    if interrupts.waiting:
                        interrupts.raise_if_interrupted()
                    bar.update(len(deltas))
                return ids, ended
            except BaseException:
                with engine.turns:
                    engine.abandon(queue)
                    engine.finish_launched()
                raise

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> np.ndarray:
        """Prompts as vectors: hidden states after the final norm.

        Args:
            prompts: as in `generate`.
            pooling: "last": that of the last token; "mean": the mean of all tokens, which reads no
                cached prefix.
            normalize: to length 1.
            dimensions: keep the first so many; None keeps all.

        Returns:
            [prompts, dimensions] float32.

        Raises:
            RequestError, EngineError: as `generate`.
        """
        check_dimensions(dimensions, self.model_config.hidden_size)
        batch = self.engine.intake.prepare_all(self.with_spans(prompts), pooling_params(pooling))
        ids, ended = self._run(batch)
        sums = [(ended[request_id, 0].pooled, len(p.tokens)) for request_id, p in zip(ids, batch, strict=True)]
        return np.stack([embedding(*each, pooling, dimensions=dimensions, normalize=normalize) for each in sums])

    @knows_names("stream", CALLS)
    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, client: str = ""
    ) -> Iterator[Delta]:
        """Yields deltas as steps give them; with n > 1 the samples interleave. Once the iterator is
        closed or dropped, the engine's next step aborts the request. `prompt` and `client` as in
        `generate`; None means `default_sampling_params`.

        Raises:
            RequestError, MemoryBudgetError: at once, not at the first delta.
            EngineError: while iterating: a step failed.
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        check_client(client)
        return self._stream(self.engine.prepare(self.with_spans(prompt, client), params), client)

    def with_spans(self, prompts: Any, client: str = "") -> Any:
        """One prompt or several, those with images as token ids and spans. Others stay as they are. `client` as in
        `generate`. RequestError: an image cannot be taken."""
        given = with_embeddings(prompts) if self.config.prompt_embeds else prompts  # the intake refuses them
        if self.image_reader is None or self.tokenizer is None:
            return given  # the intake refuses images
        return read_images(given, self.image_reader, self.tokenizer, self.plan.max_model_len - 1, client)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        **options: Unpack[ChatOptions],
    ) -> list[ChatOutput]:
        """Answers one conversation, or several at once.

        Args:
            messages: a list of {"role", "content"}, in OpenAI's form; or a list of such lists.
            sampling_params: for all conversations; None is `default_sampling_params` with all the room there is.
            tools: functions that the model may call: {"type": "function", "function": {"name", "parameters"}}.
            tool_choice: "auto" (also None), "none", "required", or {"type": "function", "function": {"name"}}.
            chat_template: Jinja text; None is the model's own.
            tool_parser, reasoning_parser: names of formats (docs/chat.md); "auto" goes by the template, "none" is off.
            options: see ChatOptions.

        Returns:
            One answer a conversation, in order. With n > 1 it is the first sample, and `.outputs` has all n.

        Raises:
            RequestError, MemoryBudgetError: a conversation cannot be taken; none was started.
            CheckpointError: there is no chat template, or it fails.
            EngineError: the errors of `generate`.
        """
        chat = self.chats(chat_template, tool_parser, reasoning_parser)
        given = as_conversations(messages, {"tools": tools, "tool_choice": tool_choice, **options})
        params = self.chat_sampling_params(sampling_params)
        batch = [self.prepare_chat(conversation, params, chat) for conversation in given]
        outputs = self.generate([each.prompt for each in batch])
        return [read_output(each, output) for each, output in zip(batch, outputs, strict=True)]

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        chat: Chat | None = None,
        **options: Any,
    ) -> Iterator[ChatDelta]:
        """Yields new parts of the answer to one conversation, as `stream` does.

        Args:
            chat: from `chats`; None is the model's own.
            options: `tools`, `tool_choice` and ChatOptions, as in `chat`.

        Raises:
            as `chat`, at once; EngineError while iterating.
        """
        params = self.chat_sampling_params(sampling_params)
        prepared = self.prepare_chat(read_conversation(messages, **options), params, chat or self.chats())
        reader = ChatReader(prepared)
        return (reader.read(delta) for delta in self._stream(prepared.prompt))

    def chat_sampling_params(self, params: SamplingParams | None) -> SamplingParams:
        """The parameters of a chat. None: the model's default, with all the room there is."""
        return replace(self.default_sampling_params, max_tokens=None) if params is None else params

    def prepare_chat(self, conversation: Conversation, params: SamplingParams, chat: Chat) -> PreparedChat:
        """Checks and tokenises a conversation. Raises what `chat` raises before it starts."""
        assert self.tokenizer is not None, "there is no Chat without a tokenizer"
        return prepare_chat(self.engine, self.tokenizer, chat, conversation, params)

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute(self, name, LLM_ATTRIBUTES)

    def expert_tokens(self) -> list[list[int]]:
        """Tokens that each rank's experts have computed, [layers][ranks], counted once for each
        expert; [] without `expert_parallel`. Any thread may call it; it waits for no step."""
        if self._replicas is not None:
            return self._replicas.expert_tokens
        return self._split.runner.expert_loads.read() if self._split else []

    def close(self) -> None:
        """Aborts all requests and frees the model and the pools at once, without a garbage
        collection. A second call completes what an exception has interrupted. With tensor
        parallelism the other ranks end too. A fork of the process only forgets the engine: its
        requests belong to the parent.
        """
        engine = self._engine
        with Interrupts():
            try:
                if engine is not None and engine.turns.in_own_process:
                    engine.intake.compiler.close()
                    if self.image_reader is not None:
                        self.image_reader.close()
                    with engine.turns:
                        engine.abort_all()
                        engine.finish_launched()
                        self._engine = None
            finally:
                self._engine = None
                if self._split:
                    self._split.close()
                    self._split = None
                if self._replicas:
                    self._replicas.close()
                    self._replicas = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _stream(self, prepared: PreparedPrompt, client: str = "") -> Iterator[Delta]:
        """Ends the request if the reader leaves."""
        engine, queue, running = self.engine, DeltaQueue(), prepared.params.n
        try:
            with engine.turns:
                engine.submit(prepared, queue=queue, client=client)
            while running:
                with engine.turns:
                    if not queue.moved:
                        self.engine.run_step()
                    deltas = queue.take_deltas()
                    running -= sum(delta.finish_reason is not None for delta in deltas)
                    if not running or any(delta.error for delta in deltas):
                        engine.abandon(queue)
                        engine.finish_launched()  # it holds nothing then
                _raise_error(deltas)
                yield from deltas
        finally:
            # The collector may run this within a step: only note the queue.
            engine.abandon(queue)


def _shows_bars() -> bool:
    """Whether standard error is a terminal, or tqdm has found a notebook. `sys.stderr` may be None."""
    return issubclass(tqdm, tqdm_notebook) or (sys.stderr is not None and sys.stderr.isatty())


def _raise_error(deltas: Sequence[Delta]) -> None:
    for delta in deltas:
        if delta.error is not None:
            raise delta.error
