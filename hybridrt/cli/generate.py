"""`hybridrt generate`: continues prompts and prints text as it comes."""

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridrt.base.errors import RankError, RequestError, shown
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.structured_outputs import StructuredOutputs
from hybridrt.cli.options import (
    EMBEDDED,
    MAX_CHARS,
    EngineOptions,
    ModelOption,
    SamplingOptions,
    SpeculativeOptions,
    option,
    read_text,
    setting,
)
from hybridrt.engine.api.sampling_defaults import default_sampling_params
from hybridrt.parallel.torchrun import world

if TYPE_CHECKING:
    from hybridrt.engine.api.llm import LLM
    from hybridrt.engine.request.outputs import Delta, RequestMetrics

LABEL_WIDTH = 60
_PATH = re.compile(r"(\.{0,2}|~)/[\w.-][\w./~-]*")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
JSON_FIELDS = ("index", "text", "token_ids", "finish_reason", "logprobs")  # fields of Delta in a line of --json


@dataclass(frozen=True)
class PromptSampling(SamplingOptions):
    """Sampling of prompts, of which several samples may be taken."""

    logprobs: int | None = setting("With --json: so many log-probabilities a token.", "none", "N")
    n: Annotated[int | None, typer.Option("-n", metavar="N", help="Samples of each prompt. [1]")] = None
    json_schema: str | None = setting("Print JSON that this file's schema accepts.", "none", "FILE")
    regex: str | None = setting("Print text that this expression matches.", "none", "TEXT")

    def given(self) -> dict[str, Any]:
        values = super().given()
        schema, regex = values.pop("json_schema", None), values.pop("regex", None)
        if schema is not None and regex is not None:
            raise RequestError("--json-schema and --regex both say what the text looks like; pass one of them")
        if schema is not None or regex is not None:
            schema = None if schema is None else read_text("--json-schema", schema)
            values["structured_outputs"] = StructuredOutputs(json=schema, regex=regex)
        return values


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="What to continue; standard input if there is none.")
    ] = None,
    model: ModelOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt in the model's chat template.")] = False,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help='Prompts are token ids, such as "5 6 7", and so is the output.')
    ] = False,
    echo: Annotated[bool | None, option("Print the prompt before the text.", "on a terminal")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each sample.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the memory plan and timings on standard error.")
    ] = False,
    sampling: PromptSampling = PromptSampling(),
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    speculation: SpeculativeOptions = SpeculativeOptions(),  # noqa: B008
) -> None:
    """Continue prompts, printing text as it comes.

    Several prompts run together and are printed one after another, each under its label. The model is named by --model:
    all arguments are prompts.
    """
    if model is None:
        _refuse_model(prompts or [])
        model = EMBEDDED
    if sampling.logprobs is not None and not json_lines:
        raise RequestError("--logprobs goes with --json, whose lines hold them; add it, or leave --logprobs out")
    torchrun = world()
    # Under torchrun rank 0 reads the shared standard input.
    typed = prompts or ([""] if torchrun and torchrun.rank else [_read_stdin()])
    from hybridrt.base.engine_config import EngineConfig
    from hybridrt.engine.api.llm import LLM
    from hybridrt.engine.text.tokenizer import check_text
    from hybridrt.runtime.load.model_path import checkpoint_path

    for text in typed:
        check_text(text)  # before the model is downloaded
    options = {"tp_size": torchrun.size if torchrun else 1, **engine.given(), **speculation.given(model)}
    path = checkpoint_path(EngineConfig(model, **options))
    params = replace(default_sampling_params(path), **sampling.given())
    taken = _as_engine_takes_them(path, typed, chat, token_ids)  # errors before weights are read
    start = time.monotonic()
    with LLM(str(path), **options) as llm:
        loaded = time.monotonic() - start
        if verbose:
            typer.echo(f"model: {path.name}, loaded in {loaded:.1f} s", err=True)
            typer.echo(f"memory plan: {llm.plan.summary()}", err=True)
        deltas = in_order(llm, taken, params, stream=not json_lines)
        if json_lines:
            finished = _print_json(deltas, typed, params.n)
        else:
            echo = sys.stdout.isatty() if echo is None else echo
            finished = _print_text(deltas, typed, params.n, token_ids or llm.tokenizer is None, echo and not chat)
    if verbose:
        for i, metrics in enumerate(finished):
            sample = f", sample {i % params.n + 1}" if params.n > 1 else ""
            typer.echo(f"prompt {i // params.n + 1}{sample}: {_timing(metrics)}", err=True)


def in_order(
    llm: "LLM", prompts: Sequence[str] | Sequence[list[int]], params: SamplingParams, stream: bool
) -> Iterator["Delta"]:
    """Runs prompts together and yields deltas in the order of the prompts. Those of later samples
    wait until earlier samples have ended.

    Args:
        stream: False: one delta a sample, with the whole output.

    Raises:
        RequestError: a prompt was refused; nothing has been yielded.
        EngineError: a sample failed.
        RankError: a tensor-parallel rank was lost.
    """
    ids = [llm.engine.add_request(prompt, params, stream=stream) for prompt in prompts]
    waiting: dict[tuple[str, int], list[Delta]] = defaultdict(list)
    for key in ((request_id, index) for request_id in ids for index in range(params.n)):
        reason = None
        while reason is None:
            while key not in waiting:
                for delta in llm.engine.step():
                    waiting[delta.request_id, delta.index].append(delta)
            for delta in waiting.pop(key):
                if delta.error is not None:
                    cause = delta.error.__cause__  # a lost rank's own error is shown
                    raise cause if isinstance(cause, RankError) else delta.error
                reason = delta.finish_reason
                yield delta


def _refuse_model(prompts: Sequence[str]) -> None:
    """Refuses the name of a model, or a missing path: the built-in model would continue it."""
    first = prompts[0] if prompts else ""
    try:
        is_model = bool(_HUB_NAME.fullmatch(first)) or first.lower().endswith(".gguf") or Path(first).is_dir()
    except (OSError, ValueError):
        return
    is_model |= len(prompts) > 1 and bool(_PATH.fullmatch(first))
    if first and is_model:
        raise RequestError(
            f"the first prompt, {shown(first)}, looks like a model: write --model {first} before the prompts. If it is "
            f"a prompt, name the model, too: --model {EMBEDDED}"
        )


def _read_stdin() -> str:
    advice = 'write one after the command, as in hybridrt generate "def main():", or pipe text in'
    if sys.stdin.isatty():
        raise RequestError(f"no prompt: {advice}")
    try:
        text = sys.stdin.read(MAX_CHARS + 1)
    except UnicodeDecodeError as e:
        raise RequestError(f"standard input is no {e.encoding} text (byte {e.start}): convert it") from e
    if len(text) > MAX_CHARS:
        raise RequestError(f"standard input has more than {MAX_CHARS} characters; a prompt has fewer")
    if not text:
        raise RequestError(f"the prompt is empty, for standard input holds nothing: {advice}")
    return text


def _as_engine_takes_them(
    path: Path, typed: Sequence[str], chat: bool, token_ids: bool
) -> Sequence[str] | Sequence[list[int]]:
    """Encodes prompts before the weights are read, for their errors."""
    from hybridrt.chat.conversation import read_conversation
    from hybridrt.engine.api.chats import Chats
    from hybridrt.engine.text.tokenizer import load_tokenizer
    from hybridrt.models.config.read_config import read_model_config

    if token_ids:
        return [_token_ids(text) for text in typed]
    if not chat:
        return typed
    read_model_config(path)  # the tokenizer does not check config.json
    chat_of_model, params = Chats(load_tokenizer(path))(), SamplingParams()
    talks = [read_conversation([{"role": "user", "content": text}]) for text in typed]
    return [chat_of_model.prompt(talk, params).tokens for talk in talks]


def _token_ids(text: str) -> list[int]:
    try:
        return [int(t) for t in re.split(r"[\s,]+", text.strip()) if t]
    except ValueError as e:
        raise RequestError(f'--token-ids: {text!r} is no list of integers such as "5 6 7"') from e


def _print_text(
    deltas: "Iterable[Delta]", typed: Sequence[str], n: int, as_ids: bool, echo: bool
) -> "list[RequestMetrics]":
    finished: list[RequestMetrics] = []
    separator = ""
    _write(_heading(typed, 0, n, echo))
    with _bar(len(typed) * n, hidden=sys.stdout.isatty()) as bar:  # on a terminal the texts show it
        for delta in deltas:
            if as_ids:
                _write("".join(f"{separator if i == 0 else ' '}{token}" for i, token in enumerate(delta.token_ids)))
                separator = " "
            else:
                _write(delta.text)
            if delta.metrics is not None:
                bar.update()
                finished.append(delta.metrics)
                more = len(finished) < len(typed) * n
                _write("\n" + ("\n" + _heading(typed, len(finished), n, echo) if more else ""))
                separator = ""
    return finished


def _bar(total: int, hidden: bool = False) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, disable=hidden or total < 2 or not sys.stderr.isatty(), unit="sample", desc="generate")


_write = partial(typer.echo, nl=False)  # which flushes


def _heading(typed: Sequence[str], index: int, n: int, echo: bool) -> str:
    text, sample = typed[index // n], index % n
    heading = typer.style(text, bold=True) if echo else ""
    if len(typed) * n == 1:
        return heading
    label = " ".join(text.split())
    label = label if len(label) <= LABEL_WIDTH else label[: LABEL_WIDTH - 1] + "…"
    label += f" ({sample + 1}/{n})" if n > 1 else ""
    return typer.style(f"==> {label} <==", fg="cyan") + "\n" + heading


def _print_json(deltas: "Iterable[Delta]", typed: Sequence[str], n: int) -> "list[RequestMetrics]":
    finished: list[RequestMetrics] = []
    with _bar(len(typed) * n) as bar:
        for delta in deltas:
            assert delta.metrics is not None, "the sample has ended"
            bar.update()
            line = {"prompt": typed[len(finished) // n], **{name: getattr(delta, name) for name in JSON_FIELDS}}
            typer.echo(json.dumps({**line, "metrics": timings(delta.metrics)}))
            finished.append(delta.metrics)
    return finished


def timings(metrics: "RequestMetrics") -> dict[str, Any]:
    """Counts of tokens and drafts, seconds to the first token and in all, and tokens a second after
    the first (None for one token)."""
    first, end, start = metrics.first_token_time, metrics.finish_time, metrics.arrival_time
    assert first is not None and end is not None, "the sample has finished"
    decoded = metrics.output_tokens - 1
    rate = decoded / (end - first) if decoded and end > first else None
    counts = {k: v for k, v in asdict(metrics).items() if not k.endswith("_time")}
    drafts = {name: getattr(metrics, name) for name in ("mean_accepted_length", "tokens_per_target_step")}
    return {**counts, **drafts, "time_to_first_token": first - start, "seconds": end - start, "tokens_per_second": rate}


def _timing(metrics: "RequestMetrics") -> str:
    t = timings(metrics)
    rate = f", then {t['tokens_per_second']:.1f} tokens/s" if t["tokens_per_second"] is not None else ""
    drafts = ""
    if t["verify_steps"]:
        drafts = (
            f"; {t['accepted']} of {t['proposed']} drafts accepted, mean accepted length "
            f"{t['mean_accepted_length']:.2f}, {t['tokens_per_target_step']:.2f} tokens per target step"
        )
    return (
        f"{t['prompt_tokens']} prompt tokens, {t['output_tokens']} output tokens in {t['seconds']:.2f} s: first after "
        f"{t['time_to_first_token'] * 1000:.0f} ms{rate}{drafts}"
    )
