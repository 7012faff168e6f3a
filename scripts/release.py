"""Builds a release: wheel and sdist with the same bytes each time, checksums, SBOM and changelog.

python -m scripts.release --out dist [--draft]

Only files of the last commit are built, with its time. The same commit, Python, zlib and setuptools
give the same bytes; sbom.json names the last three. docs/stability.md says what a release promises.
"""

import argparse
import datetime
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

from scripts import sbom

ROOT = Path(__file__).parents[1]
_BUILD = "from setuptools import build_meta; import sys; build_meta.{}(sys.argv[1])"
_FIRST_YEAR_OF_ZIP = 315532800  # 1980-01-01
_DATED = r"\d{4}-\d\d-\d\d"


class ReleaseError(Exception):
    """This tree cannot be released."""


def build(source: Path, out: Path, epoch: int) -> list[Path]:
    """Builds the sdist from `source`, and the wheel from the sdist, into `out`.

    Args:
        source: a tree without the leftovers of earlier builds; setuptools writes into it.
        epoch: seconds since 1970 that all members are dated with.
    """
    check_tools(source)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        made = _run_backend("build_sdist", source, work, epoch)
        sdist = repacked_sdist(made, out, epoch)
        with tarfile.open(sdist) as archive:
            archive.extractall(work / "source", filter="data")
        (unpacked,) = (work / "source").iterdir()
        wheel = repacked_wheel(_run_backend("build_wheel", unpacked, work, epoch), out, epoch)
    return [sdist, wheel]


def check_tools(source: Path) -> None:
    """ReleaseError if an installed build tool is not one that pyproject.toml accepts."""
    project = tomllib.loads((source / "pyproject.toml").read_text())
    for requirement in map(Requirement, project["build-system"]["requires"]):
        if not requirement.specifier.contains(version(requirement.name)):
            raise ReleaseError(f"{requirement.name} {version(requirement.name)} is installed; {requirement} is needed")


def _run_backend(function: str, source: Path, out: Path, epoch: int) -> Path:
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
    before = set(out.iterdir())
    command = [sys.executable, "-c", _BUILD.format(function), str(out)]
    result = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise ReleaseError(f"{function} has failed:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    (made,) = set(out.iterdir()) - before
    return made


def repacked_sdist(made: Path, out: Path, epoch: int) -> Path:
    """The same files, sorted, with fixed owners, modes and times. setuptools keeps those of the disk."""
    plain = io.BytesIO()
    with tarfile.open(made) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted((m for m in old.getmembers() if m.isfile()), key=lambda m: m.name):
            entry = tarfile.TarInfo(member.name)
            entry.size, entry.mtime, entry.mode = member.size, epoch, _mode(member.mode)
            new.addfile(entry, old.extractfile(member))
    target = out / made.name
    target.write_bytes(gzip.compress(plain.getvalue(), 9, mtime=0))
    return target


def repacked_wheel(made: Path, out: Path, epoch: int) -> Path:
    """The same files, sorted, the metadata last, with fixed modes and times."""
    moment = datetime.datetime.fromtimestamp(max(epoch, _FIRST_YEAR_OF_ZIP), datetime.UTC)
    target = out / made.name
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(target, "w") as new:
        for name in sorted(old.namelist(), key=lambda name: (".dist-info/" in name, name.endswith("RECORD"), name)):
            entry = zipfile.ZipInfo(name, moment.timetuple()[:6])
            entry.create_system = 3  # Unix: the modes count
            entry.external_attr = (0o100000 | _mode(old.getinfo(name).external_attr >> 16)) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            new.writestr(entry, old.read(name), compresslevel=9)
    return target


def _mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644


def changelog_section(text: str, release: str, draft: bool = False) -> str:
    """The section of CHANGELOG.md about `release`. ReleaseError without one, or if it has no date and
    is no draft."""
    found = re.search(rf"^## {re.escape(release)} \(([^\n]*)\)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ReleaseError(f'CHANGELOG.md has no section "## {release} (YYYY-MM-DD)"')
    if not draft and not re.fullmatch(_DATED, found[1]):
        raise ReleaseError(f'the section of {release} is dated "{found[1]}"; write YYYY-MM-DD, or pass --draft')
    return found[0].rstrip() + "\n"


def checksums(files: Iterable[Path]) -> str:
    """Lines for `sha256sum -c`, sorted by name."""
    ordered = sorted(files, key=lambda file: file.name)
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in ordered)


def release(source: Path, out: Path, epoch: int, draft: bool) -> list[Path]:
    """Everything that is published, in `out`, which must be empty or absent."""
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty; name another folder with --out")
    number = re.findall(r'^__version__ = "(.*)"', (source / "hybridrt/base/version.py").read_text(), re.MULTILINE)[0]
    section = changelog_section((source / "CHANGELOG.md").read_text(), number, draft)
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    archives = build(source, out, epoch)
    notes, bill, sums = out / f"CHANGELOG-{number}.md", out / "sbom.json", out / "SHA256SUMS"
    notes.write_text(section)
    bill.write_text(json.dumps(sbom.document(project, number, archives, epoch), indent=1) + "\n")
    sums.write_text(checksums([*archives, notes, bill]))
    return [*archives, notes, bill, sums]


def _git(*arguments: str) -> bytes:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    if result.returncode:
        raise ReleaseError(f"git {arguments[0]} has failed: {result.stderr.decode().strip()}")
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder that is empty or absent")
    parser.add_argument("--draft", action="store_true", help="the section of CHANGELOG.md needs no date")
    options = parser.parse_args()
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no").decode()
        if changed:
            raise ReleaseError(f"these files differ from the last commit:\n{changed}")
        with tempfile.TemporaryDirectory() as name, tarfile.open(fileobj=io.BytesIO(_git("archive", "HEAD"))) as tree:
            tree.extractall(name, filter="data")
            epoch = int(_git("log", "-1", "--format=%ct"))
            made = release(Path(name), options.out, epoch, options.draft)
    except (ReleaseError, sbom.LicenceError) as e:
        sys.exit(f"release: {e}")
    print(*made, sep="\n")


if __name__ == "__main__":
    main()
