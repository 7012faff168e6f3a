"""Expressions of module names: they match what `re` matches, and none takes long."""

import re

import hypothesis.strategies as st
import pytest

from hybridrt.errors import ConfigError
from hybridrt.models.config.name_patterns import LONGEST, NamePattern
from tests.support.levels import draw, examples

NAME = "model.layers.10.mlp.experts.3.gate_proj"


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("re:.*mlp.*", True),
        (r"re:model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj$", True),
        ("re:mlp", False),
        (r".*(?<!up_proj)$", True),
        (r".*(?<!gate_proj)$", False),
        (r"(?!.*experts).*", False),
        (r"-:", False),
        ("", True),
    ],
)
def test_names(text: str, matches: bool) -> None:
    assert NamePattern(text).match(NAME) == matches


@pytest.mark.parametrize("text", [".*" * 30 + "X", r"(m|m|mo|o|d|e|l|.)*\d\d\dX", "(.|.)*(.|.)*X", "((a?){1000}|.)*X"])
def test_expressions_that_would_take_years(text: str) -> None:
    assert not NamePattern(text).match(NAME * 2)


PIECES = [
    "a", "b", ".", r"\.", r"\d", "[ab]", "[^a]", r"\w", "ab", "x1", "[]a]", r"[\]a]", "^", "$", r"\b", r"\B", r"\Z",
    "{", "a{,}", "}", "a*", ".+", "[ab]?", "a{2}", "a{1,2}", ".*?", "(?=a)", "(?!ab)", "(?<=a)", "(?<!b)",
]  # fmt: skip
ENDS = ["", "*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "{0}"]
EXPRESSIONS = st.recursive(
    st.sampled_from(PIECES),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}{}|{})".format, st.sampled_from(["", "?:", "?P<name>"]), inner, inner),
        st.builds("({}{})".format, st.sampled_from(["?=", "?!"]), inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(ENDS)),
    ),
    max_leaves=8,
)


@examples(100, 2_000)
def test_the_same_names_as_re(examples: int) -> None:
    def check(text: str, names: list[str]) -> None:
        try:
            theirs = re.compile(text)
        except re.error:
            return
        try:
            ours = NamePattern(text)
        except ConfigError as e:
            assert "nests repetitions" in str(e)
            return
        for name in names:
            assert ours.match(name) == (theirs.match(name) is not None), (text, name)

    draw(examples, check, EXPRESSIONS, st.lists(st.text("abx1.\n", max_size=7), max_size=4))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("re:(((", r"'re:\(\(\(' is no regular expression"),
        ("re:*", "nothing to repeat"),
        ("(((a|b)+|c)+|d)+", "nests repetitions 3 deep"),
        ("(a)" * 333 + "aa", "1001 characters"),
        ("(" * 450 + ")" * 450, "no regular expression"),
        (r"(a)\1", "references"),
        ("(?i)a", "flags"),
        ("(?>a)b", "atomic"),
        ("a*+", "possessive"),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NamePattern(text)


def test_a_name_of_any_length() -> None:
    with pytest.raises(ConfigError, match=f"may have {LONGEST}"):
        NamePattern(".*").match("a" * (LONGEST + 1))
