"""LLM: a model, its engine and its tokenizer behind two methods, `generate` and `stream`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import overload

from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook

from hybridrt.config import EngineConfig, SpeculativeConfig
from hybridrt.engine.cache_dump import write_dump
from hybridrt.engine.delta_queue import DeltaQueue
from hybridrt.engine.engine import Engine
from hybridrt.engine.limits import PreparedPrompt
from hybridrt.engine.outputs import Delta, RequestOutput
from hybridrt.engine.prompts import Prompt, as_prompts
from hybridrt.engine.sampling_defaults import default_sampling_params
from hybridrt.engine.tokenizer import load_tokenizer
from hybridrt.errors import EngineError, RequestError
from hybridrt.runtime.interrupts import Interrupts
from hybridrt.runtime.model_runner import ModelRunner
from hybridrt.runtime.tensor_parallel import TensorParallelExecutor, check_world
from hybridrt.sampling_params import SamplingParams


class LLM:
    """Loads a model and generates with it. `close` (or `with`) gives the memory back.

    Several threads may call `generate`, `stream` and `close`: they take turns, a step each, and every step computes
    for all of them. Ctrl-C is taken between two steps.

    The keyword arguments are the fields of `EngineConfig`, and are explained there. With tp_size > 1 this process is
    rank 0: it starts the others itself or, under torchrun, leads those that are there. A script runs unchanged under
    torchrun: on the other ranks this constructor serves rank 0, then ends their process.

    Raises:
        ConfigError, CheckpointError, BackendError, DeviceError, MemoryBudgetError: the text says what to change.
        RankError: a tensor-parallel rank was lost.

    Attributes:
        default_sampling_params: of requests without SamplingParams: what the checkpoint's generation_config.json sets,
            else temperature 1 and the other defaults (hybridrt.engine.sampling_defaults). To change single fields of
            them, pass `dataclasses.replace(llm.default_sampling_params, ...)`.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
        max_model_len: int | None = None,
        max_running_requests: int | None = None,
        memory_fraction: float = 0.85,
        page_size: int = 16,
        chunked_prefill_size: int = 8192,
        target_itl_ms: float | None = None,
        mamba_ssm_dtype: str = "float32",
        state_mode: str = "auto",
        attention_backend: str = "auto",
        prefill_attention_backend: str | None = None,
        linear_attn_backend: str = "auto",
        cuda_graph: bool = True,
        cuda_graph_max_bs: int | None = None,
        overlap: bool = True,
        speculative: SpeculativeConfig | None = None,
        tp_size: int = 1,
        transfer_bytes: int = 0,
        prefix_cache: bool = True,
        cache_slots: int | None = None,
        seed: int = 0,
    ) -> None:
        options = dict(locals())  # the parameters, which are the fields of EngineConfig
        del options["self"]
        self.config = EngineConfig(**options | {"model": str(model)})
        check_world(tp_size)
        progress = _shows_bars()
        self._split = TensorParallelExecutor(self.config, progress=progress) if tp_size > 1 else None
        runner = self._split.runner if self._split else ModelRunner(self.config, progress=progress)
        self.model_config = runner.model_config
        self.plan = runner.memory_plan
        self.device = runner.device
        self.default_sampling_params = default_sampling_params(runner.model_path)
        self.tokenizer = load_tokenizer(runner.model_path)
        self._engine: Engine | None = Engine.from_config(self.config, runner, self.tokenizer, split=self._split)

    @property
    def engine(self) -> Engine:
        """The engine underneath, for `add_request`, `step`, `abort` and `counters`."""
        if self._engine is None:
            raise EngineError("this LLM is closed; build a new one")
        return self._engine

    @overload
    def generate(
        self, prompts: Prompt, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Runs all prompts to their end.

        Args:
            prompts: one prompt or several, of any kinds: each a string, token ids (a list, a tuple, or a 1-D integer
                array of numpy or torch), {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: for all prompts, or one each; None is `default_sampling_params`.

        Returns:
            One output a prompt, in order. With n > 1 it is the first sample, and `.outputs` has all n.

        Raises:
            RequestError, MemoryBudgetError: a prompt cannot be taken; none was started.
            EngineError: a step failed. As after an interrupt, what else was started is aborted and nothing is leaked.
        """
        batch = self._prepare(as_prompts(prompts), sampling_params)
        engine, queue = self.engine, DeltaQueue()
        total = sum(prepared.params.n for prepared in batch)
        ended: dict[tuple[str, int], Delta] = {}
        with Interrupts() as interrupts, _progress_bar(total, len(batch)) as bar:
            try:
                with engine.turns:
                    ids = [engine.submit(prepared, stream=False, queue=queue) for prepared in batch]
                while len(ended) < total:
                    with engine.turns:
                        if not queue:
                            engine.run_step()
                        deltas = queue.take()
                    _raise_error(deltas)
                    ended.update({(delta.request_id, delta.index): delta for delta in deltas})
                    interrupts.check()
                    bar.update(len(deltas))
                return [
                    whole_output(request_id, prepared, ended) for request_id, prepared in zip(ids, batch, strict=True)
                ]
            finally:
                with engine.turns:
                    engine.abandon(queue)
                    engine.finish_launched()

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """Yields deltas as steps give them; with n > 1 the samples interleave. Once the iterator is closed or has gone,
        the engine's next step aborts the request. The prompt is one of those that `generate` takes; None means
        `default_sampling_params`.

        Raises:
            RequestError, MemoryBudgetError: at once, not at the first delta.
            EngineError: while iterating: a step failed.
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        return self._stream(self.engine.prepare(prompt, params))

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes, as `Engine.reset_prefix_cache` does."""
        with self.engine.turns:
            return self.engine.reset_prefix_cache()

    def dump_cache(self, path: str | Path, *, text: bool = False) -> None:
        """Writes what the prefix cache holds now to a JSON file, for `hybridrt inspect --cache`.

        Args:
            text: also write the cached texts, if there is a tokenizer. Without it the file holds none of them.

        Raises:
            OSError: the file cannot be written.
        """
        with self.engine.turns:
            dump = self.engine.cache_dump(text=text)
        write_dump(path, dump)

    def close(self) -> None:
        """Aborts all requests and frees the model and the pools. A second call does nothing, or what an exception kept
        the first from doing."""
        engine = self._engine
        with Interrupts():
            try:
                if engine is not None:
                    with engine.turns:
                        engine.abort_all()
                        engine.finish_launched()
                        self._engine = None
            finally:
                self._engine = None
                if self._split:
                    self._split.close()
                    self._split = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _prepare(
        self, prompts: list[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[PreparedPrompt]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.default_sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts and {len(sampling_params)} SamplingParams; pass one for all, or one each"
            )
        return [self.engine.prepare(p, params) for p, params in zip(prompts, sampling_params, strict=True)]

    def _stream(self, prepared: PreparedPrompt) -> Iterator[Delta]:
        engine, queue, running = self.engine, DeltaQueue(), prepared.params.n
        try:
            with engine.turns:
                engine.submit(prepared, queue=queue)
            while running:
                with engine.turns:
                    if not queue:
                        self.engine.run_step()
                    deltas = queue.take()
                    running -= sum(delta.finish_reason is not None for delta in deltas)
                    if not running or any(delta.error for delta in deltas):
                        engine.abandon(queue)
                        engine.finish_launched()  # what is launched for it is over: it holds nothing
                _raise_error(deltas)
                yield from deltas
        finally:
            # The garbage collector may run this in any thread, in the middle of a step: it only notes the queue.
            engine.abandon(queue)


def _shows_bars() -> bool:
    """Whether progress bars are seen: standard error is a terminal, or tqdm has found a notebook. `sys.stderr` is None
    where standard error is closed."""
    return issubclass(tqdm, tqdm_notebook) or (sys.stderr is not None and sys.stderr.isatty())


def _progress_bar(total: int, prompts: int) -> tqdm:
    return tqdm(total=total, disable=prompts < 2 or not _shows_bars(), unit="sample", desc="generate")


def _raise_error(deltas: Sequence[Delta]) -> None:
    for delta in deltas:
        if delta.error is not None:
            raise delta.error


def whole_output(request_id: str, prepared: PreparedPrompt, ended: Mapping[tuple[str, int], Delta]) -> RequestOutput:
    """The samples of a prompt, each of whose tokens came in one delta."""
    scores = ended[request_id, 0].prompt_logprobs
    samples = (_sample(prepared.tokens, scores, ended[request_id, index]) for index in range(prepared.params.n))
    first, *siblings = samples
    first.siblings = tuple(siblings)
    return first


def _sample(prompt: list[int], scores: list[dict[int, float] | None] | None, delta: Delta) -> RequestOutput:
    assert delta.finish_reason is not None and delta.metrics is not None, "it has ended"
    return RequestOutput(
        request_id=delta.request_id,
        index=delta.index,
        prompt_token_ids=prompt,
        token_ids=delta.token_ids,
        text=delta.text,
        finish_reason=delta.finish_reason,
        logprobs=delta.logprobs,
        metrics=delta.metrics,
        prompt_logprobs=scores,
    )
