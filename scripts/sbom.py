"""The bill of materials of a release, as CycloneDX 1.6: dependencies, and each shipped file's licence."""

import datetime
import hashlib
import platform
import re
import tarfile
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

# Files that are not the project's own work, or that others' work went into. All others have the project's licence.
LICENCES = {
    # Weights and tokenizers are the project's. They were trained on the Python standard library; NOTICE says so.
    "hybridrt/assets/embedded/": "Apache-2.0 AND PSF-2.0",
    "hybridrt/assets/embedded_draft/": "Apache-2.0 AND PSF-2.0",
    "hybridrt/assets/page/": "Apache-2.0",
    "hybridrt/assets/option_rows.json": "Apache-2.0",
    "tests/support/json_schema_suite.json": "MIT",
}
# These name the owner of others' work, and hold none of it.
ONLY_MENTIONS = ("LICENSE", "benchmarks/train_embedded.py", "docs/embedded-model.md", "scripts/sbom.py")
_CLAIM = re.compile(rb"Copyright \(c\)|SPDX-License-Identifier|Licensed under the", re.IGNORECASE)


class LicenceError(Exception):
    """A shipped file names an owner, and LICENCES does not name the file."""


def document(project: Mapping[str, Any], number: str, archives: Sequence[Path], epoch: int) -> dict[str, Any]:
    """The whole bill.

    Args:
        project: the table [project] of pyproject.toml.
        number: the version.
        archives: wheel and sdist.
        epoch: the bill's time.
    """
    url = f"pkg:pypi/{project['name']}@{number}"
    own = {"type": "library", "bom-ref": url, "name": project["name"], "version": number, "purl": url}
    parts = [_archive(file, project["license"]) for file in archives]
    needed = list(_dependencies(project))
    digests = "".join(part["hashes"][0]["content"] for part in parts)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digests)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tools": {"components": list(_tools())},
            "component": own | {"licenses": [{"expression": project["license"]}]},
        },
        "components": [*parts, *needed],
        "dependencies": [{"ref": url, "dependsOn": [each["bom-ref"] for each in needed]}],
    }


def _tools() -> Iterator[dict[str, str]]:
    """What the bytes of the archives depend on next to the source."""
    for name, number in (
        ("python", platform.python_version()),
        ("zlib", zlib.ZLIB_RUNTIME_VERSION),
        ("setuptools", version("setuptools")),
    ):
        yield {"type": "application", "name": name, "version": number}


def _dependencies(project: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One component a package, with every range that pyproject.toml gives. An installer chooses the version."""
    ranges: dict[str, dict[str, str]] = {}
    for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for line in lines:
            name = Requirement(line).name.lower().replace("_", "-")
            if name != project["name"]:
                ranges.setdefault(name, {})[extra] = line
    for name, lines in sorted(ranges.items()):
        properties = [
            {"name": f"requirement:{extra}" if extra else "requirement", "value": lines[extra]} for extra in lines
        ]
        scope = "required" if "" in lines else "optional"
        url = f"pkg:pypi/{name}"
        yield {
            "type": "library", "bom-ref": url, "name": name, "purl": url, "scope": scope, "properties": properties,
        }  # fmt: skip


def _archive(file: Path, licence: str) -> dict[str, Any]:
    """An archive with its files. LicenceError if one's licence is not known."""
    parts = [
        _component(name, content) | {"licenses": [{"expression": licence_of(name, content, licence)}]}
        for name, content in contents(file)
    ]
    for part in parts:
        part["bom-ref"] = f"{file.name}#{part['name']}"
    return _component(file.name, file.read_bytes()) | {"bom-ref": file.name, "components": parts}


def _component(name: str, content: bytes) -> dict[str, Any]:
    return {
        "type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}],
    }  # fmt: skip


def contents(file: Path) -> Iterable[tuple[str, bytes]]:
    """Name and content of each file; of an sdist, without its first folder."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return [(name, wheel.read(name)) for name in wheel.namelist()]
    with tarfile.open(file) as sdist:
        return [
            (member.name.partition("/")[2], stream.read())
            for member in sdist.getmembers()
            if (stream := sdist.extractfile(member)) is not None
        ]


def licence_of(name: str, content: bytes, own: str) -> str:
    """The SPDX expression of a file. LicenceError if it names an owner that nobody has looked at."""
    for start, expression in LICENCES.items():
        if name.startswith(start):
            return expression
    mentions = name.startswith(ONLY_MENTIONS) or ".dist-info/licenses/" in name
    if name.startswith("hybridrt/assets/") or (_CLAIM.search(content) and not mentions):
        raise LicenceError(f"{name} names an owner or is an asset: add its licence to LICENCES in scripts/sbom.py")
    return own
