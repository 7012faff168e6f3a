"""Operations: who implements them, what is checked before a call, and what a call sees."""

import inspect

import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core import providers
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.dense.norm_activation import rms_norm


def _check(x, *_, limit, **__):
    if len(x) > limit:
        raise ConfigError(f"{len(x)} numbers are more than {limit}")


@pytest.fixture
def doubled(monkeypatch):
    monkeypatch.setattr(providers, "_IMPLEMENTATIONS", {})

    @operation(By("triton"), By("fla", priority=3), By("flashinfer", "elsewhere:it"), check=_check)
    def double(x, *, limit):
        """Twice x."""
        return 2 * x

    globals()["double"] = double  # where its reference is looked up
    yield double
    del globals()["double"]
    providers.select.cache_clear()


def test_implementations_stand_where_they_usually_do(doubled):
    found = providers._IMPLEMENTATIONS["double"]
    assert {name: (i.target, i.priority) for name, i in found.items()} == {
        "torch": (f"{__name__}:double.reference", 0),
        "triton": (f"{__name__}_triton:double_triton", 10),
        "fla": ("hybridrt.kernels.libraries.fla:double", 3),
        "flashinfer": ("elsewhere:it", 10),
    }


def test_a_call_on_a_cpu_is_the_reference(doubled):
    assert doubled(torch.ones(2), limit=2).tolist() == [2, 2]
    assert doubled(x=torch.ones(1), limit=2).tolist() == [2]


def test_arguments_are_checked_before_an_implementation_sees_them(doubled):
    with pytest.raises(ConfigError, match="3 numbers are more than 2"):
        doubled(torch.ones(3), limit=2)
    assert doubled.reference(torch.ones(3), limit=2).tolist() == [2, 2, 2]


def test_a_layer_keeps_an_implementation_and_makes_its_check_itself(doubled):
    cpu = torch.device("cpu")
    assert doubled.for_device(cpu) is doubled and doubled.for_device(torch.device("meta"), checked=True) is doubled
    assert doubled.for_device(cpu, checked=True) is doubled.reference


def test_an_operation_shows_its_signature_and_documentation():
    assert list(inspect.signature(rms_norm).parameters) == ["x", "weight", "eps"]
    assert "over the last dim" in str(rms_norm.__doc__)
