"""The wheel holds the whole package, the source distribution also what its tests read, and a checkout works whichever
way the package was installed."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hybridrt
from scripts import release, sbom

ROOT = Path(__file__).parents[1]
PACKAGES = {"hybridrt": "hybridrt", "models": "hybridrt/models", "mem_cache": "hybridrt/mem_cache"}
# Whatever precedes the name: pip and uv install and add packages by name.
BY_NAME = re.compile(r"""\b(?:pip3?|uv|pipx)\b[^`\n&|;]*\b(?:install|add)\b[^`\n&|;]*["' ]hybridrt(?:\[|["'\s]|$)""")
EPOCH = 1_700_000_001  # odd: a wheel has two seconds' resolution
TWO = ("tests/test_structure.py", "tests/mem_cache/test_slabs.py")
IGNORED = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")


def pip(*arguments: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_nothing_tells_to_install_a_package_that_is_not_published() -> None:
    """An index may give any other package of that name."""
    assert BY_NAME.search("pip install 'hybridrt[serve]'") and BY_NAME.search("uv pip install -U hybridrt")
    assert not BY_NAME.search("pip install . && hybridrt generate x")
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    for folder in ("hybridrt", "models", "mem_cache", "examples", "benchmarks"):
        texts += (ROOT / folder).rglob("*.py")
    found = {str(text.relative_to(ROOT)) for text in texts if BY_NAME.search(text.read_text())}
    assert not found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build from: setuptools would put what an earlier build left in build/ into the wheel. Its weights are
    cut, which half of the time would go into, because they cannot be compressed."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(ROOT, source, ignore=IGNORED)
    for name in (".ci", ".github"):
        shutil.copytree(ROOT / name, source / name)
    for weights in source.rglob("model.safetensors"):
        os.truncate(weights, 1000)
    return source


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a release's sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("built")
    release.build(source, out, EPOCH)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("hybridrt-*.whl"))


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(next(built.glob("hybridrt-*.tar.gz"))) as archive:
        archive.extractall(out, filter="data")
    return out / f"hybridrt-{hybridrt.__version__}"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds what `pip install .` puts into site-packages."""
    site = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", str(site), str(wheel), cwd=site)
    return site


def expected_files() -> set[str]:
    """Every file of the package, where the wheel should have it."""
    found = set()
    for directory, target in PACKAGES.items():
        for file in (ROOT / directory).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                found.add(f"{target}/{file.relative_to(ROOT / directory).as_posix()}")
    return found


@pytest.mark.slow
def test_wheel_holds_every_file(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = expected_files()
    assert {"hybridrt/py.typed", "hybridrt/models/falcon_h1.py", "hybridrt/cli/app.py"} <= expected
    assert (sorted(expected - held), sorted(held - expected)) == ([], [])


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(built: Path, source: Path, tmp_path: Path) -> None:
    """The second tree has other times and modes on disk, and lies elsewhere."""
    second = tmp_path / "elsewhere"
    shutil.copytree(source, second, copy_function=shutil.copy, ignore=IGNORED)
    for name in (".ci", ".github"):
        shutil.copytree(source / name, second / name, dirs_exist_ok=True)
    for file in second.rglob("*.py"):
        file.chmod(0o600)
        os.utime(file, (EPOCH - 1000, EPOCH - 1000))
    made = release.build(second, tmp_path / "out", EPOCH)
    assert [file.name for file in made] == sorted((f.name for f in built.iterdir()), key=lambda n: n.endswith(".whl"))
    assert all(file.read_bytes() == (built / file.name).read_bytes() for file in made)


@pytest.mark.slow
def test_the_bill_of_materials_has_every_file_with_a_licence(built: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bill = sbom.document(project, hybridrt.__version__, sorted(built.iterdir()), EPOCH)
    archives = {part["name"]: part for part in bill["components"] if part["type"] == "file"}
    for file in built.iterdir():
        parts = archives[file.name]["components"]
        assert sorted(part["name"] for part in parts) == sorted(name for name, _ in sbom.contents(file))
        found = {part["licenses"][0]["expression"] for part in parts}
        assert {"Apache-2.0", "Apache-2.0 AND PSF-2.0"} <= found <= {"Apache-2.0", "Apache-2.0 AND PSF-2.0", "MIT"}


@pytest.mark.slow
def test_wheel_brings_the_licence_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
    assert "LICENSE" in metadata
    assert "hybridrt = hybridrt.cli:main" in archive.read(metadata["entry_points.txt"]).decode()
    assert "License-Expression: Apache-2.0" in archive.read(metadata["METADATA"]).decode()


@pytest.mark.slow
def test_the_wheels_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_string(archive.read(name).decode())
    assert metadata["Version"] == hybridrt.__version__ and metadata["Author"] == "The hybridrt authors"
    assert "mamba" in metadata["Keywords"] and len(metadata.get_all("Classifier", [])) > 5
    assert metadata.get_all("Project-URL") is None, "a public address belongs into SECURITY.md and the README too"


@pytest.mark.slow
def test_the_source_distribution_holds_what_its_tests_read(unpacked: Path) -> None:
    folders = (
        "benchmarks", "docs", "examples", "hybridrt", "integrations", "mem_cache", "models", "notebooks", "tests"
    )  # fmt: skip
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()]
    expected = {str(f.relative_to(ROOT)) for f in files if "__pycache__" not in f.parts}
    expected |= {file.name for file in ROOT.glob("*.md")} | {".ci/run", "LICENSE", "MANIFEST.in", "pyproject.toml"}
    assert sorted(file for file in expected if not (unpacked / file).is_file()) == []


@pytest.mark.slow
def test_experiments_are_not_shipped(unpacked: Path, source: Path, wheel: Path) -> None:
    assert (source / "experiments" / "README.md").is_file()
    assert not (unpacked / "experiments").exists()
    assert not any("experiments" in name for name in zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("peer", ["sglang", "vllm"])
def test_a_plugin_needs_the_version_that_it_comes_with(peer: str) -> None:
    """It calls kernels, which are not stable."""
    project = tomllib.loads((ROOT / "integrations" / peer / "pyproject.toml").read_text())["project"]
    assert project["version"] == hybridrt.__version__
    assert project["dependencies"] == [f"hybridrt=={hybridrt.__version__}"]


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["sglang", "vllm"])
def test_a_plugin_is_a_wheel_of_its_own(peer: str, unpacked: Path, wheel: Path, tmp_path: Path) -> None:
    """Which has all of its files and its entry point. hybridrt's wheel has nothing of it."""
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), f"./integrations/{peer}", cwd=unpacked)
    archive = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "integrations" / peer / f"hybridrt_{peer}"
    assert names == {f"{package.name}/{file.name}" for file in package.glob("*.py")}
    metadata = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
    assert f"hybridrt = {package.name}:register" in archive.read(metadata["entry_points.txt"]).decode()
    assert not any(package.name in name for name in zipfile.ZipFile(wheel).namelist())


def test_the_hook_before_a_commit_has_a_ruff_that_the_project_accepts() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (ruff,) = (line for line in map(Requirement, extras["dev"]) if line.name == "ruff")
    (rev,) = re.findall(r"rev: v([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert ruff.specifier.contains(rev)


@pytest.mark.parametrize(
    "chosen",
    [
        # But for tests that read or import all of the package.
        pytest.param((*TWO, "-k", "not one_way and not public and not lead_to"), marks=pytest.mark.slow),
        # All files are imported, and so are their helpers: the slow level compares names alone, with the test above.
        pytest.param(("-k", "test_structure.py or test_config.py"), marks=pytest.mark.soak),
    ],
    ids=["two files", "all are imported"],
)
def test_tests_run_from_a_source_distribution(chosen: tuple[str, ...], unpacked: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    # To rewrite the asserts of hundreds of files takes longer than to run the two.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "--assert=plain", *chosen]
    result = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-4000:] + result.stderr


@pytest.mark.slow
def test_a_package_index_shows_no_links_that_lead_nowhere(wheel: Path) -> None:
    """README.md has links and pictures of the repository; it is not what an index shows."""
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = str(email.message_from_string(archive.read(name).decode()).get_payload())
    assert "# hybridrt" in text
    assert re.findall(r"\]\((?!https://)[^)]*\)|<img[^>]*>", text) == []
    named = re.findall(r"\b[A-Z]+\.md\b", text)
    assert len(named) > 2 and [path for path in named if not (ROOT / path).exists()] == []


def test_documents_name_the_bounds_of_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(line for line in project["dependencies"] if re.match(r"torch\b", line))
    for name in ("README.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"'(torch>=[^']*)'", (ROOT / name).read_text())) == {torch}, name


def test_every_dependency_has_a_lower_bound_that_is_not_newer_than_what_is_installed() -> None:
    """Without one, an installer may keep a version that nobody has tried."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *(line for name in ("serve", "otlp", "structured", "test") for line in extras[name]),
    ]
    for requirement in map(Requirement, lines):
        if requirement.name != "hybridrt":
            assert any(bound.operator == ">=" for bound in requirement.specifier), requirement
            assert requirement.specifier.contains(version(requirement.name)), requirement


def test_what_the_default_level_leaves_out_runs_elsewhere() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    left_out = set(re.findall(r"not (\w+)", settings["addopts"]))
    assert left_out == {line.split(":")[0] for line in settings["markers"]} == {"gpu", "slow", "soak"}
    default, types, _, slow = (ROOT / ".ci" / "run").read_text().splitlines()[-4:]
    assert default.endswith("&& pytest") and types.startswith("wait ") and slow.startswith("pytest -m slow --third ")
    commands = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"`pytest -m {mark}`" in commands for mark in left_out)


def test_package_list_is_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    tree = {
        ".".join((target, *file.parent.relative_to(ROOT / directory).parts)).replace("/", ".")
        for directory, target in PACKAGES.items()
        for file in (ROOT / directory).rglob("__init__.py")
    }
    assert set(settings["packages"]) == tree
    assert settings["package-dir"] == {target.replace("/", "."): directory for directory, target in PACKAGES.items()}
    folders = {file.parent for directory in PACKAGES for file in (ROOT / directory).rglob("*.py")}
    assert {str(folder) for folder in folders if not (folder / "__init__.py").is_file()} == set()


def python(site: Path, cwd: Path, *arguments: str) -> str:
    """Runs Python with `site` as the only place where hybridrt is installed."""
    # -S -s: no site-packages, hence no editable install of this checkout; what torch needs comes by path instead.
    libraries = [p for p in sys.path if p.endswith("site-packages")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *libraries])}
    command = [sys.executable, "-S", "-s", *arguments]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


WHERE = "import hybridrt.models.registry as m, hybridrt.mem_cache.pools.entries as c; print(m.__file__, c.__file__)"


@pytest.mark.slow
def test_the_installed_package_needs_no_checkout(installed: Path, tmp_path: Path) -> None:
    files = python(installed, tmp_path, "-c", WHERE).split()
    assert all(file.startswith(str(installed)) for file in files)


@pytest.mark.slow
def test_checkout_hides_an_installed_package_whole(installed: Path) -> None:
    files = python(installed, ROOT, "-c", WHERE).split()
    assert files == [str(ROOT / "models" / "registry.py"), str(ROOT / "mem_cache" / "pools" / "entries.py")]


@pytest.mark.slow
def test_nothing_else_of_a_checkout_is_part_of_the_package(installed: Path) -> None:
    code = (
        "import importlib.util as i; print([i.find_spec(f'hybridrt.{n}') for n in ('tests', 'benchmarks', 'scripts')])"
    )
    assert python(installed, ROOT, "-c", code) == "[None, None, None]\n"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["benchmarks.bench_cpu"])
def test_benchmarks_run_from_the_checkout(installed: Path, module: str) -> None:
    assert "usage" in python(installed, ROOT, "-m", module, "--help")


@pytest.mark.slow
def test_command_runs_from_an_installed_package(installed: Path, tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['hybridrt', '--version']; from hybridrt.cli import main; main()"
    assert python(installed, tmp_path, "-c", code) == f"hybridrt {hybridrt.__version__}\n"
