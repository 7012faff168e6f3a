"""Checks of outputs: compared with transformers', and each way to run with the plainest one."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hybridrt.base.dtypes import dtype_name
from hybridrt.base.errors import CheckpointError, HybridrtError, UnsupportedModelError
from hybridrt.collectives.groups import TPGroup
from hybridrt.engine.api.llm import LLM
from hybridrt.layers.rotary import rotary_table
from hybridrt.models.loading.loader import check_keys
from hybridrt.models.loading.shards import shards_of
from hybridrt.runtime.load.build_model import empty_model
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.model_path import EMBEDDED
from hybridrt.verify import oracle
from hybridrt.verify.decoded_copy import write_decoded
from hybridrt.verify.ours import (
    TOLERANCE,
    GreedyAnswer,
    answers,
    compare_runs,
    compare_with_theirs,
    engine,
    engine_options,
    kept_options,
    plain_engine,
    speculative,
    within,
)
from hybridrt.verify.prompts import prompts_of, random_tokens
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject
from hybridrt.verify.text_fit import judge_text, knowledge, text_tokens

FLOAT32 = torch.float32
TOKENS, QUICK_TOKENS = 24, 8
CHUNK = 16
WHOLE, BY_LAYER = "whole", "by layer"  # how transformers' model runs


def check_transformers(subject: Subject, result: Result) -> None:
    """Log-probabilities and greedy tokens equal transformers': in float32 if that fits, and in the dtype
    of the run."""
    if subject.broken or subject.config is None:
        return result.leave_out(subject.broken or "config.json cannot be read")
    device, count = subject.torch_device, QUICK_TOKENS if subject.quick else TOKENS
    prompts = prompts_of(subject)
    try:
        with plain_checkpoint(subject, result) as path:
            told = _ask_all(subject, path, prompts, count, device, result)
    except UnsupportedModelError as e:
        return result.leave_out(f"not compared: {e}")
    subject.exact = told.get(FLOAT32, [])
    for dtype in _own_dtypes(subject, told, result) if told else ():
        _compare(subject, dtype, prompts, told, count, result)


@contextmanager
def plain_checkpoint(subject: Subject, result: Result) -> Iterator[Path]:
    """The checkpoint, or a decoded copy of a quantised one."""
    assert subject.config is not None, "it was read"
    if subject.config.quant is None:
        yield subject.path
        return
    needed = 4 * parameter_count(subject)
    if not oracle.fits(2 * needed, torch.device("cpu")):
        raise UnsupportedModelError(f"the decoded weights need {needed:,} bytes twice, and memory has less")
    with TemporaryDirectory(prefix="hybridrt-verify-") as folder:
        subject.begin("decoding quantised weights")
        count = write_decoded(subject.path, Path(folder))
        result.notes.append(f"transformers ran a copy in which {count} quantised matrices were decoded to float32")
        yield Path(folder)


def parameter_count(subject: Subject) -> int:
    config = subject.engine_config(load_format="dummy")
    _, target = load_target(config, TPGroup())
    return sum(p.numel() for p in empty_model(config, target, torch.device("meta")).parameters())


def float32_fits(subject: Subject) -> bool:
    """Whether the device holds the model in float32, without engines that hold its memory."""
    if subject.fits_float32 is None:
        subject.close()
        subject.fits_float32 = oracle.fits(4 * parameter_count(subject), subject.torch_device)
    return subject.fits_float32


def _ask_all(
    subject: Subject, path: Path, prompts: Sequence[list[int]], count: int, device: torch.device, result: Result
) -> dict[torch.dtype, list[oracle.OracleAnswer]]:
    assert subject.config is not None, "it was read"
    architecture, run = subject.config.architecture, subject.torch_dtype
    dtypes = dict.fromkeys((FLOAT32,) if subject.config.quant is not None else (FLOAT32, run))
    ways = {dtype: _way_of_theirs(subject, dtype, device, result) for dtype in dtypes}

    def ask(model: Any, dtype: torch.dtype) -> list[oracle.OracleAnswer]:
        if dtype == next(each for each in dtypes if ways[each]):
            _compare_rope(subject, model, result)
            if tokens := text_tokens(subject):
                judge_text(knowledge(model, subject, tokens), result)
        subject.begin(f"transformers in {dtype_name(dtype)}")
        return [oracle.ask(model, prompt, count) for prompt in prompts]

    if run != FLOAT32 and list(ways.values()) == [WHOLE, WHOLE] and oracle.stored_dtype(path) == run:
        subject.begin("loading transformers' model")
        with oracle.loaded(path, architecture, run, device) as model:
            rounded = ask(model, run)
            subject.begin("transformers' model in float32")
            oracle.widen(model)
            return {FLOAT32: ask(model, FLOAT32), run: rounded}
    told: dict[torch.dtype, list[oracle.OracleAnswer]] = {}
    for dtype, way in ways.items():
        if way:
            subject.begin(f"loading transformers' model in {dtype_name(dtype)}")
            with oracle.loaded(path, architecture, dtype, device, by_layer=way == BY_LAYER) as model:
                told[dtype] = ask(model, dtype)
    return told


def _way_of_theirs(subject: Subject, dtype: torch.dtype, device: torch.device, result: Result) -> str:
    """How transformers' model runs in a dtype; "" if it does not fit."""
    needed, name = parameter_count(subject) * dtype.itemsize, dtype_name(dtype)
    if oracle.fits(needed, device):
        return WHOLE
    if dtype == FLOAT32 and _fits_by_layer(subject):
        result.notes.append(f"transformers in {name} ran layer by layer: it needs {needed:,} bytes")
        return BY_LAYER
    result.notes.append(f"transformers in {name} needs {needed:,} bytes, which do not fit: left out")
    return ""


def _fits_by_layer(subject: Subject) -> bool:
    """Whether main memory holds the checkpoint as it is (a quantised one decoded to float32), and hybridrt runs it
    in fewer bytes than float32."""
    assert subject.config is not None, "it was read"
    quantised = subject.config.quant is not None
    stored = FLOAT32 if quantised else subject.torch_dtype
    fits = oracle.fits(parameter_count(subject) * stored.itemsize, torch.device("cpu"))
    return fits and (quantised or stored != FLOAT32)


def _compare_rope(subject: Subject, model: torch.nn.Module, result: Result) -> None:
    assert subject.config is not None, "it was read"
    config, theirs = subject.config, oracle.frequencies(model)
    if not theirs:
        return
    for i in config.full_attention_layer_ids:
        attention = config.attention_of(i)
        if attention.rope is None:
            continue
        cosines, sines = rotary_table(config, attention, 2, torch.device("cpu"))[1].chunk(2)
        ours = torch.atan2(sines, cosines)
        if not any(len(own) == len(ours) and torch.allclose(own, ours, rtol=1e-4, atol=1e-7) for _, own in theirs):
            return result.fail(
                f"rope: layer {i} turns by {ours[:3].tolist()}... in hybridrt and by {theirs[0][1][:3].tolist()}... in "
                "transformers: they read config.json in different ways"
            )
    result.notes.append("rotary frequencies equal transformers'")


def _own_dtypes(
    subject: Subject, told: dict[torch.dtype, list[oracle.OracleAnswer]], result: Result
) -> list[torch.dtype]:
    """In which hybridrt runs: those of transformers' runs, but the dtype of the run instead of a float32 that does not
    fit."""
    assert subject.config is not None, "it was read"
    if subject.config.quant is not None or float32_fits(subject):
        return [subject.torch_dtype] if subject.quick else list(told)  # a quick run's float32 is in `check_ways`
    result.notes.append(f"hybridrt did not run in float32, which does not fit: {dtype_name(subject.torch_dtype)} alone")
    return [subject.torch_dtype]


def _compare(
    subject: Subject, dtype: torch.dtype, prompts: Sequence[list[int]],
    told: dict[torch.dtype, list[oracle.OracleAnswer]], count: int, result: Result,
) -> None:  # fmt: skip
    name, exact = dtype_name(dtype), told.get(FLOAT32)
    subject.begin(f"starting hybridrt in {name}")
    with plain_engine(subject, name, prefix_cache=False) as llm:
        subject.begin(f"hybridrt in {name}")
        ours = answers(llm, prompts, count, scored=True, salt="compared")
    same = told.get(dtype)
    limits = subject.limits[dtype] = TOLERANCE[dtype] if same is None else within(dtype, same, exact)
    reference = exact or same
    assert reference is not None, "transformers ran in one of them"
    largest = _compare_all(f"in {name}", prompts, ours, reference, limits, result)
    result.figures[f"largest_difference_{name}"] = largest
    against = "in float32 " if reference is exact else ""
    result.done(
        f"{name}: {len(prompts)} prompts and {count} greedy tokens each, log-probabilities within {largest:.2g} of "
        f"transformers' {against}(allowed: {limits[0]:.2g})"
    )


def _compare_all(
    what: str, prompts: Sequence[list[int]], ours: Sequence[GreedyAnswer], theirs: Sequence[oracle.OracleAnswer],
    limits: tuple[float, float], result: Result,
) -> float:  # fmt: skip
    """The largest difference."""
    return max(
        compare_with_theirs(f"prompt {i} {what}", prompt, a, b, limits, result)
        for i, (prompt, a, b) in enumerate(zip(prompts, ours, theirs))
    )


def check_ways(subject: Subject, result: Result) -> None:
    """Batches, chunks, cached prefixes and drafts give the tokens of requests that run alone."""
    if subject.broken or subject.config is None:
        return result.leave_out(subject.broken or "config.json cannot be read")
    in_float32 = not subject.quick and subject.config.quant is None and float32_fits(subject)
    dtype = FLOAT32 if in_float32 else subject.torch_dtype
    count, prompts = QUICK_TOKENS if subject.quick else TOKENS, prompts_of(subject)
    limits, name = subject.limits.get(dtype, TOLERANCE[dtype]), dtype_name(dtype)
    subject.begin("starting hybridrt")
    with plain_engine(subject, name, cuda_graph_prompts=True) as llm:
        subject.begin("alone, cached, batched")
        alone = answers(llm, prompts, count, salt="alone")
        _check_cached(subject, llm, prompts, alone, limits, result)
        _same("batched", alone, answers(llm, prompts, count, together=True, salt="batched"), limits, result)
    result.notes.append(f"these in {name}")
    if subject.quick:
        return _check_at_once(subject, prompts, alone, result)
    with engine(subject, dtype=name, chunked_prefill_size=CHUNK, prefix_cache=False) as llm:
        subject.begin("chunked")
        _same(f"chunks of {CHUNK}", alone, answers(llm, prompts, count), limits, result)
    for method in _methods(subject):
        subject.begin(f"drafts: {method}")
        try:
            with engine(subject, dtype=name, speculative=speculative(method)) as llm:
                _same(f"drafts ({method})", alone, answers(llm, prompts, count), limits, result)
        except HybridrtError as e:
            result.fail(f"drafts ({method}): {e}")


def _check_at_once(
    subject: Subject, prompts: Sequence[list[int]], alone: Sequence[GreedyAnswer], result: Result
) -> None:
    """A quick run's one engine for chunks and drafts. If float32 fits, as weights that stay quantised do, it computes
    in float32, and its answers are compared with transformers': they tell more than those in the run's dtype."""
    assert subject.config is not None, "it was read"
    exact = bool(subject.exact) and (subject.config.quant is not None or float32_fits(subject))
    dtype = FLOAT32 if exact else subject.torch_dtype
    name, limits = dtype_name(dtype), subject.limits.get(dtype, TOLERANCE[dtype])
    what = f"chunks of {CHUNK} with drafts (ngram) in {name}"
    subject.begin(f"starting hybridrt in {name}")
    with engine(subject, **_at_once(name)) as llm:
        subject.begin(what)
        ours = answers(llm, prompts, QUICK_TOKENS, scored=True)
    if not exact:
        return _same(what, alone, ours, limits, result)
    largest = _compare_all(f"in {what}", prompts, ours, subject.exact, limits, result)
    result.figures[f"largest_difference_{name}"] = largest
    result.done(f"{what}: log-probabilities within {largest:.2g} of transformers' (allowed: {limits[0]:.2g})")


def _at_once(dtype: str) -> dict[str, Any]:
    """Options of the engine of `_check_at_once`."""
    drafts = {"chunked_prefill_size": CHUNK, "speculative": speculative("ngram"), "cuda_graph": False}
    return {"dtype": dtype, "prefix_cache": False, **drafts}


def compile_early(subject: Subject) -> None:
    """Compiles the kernels of a quick run's engines, in processes next to its first checks."""
    if not subject.quick or subject.torch_device.type != "cuda":
        return
    with suppress(Exception):  # packages raise anything for an odd checkpoint; a check will meet it, and report it
        quant = subject.read_config().quant
        names = [dtype_name(subject.torch_dtype)] * 2
        if quant is None and float32_fits(subject):
            names[1] = dtype_name(FLOAT32)
        options = [kept_options(names[0]), _at_once(names[1])]
        subject.early.start([subject.engine_config(**engine_options(subject, each)) for each in options])


def _methods(subject: Subject) -> list[str]:
    return ["ngram", *["mtp"] * _has_head(subject), *["draft"] * (subject.model in EMBEDDED[:1])]


def _has_head(subject: Subject) -> bool:
    """Checks the keys: checkpoints leave prediction heads out that their config.json names."""
    assert subject.config is not None, "it was read"
    if not subject.config.mtp_layers:
        return False
    config = subject.engine_config(speculative=speculative("mtp"))
    _, target = load_target(config, TPGroup())
    keys = {key for keys in shards_of(subject.path).values() for key in keys}
    try:
        check_keys(empty_model(config, target, torch.device("meta")), subject.path, keys)
    except CheckpointError:
        return False
    return True


def _same(
    what: str,
    alone: Sequence[GreedyAnswer],
    others: Sequence[GreedyAnswer],
    limits: tuple[float, float],
    result: Result,
) -> None:
    equal = sum(
        compare_runs(f"{what}, prompt {i}", a, b, limits, result) for i, (a, b) in enumerate(zip(alone, others))
    )
    rest = "" if equal == len(alone) else "; the others differ at a tie"
    result.done(f"{what}: {equal} of {len(alone)} answers have equal tokens{rest}")


def _check_cached(
    subject: Subject, llm: LLM, prompts: Sequence[list[int]], alone: Sequence[GreedyAnswer],
    limits: tuple[float, float], result: Result,
) -> None:  # fmt: skip
    """A second turn from a cached prefix gives the tokens of one that is computed anew."""
    draw = random.Random(1)
    images = subject.config.image_tokens if subject.config else {}
    said = [[token for token in a.tokens if token not in images] for a in alone]
    turns = [[*p, *tokens, *random_tokens(subject, 5, draw)] for p, tokens in zip(prompts, said)]
    cached = answers(llm, turns, QUICK_TOKENS, salt="alone")
    fresh = answers(llm, turns, QUICK_TOKENS, salt="fresh")
    hits = sum(each.cached_tokens > 0 for each in cached)
    _same(f"cached ({hits} of {len(turns)} found their beginning)", fresh, cached, limits, result)
