"""docs/serving.md: every curl runs, every endpoint has one, the dashboard names metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybridrt.cli.options import EngineOptions
from hybridrt.cli.serve import ServerOptions
from scripts.option_rows import names, table
from tests.server.test_operations import metrics
from tests.support.http_server import Served

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "serving.md").read_text()
CALLS = [block for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) if block.startswith("curl ")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("call", CALLS, ids=[re.search(r":8000(\S+)", call)[1] for call in CALLS])  # type: ignore[index]
def test_every_call_works(call: str, served: Served) -> None:
    call = call.replace("http://127.0.0.1:8000", served.url).replace("embedded", "tested")
    result = subprocess.run(["bash", "-c", call], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout, result.stderr
    if "http_code" in call:
        assert result.stdout == "200\n"
    elif "/responses" in call and "stream" in call:
        assert '"type":"response.incomplete"' in result.stdout.splitlines()[-2]
    elif "stream" in call:
        assert result.stdout.rstrip().endswith("data: [DONE]") and '"usage":{' in result.stdout
    elif "/metrics" not in call:
        assert not json.loads(result.stdout).get("error"), result.stdout


PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=[re.search(r"from (\w+|hybridrt) ", p)[1] for p in PROGRAMS])  # type: ignore[index]
def test_every_program_runs(program: str, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """With the built-in model instead of a checkpoint, and of a client's with this server."""
    program = program.replace("http://127.0.0.1:8000", served.url).replace("tiiuae/Falcon-H1-7B-Instruct", "embedded")
    names: dict[str, Any] = {}
    exec(compile(program.replace('model="embedded"', 'model="tested"'), "docs/serving.md", "exec"), names)
    if "schema" in names:
        assert 0 <= json.loads(names["output"].text)["n"] <= 99
    else:
        assert capsys.readouterr().out


def test_every_endpoint_has_a_call(served: Served) -> None:
    with served.http() as client:
        paths = client.get("/openapi.json").json()["paths"]
    called = {path for call in CALLS for path in re.findall(r":8000(\S+)", call)}
    assert {path.replace("{name}", "embedded").replace("{response_id}", "resp_mine") for path in paths} == called


def test_options_and_metrics_that_it_names_exist(served: Served) -> None:
    options = {f"--{name.replace('_', '-')}" for name in ServerOptions.__dataclass_fields__}
    options |= {f"--{name.replace('_', '-')}" for name in EngineOptions.__dataclass_fields__}
    commands = [line for line in TEXT.splitlines() if re.search(r'hybridrt"?,? "?serve', line)]
    assert {line.split()[0].partition("=")[0] for line in commands} >= {"ExecStart", "hybridrt"}
    named = set(re.findall(r"`(--[a-z-]+)", TEXT)) | set(re.findall(r"[ \"](--[a-z-]+)", "\n".join(commands)))
    others = {"--rate", "--concurrency", "--data", "--slo-", "--step-ms", "--no-prefix-cache", "--suite", "--output"}
    repeatable = {"--api-key", "--allowed-host", "--allowed-origin", "--allow-image-url", "--served-model-name"}
    assert named - others <= options | repeatable, named - others - options
    known = {re.sub(r"_(total|count|sum|bucket)?(\[.*)?$", "", name) for name in metrics(served)}
    known |= {*metrics(served), "hybridrt:expert_tokens", "hybridrt:expert_imbalance"}  # these two only with ranks
    known |= {"hybridrt:prefill_workers", "hybridrt:decode_workers"}  # only with a role
    dashboard = (DOCS / "grafana.json").read_text()
    json.loads(dashboard)
    for name in re.findall(r"(?:vllm|hybridrt):\w+", dashboard + TEXT):
        assert name in known or re.sub(r"_(total|count|sum|bucket)$", "", name) in known, name


def test_metrics_of_the_page_on_migration_are_served(served: Served) -> None:
    """Under the names that Prometheus reads: those of counters end in _total."""
    served_names = {re.sub(r"(_count|_sum|_bucket)?(\[.*)?$", "", name) for name in metrics(served)}
    named = [name for _, _, ours in table("Metrics") for name in names(ours)]
    assert len(named) > 20 and [name for name in named if name not in served_names] == []
