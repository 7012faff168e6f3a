"""The policy names what exists, warnings have dates, and the workflows run the commands of the repository."""

import linecache
import re
import tomllib
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from hybridrt.base.deprecation import MIN_DAYS, Deprecation
from hybridrt.base.errors import ConfigError
from hybridrt.engine.cache.session_file import FORMAT
from scripts import pins

ROOT = Path(__file__).parents[1]
STABILITY = (ROOT / "docs" / "stability.md").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
WORKFLOWS = {file.name: yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "workflows").glob("*.yml")}
(CI,) = WORKFLOWS["ci.yml"]["jobs"].values()
OLD = Deprecation("LLM(old=)", "LLM(new=)", date(2026, 1, 1), date(2026, 6, 1))


def takes_old() -> None:
    OLD.warn()


def test_a_deprecation_names_both_days_and_the_new_form_at_the_place_of_the_call() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        takes_old()
    (warning,) = seen
    assert str(warning.message) == "LLM(old=) is deprecated since 2026-01-01 and works until 2026-06-01: use LLM(new=)"
    assert warning.category is FutureWarning, "Python hides DeprecationWarning from users"
    assert linecache.getline(warning.filename, warning.lineno).strip() == "takes_old()"


def test_a_deprecation_lasts_as_long_as_the_policy_says() -> None:
    assert f"{MIN_DAYS} days at least" in STABILITY
    with pytest.raises(ConfigError, match=f"warn for 89 days; it must be {MIN_DAYS} at least"):
        Deprecation("a", "b", date(2026, 1, 1), date(2026, 3, 31))


def test_the_policy_names_the_groups_formats_and_pythons_that_exist() -> None:
    groups = set()
    for folder in ("hybridrt", "models"):
        for file in (ROOT / folder).rglob("*.py"):
            groups |= set(re.findall(r"= Plugins\(\s*\"(hybridrt\.\w+)\"", file.read_text()))
    (listed,) = re.findall(r"The groups of entry points: (.*?)\.\n\n", STABILITY, re.DOTALL)
    assert set(re.findall(r"`(hybridrt\.\w+)`", listed)) == groups and len(groups) == 7
    assert f"`{FORMAT}`" in STABILITY
    assert set(re.findall(r"\b3\.\d\d\b", STABILITY)) == PYTHONS


def test_each_python_runs_all_checks_once_with_old_and_new_versions() -> None:
    rows = CI["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == PYTHONS and {row["pins"] for row in rows} == {"oldest", "newest"}
    torch = next(line for line in map(Requirement, PROJECT["dependencies"]) if line.name == "torch")
    versions = [row["torch"].removeprefix("torch==").removesuffix(".*") for row in rows]
    assert all(torch.specifier.contains(f"{version}.0") for version in versions)
    bounds = {bound.operator: bound.version for bound in torch.specifier}
    assert rows[0]["pins"] == "oldest" and versions[0] == bounds[">="]
    newest = f"2.{int(bounds['<'].partition('.')[2]) - 1}"
    assert versions[-1] == newest
    assert CI["steps"][-1] == {"run": ".ci/run"}


def test_workflows_run_files_and_modules_that_exist_and_may_write_nothing() -> None:
    commands = [step.get("run", "") for w in WORKFLOWS.values() for j in w["jobs"].values() for step in j["steps"]]
    modules = {name for command in commands for name in re.findall(r"python -m ([\w.]+)", command)}
    assert modules == {"scripts.pins", "scripts.release"}
    assert all((ROOT / f"{module.replace('.', '/')}.py").is_file() for module in modules)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"python -m {module}" in text for module in modules)


def test_the_oldest_pins_are_the_lower_bounds() -> None:
    lines = dict(line.split("==") for line in pins.oldest(PROJECT))
    assert lines["torch"] == "2.11" and {"numpy", "fastapi", "llguidance", "triton"} <= lines.keys()
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(lines[requirement.name])


def test_addresses_that_do_not_exist_are_called_placeholders() -> None:
    for name in ("MAINTAINERS.md", "SECURITY.md"):
        text = (ROOT / name).read_text()
        assert "laceholder" in text and not re.search(r"[\w.]+@[\w.]+", text), (
            "an address is there: drop the placeholder"
        )
