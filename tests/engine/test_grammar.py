"""Masks and drafts against llguidance's own matcher, fed token by token; and what compiling refuses."""

import random
import sys
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from hybridrt.base.errors import EngineError, QueueFullError, RequestError
from hybridrt.base.structured_outputs import MAX_CHOICES, StructuredOutputs
from hybridrt.engine.core.grammar_masks import fill_masks
from hybridrt.engine.grammar import grammar_compiler
from hybridrt.engine.grammar.grammar_compiler import KEPT, GrammarCompiler
from hybridrt.engine.grammar.grammar_text import grammar_text
from hybridrt.engine.grammar.matcher import MaskedRow, Matcher
from hybridrt.engine.text.tokenizer import load_tokenizer
from hybridrt.runtime.load.model_path import resolve_model_path
from hybridrt.speculative.drafter import Draft
from tests.support.schemas import SCHEMAS

EMBEDDED = resolve_model_path("embedded")
VOCAB, EOS = 4103, (0, 2)  # seven rows more than the tokenizer has tokens
OTHERS = [
    {"regex": r"(\d{3}-){2}\d{4}|[a-f]+é?"},
    {"regex": "(a|b|ab|ba)*c"},
    {"choice": ["red", "green", "greener", 'a "quoted"\n\\ word', "é😀"]},
    {"grammar": 'start: e\ne: t | t "+" e\nt: /[0-9]+/ | "(" e ")"'},
]


def make_compiler(**options: Any) -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer(EMBEDDED), VOCAB, EOS, **options)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler(threads=3)


def tokens_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def oracle(tokenizer: LLTokenizer, grammar: str, tokens: list[int]) -> bytes:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    for token in tokens:
        assert matcher.consume_token(token)
    return matcher.compute_bitmask()


def random_draft(rng: random.Random, matcher: Matcher, compiler: GrammarCompiler) -> Draft:
    """A chain or a tree, of tokens that mostly may follow."""
    nodes, tokens, parents = [matcher.copy()], list[int](), list[int]()
    for _ in range(rng.randrange(5)):
        parent = rng.randrange(len(nodes)) if rng.random() < 0.4 else len(nodes) - 1
        found = tokens_of(fill_masks([MaskedRow(nodes[parent], Draft())], compiler.words, compiler.executor)[0])
        token = rng.choice(found) if rng.random() < 0.8 else rng.randrange(VOCAB)
        node = nodes[parent].copy()
        node.inner.try_consume_tokens([token])
        tokens.append(token)
        parents.append(parent)
        nodes.append(node)
    return Draft(tokens, None if parents == list(range(len(parents))) else parents)


def path_of(draft: Draft, node: int) -> list[int]:
    """The tokens from the root to a node."""
    path = []
    while node:
        path.append(draft.tokens[node - 1])
        node = node - 1 if draft.parents is None else draft.parents[node - 1]
    return path[::-1]


def check_states(compiler: GrammarCompiler, specs: list[StructuredOutputs], want: int, seed: int) -> None:
    """Walks all grammars at random, several samples of each in one batch, until `want` masks were compared."""
    rng, checked = random.Random(seed), 0
    tokenizer, grammars = compiler._loaded(), {spec: grammar_text(spec) for spec in specs}
    walks = [(spec, compiler.matcher(spec), list[int]()) for spec in specs]
    while checked < want:
        drafts = [Draft() if rng.random() < 0.7 else m.allowed(random_draft(rng, m, compiler)) for _, m, _ in walks]
        rows = [MaskedRow(matcher, draft) for (_, matcher, _), draft in zip(walks, drafts)]
        ended = rng.randrange(len(rows) + 1)
        rows.insert(ended, MaskedRow(None, Draft([1, 2], [0, 0])))
        lines = iter(fill_masks(rows, compiler.words, compiler.executor))
        for place, row in enumerate(rows):
            got = [next(lines) for _ in range(1 + len(row.draft))]
            if place == ended:
                assert all((line == -1).all() for line in got)
                continue
            spec, matcher, output = walks[place - (place > ended)]
            for node, line in enumerate(got):
                want_mask = oracle(tokenizer, grammars[spec], output + path_of(row.draft, node))
                assert line.tobytes() == want_mask and max(tokens_of(line)) < 4096
                checked += 1
            token = rng.choice(tokens_of(got[0]))
            output.append(token)
            if token in EOS or matcher.advance(token) or len(output) > 40:
                walks[place - (place > ended)] = (spec, compiler.matcher(spec), [])


ALL = [StructuredOutputs(json=schema) for schema in SCHEMAS] + [StructuredOutputs(**fields) for fields in OTHERS]


def test_masks_are_those_of_a_matcher_fed_token_by_token(compiler: GrammarCompiler) -> None:
    check_states(compiler, ALL, 500, seed=0)


@pytest.mark.parametrize(
    "count", [pytest.param(1000, marks=pytest.mark.slow), pytest.param(20_000, marks=pytest.mark.soak)]
)
def test_thousands_of_masks(count: int, compiler: GrammarCompiler) -> None:
    check_states(compiler, ALL, count, seed=1)


def test_drafts_are_cut_where_the_grammar_or_the_output_ends(compiler: GrammarCompiler) -> None:
    tokenizer = load_tokenizer(EMBEDDED)
    assert tokenizer is not None
    a, b, c, d = (tokenizer.encode_bare(letter)[0] for letter in "abcd")
    matcher = compiler.matcher(StructuredOutputs(regex="[ab]{2}c?"))
    assert matcher.allowed(Draft([a, d, b])) == Draft([a])
    assert matcher.allowed(Draft([a, b, EOS[0], c])) == Draft([a, b])
    assert matcher.allowed(Draft([a, b, c, a])) == Draft([a, b, c])
    tree = Draft([d, a, b, a, c, c, EOS[1]], [0, 0, 0, 2, 4, 3, 4])
    assert matcher.allowed(tree) == Draft([a, b, a, c], [0, 0, 1, 3])
    assert matcher.allowed(Draft([d, a, b], [0, 0, 2])) == Draft([a, b], None)
    assert not matcher.advance(a) and not matcher.advance(b) and matcher.advance(c)


def test_what_the_grammar_forbids_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(StructuredOutputs(choice=["red"]))
    with pytest.raises(EngineError, match="structured_outputs"):
        matcher.advance(5)
    fine = compiler.matcher(StructuredOutputs(choice=["red"]))
    fine.check_limits()


def test_as_many_choices_as_may_be_are_followed_to_their_ends(compiler: GrammarCompiler) -> None:
    choices = [f"item {i}" for i in range(MAX_CHOICES)]
    for index in (0, 12, 123, MAX_CHOICES - 1):
        matcher, tokenizer = compiler.matcher(StructuredOutputs(choice=choices)), load_tokenizer(EMBEDDED)
        assert tokenizer is not None
        for token in tokenizer.encode_bare(choices[index]):
            assert token in tokens_of(matcher.mask())
            matcher.advance(token)
        assert matcher.inner.is_accepting()


BAD = [
    ({"json": False}, "[Uu]nsatisfiable"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"$ref": "https://example.com/schema"}}, "not present in a registry"),
    ({"json": {"$ref": "file:///etc/passwd"}}, "not present in a registry"),
    ({"json": {"enum": []}}, "[Uu]nsatisfiable"),
    ({"json": {"$ref": "#"}}, "no text of finite length"),
    ({"json": {"type": "integer", "multipleOf": 9999991}}, "multipleOf"),
    ({"json": {"allOf": [{"multipleOf": 99.73}, {"multipleOf": 9967}]}}, "multipleOf"),
    ({"grammar": 'start: %json {"m\\u0075ltipleOf" : 9999991.0}'}, "multipleOf"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "."),
    ({"regex": "[a"}, "unclosed"),
    ({"regex": "[^\\x00-\\U0010ffff]"}, "."),
    ({"grammar": "start: missing"}, "missing"),
    ({"grammar": "start: start"}, "."),
    ({"grammar": '%import /etc/passwd\nstart: "a"'}, "."),
]


@pytest.mark.parametrize(("fields", "text"), BAD, ids=[str(fields)[:40] for fields, _ in BAD])
def test_grammars_that_cannot_be_used(fields: dict[str, Any], text: str, compiler: GrammarCompiler) -> None:
    for _ in range(2):  # compiled once, refused twice
        with pytest.raises(RequestError, match=text) as info:
            compiler.matcher(StructuredOutputs(**fields))
        assert info.value.field == "structured_outputs" and len(str(info.value)) < 700


def test_multiples_that_need_few_remainders(compiler: GrammarCompiler) -> None:
    values = [7, 11, 0.13, 2.5, 1_000_000, 0.0001, 30]
    schema = {"anyOf": [{"type": "number", "multipleOf": value} for value in values]}
    compiler.matcher(StructuredOutputs(json=schema))


def test_a_long_chain_of_rules_ends_no_process(compiler: GrammarCompiler) -> None:
    """llguidance compiles it by recursion, deeper than the stack of a usual thread."""
    rules = [f'r{i}: r{i + 1} "x"' for i in range(4000)]
    compiler.matcher(StructuredOutputs(grammar="\n".join(["start: r0", *rules, 'r4000: "a"'])))


def test_a_grammar_whose_thread_does_not_start_is_compiled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Any) -> None:
        raise RuntimeError("can't start new thread")

    compiler, spec = make_compiler(), StructuredOutputs(regex="a")
    with monkeypatch.context() as patch:
        patch.setattr(grammar_compiler, "in_thread", fail)
        with pytest.raises(QueueFullError, match="can't start new thread"):
            compiler.matcher(spec)
    compiler.matcher(spec)


def test_equal_grammars_compile_once_and_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, compiled, real = make_compiler(), list[StructuredOutputs](), grammar_text
    monkeypatch.setattr(grammar_compiler, "grammar_text", lambda o: compiled.append(o) or real(o))  # type: ignore[func-returns-value]
    specs = [StructuredOutputs(regex=f"a{i}") for i in range(KEPT + 1)]
    first, second = compiler.matcher(specs[0]), compiler.matcher(specs[0])
    assert len(compiled) == 1 and first.inner is not second.inner
    for spec in specs:
        compiler.matcher(spec)
    compiler.matcher(specs[-1])
    assert len(compiled) == KEPT + 1
    compiler.matcher(specs[0])
    assert len(compiled) == KEPT + 2


def grow(compiler: GrammarCompiler, spec: StructuredOutputs, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Asks for a matcher, and waits until the grammar has the roots that it gets."""
    with monkeypatch.context() as patch:
        patch.setattr(grammar_compiler, "in_thread", lambda run: run())
        compiler.matcher(spec, **options)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars are compiled again, however busy the machine is."""
    monkeypatch.setattr(grammar_compiler, "GROW_SECONDS", 600.0)


@pytest.mark.usefixtures("patient")
def test_a_shared_grammar_has_a_lexer_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, spec = make_compiler(threads=3), StructuredOutputs(regex="[ab]c")
    waiting = compiler.matcher(spec)  # alone: not worth more than one
    grammar = waiting._grammar
    assert len(grammar.roots) == 1
    grow(compiler, spec, monkeypatch)
    assert len(grammar.roots) == 3
    matchers = [compiler.matcher(spec) for _ in range(5)]
    assert [m.root for m in (waiting, *matchers)] == [0, 1, 2, 0, 1, 2]
    for token in compiler._tokenizer.encode_bare("b"):
        for m in matchers:
            m.advance(token)
    copies = [m.copy() for m in matchers]
    masks = fill_masks(
        [MaskedRow(m, Draft()) for m in (*matchers, *copies, waiting)], compiler.words, compiler.executor
    )
    assert len({line.tobytes() for line in masks[:-1]}) == 1 and (masks[0] != masks[-1]).any()


@pytest.mark.usefixtures("patient")
def test_samples_of_one_request_share_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, spec = make_compiler(threads=2), StructuredOutputs(regex="[ab]c")
    grow(compiler, spec, monkeypatch, samples=4)
    first = compiler.matcher(spec)
    assert sorted(m.root for m in (first.copy(), first.copy(), first)) == [0, 0, 1]


@pytest.mark.usefixtures("patient")
def test_few_grammars_have_several_lexers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make_compiler(threads=2)
    specs = [StructuredOutputs(regex=f"a{i}") for i in range(grammar_compiler.SHARED + 1)]
    for spec in specs:
        grow(compiler, spec, monkeypatch, samples=2)
    roots = [len(compiler._compiled[spec].result().roots) for spec in specs]  # type: ignore[union-attr]
    assert roots == [1] + [2] * grammar_compiler.SHARED
    monkeypatch.setattr(grammar_compiler, "GROW_SECONDS", 0.0)
    slow = StructuredOutputs(regex="slow")
    grow(compiler, slow, monkeypatch, samples=2)
    assert len(compiler.matcher(slow)._grammar.roots) == 1 and not compiler._growing


def test_models_and_installations_that_cannot_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, tokenizer = StructuredOutputs(regex="a"), load_tokenizer(EMBEDDED)
    for broken, text in (
        (GrammarCompiler(None, VOCAB, EOS), "need a tokenizer"),
        (GrammarCompiler(tokenizer, VOCAB, ()), "end-of-sequence"),
        (GrammarCompiler(tokenizer, 4095, EOS), "vocabulary of 4095"),
    ):
        with pytest.raises(RequestError, match=text):
            broken.matcher(spec)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"'\.\[structured\]'"):
        GrammarCompiler(tokenizer, VOCAB, EOS).matcher(spec)
