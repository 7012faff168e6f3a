"""Strict functions in every format: what the grammar allows, the parser reads, and its arguments follow the schema."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from hybridrt.base.structured_outputs import StructuredOutputs
from hybridrt.chat.answer_parser import AnswerParser
from hybridrt.chat.constraints import _RULES, Constraints
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.events import ChatMessage
from hybridrt.chat.registry import TOOL_PARSERS
from hybridrt.engine.grammar.grammar_compiler import GrammarCompiler
from hybridrt.engine.grammar.matcher import Matcher
from tests.support.levels import sweep
from tests.support.scripted_llm import END, byte_tokenizer

USER = {"role": "user", "content": "Hi"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["a", "b c", "</tool_call>"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 30},
        "places": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "inner": {
            "type": "object",
            "properties": {"é": {"type": "boolean"}, "x": {"type": ["string", "null"]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["text", "count"],
    "additionalProperties": False,
}
# Values that are named one by one, after references that a format must follow.
LITERALS: dict[str, Any] = {
    "$id": "https://example.com/literals",
    "$ref": "#/$defs/arguments",
    "$defs": {
        "arguments": {
            "type": "object",
            "properties": {
                "kind": {"const": "b c", "type": "string"},
                "mixed": {"enum": ["a", 1, None, "null", "12"]},
                "one": {"$ref": "#/$defs/one"},
                "count": {"type": "integer"},
            },
            "required": ["kind", "mixed"],
            "additionalProperties": False,
        },
        "one": {"const": 1},
    },
}
# What may stand in text and means something outside of it.
HOSTILE = [
    "</tool_call>", "</TOOLCALL>", "</tool_calls>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<tool_call>",
    "</function>", "</parameter>", "\n</parameter>\n", "<parameter=kind>", "\\u00e9\\ud83d\\ude00", '\\"}}]', "\\\\",
    "é😀", "')]", "</arg_value>", "<arg_key>kind</arg_key>", "</function_calls>", "```",
]  # fmt: skip
CLOSING = '"}])\n</>'
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, len(TOKENIZER.hf), [TOKENIZER.hf.convert_tokens_to_ids(END)])


def written(matcher: Matcher, rng: random.Random) -> str | None:
    """A section of calls that the grammar allows, with hostile text wherever it fits; None if it does not end."""
    tokens, end = list[int](), TOKENIZER.hf.convert_tokens_to_ids(END)
    closing = set(TOKENIZER.encode_bare(CLOSING))
    for _ in range(700):
        # Spelt out: a tag that is a token is no text.
        hostile = [token for letter in rng.choice(HOSTILE) for token in TOKENIZER.encode_bare(letter)]
        if rng.random() < 0.15 and matcher.inner.validate_tokens(hostile) == len(hostile):
            assert matcher.inner.consume_tokens(hostile)
            tokens += hostile
            continue
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()
        if end in allowed:
            return TOKENIZER.decode(tokens, skip_special_tokens=False)
        preferred = [token for token in allowed if token in closing] if rng.random() < 0.4 else []
        tokens.append(rng.choice(preferred or allowed))
        if matcher.advance(tokens[-1]):
            return TOKENIZER.decode(tokens, skip_special_tokens=False)
    return None


# Harmony refuses strict functions: its calls are messages with headers of their own (tests/chat/test_harmony.py).
STRICT = sorted(set(TOOL_PARSERS.names()) - {"harmony"})


def check(name: str, compiler: GrammarCompiler, count: int, schema: dict[str, Any] = SCHEMA) -> None:
    kind, rng, found = TOOL_PARSERS.load(name), random.Random(name), 0
    function = {"name": "note", "strict": True, "parameters": schema}
    tools = read_conversation([USER], [{"type": "function", "function": function}]).tools
    tags = Constraints(TOKENIZER.hf.get_added_vocab())
    rules = kind({}).section_rules(tools, lambda text: tags._literals([text]))
    assert rules is not None, "a format of ours takes strict functions"
    grammar = StructuredOutputs(grammar="\n".join(["start: section", *rules, *_RULES]))
    for _ in range(count):
        section = written(compiler.matcher(grammar), rng)
        if section is None:
            continue
        text = kind.opens[0] + section + "".join(kind.closes[:1])
        for pieces in ([text], list(text)):
            parser = AnswerParser(kind({"note": schema}))
            message = ChatMessage().extend([e for piece in pieces for e in parser.feed(piece)] + parser.finish())
            assert not message.content and message.tool_calls, text
            for call in message.tool_calls:
                assert call.name == "note"
                jsonschema.validate(json.loads(call.arguments), schema)
        found += 1
    assert found >= count / 4


@pytest.mark.parametrize("name", sweep(STRICT, 3))
def test_what_the_grammar_allows_is_read_as_valid_arguments(name: str, compiler: GrammarCompiler) -> None:
    check(name, compiler, 2)
    check(name, compiler, 2, LITERALS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (i % 2)) for i, name in enumerate(STRICT)]
)
def test_more_of_what_the_grammar_allows(name: str, compiler: GrammarCompiler) -> None:
    check(name, compiler, 6)
    check(name, compiler, 2, LITERALS)
