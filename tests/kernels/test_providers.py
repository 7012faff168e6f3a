"""Which implementation is picked, how the choice is overridden, and what the errors say."""

import pytest

from hybridrt.base.errors import BackendError, ConfigError, ProviderNotInstalledError
from hybridrt.kernels.core import providers
from hybridrt.kernels.core.providers import By


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(providers.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(providers, "_IMPLEMENTATIONS", {})
    monkeypatch.setattr(providers, "_has_nvcc", lambda: True)
    monkeypatch.setattr(providers, "_import_operations", _register_three)
    _clear_caches()
    yield
    _clear_caches()


def _clear_caches():
    providers.select.cache_clear()
    providers._overrides.cache_clear()
    providers._missing.cache_clear()


def _install(monkeypatch, **versions):
    """Pretend that exactly these distributions (underscores for dashes) are installed."""
    names = {name.replace("_", "-"): version for name, version in versions.items()}

    def version_of(distribution):
        if distribution not in names:
            raise providers.importlib.metadata.PackageNotFoundError(distribution)
        return names[distribution]

    def find(module):
        distributions = {p.module: p.distribution for p in providers.PROVIDERS.values()}
        return object() if distributions.get(module, module.replace("_", "-")) in names else None

    monkeypatch.setattr(providers.importlib.util, "find_spec", find)
    monkeypatch.setattr(providers.importlib.metadata, "version", version_of)


def _register_three():
    providers.register("op", By("torch", "math:floor", priority=0))
    providers.register("op", By("triton", "math:ceil", priority=10))
    providers.register("op", By("flashinfer", "math:sqrt", priority=20))


def test_highest_priority_that_is_installed_and_runs_on_the_device(monkeypatch):
    import math

    _install(monkeypatch, triton="3.6.0", flashinfer_python="0.6.12")
    assert providers.select("op", "cuda") is math.sqrt
    assert providers.select("op", "cpu") is math.floor


def test_too_old_or_absent_counts_as_missing(monkeypatch):
    import math

    _install(monkeypatch, triton="3.6.0", flashinfer_python="0.6.9")
    assert providers.select("op", "cuda") is math.ceil
    with pytest.raises(ProviderNotInstalledError, match=r"0\.6\.9, at least 0\.6\.12"):
        providers.select("op", "cuda", "flashinfer")
    _clear_caches()
    _install(monkeypatch, triton="3.6.0")
    with pytest.raises(ProviderNotInstalledError, match=r"pip install '\.\[flashinfer\]'"):
        providers.select("op", "cuda", "flashinfer")


def test_named_provider_that_does_not_fit_is_an_error(monkeypatch):
    _install(monkeypatch, triton="3.6.0", flashinfer_python="0.6.12")
    with pytest.raises(BackendError, match="runs on cuda only"):
        providers.select("op", "cpu", "flashinfer")
    with pytest.raises(ConfigError, match="providers that do: flashinfer, torch, triton"):
        providers.select("op", "cuda", "cutlass")
    with pytest.raises(ConfigError, match="known: op"):
        providers.select("oops", "cuda")
    with pytest.raises(ConfigError, match="unknown kernel provider"):
        providers.register("op", By("cutlass", "math:floor"))


def test_a_provider_that_a_backend_from_outside_made_up_is_a_typed_error():
    with pytest.raises(ConfigError, match="unknown kernel provider 'nonsense'; known: torch") as error:
        providers.provider_objection("nonsense", "cpu")
    assert "\n" not in str(error.value)


def test_triton_on_cpu_only_under_the_interpreter_and_never_by_itself(monkeypatch):
    import math

    _install(monkeypatch, triton="3.6.0")
    with pytest.raises(BackendError):
        providers.select("op", "cpu", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert providers.select("op", "cpu", "triton")(1.5) == math.ceil(1.5)
    assert providers.select("op", "cpu") is math.floor


def test_environment_overrides_and_names_what_is_wrong(monkeypatch):
    import math

    _install(monkeypatch, triton="3.6.0")
    monkeypatch.setenv(providers.ENVIRONMENT_VARIABLE, "op=torch")
    assert providers.select("op", "cuda") is math.floor
    for text, message in (("op", "operation=provider"), ("oops=torch", "known: op"), ("op=x", "flashinfer, torch")):
        _clear_caches()
        monkeypatch.setenv(providers.ENVIRONMENT_VARIABLE, text)
        with pytest.raises(ConfigError, match=message):
            providers.select("op", "cuda")


def test_report_gives_a_reason_for_every_provider_passed_over(monkeypatch):
    _install(monkeypatch, triton="3.6.0")
    cpu, cuda = providers.report()
    assert (cpu.op, cpu.device, cpu.picked) == ("op", "cpu", "torch")
    assert (cuda.device, cuda.picked) == ("cuda", "triton")
    assert "not installed" in cuda.others["flashinfer"] and cuda.others["torch"] == "triton is preferred"
    assert cpu.others["triton"] == "runs on cuda only"
    _clear_caches()
    monkeypatch.setenv(providers.ENVIRONMENT_VARIABLE, "op=torch")
    cpu, cuda = providers.report()
    assert cuda.picked == "torch" and cuda.others["triton"] == "HYBRIDRT_PROVIDERS names torch"


def test_without_nvcc_a_library_that_compiles_is_passed_over_and_says_why(monkeypatch):
    import math

    _install(monkeypatch, triton="3.6.0", flashinfer_python="0.6.12")
    monkeypatch.setattr(providers, "_has_nvcc", lambda: False)
    assert providers.select("op", "cuda") is math.ceil
    with pytest.raises(ProviderNotInstalledError, match=r"nvcc.*install the CUDA toolkit or flashinfer-jit-cache"):
        providers.select("op", "cuda", "flashinfer")
    assert "nvcc" in providers.report(("cuda",))[0].others["flashinfer"]
    assert "nvcc" in (providers.provider_objection("flashinfer", "cuda") or "")
    _clear_caches()
    _install(monkeypatch, triton="3.6.0", flashinfer_python="0.6.12", flashinfer_jit_cache="0.6.12")
    assert providers.select("op", "cuda") is math.sqrt


def test_nvcc_is_looked_for_on_the_path_and_where_cuda_is_installed(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(providers, "DEFAULT_CUDA_HOME", str(tmp_path / "cuda"))
    assert not providers._has_nvcc()
    for at in (tmp_path / "nvcc", tmp_path / "cuda" / "bin" / "nvcc"):
        at.parent.mkdir(parents=True, exist_ok=True)
        at.touch(mode=0o755)
        assert providers._has_nvcc()
        at.unlink()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))
    (tmp_path / "other" / "bin").mkdir(parents=True)
    (tmp_path / "other" / "bin" / "nvcc").touch(mode=0o755)
    assert providers._has_nvcc()


def test_an_installed_library_that_cannot_be_imported_is_no_import_error(monkeypatch):
    _install(monkeypatch, triton="3.6.0", sglang_kernel="0.4.4")
    providers.register("op", By("sgl_kernel", "hybridrt_absent.module:op", priority=30))
    with pytest.raises(ProviderNotInstalledError, match="'sgl_kernel' of 'op' is installed but cannot be imported"):
        providers.select("op", "cuda")
