"""Attention backends by name: those of this package and those of others, and which of them "auto" means."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrt.attention import paged
from hybridrt.attention.fa3 import Fa3AttnBackend
from hybridrt.attention.paged import TorchNativeAttnBackend
from hybridrt.base import plugins
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import BackendError, ProviderNotInstalledError
from hybridrt.base.model_config import AttentionSpec
from hybridrt.models.config.read_config import read_model_config
from hybridrt.recurrent import backends as registry
from tests.support.checkpoints import CheckpointStore
from tests.support.outside_attention import OutsideAttnBackend
from tests.support.session import Session

SPEC = AttentionSpec(2, 2, 128, 128, None, 0.5, torch.bfloat16)


def test_registry_names_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert registry.load_attention_backend("torch", cpu) is TorchNativeAttnBackend
    assert registry.load_attention_backend("auto", cpu) is TorchNativeAttnBackend
    assert "torch" in registry.attention_backend_names()
    with pytest.raises(BackendError, match="torch"):
        registry.load_attention_backend("nonsense", cpu)
    built_in: Any = registry.BACKENDS.built_in
    monkeypatch.setitem(built_in, "absent", "hybridrt_absent.module:Backend")
    with pytest.raises(BackendError, match=r"hybridrt_absent.*install"):
        registry.load_attention_backend("absent", cpu)


def test_prefill_takes_a_faster_library_where_no_backend_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By name, or the first that is installed and serves this KV cache; one that is installed and cannot says why.
    flashinfer, which is slower than our kernels, only by name."""
    cuda, answers = torch.device("cuda"), {"sgl_kernel": "head_dim is 80", "flashinfer": None}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(paged, "provider_objection", lambda provider, device: answers[provider])
    monkeypatch.setattr(registry, "is_installed", lambda provider: provider == "sgl_kernel")

    def resolved(device: torch.device = cuda, **config: Any) -> str:
        return registry.resolve_prefill_name(EngineConfig("x", **config), device, [SPEC])

    assert resolved() == "triton"
    assert resolved(prefill_attention_backend="flashinfer") == "flashinfer"
    assert "prefill attention does not use fa3: head_dim is 80" in caplog.text
    answers["sgl_kernel"] = None
    assert resolved() == "fa3"
    assert resolved(attention_backend="triton") == "triton"
    assert resolved(prefill_attention_backend="auto") == "triton"
    assert resolved(torch.device("cpu")) == "torch"
    assert registry.resolve_prefill_name(EngineConfig("x"), cuda, []) == "triton", "no attention layer, no library"
    answers |= dict.fromkeys(answers, "not installed")
    assert resolved() == "triton"


@pytest.mark.parametrize(("changes", "message"), [
    ({"dtype": torch.float32}, "float32, it takes bfloat16"), ({"head_dim": 80}, "head_dim is 80, it takes 64"),
    ({"capability": (12, 0)}, "sm_120"),
])  # fmt: skip
def test_what_flash_attention_3_cannot_serve(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: changes.get("capability", (9, 0)))
    monkeypatch.setattr(paged, "provider_objection", lambda provider, device: None)
    cuda, spec = torch.device("cuda"), replace(SPEC, dtype=torch.bfloat16, head_dim=128, v_head_dim=128)
    head_dim = changes.get("head_dim", 128)
    other = replace(spec, dtype=changes.get("dtype", spec.dtype), head_dim=head_dim, v_head_dim=head_dim)
    if "capability" not in changes:
        assert Fa3AttnBackend.objection(cuda, [spec]) is None
    assert message in (Fa3AttnBackend.objection(cuda, [spec, other]) or "")


def test_backends_of_e4m3_codes_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A backend from outside that says nothing about codes is none of them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(paged, "provider_objection", lambda provider, device: None)
    monkeypatch.setattr(registry, "is_installed", lambda provider: provider == "sgl_kernel")
    cuda = torch.device("cuda")
    found = registry.objections_to_codes(cuda)
    assert [name for name, why in found.items() if why is None] == ["fa3", "triton", "torch"]
    assert found["flashinfer"] == 'FlashinferAttnBackend reads no KV cache of fp8_e4m3; use "triton" or "torch"'
    coded = replace(SPEC, dtype=torch.float8_e4m3fn, query_dtype=torch.bfloat16)
    assert "fp8_e4m3" in (OutsideAttnBackend.objection(cuda, [coded]) or "")
    single = replace(coded, query_dtype=torch.float32)
    assert registry.resolve_prefill_name(EngineConfig("x"), cuda, [coded]) == "fa3"
    assert registry.resolve_prefill_name(EngineConfig("x"), cuda, [single]) == "triton"
    assert "does not use fa3: queries are torch.float32" in caplog.text


@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_libraries_without_latent_attention_say_so(name: str) -> None:
    latent = AttentionSpec(2, 1, 24, 16, None, 0.5, torch.bfloat16, "mla")
    reason = registry.backend_class(name).objection(torch.device("cuda"), [latent])
    assert reason is not None and 'no kernels for latent attention (variant "mla"); use "triton" or "torch"' in reason


def test_sinks_are_refused_by_libraries_and_automatic_prefill_takes_our_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(paged, "provider_objection", lambda provider, device: None)
    monkeypatch.setattr(registry, "is_installed", lambda provider: True)
    cuda, sinks = torch.device("cuda"), replace(SPEC, sinks=True)
    for name, served in (("fa3", False), ("flashinfer", False), ("triton", True), ("torch", True)):
        reason = registry.backend_class(name).objection(cuda, [SPEC, sinks])
        assert reason is None if served else 'no kernels for attention sinks; use "triton" or "torch"' in (reason or "")
        assert registry.backend_class(name).objection(cuda, [SPEC]) is None
    assert "attention sinks" in (OutsideAttnBackend.objection(cuda, [sinks]) or "")
    assert registry.resolve_prefill_name(EngineConfig("x"), cuda, [sinks]) == "triton"
    assert "prefill attention does not use fa3: Fa3AttnBackend has no kernels for attention sinks" in caplog.text


def test_a_library_that_is_not_there_is_named_before_what_it_takes_and_not_without_attention() -> None:
    other = replace(SPEC, dtype=torch.float32, head_dim=80, v_head_dim=80)
    assert "runs on cuda only" in (Fa3AttnBackend.objection(torch.device("cpu"), [other]) or "")
    assert Fa3AttnBackend.objection(torch.device("cpu"), []) is None


@pytest.mark.parametrize(("name", "extra"), [("fa3", "sgl"), ("flashinfer", "flashinfer")])
def test_a_backend_without_its_library_names_what_to_install(name: str, extra: str) -> None:
    with pytest.raises(ProviderNotInstalledError, match=rf"{name}.*pip install '\.\[{extra}\]'"):
        registry.load_attention_backend(name, torch.device("cpu"))


def test_third_parties_register_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point(SimpleNamespace):
        name, value = "theirs", "tests.attention.test_backends_routing:Instrumented"

    class Wrong(SimpleNamespace):
        name, value = "wrong", "tests.attention.test_backends_routing:LAYER"

    monkeypatch.setattr(
        plugins, "entry_points", lambda group: {"hybridrt.attention_backends": [Point(), Wrong()]}[group]
    )
    assert "theirs" in registry.attention_backend_names()
    assert registry.load_attention_backend("theirs", torch.device("cpu")).__name__ == "Instrumented"
    with pytest.raises(BackendError, match=r"'wrong'.*must name a SegmentedAttnBackend"):
        registry.load_attention_backend("wrong", torch.device("cpu"))


def test_a_backend_of_another_package_runs_and_lists_what_it_requires(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = SimpleNamespace(name="outside", value="tests.support.outside_attention:OutsideAttnBackend")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == registry.BACKENDS.group else [])
    path, requests = checkpoints["qwen-plain"].path, [([5, 6, 7, 8], 5), ([9], 5)]
    OutsideAttnBackend.layers_seen.clear()
    samples = Session(path, attention_backend="outside").run(requests)
    assert [s.tokens for s in samples] == [s.tokens for s in Session(path).run(requests)]
    assert OutsideAttnBackend.layers_seen == set(read_model_config(path).full_attention_layer_ids)
    with pytest.raises(BackendError, match="cannot serve attention on 'cpu': a window of 9, it takes none"):
        Session(checkpoints["swa_ssm-plain"].path, attention_backend="outside")


def test_each_device_has_a_backend_that_auto_means() -> None:
    for device, decode in (("cpu", "torch"), ("cuda", "triton")):
        assert registry.resolve_attention_name("auto", torch.device(device)) == decode
