"""docs/migrate.md: it names each option of vLLM and SGLang, and whatever its columns of hybridrt name is there, in the
help and the routes. tests/server/test_docs.py compares its metrics.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from hybridrt.chat.registry import REASONING_PARSERS, TOOL_PARSERS
from hybridrt.cli.app import app
from scripts.option_rows import DOCUMENT, names, table

ROOT = Path(__file__).parents[1]
NOTHING = {"-", "not there"}
# The options of `vllm serve` and `sglang.launch_server`, as released.
PEERS = json.loads((ROOT / "tests" / "vectors" / "peer_options.json").read_text())
TABLES = {"vllm": "vllm serve", "sglang": "sglang.launch_server"}


def rows(title: str) -> list[list[str]]:
    return list(table(title))


def named(cell: str) -> set[str]:
    return set(names(cell))


@pytest.mark.parametrize("peer", TABLES)
def test_each_option_of_theirs_has_a_row(peer: str) -> None:
    told = [name for row in rows(TABLES[peer]) for name in named(row[0])]
    assert sorted(set(PEERS[peer]["options"]) - set(told)) == []
    assert sorted(name for name in set(told) if told.count(name) > 1) == [], "two rows have these"
    assert PEERS[peer]["version"] in DOCUMENT.read_text().split("## vllm serve")[0]


@pytest.mark.parametrize(("option", "parsers"), [
    ("--tool-call-parser", TOOL_PARSERS), ("--reasoning-parser", REASONING_PARSERS),
])  # fmt: skip
def test_each_parser_is_named(option: str, parsers: Any) -> None:
    for title in TABLES.values():
        remark = next(row[2] for row in rows(title) if option in named(row[0]))
        assert [name for name in parsers.built_in if name not in remark] == []


def test_options_of_ours_are_in_the_help() -> None:
    command: Any = typer.main.get_command(app)
    serve = command.commands["serve"]
    known = {option for parameter in serve.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for title in ("vllm serve", "sglang.launch_server"):
        assert len(rows(title)) > 30
        for theirs, ours, remark in rows(title):
            assert named(theirs) and (named(ours) or ours in NOTHING), theirs
            assert ours != "-" or remark, f"{theirs}: say why there is nothing to set"
            for name in named(ours) | {word for word in named(remark) if re.fullmatch(r"--[a-z-]+", word)}:
                assert name in known or name == "MODEL", name


def test_each_option_of_serve_that_others_have_is_named() -> None:
    """Options that only hybridrt has are listed here."""
    own = {
        "--max-body-bytes", "--max-stored-responses", "--max-stored-bytes", "--request-timeout",
        "--kv-scales", "--audit-hits", "--device", "--fleet-key-file", "--help",
    }  # fmt: skip
    command: Any = typer.main.get_command(app)
    told = {name for title in TABLES.values() for row in rows(title) for name in named(row[1]) | named(row[2])} | own
    options = [parameter for parameter in command.commands["serve"].params if parameter.param_type_name == "option"]
    untold = [option.opts[0] for option in options if not told & {*option.opts, *option.secondary_opts}]
    assert untold == [], "docs/migrate.md: name these, or add them to `own` here"


def test_endpoints_of_ours_are_routes() -> None:
    text = (ROOT / "hybridrt" / "server" / "app.py").read_text()
    routes = set(re.findall(r'@app\.\w+\("([^"]+)"', text))
    for _, ours, _ in rows("Endpoints"):
        assert named(ours) <= routes and (named(ours) or ours in NOTHING), ours
