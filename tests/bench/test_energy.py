"""Energy of a load, with counters of a GPU that is not there."""

import json
import sys
import time
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridrt.base.errors import DeviceError, ProviderNotInstalledError
from hybridrt.bench.energy import VISIBLE, Energy, measured, nvml
from hybridrt.cli.app import app

SUMMARY = {"requests": 5, "failed": 1, "prompt_tokens": 100, "output_tokens": 50}


def test_idle_energy_is_subtracted() -> None:
    found = Energy(gpus=2, idle_watts=100.0, joules=3000.0, seconds=10.0).figures(SUMMARY)
    assert found["joules_without_idle"] == 2000.0 and found["mean_watts"] == 300.0
    assert (found["joules_per_output_token"], found["joules_per_token"]) == (40.0, pytest.approx(2000 / 150))
    assert found["joules_per_request"] == 500.0


def test_nothing_is_divided_by_zero() -> None:
    found = Energy(joules=1.0).figures(dict.fromkeys(SUMMARY, 0))
    assert found["joules_per_output_token"] == found["joules_per_request"] == 0.0


def test_the_load_is_measured_after_the_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs: 10 J each while idle for 2 s, then 45 J each in 3 s."""
    clock = iter([0.0, 2.0, 5.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    counters = iter([[5.0, 7.0], [15.0, 17.0], [60.0, 62.0]])
    with measured(lambda: next(counters)) as energy:
        pass
    assert energy == Energy(gpus=2, idle_watts=10.0, joules=90.0, seconds=3.0)


class Error(Exception):
    pass


def library(**changes: Any) -> Any:
    values = count(1_000_000, 2_000)  # millijoules, at each reading
    usual = {
        "NVMLError": Error, "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda i: i, "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: next(values),
    }  # fmt: skip
    return SimpleNamespace(**(usual | changes))


def broken(*_: object) -> None:
    raise Error("not supported")


@pytest.mark.parametrize(
    ("named", "read"),
    [(None, [0, 1, 2]), ("2", [2]), (" 1,0", [1, 0]), ("GPU-b", [1]), ("GPU-a1,GPU-a2", [0, 2])],
)
def test_only_visible_gpus_count(named: str | None, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of this machine may work for somebody else."""
    three: dict[str, Any] = {
        "nvmlDeviceGetCount": lambda: 3, "nvmlDeviceGetUUID": lambda gpu: ("GPU-a1", "GPU-b1", "GPU-a2")[gpu],
        "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 1000 * gpu,
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", library(**three))
    if named is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, named)
    with nvml() as joules:
        assert list(joules()) == read


@pytest.mark.parametrize("named", ["", "3", "-1", "GPU-a", "GPU-c", "MIG-a", "x"])
def test_a_name_of_no_gpu(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, named)
    uuids: dict[str, Any] = {
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetUUID": ("GPU-a1", "GPU-b1", "GPU-a2").__getitem__,
    }
    monkeypatch.setitem(sys.modules, "pynvml", library(**uuids))
    with pytest.raises(DeviceError, match=VISIBLE), nvml():
        pass


@pytest.mark.parametrize("changes", [{"nvmlInit": broken}, {"nvmlDeviceGetTotalEnergyConsumption": broken}])
def test_a_machine_without_counters(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(**changes))
    with pytest.raises(DeviceError, match="not supported"), nvml():
        pass


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ProviderNotInstalledError, match="nvidia-ml-py"), nvml():
        pass


def test_the_command_prints_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    monkeypatch.setattr("hybridrt.bench.energy.IDLE_SECONDS", 0.0)
    monkeypatch.setattr("hybridrt.bench.energy.time.sleep", lambda seconds: None)
    words = ["--device", "cpu", "--requests", "2", "--prompt-tokens", "4", "--output-tokens", "3", "--fixed", "--json"]
    result = CliRunner().invoke(app, ["bench", "offline", "--energy", *words])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["energy"]
    assert found["joules"] == 2.0 and found["gpus"] == 1
