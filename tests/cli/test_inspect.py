"""`hybridrt inspect` and `hybridrt doctor`: what they say is what the runtime does."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner, Result

from hybridrt import EngineConfig
from hybridrt.base.gpus import GPUS
from hybridrt.cli import doctor as doctor_module
from hybridrt.cli import tables
from hybridrt.cli.app import app
from hybridrt.cli.inspect import describe_model
from hybridrt.cli.tables import bytes_text, count_text, ranges_text
from hybridrt.kernels.core import providers
from hybridrt.kinds.registry import can_replay
from hybridrt.layers.linear import parameter_count
from hybridrt.models.config.read_config import read_model_config
from hybridrt.runtime.load import build_model, fit
from hybridrt.runtime.run.model_runner import ModelRunner
from tests.models.test_vision import QWEN, seeing
from tests.support.checkpoints import (
    CheckpointStore,
    Make,
    falcon,
    falcon_mamba,
    jamba,
    lfm2,
    lfm2_moe,
    mamba,
    mamba2,
    nemotron,
    qwen,
    swa_ssm,
)
from tests.support.levels import sweep
from tests.support.ling25 import ling25
from tests.support.newer_checkpoints import bamba, granite, kimi, lfm3, ling, minimax, olmo, qwen35_moe, zamba2
from tests.support.tiny import write_tiny
from tests.support.windowed_checkpoints import gpt_oss, lara

FAMILIES: dict[str, tuple[Make, str]] = {
    "falcon": (falcon(num_hidden_layers=3), "HHH"),
    "nemotron": (nemotron("M*-ME"), "M*-ME"),
    "qwen": (qwen(num_hidden_layers=8), "GGG*GGG*"),
    "falcon_mamba": (falcon_mamba(), "MM"),
    "qwen35": (qwen35_moe(), "GGG*"),
    "granite": (granite(), "M*MM"),
    "bamba": (bamba(), "M*M"),
    "olmo": (olmo(), "G*G"),
    "jamba": (jamba(num_hidden_layers=4, expert_layer_period=1, expert_layer_offset=0), "M*MM"),
    "lfm2": (lfm2(), "C*CC"),
    "lfm3": (lfm3(num_hidden_layers=3, layer_types=["conv", "sliding_attention", "conv"]), "C*C"),
    "mamba": (mamba(), "MM"),
    "mamba2": (mamba2(), "MM"),
    "zamba2": (zamba2(), "MHMHM"),
    "minimax": (minimax(), "L*L"),
    "ling25": (ling25(first_k_dense_replace=0), "L*L*"),
    "kimi": (kimi(mlp_layer_types=["sparse"] * 4), "KKK*"),
    "lfm2_moe": (lfm2_moe(num_dense_layers=0), "C*CC"),
    "ling": (ling(first_k_dense_replace=0), "K*K*"),
    "swa_ssm": (swa_ssm(history_mode="enabled"), "HHHH"),
}
SMALL = {"max_running_requests": 3, "max_model_len": 64, "device": "cpu"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


@pytest.fixture(params=sweep(FAMILIES, 3))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    make, symbols = FAMILIES[request.param]
    return write_tiny(tmp_path, make, tokenizer=False), symbols


@pytest.mark.parametrize(
    "options", [{}, {"state_mode": "replay", "mamba_ssm_dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}]
)
def test_report_is_what_a_runner_allocates(model: tuple[Path, str], options: dict[str, Any]) -> None:
    if not can_replay(read_model_config(model[0]).linear):
        options = {k: v for k, v in options.items() if k != "state_mode"}
    config = EngineConfig(str(model[0]), load_format="dummy", **SMALL, **options)
    report, runner = describe_model(config), ModelRunner(config)
    assert report.weight_bytes == build_model.weight_bytes(runner.model)
    assert report.kv_dtype == ("float8_e4m3fn" if "kv_cache_dtype" in options else "float32")
    assert report.num_parameters == parameter_count(runner.model)
    kv, mamba = runner.pools.kv, runner.pools.req_to_token.mamba_pool
    assert report.kv_bytes_per_token == sum(layer.kv_bytes_per_token for layer in report.layers)
    assert mamba is not None
    for i, layer in enumerate(report.layers):
        held, pages = (kv.layer_tensors(i), kv.num_pages[kv.group_of(i)] + 1) if i in kv.specs else ((), 0)
        assert layer.kv_bytes_per_token * pages * kv.page_size == sum(t.nbytes for t in held)
        cached = vars(mamba.layer_cache(i)).values() if i in mamba.layer_ids else ()
        assert layer.state_bytes == sum(t[0].nbytes for t in cached if t is not None)
    assert report.plan is not None
    assert (report.plan.num_rows, report.plan.groups) == (runner.memory_plan.num_rows, runner.memory_plan.groups)


def test_table_shows_the_stack_and_a_row_for_each_kind(model: tuple[Path, str]) -> None:
    path, symbols = model
    result = run("inspect", str(path), "--device", "cpu", "--max-running-requests", "3", "--max-model-len", "64")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert symbols in lines
    rows = [line.split()[:2] for line in lines if line[:2] in {f"{s} " for s in symbols}]
    assert rows == [
        [s, ranges_text([i for i, t in enumerate(symbols) if t == s]).split()[0]] for s in dict.fromkeys(symbols)
    ]
    assert "3 running requests" in lines[-1]
    assert lines[1].startswith("Fits: ")


def test_a_tower_of_images_is_counted(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = seeing(checkpoints[QWEN].path, tmp_path / "model")
    config = EngineConfig(str(path), **SMALL)
    report, blind = describe_model(config), describe_model(replace(config, images=False))
    assert report.tower_bytes == report.weight_bytes - blind.weight_bytes and blind.tower_bytes is None
    shown, hidden = (
        run("inspect", str(path), "--device", "cpu", *option).stdout.split() for option in ((), ("--no-images",))
    )
    assert {"tower", "encoder:"} <= set(shown) and not {"tower", "encoder:"} & set(hidden)


def test_sizes_of_a_layer_have_names() -> None:
    layer, *_ = json.loads(run("inspect", "--json").stdout)["layers"]
    heads = "attention (4 heads, 2 KV heads, head_dim 64)"
    assert layer["mixer"] == f"{heads} + mamba2 (heads 8, head_dim 64, state_dim 64)"


@pytest.mark.parametrize(("make", "window", "full", "sinks"), [
    (gpt_oss(), "0, 2", "1, 3", ", sinks"), (lara(), "1, 4", "3", ""),
])  # fmt: skip
def test_windows_and_full_attention_have_rows_of_their_own(
    make: Make, window: str, full: str, sinks: str, tmp_path: Path
) -> None:
    path = write_tiny(tmp_path, make, tokenizer=False)
    lines = [line for line in run("inspect", str(path), "--device", "cpu").stdout.splitlines() if line[:2] == "* "]
    assert [line[2:].split("attention")[0].rsplit(None, 1)[0].strip() for line in lines] == [window, full]
    mixers = [
        layer["mixer"] for layer in json.loads(run("inspect", str(path), "--device", "cpu", "--json").stdout)["layers"]
    ]
    for text, layers in ((f", window 9{sinks})", window), (f"8{sinks})", full)):
        assert all(mixers[int(i)].endswith(text) for i in layers.split(", ")), mixers


def test_latent_attention_shows_its_cache(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, kimi(), tokenizer=False)
    *_, layer = json.loads(run("inspect", str(path), "--device", "cpu", "--json").stdout)["layers"]
    assert layer["mixer"] == "latent attention (4 heads, 20 + 4 numbers a token)"
    assert layer["kv_bytes_per_token"] == 4 * 24


def test_layers_of_other_windows_have_rows_of_their_own(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, lfm3(), tokenizer=False)
    lines = run("inspect", str(path), "--device", "cpu", "--max-model-len", "64").stdout.splitlines()
    assert [line.split()[:2] for line in lines if line[:2] in ("C ", "* ")] == [["C", "0,"], ["*", "1"], ["*", "3-4"]]
    layers = json.loads(run("inspect", str(path), "--device", "cpu", "--json").stdout)["layers"]
    assert [layer["mixer"].endswith("window 9)") for layer in layers] == [False, False, False, True, True]


def test_a_layer_without_a_recurrent_state_shows_its_conv(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, lfm2(), tokenizer=False)
    layer, *_ = json.loads(run("inspect", str(path), "--device", "cpu", "--json").stdout)["layers"]
    assert layer["mixer"] == "short_conv (channels 32, taps 3)"


def test_json_lists_every_layer_and_the_sums(model: tuple[Path, str]) -> None:
    path, symbols = model
    report = json.loads(run("inspect", str(path), "--device", "cpu", "--json").stdout)
    layers = report["layers"]
    assert [layer["layer"] for layer in layers] == list(range(len(symbols)))
    assert "".join(layer["symbol"] for layer in layers) == symbols
    assert report["state_bytes_per_request"] == sum(layer["state_bytes"] for layer in layers) > 0
    assert report["kv_bytes_per_token"] == sum(layer["kv_bytes_per_token"] for layer in layers)
    assert (report["kv_bytes_per_token"] > 0) == (not set("*H").isdisjoint(symbols))
    assert report["plan"]["pool_bytes"] <= report["plan"]["budget_bytes"]


def test_inspect_loads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("inspect filled a model")

    monkeypatch.setattr(build_model, "load_weights", refuse)
    monkeypatch.setattr(build_model, "fill_dummy", refuse)
    result = run("inspect", str(Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-next-12l"))
    assert result.exit_code == 0, result.output
    assert "20.4 B parameters" in result.stdout, "80 GB of weights that were not allocated"


def test_a_memory_too_small_is_said_and_the_layers_are_shown(
    model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = (
        build_model.weight_bytes(ModelRunner(EngineConfig(str(model[0]), load_format="dummy", **SMALL)).model) + 400_000
    )
    monkeypatch.setattr(fit, "free_host_memory", lambda: free)
    result = run("inspect", str(model[0]), "--device", "cpu", "--max-running-requests", "4096")
    assert result.exit_code == 0
    assert model[1] in result.stdout
    assert "Does not fit: the pools' budget" in " ".join(result.stdout.split()[2:9]), "before the layers"
    arguments = ("--device", "cpu", "--max-running-requests", "4096", "--json")
    report = json.loads(run("inspect", str(model[0]), *arguments).stdout)
    assert report["plan"] is None and "budget" in report["plan_error"]
    assert (report["fits"], report["free_bytes"]) == (False, free)


def test_weights_that_do_not_fit_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "free_host_memory", lambda: 23 * 2**30)
    model = str(Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-next-12l")
    text = " ".join(run("inspect", model, "--device", "cpu").stdout.split())
    assert 'Does not fit: the weights need 76.69 GiB, and cpu has 23.00 GiB for them; use dtype="bfloat16"' in text
    assert "Memory plan" not in text


def test_what_fits_is_said_beside_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools get a share of what the weights leave, not of what is free before they are loaded."""
    model = str(write_tiny(tmp_path))
    monkeypatch.setattr(fit, "free_host_memory", lambda: 2**25)
    report = json.loads(run("inspect", model, "--device", "cpu", "--json").stdout)
    assert report["plan"]["budget_bytes"] == (2**25 - report["weight_bytes"]) // 4
    assert f"of {bytes_text(2**25)} that cpu has" in run("inspect", model, "--device", "cpu").stdout


@pytest.mark.parametrize("width", [60, 200])
@pytest.mark.parametrize("arguments", [("inspect",), ("doctor",)])
def test_tables_break_no_word(arguments: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PIPED_WIDTH", width)
    lines = run(*arguments).stdout.splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(lines).replace(",", "").split()
    expected = {
        "inspect": ("feed-forward", "state/request", "attention", "backend"),
        "doctor": ("recurrent_gated_delta_rule", "router_sigmoid_grouped", "flash-linear-attention", "operations"),
    }[arguments[0]]
    assert [word for word in expected if word not in words] == []


def test_two_attention_backends_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridrt.recurrent import backends as registry

    built_in: Any = registry.BACKENDS.built_in
    monkeypatch.setitem(built_in, "other", built_in["torch"])
    config = EngineConfig(str(write_tiny(tmp_path)), device="cpu", prefill_attention_backend="other")
    assert describe_model(config).layers[0].backends == "torch/other + mamba2"


def test_inspect_refuses_what_a_run_would_refuse(tmp_path: Path) -> None:
    unknown = run("inspect", str(write_tiny(tmp_path)), "--attention-backend", "zzz")
    assert (unknown.exit_code, "--attention-backend 'zzz' is not supported" in unknown.stderr) == (2, True)
    (tmp_path / "config.json").write_text('{"architectures": ["NopeForCausalLM"], "model_type": "nope"}')
    unsupported = run("inspect", str(tmp_path))
    assert (unsupported.exit_code, "'NopeForCausalLM' is not supported" in unsupported.stderr) == (2, True)


def test_doctor_names_the_provider_of_every_operation() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    assert [(row["op"], row["device"]) for row in report["operations"]] == [
        (row.op, row.device) for row in providers.report(devices)
    ]
    assert all(row["picked"] == "torch" for row in report["operations"] if row["device"] == "cpu")
    assert torch.__version__.startswith(report["versions"]["torch"])  # which may name its build too: 2.15.0+cu132
    assert "torch" in report["attention_backends"]
    assert report["kv_codes"]["torch"] is None and report["kv_codes"]["flashinfer"]


def test_doctor_says_why_a_provider_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [providers.ReportRow("rms_norm", "cpu", "torch", {"flashinfer": "not installed: pip install '.[x]'"})]
    monkeypatch.setattr(providers, "report", lambda devices: rows)
    text = run("doctor").stdout
    assert "flashinfer: not installed: pip install '.[x]'" in text
    assert "cores in use" in text


def test_doctor_has_one_row_for_operations_with_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation is still found under the provider that serves it."""
    operations = doctor_module.examine().operations
    text = run("doctor").stdout.split("Operations", 1)[1]
    assert all(row.op in text for row in operations)
    groups = {(row.device, row.picked, tuple(row.others.items())) for row in operations}
    providers_named = [line for line in text.splitlines() if line.startswith(("torch", "triton", "none"))]
    assert len(providers_named) == len(groups) <= len(operations) / 3 or torch.cuda.is_available()


def test_doctor_lists_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "PACKAGES", ("torch", "no-such-distribution"))
    versions = doctor_module.examine().versions
    assert versions["torch"] and versions["no-such-distribution"] is None


def test_doctor_warns_of_versions_beyond_the_tested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = ["torch<2.16,>=2.11", 'flashinfer-python<0.8,>=0.6.12; extra == "flashinfer"', "numpy>=1.26"]
    inside = {"torch": "2.15.1+cpu", "flashinfer-python": None, "numpy": "9.0"}
    assert doctor_module.untested(inside, bounds) == []
    beyond = doctor_module.untested({"torch": "2.16.0", "flashinfer-python": "0.8.0"}, bounds)
    assert [line.split(" is untested")[0] for line in beyond] == ["torch 2.16.0", "flashinfer-python 0.8.0"]
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ours = [*project["dependencies"], *project["optional-dependencies"]["flashinfer"]]
    newest = {"transformers": "5.24.0", "flashinfer-python": "0.7.2"}
    assert doctor_module.untested(newest, ours) == []
    own = SimpleNamespace(version="0.1", requires=["torch<1"])
    installed = doctor_module._installed
    monkeypatch.setattr(doctor_module, "_installed", lambda name: own if name == "hybridrt" else installed(name))
    version = doctor_module.examine().versions["torch"]
    assert f"torch {version} is untested" in " ".join(run("doctor").stdout.split())
    assert len(json.loads(run("doctor", "--json").stdout)["warnings"]) == 1


def test_every_package_with_bounds_is_examined() -> None:
    """doctor compares by name: a requirement under another name would never be checked."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    requirements = [Requirement(line) for line in lines]
    bounded = {r.name for r in requirements if any(s.operator == "<" for s in r.specifier)}
    assert {"torch", "triton", "transformers", "flashinfer-python"} <= bounded <= set(doctor_module.examine().versions)


def test_a_wrong_override_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(providers.ENVIRONMENT_VARIABLE, "no_such_operation=torch")
    providers._overrides.cache_clear()
    try:
        result = run("doctor")
    finally:
        monkeypatch.undo()
        providers._overrides.cache_clear()
    assert (result.exit_code, "no_such_operation" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "-"), (1023, "1023 B"), (1536, "1.5 KiB"), (100 * 2**20, "100 MiB"), (2**41, "2.0 TiB")]
)
def test_bytes_read_as_people_write_them(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(7, "7"), (999, "999"), (1234, "1.23 K"), (5_730_000, "5.73 M"), (999_999, "1 M"), (2 * 10**16, "20000 T")],
)
def test_counts_of_parameters_read_as_people_write_them(count: int, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(("gpu", "fits"), [("h100", True), ("l4", True)])
def test_a_plan_for_a_gpu_that_is_not_here(gpu: str, fits: bool) -> None:
    result = run("inspect", "--gpu", gpu, "--json")
    report = json.loads(result.stdout)
    assert (report["fits"], report["device"], report["dtype"]) == (fits, gpu, "bfloat16")
    assert report["free_bytes"] == int(GPUS[gpu].memory * 0.85)
    assert f"memory_fraction 0.85 of {GPUS[gpu].memory / 2**30:.2f} GiB" in report["budget"]
    # As a run there would have: rows, graphs and backends are not those of this machine.
    assert report["plan"]["num_rows"] == 256 and "triton" in report["layers"][0]["backends"]


def test_a_gpu_that_is_not_here_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which backend prefills depends on the device's capability."""
    for name in ("hybridrt.recurrent.backends.resolve_prefill_name", "hybridrt.base.device.GPUFacts.of_device"):
        monkeypatch.setattr(name, None)
    assert run("inspect", "--gpu", "h100").exit_code == 0


@pytest.mark.parametrize("options", ["--quantization fp8", "--kv-cache-dtype fp8_e4m3", "--mamba-ssm-dtype fp8"])
def test_float8_is_a_matter_of_the_named_gpu(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU of this machine, if there is one, may be another."""
    for name in ("get_device_capability", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, None)
    assert run("inspect", "--gpu", "l4", *options.split()).exit_code == 0
    result = run("inspect", "--gpu", "a100", *options.split())
    assert (result.exit_code, "a100 has no e4m3 numbers (sm_89" in result.stderr) == (2, True), result.output


def test_other_weights_need_no_float8() -> None:
    assert run("inspect", "--gpu", "a100", "--quantization", "int4").exit_code == 0


def test_a_model_that_is_too_large_for_a_gpu(tmp_path: Path) -> None:
    large = falcon(num_hidden_layers=3, vocab_size=1_000_000, hidden_size=8192, intermediate_size=64)
    path = write_tiny(tmp_path, large, tokenizer=False)
    reports = {gpu: json.loads(run("inspect", str(path), "--gpu", gpu, "--json").stdout) for gpu in ("l4", "h200")}
    assert [report["fits"] for report in reports.values()] == [False, True]
    assert "weights need" in reports["l4"]["plan_error"]
    assert "and the GPU has 18.70 GiB for them: of its 22.00 GiB" in reports["l4"]["plan_error"]


@pytest.mark.parametrize(
    ("options", "text"),
    [(("--gpu", "h101"), "--gpu is 'h101'"), (("--gpu", "h100", "--device", "cpu"), "leave it out")],
)
def test_wrong_gpus_are_refused(options: tuple[str, ...], text: str) -> None:
    result = run("inspect", *options)
    assert (result.exit_code, text in result.stderr) == (2, True), result.stderr


def test_inspect_says_where_the_budget_comes_from() -> None:
    assert "Budget: memory_fraction 0.5 of the main memory" in run("inspect", "--memory-fraction", "0.5").stdout
    assert "pools take 1/4 of what the weights leave" in run("inspect").stdout


def test_ranges_collapse_neighbours() -> None:
    assert ranges_text([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
