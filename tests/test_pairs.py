"""Every pair of features is tried, or is named here with the reason why not.

`python -m tests.test_pairs` writes docs/pairs.md.
"""

from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, HybridrtError
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.cache import host_fetches
from tests.support.features import FEATURES, PAIRS, USUAL, Answer, in_two_chunks, outputs, write_model

ROOT = Path(__file__).parents[1]
DRAFTERS = ("ngram", "draft", "mtp")
Pair = tuple[str, str]
# Codes of states are rounded where a ring is folded. A ring with room for drafts folds after other tokens.
RUNS: frozenset[Pair] = frozenset(("8-bit states", method) for method in DRAFTERS)
# These round codes where they keep a state. They are compared with the prefix cache in memory, and a repeated request
# with the first one.
KEEPERS = frozenset(("prefix cache", "host tier", "sessions"))
# Pairs that another test has, "file::test", or that an option cannot ask for.
ELSEWHERE: dict[Pair, str] = {
    ("tp", "transfer"): "tests/transfer/test_nixl.py::test_other_numbers_of_ranks",
    ("ep", "transfer"): "tests/transfer/test_nixl.py::test_other_numbers_of_ranks",
    **{pair: "one option: speculative" for pair in PAIRS if set(pair) <= set(DRAFTERS)},
}
# What an error says of a pair that is refused.
REFUSED: dict[Pair, str] = {
    ("dp", "sessions"): "a session cannot be saved or loaded: it belongs to one engine",
    ("dp", "transfer"): "transfer_bytes belongs to one engine",
    ("draft", "images"): "drafts with a smaller model, which sees no images",
}
# Their pairs start processes, for tens of seconds: most of them are tried by hand, before a release.
RANKS = ("tp", "ep", "dp")
RANK_PAIRS = (("quantised", "tp"), ("ep", "mtp"), ("quantised", "dp"))
# Features that are not there, and what refuses them or shows that they are not.
ABSENT = {
    "adapters": "test_adapters_are_refused_by_name",
    "deterministic": "", "updates": "",
}  # fmt: skip
TRIED = [pair for pair in PAIRS if pair not in ELSEWHERE and pair not in REFUSED]


def test_each_option_of_an_engine_is_a_feature_or_usual() -> None:
    """A new feature gets a line in FEATURES, and with it a cell with each other one."""
    known = {name for feature in FEATURES.values() for name in feature.fields} | USUAL
    assert {field.name for field in fields(EngineConfig)} == known
    assert not known & set(ABSENT)


def test_each_pair_has_a_cell() -> None:
    assert set(TRIED) | ELSEWHERE.keys() | REFUSED.keys() == set(PAIRS) and set(TRIED) >= RUNS
    for told in ELSEWHERE.values():
        file, _, name = told.partition("::")
        assert not name or f"def {name}(" in (ROOT / file).read_text(), told
    assert all(not name or name in globals() for name in ABSENT.values())


def test_adapters_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapters \(LoRA\) are not supported"):
        LLM(tmp_path, device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("features"))


@cache
def plainest(model: Path, names: tuple[str, ...]) -> list[Answer]:
    """Answers of a run with the features among `names` that change numbers, and no others."""
    return outputs(model, names, model)


def expected(model: Path, pair: Pair, found: list[Answer]) -> list[Answer]:
    """Answers of a run that rounds where this pair does."""
    if "8-bit states" in pair and "transfer" in pair:
        return in_two_chunks(model, ("8-bit states",), found)
    if "8-bit states" in pair and KEEPERS & {*pair}:
        return plainest(model, ("8-bit states", "prefix cache"))
    return plainest(model, tuple(name for name in pair if not FEATURES[name].exact))


def _levels() -> list[Any]:
    """In the slow level each sixth pair without ranks, and a pair of each sort of ranks: all features are in one. The
    others are in the soak level."""
    slow = {*[pair for pair in TRIED if not set(pair) & set(RANKS)][::6], *RANK_PAIRS}
    assert {name for pair in slow for name in pair} == set(FEATURES)
    names = {pair: "-".join(pair).replace(" ", "_") for pair in TRIED}
    return [
        pytest.param(pair, id=names[pair], marks=pytest.mark.slow if pair in slow else pytest.mark.soak)
        for pair in TRIED
    ]


@pytest.mark.slow
@pytest.mark.parametrize("pair", [
    pytest.param(pair, marks=[pytest.mark.soak] * ("sessions" in pair))  # test_replicas has it, without processes
    for pair in REFUSED
])  # fmt: skip
def test_two_features_that_are_refused_by_name(model: Path, tmp_path: Path, pair: Pair) -> None:
    with pytest.raises(HybridrtError, match=REFUSED[pair]):
        outputs(model, pair, tmp_path)


@pytest.mark.parametrize("pair", _levels())
def test_two_features_together(model: Path, tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns of three requests. Features that change no number change no token."""
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)
    found = outputs(model, pair, tmp_path)
    assert all(tokens for tokens, _ in found)
    if pair in RUNS:
        return
    for (tokens, logprobs), (meant, numbers) in zip(found, expected(model, pair, found), strict=True):
        assert tokens == meant
        # Tokens seldom show that a code differs.
        assert "8-bit states" not in pair or logprobs == pytest.approx(numbers, abs=1e-4)


def table() -> str:
    """A row and a column for each feature."""
    names = list(FEATURES)
    rows = [["", *names], ["---"] * (len(names) + 1)]
    for row in names:
        rows.append([row, *(_cell(row, column) for column in names)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(row: str, column: str) -> str:
    pair = next((pair for pair in PAIRS if set(pair) == {row, column}), None)
    if pair is None:
        return ""
    if pair in REFUSED:
        return "refused"
    if pair in ELSEWHERE:
        return "one at a time" if "::" not in ELSEWHERE[pair] else "own test"
    if "8-bit states" in pair and {*pair} & {*KEEPERS, "transfer"}:
        return "as moved" if "transfer" in pair else "as kept"
    return "runs" if pair in RUNS else "equal"


HEAD = """# Features together

Each pair of features is tried on a tiny model: two turns of three requests, on a CPU. "equal": the
tokens are those of a run without the features that change no number. "as kept": tokens are those of
the request that left the state, in memory, in main memory and in a session. "as moved": tokens are
those of one worker that computes the last token of a prompt apart. "runs": both features round at
other places together than alone, so tokens are not compared. "own test": another test has the pair.
"one at a time": one option chooses between them. "refused": an error names the two.

Of the prompts with images, a worker that fetches prompts computes those with an image itself.
Adapters are refused by name. `python -m tests.test_pairs` writes this page, and `pytest -m "slow or
soak" tests/test_pairs.py` tries the pairs. A new option of the engine that has no row fails a test.

"""
DOCUMENT = ROOT / "docs" / "pairs.md"


def test_the_page_is_up_to_date() -> None:
    assert HEAD + table() + "\n" == DOCUMENT.read_text(), "run python -m tests.test_pairs"


if __name__ == "__main__":
    DOCUMENT.write_text(HEAD + table() + "\n")
