"""A release has a dated section of the changelog, archives whose bytes depend on their files alone, and known licences.

tests/test_packaging.py builds whole archives twice.
"""

import hashlib
import io
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from scripts import release, sbom

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGES = "# Changelog\n\n## 0.2.0 (not released yet)\n\n- b\n\n## 0.1.0 (2026-01-31)\n\n### Added\n\n- a\n"
FILES = {
    "x/b.py": (b"b", 0o664),
    "x/a.py": (b"a", 0o600),
    "x-1.dist-info/RECORD": (b"r", 0o644),
    "x/run": (b"#", 0o777),
}


def test_a_release_needs_its_dated_section() -> None:
    assert release.changelog_section(CHANGES, "0.1.0") == "## 0.1.0 (2026-01-31)\n\n### Added\n\n- a\n"
    assert release.changelog_section(CHANGES, "0.2.0", draft=True) == "## 0.2.0 (not released yet)\n\n- b\n"
    with pytest.raises(release.ReleaseError, match='dated "not released yet"; write YYYY-MM-DD'):
        release.changelog_section(CHANGES, "0.2.0")
    with pytest.raises(release.ReleaseError, match=r'no section "## 0\.3\.0 \(YYYY-MM-DD\)"'):
        release.changelog_section(CHANGES, "0.3.0", draft=True)


def test_a_folder_with_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    with pytest.raises(release.ReleaseError, match="is not empty"):
        release.release(ROOT, tmp_path, 0, draft=True)


def test_a_tool_that_the_project_does_not_accept_builds_nothing(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[build-system]\nrequires = ["setuptools>=7777"]\n')
    with pytest.raises(release.ReleaseError, match="setuptools>=7777 is needed"):
        release.build(tmp_path, tmp_path / "out", 0)


def tar(file: Path, names: list[str], time: int, owner: str) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(FILES[name][0]), FILES[name][1]
            entry.mtime, entry.uname = time, owner
            archive.addfile(entry, io.BytesIO(FILES[name][0]))
    return file


def wheel(file: Path, names: list[str], year: int, mask: int) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0))
            entry.external_attr = (FILES[name][1] & mask) << 16
            archive.writestr(entry, FILES[name][0])
    return file


def test_bytes_of_an_sdist_depend_on_its_files_alone(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
    tar(tmp_path / "1.tar.gz", sorted(FILES), 1, "me")
    one = release.repacked_sdist(tmp_path / "1.tar.gz", tmp_path / "a", 99)
    tar(tmp_path / "1.tar.gz", sorted(FILES, reverse=True), 2, "you")
    two = release.repacked_sdist(tmp_path / "1.tar.gz", tmp_path / "b", 99)
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes()[4:8] == bytes(4), "the time of compression"
    with tarfile.open(one) as archive:
        members = {m.name: (m.mode, m.mtime, m.uid, m.uname) for m in archive.getmembers()}
        assert members["x/a.py"] == (0o644, 99, 0, "") and members["x/run"][0] == 0o755
        assert list(members) == sorted(FILES)


def test_bytes_of_a_wheel_depend_on_its_files_alone(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
    one = release.repacked_wheel(wheel(tmp_path / "1.whl", sorted(FILES), 1999, 0o700), tmp_path / "a", 99)
    later = wheel(tmp_path / "1.whl", sorted(FILES, reverse=True), 2020, 0o777)
    two = release.repacked_wheel(later, tmp_path / "b", 99)
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as archive:
        assert archive.namelist() == ["x/a.py", "x/b.py", "x/run", "x-1.dist-info/RECORD"]
        assert archive.getinfo("x/a.py").create_system == 3, "else modes depend on where it was built"
        assert archive.getinfo("x/a.py").date_time[0] == 1980, "a wheel knows no earlier year"
        assert {name: archive.read(name) for name in FILES} == {name: content for name, (content, _) in FILES.items()}


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("b", "a")]
    for file in files:
        file.write_text(file.name)
    lines = [f"{hashlib.sha256(name.encode()).hexdigest()}  {name}" for name in "ab"]
    assert release.checksums(files).splitlines() == lines


def test_a_file_that_names_an_owner_needs_a_known_licence() -> None:
    assert sbom.licence_of("hybridrt/base/errors.py", b"x", "Apache-2.0") == "Apache-2.0"
    assert sbom.licence_of("hybridrt/assets/embedded/config.json", b"{}", "Apache-2.0") == "Apache-2.0 AND PSF-2.0"
    for name, content in (
        ("models/new.py", b"# SPDX-%s: MIT" % b"License-Identifier"),
        ("hybridrt/assets/new/w.safetensors", b""),
    ):
        with pytest.raises(sbom.LicenceError, match="to LICENCES in"):
            sbom.licence_of(name, content, "Apache-2.0")
    assert all((ROOT / name).exists() for name in sbom.LICENCES)


def test_the_bill_names_every_requirement(tmp_path: Path) -> None:
    bill = sbom.document(PROJECT, "1.2.3", [wheel(tmp_path / "1.whl", sorted(FILES), 2020, 0o777)], 0)
    parts = {part["name"]: part for part in bill["components"]}
    assert parts["torch"]["scope"] == "required" and parts["fastapi"]["scope"] == "optional"
    lines = {p["value"] for part in parts.values() for p in part.get("properties", [])}
    given = {line for group in PROJECT["optional-dependencies"].values() for line in group} | {*PROJECT["dependencies"]}
    assert lines == {line for line in given if not line.startswith("hybridrt[")}
    assert {part["name"] for part in parts["1.whl"]["components"]} == set(FILES)
    references = [bill["metadata"]["component"]["bom-ref"], *(part["bom-ref"] for part in parts.values())]
    assert len(set(references)) == len(references)
