"""A budget of reasoning with speculation: drafts are taken back, and the text is that without drafts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import GrammarError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.structured_outputs import StructuredOutputs, Thinking
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.core.grammar_masks import fill_masks
from hybridrt.engine.grammar.grammar_compiler import GrammarCompiler
from hybridrt.engine.grammar.matcher import MaskedRow, Matcher
from hybridrt.speculative.drafter import Draft
from tests.support.checkpoints import falcon
from tests.support.scripted_llm import END, TEMPLATE, byte_tokenizer
from tests.support.tiny import write_tiny

TOKENIZER = byte_tokenizer()
A, B, OPEN, CLOSE, EOS = (
    TOKENIZER.encode_bare(text)[0] for text in ("a", "b", "<think>", "</think>", END)
)  # fmt: skip
HALF = TOKENIZER.encode_bare("é")[0]
BOOLEAN = StructuredOutputs(json={"type": "boolean"})


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, len(TOKENIZER.hf), [EOS], threads=1)


def matcher_of(compiler: GrammarCompiler, begun: bool, budget: int | None) -> Matcher:
    tags = f"<[{CLOSE}]>" if begun else f"(<[{CLOSE}]>)?"
    thinking = Thinking(() if begun else (OPEN,), (CLOSE,), budget)
    return compiler.matcher(StructuredOutputs(grammar=f"start: {tags} /[ab]+c/", thinking=thinking))


def masks_of(compiler: GrammarCompiler, matcher: Matcher, draft: Draft) -> list[set[int]]:
    lines = fill_masks([MaskedRow(matcher, draft)], compiler.words, compiler.executor)
    return [set(np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")).tolist()) for line in lines]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 2, 5, None])
def test_masks_and_drafts_are_those_token_by_token(begun: bool, budget: int | None, compiler: GrammarCompiler) -> None:
    """Of chains and trees, through the reasoning and its end; afterwards the matcher is as it was."""
    first = [] if begun else [OPEN]
    for thought in ([], [A], [A, HALF], [A, OPEN], [B, B, A, B, A, A]):
        chain = [*first, *thought, CLOSE, A, B, CLOSE]
        for parents in (None, [0, *range(len(chain) - 1), 0][: len(chain)]):
            matcher = matcher_of(compiler, begun, budget)
            draft = Draft(chain) if parents is None else Draft([EOS, *chain], [0, 0, *range(2, len(chain) + 1)])
            kept = matcher.allowed(draft)
            found = masks_of(compiler, matcher, kept)
            for place, mask in enumerate(found):
                alone = matcher_of(compiler, begun, budget)
                for token in kept.tokens[:place]:
                    assert token in masks_of(compiler, alone, Draft())[0]
                    alone.advance(token)
                assert mask == masks_of(compiler, alone, Draft())[0]
                if place == len(kept):
                    assert chain[place] not in mask
            assert masks_of(compiler, matcher, Draft())[0] == found[0]


def test_a_spent_budget_leaves_the_end_alone_within_a_character_too(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, begun=True, budget=2)
    for token in (A, HALF):
        assert len(masks_of(compiler, matcher, Draft())[0]) > 200 and not matcher.advance(token)
    assert masks_of(compiler, matcher, Draft())[0] == {CLOSE}
    with pytest.raises(GrammarError, match="reasoning"):
        matcher.copy().advance(A)
    copied = matcher.copy()
    assert not copied.advance(CLOSE) and masks_of(compiler, copied, Draft())[0] == {A, B}
    assert masks_of(compiler, matcher, Draft())[0] == {CLOSE}


def test_a_budget_compiles_nothing_anew(compiler: GrammarCompiler) -> None:
    found = {matcher_of(compiler, True, budget)._grammar for budget in range(20)}
    assert len(found) == 1


@pytest.mark.parametrize("attribute", ["max_tokens=3", 'stop="x"'])
def test_rules_that_llguidance_cannot_take_back_work_with_drafts(attribute: str, compiler: GrammarCompiler) -> None:
    """A caller's grammar may have them."""
    form = StructuredOutputs(grammar=f'start: a "b"\na[{attribute}]: /a*/')
    matcher = compiler.matcher(form)
    assert not matcher.plain
    for draft in (Draft([A, A, B]), Draft([B, A, A, A, A, A], [0, 0, 2, 3, 4, 5])):
        kept = matcher.allowed(draft)
        found = masks_of(compiler, matcher, kept)
        for node in range(len(kept) + 1):
            path, place = [], node
            while place:
                path.append(kept.tokens[place - 1])
                place = place - 1 if kept.parents is None else kept.parents[place - 1]
            alone = compiler.matcher(form)
            for token in reversed(path):
                alone.advance(token)
            assert found[node] == masks_of(compiler, alone, Draft())[0]
    matcher.check_limits()


CASES: list[tuple[int | None, StructuredOutputs | None]] = [
    (9, None), (3, None), (0, None), (None, BOOLEAN), (0, BOOLEAN), (9, BOOLEAN),
    (4, StructuredOutputs(regex="[ab]{2,9}")), (2, StructuredOutputs(choice=["yes", "no"])),
]  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "ngram": {"speculative": SpeculativeConfig("ngram", num_draft_tokens=3)},
    "tree": {"speculative": SpeculativeConfig("ngram", num_draft_tokens=5, topk=2)},
    "overlap": {},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = falcon(vocab_size=len(TOKENIZER.hf), max_position_embeddings=4096)
    directory = tmp_path_factory.mktemp("thinker")
    made = write_tiny(directory, make, tokenizer=False, generation={"eos_token_id": [EOS]})
    hf = byte_tokenizer().hf
    hf.chat_template = TEMPLATE + "{# </think> #}"  # how the parser is known
    hf.save_pretrained(str(made))
    return made


def answers(path: Path, drafted: bool = False, **options: Any) -> Iterator[Any]:
    base = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "max_model_len": 256, "seed": 5}
    messages: Any = [{"role": "user", "content": "abcabcabcabc the red the red the red"}]
    with LLM(str(path), max_running_requests=4, **base, **options) as llm:
        engine: Engine = llm.engine
        for budget, form in CASES:
            for temperature in (0.0, 1.0):
                for opened in (True, False):
                    params = SamplingParams(max_tokens=16, temperature=temperature, seed=3, n=1 + int(temperature))
                    params = replace(params, structured_outputs=form)
                    more = {} if budget is None else {"thinking_budget": budget}
                    kwargs = {"chat_template_kwargs": {"enable_thinking": opened}}
                    (answer,) = llm.chat(messages, params, **more, **kwargs)
                    if opened and budget is not None:
                        assert all(each.reasoning_tokens <= budget + 1 for each in answer.outputs)
                    yield [each.output.token_ids for each in answer.outputs]
        assert not drafted or engine.counters().accepted > 0


@pytest.mark.parametrize("mode", ["tree", "overlap", pytest.param("ngram", marks=pytest.mark.soak)])
@pytest.mark.slow
def test_the_same_tokens_as_without_drafts(mode: str, path: Path, plain: list[Any]) -> None:
    assert list(answers(path, mode != "overlap", **MODES[mode])) == plain


@pytest.fixture(scope="module")
def plain(path: Path) -> list[Any]:
    return list(answers(path))
