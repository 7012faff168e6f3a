"""Time of masks: forms are bounded, measured before they are taken, and a request that takes too much ends alone."""

import time
from typing import Any

import numpy as np
import pytest

from hybridrt.base.errors import GrammarError, RequestError
from hybridrt.base.structured_outputs import MAX_CHARACTERS, StructuredOutputs
from hybridrt.engine.core import grammar_masks
from hybridrt.engine.core.grammar_masks import fill_masks
from hybridrt.engine.grammar import compile_child
from hybridrt.engine.grammar.grammar_compiler import GrammarCompiler
from hybridrt.engine.grammar.mask_time import BURST_SECONDS, STEP_SECONDS, WATCHED_STEPS, Allowance
from hybridrt.engine.grammar.matcher import MaskedRow, Matcher
from hybridrt.engine.text.tokenizer import load_tokenizer
from hybridrt.runtime.load.model_path import resolve_model_path
from hybridrt.speculative.drafter import Draft

LONG = "a" * MAX_CHARACTERS
EOS = (0, 2)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer(resolve_model_path("embedded")), 4103, EOS, threads=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": ["b", LONG]},
        {"regex": LONG + "a"},
        {"json": {"enum": [1, LONG + "a"]}},
        {"json": {"properties": {LONG + "a": {}}}},
        {"json": {"pattern": LONG + "a"}},
        {"grammar": f'start: "{LONG}"'},
        {"grammar": f"start: /{LONG}/"},
    ],
    ids=lambda fields: str(fields)[:30],
)
def test_a_form_that_is_too_long_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=rf"{MAX_CHARACTERS}.*smaller"):
        StructuredOutputs(**fields)


ONE_WAY: list[dict[str, Any]] = [
    {"choice": ["a" * 60_000, "b" * 60_000]},
    {"regex": "a{100000}"},
    {"regex": "[ab](cd){30000}"},
    {"json": {"const": "ab" * 30_000}},
    {"grammar": 'start: r0\n' + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(20)) + '\nr20: "ab"'},
    {"grammar": '%llguidance {"no_forcing": false}\nstart: "' + "a" * 60_000 + '"'},
]  # fmt: skip


@pytest.mark.parametrize("fields", ONE_WAY, ids=lambda fields: str(fields)[:30])
def test_where_one_text_can_follow_a_mask_does_not_walk_through_it(
    fields: dict[str, Any], compiler: GrammarCompiler
) -> None:
    """CPU time of the thread; the walk took 10 to 40 ms each time."""
    matcher, worst = compiler.matcher(StructuredOutputs(**fields)), []
    for _ in range(8):
        began = time.thread_time()
        mask = matcher.mask()
        worst.append(time.thread_time() - began)
        matcher.advance(int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[-1]))
    assert sorted(worst)[-2] < 0.003, worst


def test_an_enumeration_of_a_usual_size_can_be_followed(compiler: GrammarCompiler) -> None:
    """Its mask after the first quote is the largest, and takes about 2 ms: the limits of a mask leave room for it."""
    rng = np.random.default_rng(0)
    values = ["".join(map(chr, rng.choice([*range(65, 91), *range(97, 123)], 20))) for _ in range(1000)]
    matcher = compiler.matcher(StructuredOutputs(json={"enum": values}))
    tokenizer = load_tokenizer(resolve_model_path("embedded"))
    for text in ('"', values[7][0], values[7][1]):
        (token,) = tokenizer.encode_bare(text)
        assert np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[token]
        matcher.advance(token)


def test_a_grammar_whose_masks_or_tokens_are_slow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What measures them, with a limit that any mask exceeds."""
    compiler = GrammarCompiler(load_tokenizer(resolve_model_path("embedded")), 4103, EOS)
    root = compiler.matcher(StructuredOutputs(regex="(a|b)*c"))._grammar.roots[0]
    assert compile_child._unfit(root, set(EOS)) == ""
    for limit, text in (("TOKEN_SECONDS", "reading a token of it"), ("MASK_SECONDS", "a mask of it")):
        monkeypatch.setattr(compile_child, limit, 0.0)
        found = compile_child._unfit(root, set(EOS))
        assert found.startswith(text) and "ms of CPU time, more than 0" in found


def test_an_object_of_too_many_optional_properties_is_refused(compiler: GrammarCompiler) -> None:
    """Its first token cannot be followed, and would hold the interpreter."""
    properties = {f"p{i}": {"type": "string"} for i in range(700)}
    with pytest.raises(RequestError, match=r"row has .* items.*simpler"):
        compiler.matcher(StructuredOutputs(json={"type": "object", "properties": properties}))
    required = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    compiler.matcher(StructuredOutputs(json=required))


class Slow(Matcher):
    """Its masks take CPU time."""

    seconds = 0.0

    def fill_masks(self, draft: Draft, masks: np.ndarray) -> None:
        super().fill_masks(draft, masks)
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass


def rows_of(compiler: GrammarCompiler, count: int, seconds: float) -> list[MaskedRow]:
    found = []
    for _ in range(count):
        matcher = Slow(compiler.grammar(StructuredOutputs(regex="[ab]*c")))
        matcher.seconds = seconds
        matcher.allowance.watch()
        found.append(MaskedRow(matcher, Draft()))
    return found


def failed(rows: list[MaskedRow]) -> int:
    count = 0
    for row in rows:
        assert row.matcher is not None
        try:
            row.matcher.check_limits()
        except GrammarError as e:
            assert "delay all other requests" in str(e)
            count += 1
    return count


def test_heavy_masks_of_a_step_have_a_limit_together(compiler: GrammarCompiler) -> None:
    """Before, eight such requests took eight times as long. The light ones are made first, and none of them fails."""
    heavy, light = rows_of(compiler, 8, 0.03), rows_of(compiler, 4, 0.0)
    for row in heavy:
        row.matcher.allowance.last = 0.03  # type: ignore[union-attr]
    began = time.thread_time()
    masks = fill_masks([*heavy, *light], compiler.words, compiler.executor)
    assert time.thread_time() - began < STEP_SECONDS + 0.06
    assert failed(heavy) == 4 and failed(light) == 0
    assert all((line != -1).any() for line in masks[8:])


def test_a_request_whose_masks_take_too_much_on_average_ends(compiler: GrammarCompiler) -> None:
    (heavy,), steps = rows_of(compiler, 1, 0.02), 1
    (token,) = compiler._tokenizer.encode_bare("a")  # type: ignore[union-attr]
    fill_masks([heavy], compiler.words, compiler.executor)
    while not failed([heavy]):
        heavy.matcher.advance(token)  # type: ignore[union-attr]
        fill_masks([heavy], compiler.words, compiler.executor)
        steps += 1
    assert 3 < steps <= BURST_SECONDS / 0.01


def test_once_masks_take_long_together_each_is_measured(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    matchers = [compiler.matcher(StructuredOutputs(regex="[ab]*c")) for _ in range(70)]
    rows = [MaskedRow(matcher, Draft()) for matcher in matchers]
    together = fill_masks(rows, compiler.words, compiler.executor)
    for matcher in matchers:  # a busy machine may have made them slow
        matcher.allowance.watched = 0
    monkeypatch.setattr(grammar_masks, "WATCH_SECONDS", -1.0)
    assert (fill_masks(rows, compiler.words, compiler.executor) == together).all()
    assert all(m.allowance.watched for m in matchers)
    assert sum(m.allowance.watched == WATCHED_STEPS - 1 for m in matchers) > 30  # those of later slices, at once
    monkeypatch.setattr(grammar_masks, "WATCH_SECONDS", 600.0)
    for _ in range(WATCHED_STEPS):
        fill_masks(rows, compiler.words, compiler.executor)
    assert not any(m.allowance.watched for m in matchers if not m.allowance.heavy)


def test_an_ambiguous_grammar_ends_with_an_error_and_not_with_masks_of_a_quarter_of_a_second(
    compiler: GrammarCompiler,
) -> None:
    """Its items grow with the square of the output: llguidance's limits count others."""
    matcher = compiler.matcher(StructuredOutputs(grammar='start: e\ne: e e e | "a" | "ab" | "b" | e "a"'))
    matcher.allowance.watch()
    (token,) = compiler._tokenizer.encode_bare("a")  # type: ignore[union-attr]
    began = time.thread_time()
    with pytest.raises(GrammarError):
        for _ in range(400):
            fill_masks([MaskedRow(matcher, Draft())], compiler.words, compiler.executor)
            matcher.check_limits()
            matcher.advance(token)
    assert time.thread_time() - began < 3.0


def test_an_allowance_grows_with_tokens_up_to_its_limit() -> None:
    allowance = Allowance()
    for _ in range(1000):
        allowance.advanced(0.001)
    allowance.masked(0.9 * BURST_SECONDS, 1)
    allowance.check_time()
    allowance.spend(0.2 * BURST_SECONDS)
    with pytest.raises(GrammarError, match="3 ms of CPU time a token"):
        allowance.check_time()
