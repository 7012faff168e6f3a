"""docs/chat.md: its examples run, in order, and its table lists every parser."""

import re
from pathlib import Path

from hybridrt.chat.registry import REASONING_PARSERS, TOOL_PARSERS

TEXT = (Path(__file__).parents[2] / "docs" / "chat.md").read_text()


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/chat.md", "exec"), names)


def test_every_parser_is_listed() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \| `?[<H]", TEXT, re.MULTILINE))
    assert listed == {*TOOL_PARSERS.built_in, *REASONING_PARSERS.built_in}


def test_a_parser_takes_less_than_60_lines() -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "class Arrow" in b)
    assert block.count("\n") < 60
