"""Entry points of packages that are installed, and that are installed while a process runs."""

import shutil
from pathlib import Path

import pytest

from hybridrt.base.errors import BackendError
from hybridrt.base.plugins import Plugins

WORDS = Plugins("hybridrt.tested_words", {"own": "builtins:str"}, "word", type)


def install(folder: Path, package: str, points: str) -> None:
    """As pip does: the folder of what is installed gets one more."""
    info = folder / f"{package}-1.0.dist-info"
    made = folder.parent / info.name
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text(points)
    shutil.move(made, info)


def test_a_package_that_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of entry points are read again only if a folder has changed, as every start of an engine looks them up."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    assert WORDS.names() == ["own"]
    install(folder, "one", "[hybridrt.tested_words]\nnumber = builtins:int\n[hybridrt.others]\nother = builtins:list\n")
    assert WORDS.names() == ["number", "own"] and WORDS.load("number") is int
    install(folder, "two", "[hybridrt.tested_words]\nfloating = builtins:float\nown = builtins:bytes\n")
    assert WORDS.names() == ["floating", "number", "own"] and WORDS.load("own") is str
    shutil.rmtree(folder / "one-1.0.dist-info")
    with pytest.raises(BackendError, match="word 'number' is not supported; supported are floating, own"):
        WORDS.load("number")


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "missing"))
    install_to = tmp_path / "site"
    install_to.mkdir()
    install(install_to, "one", "[hybridrt.tested_words]\nnumber = builtins:int\n")
    monkeypatch.syspath_prepend(str(install_to))
    assert "number" in WORDS.names()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: pytest.fail("read again"))
    assert "number" in WORDS.names() and WORDS.place("number") == "builtins:int"
