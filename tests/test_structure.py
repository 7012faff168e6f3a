"""The shape of the code: which way imports point, how long files are, how deep a call goes, what docs list."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts import file_table

ROOT = Path(__file__).parents[1]
PACKAGES = {"hybridrt": "hybridrt", "models": "hybridrt.models", "mem_cache": "hybridrt.mem_cache"}
# A folder imports from itself and from those before it. Files of `server` and `cli` without a folder of their own come
# last there, and so do the public modules next to `base`.
ORDER = (
    "base", "channel", "kinds", "kernels.core", "kernels.state", "kernels.dense", "kernels.quant",
    "kernels.attention", "kernels.sampling", "kernels.mamba", "kernels.delta_rule", "kernels.libraries", "collectives",
    "mem_cache.pools", "mem_cache.prefix_tree", "fleet.prefix_mirror", "fleet.placement",
    "fleet.cache_messages",
    "attention", "layers", "recurrent", "models", "runtime.step",
    "runtime.sampling", "runtime.replay", "runtime.load", "runtime.run", "runtime.precompile",
    "runtime.tune", "speculative",
    "parallel", "engine.text", "embedding", "images", "chat", "engine.grammar", "engine.request", "engine.cache",
    "engine.core", "engine.replicas", "engine.api", "transfer", "bench", "verify",
    "server.wire", "server.core", "server.openai", "server.anthropic", "server", "fleet", "cli",
)  # fmt: skip
PUBLIC = ("config", "errors", "sampling_params", "structured_outputs", "version")  # of one line each, from `base`
MAX_FUNCTION_LINES = 40
KERNELS = ("triton.jit", "jit_kernel", "gluon.jit", "gluon_kernel")  # decorators of functions that run on a GPU
OUTSIDE = ("models", "mem_cache", "tests", "benchmarks", "examples", "experiments")
OPTIONAL = (
    "flashinfer", "mamba_ssm", "causal_conv1d", "sgl_kernel", "fla", "nixl", "llguidance", "matplotlib", "pynvml",
    "hypothesis", "pytest", "ray",
)  # fmt: skip


def sources() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for directory, package in PACKAGES.items():
        for file in sorted((ROOT / directory).rglob("*.py")):
            parts = [package, *file.relative_to(ROOT / directory).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


SOURCES = sources()


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(file)))


@cache
def rank(module: str) -> int:
    """Position in ORDER of the module's folder. hybridrt itself (lazy exports, the command) comes last."""
    name = module.removeprefix("hybridrt").removeprefix(".")
    if name in ("", "__main__"):
        return len(ORDER)
    if name in PUBLIC or any(known.startswith(f"{name}.") for known in ORDER):  # or a folder of folders: empty
        return 0
    return max(i for i, known in enumerate(ORDER) if f"{name}.".startswith(f"{known}.") and _longest(name, known))


def _longest(name: str, known: str) -> bool:
    """Whether no longer entry of ORDER holds the module."""
    return not any(len(other) > len(known) and f"{name}.".startswith(f"{other}.") for other in ORDER)


@cache
def imports(file: Path) -> tuple[str, ...]:
    """Modules that a file imports anywhere: in functions and under TYPE_CHECKING too."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in SOURCES else str(node.module) for name in names)


def test_every_module_has_its_place_in_the_order() -> None:
    assert len(SOURCES) > 50
    for module in SOURCES:
        rank(module)


def wrong_import(module: str, imported: str) -> str | None:
    """What is wrong with an import."""
    top, known = imported.split(".")[0], ("hybridrt.base.errors", "hybridrt.base.device")
    if top in OUTSIDE:
        return "which is not part of the package"
    if top != "hybridrt":
        return None
    if imported not in SOURCES:
        return "which does not exist"
    if rank(imported) > rank(module) and not module.startswith("hybridrt.cli"):
        return "which comes later in ORDER"
    if module.startswith("hybridrt.kernels.") and not (imported in known or imported.startswith("hybridrt.kernels.")):
        return "and kernels know nothing but errors, devices and each other"
    return None


def test_imports_point_one_way() -> None:
    pairs = [(module, name) for module, file in SOURCES.items() for name in imports(file) if module != "hybridrt"]
    assert len(pairs) > 2000
    # The package itself is the top: lazy exports and type hints.
    assert [f"{pair[0]} imports {pair[1]}, {why}" for pair in pairs if (why := wrong_import(*pair))] == []


@pytest.mark.parametrize(
    ("module", "imported", "why"),
    [
        ("hybridrt.base.device", "tests.conftest", "not part"),
        ("hybridrt.base.device", "hybridrt.base.no_such_module", "not exist"),
        ("hybridrt.base.device", "hybridrt.engine.api.llm", "later"),
        ("hybridrt.kernels.core.launch", "hybridrt.base.errors_foreign", "kernels know"),
    ],
)
def test_an_import_the_wrong_way_is_told(module: str, imported: str, why: str) -> None:
    assert why in (wrong_import(module, imported) or "") and wrong_import(module, "torch") is None


@pytest.mark.parametrize("module", PUBLIC)
def test_public_modules_hold_names_of_base_alone(module: str) -> None:
    """And nothing below the package itself imports them: a name has one home."""
    homes = set(imports(SOURCES[f"hybridrt.{module}"])) - {"typing"}
    assert homes and all(home.startswith("hybridrt.base.") for home in homes)
    users = [name for name, file in SOURCES.items() if f"hybridrt.{module}" in set(imports(file)) - {name}]
    users = [name for name in users if name != "hybridrt"]
    assert users == []


def test_names_of_objects_lead_to_them() -> None:
    """Strings "module:object": of kinds, families, operations, methods and messages."""
    texts = {
        node.value
        for file in SOURCES.values()
        for node in nodes(file)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    named = {text for text in texts if re.fullmatch(r"hybridrt(\.\w+)+:[A-Za-z]\w*", text)}
    assert len(named) > 40
    for text in named:
        module, _, name = text.partition(":")
        defined = {getattr(node, "name", None) for node in parsed(SOURCES[module]).body}
        defined |= set(re.findall(r"^(\w+)(?:: [^=]+)? = ", SOURCES[module].read_text(), re.MULTILINE))
        assert name in defined, text


def test_the_walk_finds_every_kind_of_import(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hybridrt.engine.api import llm\n"
        "def f():\n    import hybridrt.cli.app\n"
    )
    assert list(imports(file)) == ["typing", "hybridrt.engine.api.llm", "hybridrt.cli.app"]
    assert (
        rank("hybridrt.engine.api.llm")
        > rank("hybridrt.models.loading.loader")
        > rank("hybridrt.kernels.attention.paged_attention")
    )


def test_host_functions_are_short() -> None:
    """Without signature and docstring. Triton kernels may be longer."""
    lengths = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}": body_lines(node)
        for file in SOURCES.values()
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not decorated(node, *KERNELS)
    }
    assert len(lengths) > 1000
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def decorated(node: ast.AST, *names: str) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(decorator).partition("(")[0] in names for decorator in decorators)


def test_kernels_that_the_host_launches_are_jit_kernels() -> None:
    """No host function names one of `triton.jit`, which would be launched by Triton's own slow path."""
    found = []
    for file in SOURCES.values():
        imported = [node for node in nodes(file) if isinstance(node, ast.ImportFrom) and node.module in SOURCES]
        names = own_kernels(file) | {
            alias.name for node in imported for alias in node.names
            if alias.name in own_kernels(SOURCES[node.module or ""])
        }  # fmt: skip
        functions = [node for node in nodes(file) if decorated(node, *KERNELS)] if names else []
        of_kernels = {each for function in functions for each in ast.walk(function)}
        host = (node for node in nodes(file) if isinstance(node, ast.Name) and node not in of_kernels)
        found += [f"{file.relative_to(ROOT)}:{node.lineno} {node.id}" for node in host if node.id in names]
    assert found == []


def test_kernels_have_names_of_their_own() -> None:
    """A profile of a GPU shows the name alone."""
    launched = [
        node.name for file in SOURCES.values() for node in nodes(file)
        if isinstance(node, ast.FunctionDef) and decorated(node, "jit_kernel", "gluon_kernel")
    ]  # fmt: skip
    twice = {name for name in launched if launched.count(name) > 1}
    assert len(launched) > 60 and twice <= {"_prepare_kernel"}, twice  # both are of the delta rule


@cache
def own_kernels(file: Path) -> set[str]:
    """Functions of `triton.jit` and `gluon.jit` that a file defines."""
    return {
        node.name
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef) and decorated(node, "triton.jit", "gluon.jit")
    }


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and its docstring."""
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def test_classes_say_what_they_are() -> None:
    """A model's class is explained by the docstring of its file."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in SOURCES.values()
        for node in nodes(file)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
        if not file.is_relative_to(ROOT / "models")
    ]
    assert found == []


def test_nothing_is_found_by_its_address() -> None:
    """An `id` is that of another object once the first one is gone."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in SOURCES.values()
        for node in nodes(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id"
    ]
    assert found == []


def test_bare_imports_of_models_are_a_lint_error(tmp_path: Path) -> None:
    ruff = pytest.importorskip("ruff", reason="ruff comes with the dev extra")
    file = tmp_path / "x.py"
    file.write_text("import models\nfrom mem_cache import kv_pool\n\nprint(models, kv_pool)\n")
    command = [ruff.find_ruff_bin(), "check", "--config", str(ROOT / "pyproject.toml"), "--select", "TID", str(file)]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    assert found.count("TID251") == 2, found


# Tuples with a name: shapes and widths, which are no records.
SHAPES = ("shape", "shapes", "sizes", "temporal")
# No records either: arrays, lists, and the arguments that the contract's hooks pass on.
BY_POSITION = {
    "hybridrt/base/files_safetensors.py (dtype, shape, offsets)",
    "hybridrt/engine/request/sample_request.py "
    "(self.computed, self.output_index, self.prefill_end, self.max_output, self.capacity)",
    "hybridrt/recurrent/mamba1.py (_, b, c)",
    "hybridrt/runtime/replay/cpu_steps.py (*inputs, rows, seq_lens, output_indices)",
    "hybridrt/runtime/replay/cpu_steps.py (ids, _, slots, _, lens, _)",
}


def test_records_are_read_by_attribute() -> None:
    """No name or attribute is unpacked into more than two targets: fields that are added later would shift the rest."""
    found = {
        f"{file.relative_to(ROOT)} {ast.unparse(target)}"
        for file in SOURCES.values()
        for node in nodes(file)
        if isinstance(node, ast.Assign)
        for target, value in unpacked(node)
        if unpacks_a_record(target, value)
    }
    assert found <= BY_POSITION, found - BY_POSITION


def unpacked(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target of an assignment with its value: `(a, b, c), d = x, y` gives (a, b, c) with x, and d with y."""
    pairs = [(target, node.value) for target in node.targets]
    for target, value in pairs:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs.extend(zip(target.elts, value.elts, strict=True))
        else:
            yield target, value


def unpacks_a_record(target: ast.expr, value: ast.expr) -> bool:
    if not isinstance(target, ast.Tuple | ast.List):
        return False
    if isinstance(value, ast.BoolOp):
        value = value.values[0]
    name = re.fullmatch(r"(?:\w+\.)*(\w+)", ast.unparse(value))
    nested = any(isinstance(part, ast.Tuple) for part in target.elts)
    return name is not None and name[1] not in SHAPES and (len(target.elts) > 2 or nested)


def test_the_walk_finds_every_unpacking() -> None:
    def found(text: str) -> bool:
        node = ast.parse(text).body[0]
        assert isinstance(node, ast.Assign)
        return any(unpacks_a_record(*pair) for pair in unpacked(node))

    assert all(map(found, ("a, b, c = x", "a, *_, c = x.y", "(a, b, c), d = x, 1", "a, b, c = x or (1, 2, 3)")))
    assert found("(a, b), c = x")
    assert not any(map(found, ("a, b = x", "a, b, c = x.shape", "a, b, c = f(x)", "a, b, c = x.a, x.b, x.c")))


def test_no_backend_or_layer_rebinds_its_argument_out() -> None:
    """`out` is where the caller wants the result. Another tensor of that name would hide that it is elsewhere."""
    rebound = [
        f"{file.relative_to(ROOT)}:{name.lineno}"
        for module, file in SOURCES.items()
        if module.startswith(("hybridrt.attention.", "hybridrt.layers.", "hybridrt.recurrent.", "hybridrt.models."))
        for function in nodes(file)
        if isinstance(function, ast.FunctionDef)
        and "out" in {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        for name in ast.walk(function)
        if isinstance(name, ast.Name) and name.id == "out" and isinstance(name.ctx, ast.Store)
    ]
    assert rebound == []


def test_file_table_is_up_to_date() -> None:
    text = file_table.DOCUMENT.read_text()
    assert file_table.document() == text, "run python scripts/file_table.py"
    listed = set(re.findall(r"^\| `([\w./]+\.py)` \|", text, re.MULTILINE))
    assert {str(f.relative_to(ROOT)) for f in SOURCES.values() if f.read_text().strip()} <= listed
    assert all(re.findall(r"^\| `[\w./]+\.py` \|(.*)\|", text, re.MULTILINE)), "each file says what it is"


@pytest.mark.parametrize("docstring", ["Wraps the", "Limits number, memory and.\ntime.", "", "Word " * 50 + "."])
def test_the_summary_of_a_file_is_a_whole_sentence(docstring: str) -> None:
    with pytest.raises(ValueError, match="sentence"):
        file_table.first_sentence(docstring)


def test_a_summary_may_be_wrapped_and_ends_before_the_next_sentence() -> None:
    assert (
        file_table.first_sentence("Rows and\ncolumns (Qin et al. 2024). Not this.")
        == "Rows and columns (Qin et al. 2024)."
    )
    assert file_table.first_sentence("The formula:\n\n    a = b") == "The formula:"


# Besides hybridrt/base/device.py. This one puts a GPU that is not there in torch.cuda's place.
ASK_OF_CUDA = {"hybridrt/runtime/precompile/pretend_gpu.py"}


def test_one_file_asks_torch_about_gpus() -> None:
    """Comments and texts apart: attributes of torch.cuda, and imports of it."""
    found = {
        str(file.relative_to(ROOT))
        for file in SOURCES.values()
        for node in nodes(file)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda")
        or (isinstance(node, ast.Import) and any(name.name.startswith("torch.cuda") for name in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"))
        or (isinstance(node, ast.ImportFrom) and node.module == "torch" and "cuda" in {n.name for n in node.names})
    }
    assert found - ASK_OF_CUDA == {"hybridrt/base/device.py"}


def test_compiling_ahead_is_a_plug() -> None:
    """The runtime takes it as an argument (`hybridrt.runtime.load.start_kernels`)."""
    plug = "hybridrt.runtime.precompile"
    users = {
        module
        for module, file in SOURCES.items()
        if not module.startswith(plug) and any(f"{name}.".startswith(f"{plug}.") for name in imports(file))
    }
    assert users == {
        "hybridrt.engine.core.load_engine", "hybridrt.cli.compile", "hybridrt.runtime.tune.model_shapes",
        "hybridrt.verify.early_kernels",
    }  # fmt: skip


def test_shipped_code_needs_no_tools_of_tests() -> None:
    tools = ("unittest", "pytest", "hypothesis")
    users = {module for module, file in SOURCES.items() if any(name.split(".")[0] in tools for name in imports(file))}
    assert users == set()
