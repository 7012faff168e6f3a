"""The manifest and the container file name options and paths that exist."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hybridrt.cli.app import app
from hybridrt.server.core.config import ServerConfig

ROOT = Path(__file__).parents[1]
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
PODS = {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in OBJECTS if o["kind"] == "Deployment"}


@pytest.mark.parametrize("name", PODS)
def test_containers_start_with_options_that_exist(name: str) -> None:
    (container,) = PODS[name]["containers"]
    command, *arguments = container["args"]
    shown = CliRunner().invoke(app, [command, "--help"]).stdout
    options = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert options and all(re.search(rf"^ .*{option}\b", shown, re.MULTILINE) for option in options)
    variables = {each["name"] for each in container["env"]}
    assert variables <= {"HYBRIDRT_FLEET_KEY", "HYBRIDRT_API_KEY", "HF_HOME"}


@pytest.mark.parametrize("name", PODS)
def test_a_pod_gets_no_connections_when_it_ends(name: str) -> None:
    """Its address is taken from Services and DNS while preStop runs, before SIGTERM."""
    (container,) = PODS[name]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = next(float(a.partition("=")[2]) for a in container["args"] if a.startswith("--drain-timeout"))
    assert command[0] == "sleep" and PODS[name]["terminationGracePeriodSeconds"] > drain + float(command[1])
    (deployment,) = [o for o in OBJECTS if o["kind"] == "Deployment" and o["metadata"]["name"] == name]
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_longer_to_end_than_its_requests(name: str) -> None:
    (container,) = PODS[name]["containers"]
    (drain,) = [float(a.partition("=")[2]) for a in container["args"] if a.startswith("--drain-timeout")]
    assert PODS[name]["terminationGracePeriodSeconds"] > drain + 5 >= ServerConfig().drain_timeout
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"


def test_selectors_and_names_fit_together() -> None:
    labels = [o["spec"]["template"]["metadata"]["labels"] for o in OBJECTS if o["kind"] == "Deployment"]
    for each in OBJECTS:
        selector = each["spec"].get("selector", {})
        if selector:
            assert selector.get("matchLabels", selector) in labels, each["metadata"]["name"]
        target = each["spec"].get("scaleTargetRef")
        assert target is None or target["name"] in PODS
    services = {o["metadata"]["name"] for o in OBJECTS if o["kind"] == "Service"}
    (router,) = PODS["hybridrt-router"]["containers"]
    (url,) = [a.partition("=")[2] for a in router["args"] if a.startswith("--discover")]
    assert re.fullmatch(r"http://([\w-]+):8000", url)[1] in services  # type: ignore[index]


def test_the_container_file_compiles_with_options_that_exist() -> None:
    text = (ROOT / "deploy" / "Containerfile").read_text()
    shown = CliRunner().invoke(app, ["compile", "--help"]).stdout
    assert all(option in shown for option in re.findall(r"hybridrt compile .*?(--[\w-]+)", text))
    assert "hybridrt compile" in text


def test_the_container_file_installs_the_wheel_of_a_release() -> None:
    text = (ROOT / "deploy" / "Containerfile").read_text()
    commands = [line for line in text.splitlines() if not line.startswith("#")]
    copied = [line.split()[1:] for line in commands if line.startswith("COPY")]
    assert copied == [["dist", "/dist"]], "nothing of the checkout but what was released"
    installed = re.findall(r"pip install .*?(\S*\.whl)\)\[([\w,]+)\]", text)
    assert installed == [("/dist/hybridrt-*.whl", "serve,transfer")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"serve", "transfer"} <= extras.keys()
    assert "sha256sum --check SHA256SUMS" in text


def test_pods_run_as_the_user_of_the_image() -> None:
    """The base image has a user with the id 1000: another one could not be made."""
    (user,) = re.findall(r"useradd .*--uid (\d+)", (ROOT / "deploy" / "Containerfile").read_text())
    assert int(user) > 1000
    contexts = [pod["securityContext"] for pod in PODS.values()]
    assert all(context["runAsUser"] == context["fsGroup"] == int(user) for context in contexts)
