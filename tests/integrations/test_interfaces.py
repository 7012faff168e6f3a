"""The stubs have the signatures that vLLM and SGLang have published. Where their source is at hand (installed, or in a
folder that HYBRIDRT_PEERS names) it is compared; elsewhere these tests are skipped."""

import ast
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import sglang_stub, vllm_stub
from tests.support.peer_source import definition, fields, signature, source_of

ROOT = Path(__file__).parents[2]
STUBS: dict[str, ModuleType] = {"vllm": vllm_stub, "sglang": sglang_stub}
GDN = "model_executor/layers/mamba/gdn"
# What the plugin of vLLM reads of objects that the stubs do not define.
READ = {
    ("config/cache.py", "CacheConfig"): {"mamba_cache_mode", "mamba_ssm_cache_dtype", "mamba_page_size_padded"},
    ("config/vllm.py", "VllmConfig"): {
        "cache_config", "model_config", "parallel_config", "scheduler_config", "speculative_config",
        "kv_transfer_config", "additional_config",
    },
    ("config/scheduler.py", "SchedulerConfig"): {"max_num_seqs"},
    ("config/parallel.py", "ParallelConfig"): {"tensor_parallel_size"},
    ("config/model.py", "ModelConfig"): {"architecture", "dtype", "hf_text_config"},
    (f"{GDN}/qwen_gdn_linear_attn.py", "QwenGatedDeltaNetAttention"): {"A_log", "dt_bias", "conv1d", "num_k_heads"},
    (f"{GDN}/base.py", "GatedDeltaNetAttention"): {"prefix", "tp_size", "activation"},
}  # fmt: skip
# Names that the plugin imports, by the file that defines them.
IMPORTED = {
    "vllm": {
        "platforms/interface.py": {"Platform.is_cuda"},
        "model_executor/models/qwen3_5.py": {
            "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        },
    },
    "sglang": {"srt/plugins/__init__.py": {"load_plugins"}},
}  # fmt: skip
# Where each engine names the group of entry points that it loads.
GROUPS = {
    "vllm": ("plugins/__init__.py", "DEFAULT_PLUGINS_GROUP"),
    "sglang": ("srt/plugins/__init__.py", "GENERAL_PLUGINS_GROUP"),
}


def published(peer: str, file: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    source = source_of(peer)
    if source is None:
        pytest.skip(f"{peer} is not at hand")
    file, _, other = file.partition(":")
    found = definition(source / file, other or name)
    assert found is not None, f"{peer}/{file} has no {other or name}"
    return found


@pytest.mark.parametrize(("peer", "name"), [(peer, name) for peer, stub in STUBS.items() for name in stub.PUBLISHED])
def test_a_stub_is_what_was_published(peer: str, name: str) -> None:
    stub = STUBS[peer]
    theirs, own = (
        published(peer, stub.PUBLISHED[name], name),
        definition(Path(str(stub.__file__)), _defined(stub, name)),
    )
    assert own is not None and type(own) is type(theirs)
    if isinstance(own, ast.ClassDef):
        assert fields(own) <= fields(theirs)
    else:
        assert isinstance(theirs, ast.FunctionDef) and signature(own) == signature(theirs)


def _defined(stub: ModuleType, name: str) -> str:
    """Where a stub defines a name: a class may inherit what several of the published ones define."""
    owner, _, method = name.rpartition(".")
    if not owner:
        return name
    found = getattr(stub, owner)
    kind = found if isinstance(found, type) else type(found)
    return next(f"{each.__name__}.{method}" for each in kind.__mro__ if method in vars(each))


@pytest.mark.parametrize("where", READ, ids=lambda where: where[1])
def test_what_the_plugin_reads_is_there(where: tuple[str, str]) -> None:
    found = published("vllm", *where)
    assert isinstance(found, ast.ClassDef) and READ[where] <= fields(found)


@pytest.mark.parametrize(("peer", "file"), [(peer, file) for peer, files in IMPORTED.items() for file in files])
def test_what_the_plugin_imports_is_there(peer: str, file: str) -> None:
    for name in IMPORTED[peer][file]:
        published(peer, file, name)


@pytest.mark.parametrize("peer", STUBS)
def test_the_entry_point_has_the_group_that_the_engine_loads(peer: str) -> None:
    project = tomllib.loads((ROOT / "integrations" / peer / "pyproject.toml").read_text())["project"]
    ((group, points),) = project["entry-points"].items()
    assert points == {"hybridrt": f"hybridrt_{peer}:register"}
    source = source_of(peer)
    if source is None:
        pytest.skip(f"{peer} is not at hand")
    file, name = GROUPS[peer]
    assert f'{name} = "{group}"' in (source / file).read_text()


def test_a_difference_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("class A:\n    x: int\n    def f(self, a: int, *, b=1): self.y = 2\nclass B:\n    def g(): pass\n")
    found = definition(file, "A.f")
    assert isinstance(found, ast.FunctionDef) and signature(found) == ["self", "a", "*", "b=1"]
    whole = definition(file, "A")
    assert isinstance(whole, ast.ClassDef) and fields(whole) == {"x", "y", "f"}
    assert definition(file, "A.g") is None
