"""docs/embedding.md: its examples run, there is one in each section, and it names all of the surface."""

import re
from pathlib import Path

import pytest

from hybridrt import embedding

TEXT = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in TEXT.split("\n## ")[1:]}


@pytest.mark.parametrize("title", SECTIONS)
def test_the_example_of_a_section_runs(title: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[title], re.DOTALL)
    exec(compile(code, f"docs/embedding.md, {title}", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("owner", [embedding.EmbeddedRuntime, embedding.DecodeGraphs])
def test_the_document_names_every_method(owner: type) -> None:
    methods = [name for name, value in vars(owner).items() if callable(value) and not name.startswith("_")]
    assert [name for name in methods if not re.search(rf"\b{name}\b", TEXT)] == []
