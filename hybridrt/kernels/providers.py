"""Which implementation of an operation runs.

Every file of this package registers its operations here, once per provider: `torch` (the plain reference, always
there), `triton` (ours, CUDA), and installed libraries. `select` picks the one of highest priority that is installed,
runs on the device and supports the call; `HYBRIDRT_PROVIDERS="rms_norm=torch,sample=triton"` overrides it.
Implementations are named "module:attribute" and imported when first picked, so that no optional package is imported
before it is used.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hybridrt.errors import BackendError, ConfigError, ProviderNotInstalledError

Supports = Callable[[Mapping[str, Any]], str | None]
ENVIRONMENT_VARIABLE = "HYBRIDRT_PROVIDERS"


@dataclass(frozen=True)
class Provider:
    """A source of kernels: the module that must be importable, its distribution and minimum version, and our extra."""

    name: str
    devices: tuple[str, ...]
    module: str | None = None
    distribution: str | None = None
    min_version: str = "0"
    install: str = ""


@dataclass(frozen=True)
class Implementation:
    """One provider's implementation of one operation. `supports(facts)` answers None, or why it cannot serve them."""

    op: str
    provider: Provider
    target: str
    priority: int
    supports: Supports | None

    def load(self) -> Callable[..., Any]:
        module, attribute = self.target.split(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return function


@dataclass(frozen=True)
class ReportRow:
    """What `select` would pick for an operation on a device, and why every other provider was passed over."""

    op: str
    device: str
    picked: str | None
    others: dict[str, str]


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("torch", ("cpu", "cuda")),
        Provider("triton", ("cuda",), "triton", "triton", "3.6", "pip install triton"),
        Provider(
            "flashinfer", ("cuda",), "flashinfer", "flashinfer-python", "0.6.12", "pip install 'hybridrt[flashinfer]'"
        ),
        Provider("mamba_ssm", ("cuda",), "mamba_ssm", "mamba-ssm", "2.2", "pip install 'hybridrt[mamba]'"),
        Provider("sgl_kernel", ("cuda",), "sgl_kernel", "sglang-kernel", "0.4.4", "pip install 'hybridrt[sgl]'"),
    )
}
_IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {}


def register(op: str, provider: str, target: str, *, priority: int = 0, supports: Supports | None = None) -> None:
    """Declare that `target` ("module:attribute") implements `op`. Among those that fit, the highest priority is picked.

    Raises ConfigError for a provider that PROVIDERS does not list.
    """
    if provider not in PROVIDERS:
        raise ConfigError(f"unknown kernel provider {provider!r} for {op!r}; known: {', '.join(PROVIDERS)}")
    _IMPLEMENTATIONS.setdefault(op, {})[provider] = Implementation(op, PROVIDERS[provider], target, priority, supports)
    select.cache_clear()


@cache
def select(op: str, device_type: str, name: str | None = None, **facts: Any) -> Callable[..., Any]:
    """The implementation of `op` to call on `device_type` ("cpu", "cuda").

    `name` insists on one provider; `facts` (hashable: dtypes, head dims, ...) go to the `supports` predicates. Cached,
    so a repeated call costs a dictionary look-up. Raises ConfigError (unknown operation or provider),
    ProviderNotInstalledError (a named provider is missing), BackendError (it does not fit, or nothing does).
    """
    name = name or _overrides().get(op)
    if name is not None:
        return _named(op, device_type, name, facts).load()
    for implementation in _ranked(op, device_type):
        if _objection(implementation, device_type, facts) is None:
            return implementation.load()
    raise BackendError(f"no provider implements {op!r} on {device_type!r} for {facts or 'this call'}")


def report(devices: tuple[str, ...] = ("cpu", "cuda")) -> list[ReportRow]:
    """One row per operation and device, in alphabetical order. Imports no optional package."""
    _import_operations()
    return [_report_row(op, device) for op in sorted(_IMPLEMENTATIONS) for device in devices]


def _report_row(op: str, device: str) -> ReportRow:
    objections = {
        implementation.provider.name: _objection(implementation, device, {}) for implementation in _ranked(op, device)
    }
    forced = _overrides().get(op)
    fitting = [name for name, objection in objections.items() if objection is None and forced in (None, name)]
    picked = fitting[0] if fitting else None
    passed_over = f"{ENVIRONMENT_VARIABLE} names {forced}" if forced else f"{picked} is preferred"
    others = {name: objection or passed_over for name, objection in objections.items() if name != picked}
    return ReportRow(op, device, picked, others)


def _ranked(op: str, device_type: str) -> list[Implementation]:
    """By falling priority; on a CPU the torch path comes first, since others only interpret kernels there."""
    if op not in _IMPLEMENTATIONS:
        _import_operations()
    if op not in _IMPLEMENTATIONS:
        raise ConfigError(f"unknown operation {op!r}; known: {', '.join(sorted(_IMPLEMENTATIONS))}")
    on_cpu = device_type == "cpu"
    return sorted(
        _IMPLEMENTATIONS[op].values(), key=lambda i: (on_cpu and i.provider.name == "torch", i.priority), reverse=True
    )


def _named(op: str, device_type: str, name: str, facts: Mapping[str, Any]) -> Implementation:
    candidates = {implementation.provider.name: implementation for implementation in _ranked(op, device_type)}
    if name not in candidates:
        raise ConfigError(f"{name!r} does not implement {op!r}; providers that do: {', '.join(sorted(candidates))}")
    missing = _missing(candidates[name].provider)
    if missing is not None:
        raise ProviderNotInstalledError(f"{op!r} was asked of provider {name!r}, which is {missing}")
    objection = _objection(candidates[name], device_type, facts)
    if objection is not None:
        raise BackendError(f"provider {name!r} cannot serve {op!r} on {device_type!r}: {objection}")
    return candidates[name]


def _objection(implementation: Implementation, device_type: str, facts: Mapping[str, Any]) -> str | None:
    provider = implementation.provider
    interpreted = provider.name == "triton" and _interpreted()
    if device_type not in provider.devices and not interpreted:
        return f"runs on {' and '.join(provider.devices)} only"
    return _missing(provider) or (implementation.supports(facts) if implementation.supports else None)


@cache
def _missing(provider: Provider) -> str | None:
    if provider.module is None:
        return None
    if importlib.util.find_spec(provider.module) is None:
        return f"not installed: {provider.install}"
    try:
        version = importlib.metadata.version(provider.distribution or provider.module)
    except importlib.metadata.PackageNotFoundError:
        return f"importable, but the distribution {provider.distribution!r} is not installed: {provider.install}"
    if _version_tuple(version) < _version_tuple(provider.min_version):
        return f"too old ({version}, at least {provider.min_version} is needed): {provider.install} --upgrade"
    return None


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


@cache
def _overrides() -> dict[str, str]:
    """The environment variable, read once: {operation: provider}. Raises ConfigError for names that do not exist."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not text.strip():
        return {}
    _import_operations()
    return dict(_parse_override(item) for item in text.split(",") if item.strip())


def _parse_override(item: str) -> tuple[str, str]:
    op, equals, provider = (part.strip() for part in item.partition("="))
    if not equals:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: {item!r} should read operation=provider")
    if op not in _IMPLEMENTATIONS:
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE}: unknown operation {op!r}; known: {', '.join(sorted(_IMPLEMENTATIONS))}"
        )
    if provider not in _IMPLEMENTATIONS[op]:
        known = ", ".join(sorted(_IMPLEMENTATIONS[op]))
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: {provider!r} does not implement {op!r}; providers that do: {known}")
    return op, provider


def _import_operations() -> None:
    """Import the files that register operations; the `_triton` ones are implementations and stay unimported."""
    package = importlib.import_module("hybridrt.kernels")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.endswith("_triton"):
            importlib.import_module(f"hybridrt.kernels.{module.name}")
