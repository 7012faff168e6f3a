"""Selects the implementation of an operation.

Every operation is registered once per provider: `torch` (the reference), `triton` (ours, CUDA), and
installed libraries. `select` picks the highest priority that is installed and runs on the device;
`HYBRIDRT_PROVIDERS="rms_norm=torch,sample=triton"` overrides it. Implementations are imported when
first picked: optional packages may be missing.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import shutil
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from hybridrt.base.errors import BackendError, ConfigError, ProviderNotInstalledError
from hybridrt.kernels.core.launch import compute_keys

ENVIRONMENT_VARIABLE = "HYBRIDRT_PROVIDERS"
DEFAULT_CUDA_HOME = "/usr/local/cuda"


@dataclass(frozen=True)
class Provider:
    """A source of kernels: the module that must be importable, its distribution, minimum version,
    and our extra.

    `prebuilt`: it compiles kernels with nvcc at first use, unless the module of this name is
    installed.
    """

    name: str
    devices: tuple[str, ...]
    module: str | None = None
    distribution: str | None = None
    min_version: str = "0"
    install: str = ""
    prebuilt: str | None = None


@dataclass(frozen=True)
class By:
    """An implementation of an operation.

    Attributes:
        provider: a name of PROVIDERS.
        target: "module:attribute". None for the usual place: `<name>_triton` in `<file>_triton.py`
            next to the operation, or `<name>` in `libraries/<provider>.py`.
        priority: the highest one that fits is picked.
        needs_host: it needs exact prompt lengths on the host, so a graph cannot hold it.
    """

    provider: str
    target: str | None = None
    _: KW_ONLY
    priority: int = 10
    needs_host: bool = False

    def load(self) -> Callable[..., Any]:
        """Raises ProviderNotInstalledError if the provider is installed but cannot be imported."""
        assert self.target is not None, "`operation` fills it in"
        module, attribute = self.target.split(":")
        try:
            imported = importlib.import_module(module)
            function: Callable[..., Any] = attrgetter(attribute)(imported)
        except ImportError as e:
            raise ProviderNotInstalledError(
                f"provider {self.provider!r} of {attribute!r} is installed but cannot be imported: {e}"
            ) from e
        if self.provider == "triton":
            compute_keys(imported)
        return function


@dataclass(frozen=True)
class ReportRow:
    """The pick of `select` for an operation on a device, and why each other provider was passed
    over."""

    op: str
    device: str
    picked: str | None
    others: dict[str, str]


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("torch", ("cpu", "cuda")),
        Provider("triton", ("cuda",), "triton", "triton", "3.6", "pip install triton"),
        Provider(
            "flashinfer", ("cuda",), "flashinfer", "flashinfer-python", "0.6.12", "pip install '.[flashinfer]'",
            prebuilt="flashinfer_jit_cache",
        ),
        Provider("mamba_ssm", ("cuda",), "mamba_ssm", "mamba-ssm", "2.2", "pip install '.[mamba]'"),
        Provider("sgl_kernel", ("cuda",), "sgl_kernel", "sglang-kernel", "0.4.4", "pip install '.[sgl]'"),
        Provider("fla", ("cuda",), "fla", "flash-linear-attention", "0.6", "pip install '.[fla]'"),
    )
}  # fmt: skip
_IMPLEMENTATIONS: dict[str, dict[str, By]] = {}


def register(op: str, implementation: By) -> None:
    """Declares an implementation of `op`. ConfigError for a provider that PROVIDERS does not
    list."""
    if implementation.provider not in PROVIDERS:
        known = ", ".join(PROVIDERS)
        raise ConfigError(f"unknown kernel provider {implementation.provider!r} for {op!r}; known: {known}")
    _IMPLEMENTATIONS.setdefault(op, {})[implementation.provider] = implementation
    select.cache_clear()


@cache
def select(op: str, device_type: str, name: str | None = None) -> Callable[..., Any]:
    """The implementation of `op` on `device_type` ("cpu", "cuda"), cached. `name` insists on one
    provider.

    Raises:
        ConfigError: unknown operation or provider.
        ProviderNotInstalledError: a named provider is missing.
        BackendError: it does not run on the device, or nothing does.
    """
    return _pick(op, device_type, name).load()


def needs_host(op: str, device_type: str) -> bool:
    """Whether `op` goes to an implementation that a graph cannot hold. Raises as `select`."""
    return _pick(op, device_type, None).needs_host


def _pick(op: str, device_type: str, name: str | None) -> By:
    name = name or _overrides().get(op)
    if name is not None:
        candidate = _candidate(op, device_type, name)
        require(name, repr(op))
        if reason := provider_objection(name, device_type):
            raise BackendError(f"provider {name!r} cannot serve {op!r} on {device_type!r}: {reason}")
        return candidate
    for implementation in _ranked(op, device_type):
        if provider_objection(implementation.provider, device_type) is None:
            return implementation
    raise BackendError(f"no provider implements {op!r} on {device_type!r}")


def provider_objection(name: str, device_type: str) -> str | None:
    """Why a provider cannot serve a device; None if it can.

    ConfigError if PROVIDERS does not list it: a backend from outside may name any.
    """
    if name not in PROVIDERS:
        raise ConfigError(f"unknown kernel provider {name!r}; known: {', '.join(PROVIDERS)}")
    provider = PROVIDERS[name]
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if device_type not in provider.devices and not interpreted:
        return f"runs on {' and '.join(provider.devices)} only"
    return _missing(provider)


def is_installed(name: str) -> bool:
    """Whether the module of a provider can be found. Imports nothing."""
    module = PROVIDERS[name].module
    return module is None or importlib.util.find_spec(module) is not None


def require(name: str, what: str) -> None:
    """Raises ProviderNotInstalledError if the provider that `what` needs is not installed or
    unusable."""
    missing = _missing(PROVIDERS[name])
    if missing is not None:
        raise ProviderNotInstalledError(f"{what} was asked of provider {name!r}, which is {missing}")


def report(devices: tuple[str, ...] = ("cpu", "cuda")) -> list[ReportRow]:
    """One row per operation and device, in alphabetical order. Imports no optional package."""
    _import_operations()
    return [_report_row(op, device) for op in sorted(_IMPLEMENTATIONS) for device in devices]


def _report_row(op: str, device: str) -> ReportRow:
    objections = {
        candidate.provider: provider_objection(candidate.provider, device) for candidate in _ranked(op, device)
    }
    forced = _overrides().get(op)
    fitting = [name for name, reason in objections.items() if reason is None and forced in (None, name)]
    picked = fitting[0] if fitting else None
    passed_over = f"{ENVIRONMENT_VARIABLE} names {forced}" if forced else f"{picked} is preferred"
    others = {name: reason or passed_over for name, reason in objections.items() if name != picked}
    return ReportRow(op, device, picked, others)


def _ranked(op: str, device_type: str) -> list[By]:
    """Implementations by falling priority. On a CPU torch comes first, since others only interpret
    kernels there."""
    if op not in _IMPLEMENTATIONS:
        _import_operations()
    if op not in _IMPLEMENTATIONS:
        raise ConfigError(f"unknown operation {op!r}; known: {', '.join(sorted(_IMPLEMENTATIONS))}")
    preferred = "torch" if device_type == "cpu" else None
    return sorted(_IMPLEMENTATIONS[op].values(), key=lambda i: (i.provider == preferred, i.priority), reverse=True)


def _candidate(op: str, device_type: str, name: str) -> By:
    candidates = {candidate.provider: candidate for candidate in _ranked(op, device_type)}
    if name not in candidates:
        raise ConfigError(f"{name!r} does not implement {op!r}; providers that do: {', '.join(sorted(candidates))}")
    return candidates[name]


@cache
def _missing(provider: Provider) -> str | None:
    if not is_installed(provider.name):
        return f"not installed: {provider.install}"
    if provider.module is None:
        return None
    try:
        version = importlib.metadata.version(provider.distribution or provider.module)
    except importlib.metadata.PackageNotFoundError:
        return f"importable, but the distribution {provider.distribution!r} is not installed: {provider.install}"
    if _version_tuple(version) < _version_tuple(provider.min_version):
        return f"too old ({version}, at least {provider.min_version} is needed): {provider.install} --upgrade"
    if provider.prebuilt and importlib.util.find_spec(provider.prebuilt) is None and not _has_nvcc():
        return (
            f"unable to build its kernels: nvcc is neither on PATH nor under CUDA_HOME; install the CUDA toolkit or "
            f"{provider.prebuilt.replace('_', '-')}"
        )
    return None


def _has_nvcc() -> bool:
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), DEFAULT_CUDA_HOME)
    return any(shutil.which("nvcc", path=f"{home}/bin") for home in homes if home) or bool(shutil.which("nvcc"))


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


@cache
def _overrides() -> dict[str, str]:
    """{operation: provider} of the environment, read once. ConfigError for unknown names."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    return dict(_parse_override(item) for item in text.split(",") if item.strip())


def check_overrides(device_type: str) -> None:
    """Raises ConfigError, ProviderNotInstalledError or BackendError for unusable overrides at the
    start, not in a request's step."""
    for op in _overrides():
        _pick(op, device_type, None)


def _parse_override(item: str) -> tuple[str, str]:
    op, equals, provider = (part.strip() for part in item.partition("="))
    if not equals:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: {item!r} should read operation=provider")
    try:
        _candidate(op, "cpu", provider)
    except ConfigError as e:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: {e}") from None
    return op, provider


def _import_operations() -> None:
    """Only files that register operations: not those of Triton and of libraries."""
    package = importlib.import_module("hybridrt.kernels")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("_triton") and ".libraries" not in module.name:
            importlib.import_module(module.name)
