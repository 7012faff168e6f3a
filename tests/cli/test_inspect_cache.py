"""`hybridrt inspect --cache`: dumps of a running engine are drawn, and strangers' files are refused."""

import errno
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrt import LLM, CacheDumpError, SamplingParams
from hybridrt.cli.cache_picture import as_svg, as_text, label
from hybridrt.engine.cache.cache_dump import DumpedNode, read_dump, write_dump
from tests.cli.test_inspect import run
from tests.engine.test_prefix_states import TEXT, rig_with_cache
from tests.support.tiny import write_tiny


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an engine that has run three prompts, two of which begin alike."""
    path = tmp_path_factory.mktemp("dump")
    model = str(write_tiny(path, tokenizer=False))
    llm = LLM(model, load_format="dummy", device="cpu", max_model_len=128, max_running_requests=2)
    for prompt in ([5] * 40, [5] * 40 + [6] * 20, [7] * 40):
        llm.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    llm.dump_cache(path / "dump.json")
    counters = llm.engine.counters()
    found = read_dump(path / "dump.json")
    assert (found.asked, found.hit) == (140, counters.cache_hit) and counters.cache_hit >= 32
    assert found.states == sum(node.state for node in found.nodes) == counters.cached_slots > 0
    assert found.pages == sum(node.pages + node.tail for node in found.nodes) == counters.cached_pages > 0
    assert {node.text for node in found.nodes} == {None}
    llm.close()
    return path / "dump.json"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_dump_for_which_there_is_no_room_names_its_file(dump: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'$"):
        write_dump("/dev/full", read_dump(dump))


def test_a_full_disk_leaves_the_older_dump(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, found, write = dump.read_bytes(), read_dump(dump), Path.write_text

    def half(path: Path, text: str, encoding: str) -> None:
        write(path, text[: len(text) // 2], encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as refused:
        patch.setattr(Path, "write_text", half)
        write_dump(dump, found)
    assert str(refused.value).endswith(f"No space left on device: '{dump}'")
    assert dump.read_bytes() == before and list(dump.parent.glob(".*.part")) == []
    dump.chmod(0o600)
    write_dump(dump, found)
    assert read_dump(dump) == found and dump.stat().st_mode & 0o777 == 0o600
    with pytest.raises(NotADirectoryError, match=f"{dump}/other"):
        write_dump(dump / "other", found)


def test_the_tree_is_drawn(dump: Path, tmp_path: Path) -> None:
    nodes = read_dump(dump).nodes
    result = run("inspect", "--cache", str(dump), "--svg", str(tmp_path / "tree.svg"))
    assert result.exit_code == 0 and all(f"{node.start}..{node.end}" in result.stdout for node in nodes)
    assert result.stdout.count("─ ") == len(nodes) and "140 tokens asked" in result.stdout
    drawing = ElementTree.parse(tmp_path / "tree.svg").getroot()
    assert len(drawing.findall("{*}circle")) == sum(node.state for node in nodes)


def test_texts_are_data(dump: Path, tmp_path: Path) -> None:
    fields = json.loads(dump.read_text())
    fields["nodes"][0]["text"] = "</text><script>\x1b[31m" + "x" * 100
    (tmp_path / "dump").write_text(json.dumps(fields))
    found = read_dump(tmp_path / "dump")
    assert "<script>" not in as_svg(found) and "\x1b" not in as_text(found) + as_svg(found)
    ElementTree.fromstring(as_svg(found))


def test_prompts_without_a_salt_have_number_0() -> None:
    """Whichever salt comes first in the tree."""
    rig = rig_with_cache(grid=4, slots=8)
    for end, salt in ((9, None), (10, "a"), (11, "b")):
        rig.finish(TEXT[:end], max_tokens=1, seed=1, cache_salt=salt)
    ends = {salt: [node.end for node in rig.engine.cache_dump().nodes if node.salt == salt] for salt in range(4)}
    assert ends[0] == [8, 9] and sorted([ends[1], ends[2]]) == [[8, 10], [8, 11]] and not ends[3]


def test_deep_nodes_and_long_labels_are_drawn_whole(dump: Path) -> None:
    """Lines of deep nodes have no indentation of their own: a drawing grows with the nodes, not with their square."""
    found = read_dump(dump)
    deep = [DumpedNode(i - 1, i, i + 1, 1, True, False, 0, 1, 0, "x" * 100) for i in range(500)]
    found = replace(found, nodes=tuple(deep))
    lines = as_text(found).split("\n")[3:]
    assert len(lines) == 500 and max(map(len, lines)) < 250 and "level 499: 499..500" in lines[-1]
    drawing = ElementTree.fromstring(as_svg(found))
    right = max(int(text.get("x", "0")) for text in drawing.findall("{*}text")) + 7 * len(label(deep[-1], 499))
    assert int(drawing.get("width", "0")) >= right


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', "[" * 100_000, "\xff"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "dump").write_bytes(text.encode("latin-1"))
    with pytest.raises(CacheDumpError):
        read_dump(tmp_path / "dump")
    assert run("inspect", "--cache", str(tmp_path / "dump")).exit_code == 2
    assert run("inspect", "--cache", str(tmp_path / "none")).exit_code == 2
    assert run("inspect", "--svg", str(tmp_path / "none")).exit_code == 2


values = st.sampled_from([None, True, False, -2, -1, 0, 1, 2, 17, 200, 2**60, 1.5, float("nan"), "x", [], [{}], {}])


@given(st.data())
def test_a_damaged_dump_is_refused_or_drawn(dump: Path, data: st.DataObject) -> None:
    fields: dict[str, Any] = json.loads(dump.read_text())
    target = data.draw(st.sampled_from([fields, *fields["nodes"]]))
    name = data.draw(st.sampled_from(sorted(target)))
    if data.draw(st.booleans()):
        target[name] = data.draw(values)
    else:
        del target[name]
    changed = dump.with_name("changed.json")
    changed.write_text(json.dumps(fields))
    try:
        found = read_dump(changed)
    except CacheDumpError:
        return
    assert as_text(found)
    ElementTree.fromstring(as_svg(found))
