"""Reports: what differs from another one, the page, the table of all, the exit status."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridrt.base.errors import ConfigError
from hybridrt.cli import verify as command
from hybridrt.cli.app import app
from hybridrt.verify import run
from hybridrt.verify.against import read_report
from hybridrt.verify.files import check_config, check_hashes, check_tensors
from hybridrt.verify.page import page
from hybridrt.verify.published_hashes import published_hash, sha256_of
from hybridrt.verify.results import Report, Result
from hybridrt.verify.rope_fit import _judge
from hybridrt.verify.subject import Subject
from scripts import verified_table
from tests.support import damages
from tests.support.checkpoints import CheckpointStore

QUICK = {"config": check_config, "hashes": check_hashes, "tensors": check_tensors}


@pytest.fixture
def model(checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "CHECKS", QUICK)
    return damages.copied(checkpoints["falcon-plain"].path, tmp_path / "model")


def reported(path: Path, **options: Any) -> Report:
    return run.verify(Subject(str(path), device="cpu"), **options)


def test_another_report_names_what_differs(model: Path) -> None:
    """Also two rows that were exchanged, which no statistics show."""
    before = reported(model).as_json()
    assert before["model"] == "model" and str(model.parent) not in json.dumps(before)
    assert reported(model, against=before).status == "passed"
    key = damages.some_matrix(model)
    damages.change_tensor(model, key, lambda t: t.flip(0))
    damages.change_config(model, lambda raw: raw["rope_parameters"].update(rope_theta=123.0))
    (model / "chat_template.jinja").write_text("other")
    report = reported(model, against=before)
    assert [r.status for r in report.results] == ["passed", "passed", "passed", "failed"]
    assert [line.split(": ", 1)[1] for line in report.results[-1].findings] == [
        "config.json: rope_parameters.rope_theta is 123.0; it was 10000.0 in the other report",
        f"{key} differs from the other report's",
        "chat_template.jinja differs from the other report's",
    ]


def test_a_damaged_file_is_named_without_its_folder(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found = json.dumps(reported(model).as_json())
    assert "failed: model.safetensors cannot be read" in found and str(model.parent) not in found


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"hashes": {"files": []}}')
    with pytest.raises(ConfigError, match="is no report"):
        read_report(str(tmp_path / "x.json"))


@pytest.mark.parametrize("way", ["cache", "folder"])
def test_a_hash_of_the_hub_is_compared(model: Path, way: str) -> None:
    """The hub's cache names files by their hash; a folder has notes."""
    weights = model / "model.safetensors"
    digest = sha256_of(weights)
    if way == "cache":
        weights.rename(model.parent / digest)
        weights.symlink_to(model.parent / digest)
    else:
        note = model / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
        note.parent.mkdir(parents=True)
        note.write_text(f"commit\n{digest}\n1.0\n")
    assert published_hash(weights) == digest
    assert reported(model).results[1].figures["published"] == 1
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert "model.safetensors differs from what the hub published" in reported(model).results[1].findings[0]


def test_a_file_is_read_once_for_its_hashes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have gigabytes."""
    read: list[str] = []
    monkeypatch.setattr("hybridrt.verify.files.published_hash", lambda file: "0" * 64)
    monkeypatch.setattr("hybridrt.verify.files.sha256_of", lambda file: read.append(file.name) or "1" * 64)
    monkeypatch.setattr("hybridrt.verify.published_hashes._digest", None)
    subject, result = Subject(str(model)), Result("hashes")
    check_hashes(subject, result)
    assert len(read) == len(set(read)) == len(result.findings) > 2


def test_a_check_that_breaks_off_has_failed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages raise anything for an odd checkpoint."""

    def broken(subject: Subject, result: Result) -> None:
        raise KeyError("model.vocab")

    monkeypatch.setattr(run, "CHECKS", {"tokenizer": broken, "config": check_config})
    found = run.verify(Subject(str(model)))
    assert [result.status for result in found.results] == ["failed", found.results[1].status]
    assert "KeyError" in found.results[0].findings[0] and "model.vocab" in found.results[0].findings[0]


def test_a_damaged_file_is_named_and_the_others_are_checked(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-5])
    report = reported(model)
    assert [r.status for r in report.results] == ["passed", "passed", "failed"]
    assert "model.safetensors" in report.results[2].findings[0] and "damaged" in report.results[2].findings[0]


def test_the_page_has_all_checks_and_no_markdown_of_the_checkpoint() -> None:
    result = Result("rope")
    result.fail("config.json: `x` | <img src=y>")
    result.fail("![a](https://b/c) \\| d")
    result.figures["seconds_of_parts"] = {"loading *it*": 1.26, "running": 0.5}
    files = {"a": "1" * 64, "b\n# ![c](d)": "2" * 64}
    report = Report("m", False, {"layers": 2}, {"device": "CPU", "torch": "2"}, [result], {"files": files})
    text = page(report.as_json())
    assert "| rope | **FAILED** |" in text and "failed: config.json: 'x' \\| &lt;img src=y>" in text
    assert f"- a {'1' * 64}" in text and f"- b # !\\[c\\](d) {'2' * 64}" in text
    assert r"!\[a\](https://b/c) \\\| d" in text
    assert r"- seconds: loading \*it\* 1.3, running 0.5" in text


def test_figures_of_a_damaged_model_are_json() -> None:
    figures = {"text_loss": math.inf, "preferred": math.nan, "tasks": {"few": {"acc,none": math.nan, "n": 3}}}
    found = Report("m", True, {}, {}, [Result("transformers", figures=figures)], {}).as_json()
    json.dumps(found, allow_nan=False)
    assert found["results"][0]["figures"] == {
        "text_loss": None, "preferred": None, "tasks": {"few": {"acc,none": None, "n": 3}},
    }  # fmt: skip


@pytest.mark.parametrize(("found", "status"), [
    ({1e5: 7.0, 1e4: 7.5, 1e6: 9.0}, "passed"), ({1e5: 7.5, 1e4: 7.0, 1e6: 9.0}, "failed"),
    ({1e5: 4000.0, 1e4: 4010.0, 1e6: 3999.0}, "passed"),
])  # fmt: skip
def test_a_text_tells_rope_theta(found: dict[float, float], status: str) -> None:
    result = Result("rope by text")
    _judge(1e5, found, 4096, result)
    assert result.status == status


@pytest.mark.parametrize(("status", "strict", "code"), [
    ("passed", True, 0), ("warned", False, 0), ("warned", True, 1), ("failed", False, 1),
])  # fmt: skip
def test_the_exit_status(status: str, strict: bool, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = Report("m", False, {}, {"device": "CPU"}, [Result("rope", status)], {"files": {}, "tensors": {}})
    monkeypatch.setattr(command, "_run", lambda *_: report)
    words = ["verify", "embedded", "--json", "--out", str(tmp_path / "r"), *["--strict"] * strict]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    assert json.loads(result.stdout)["status"] == json.loads((tmp_path / "r.json").read_text())["status"] == status
    assert (tmp_path / "r.md").read_text().startswith(f"# m: {status}")


def test_a_full_disk_loses_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = Report("m", False, {}, {"device": "CPU"}, [Result("rope", "passed")], {"files": {}, "tensors": {}})

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "_run", lambda *_: report)
    monkeypatch.setattr(Path, "write_text", full)
    result = CliRunner().invoke(app, ["verify", "embedded", "--json", "--out", str(tmp_path / "r")])
    assert isinstance(result.exception, OSError) and json.loads(result.stdout)["status"] == "passed"


@pytest.mark.parametrize("words", [["verify"], ["compare", "http://a", "http://b", "--trace", "t"]])
@pytest.mark.parametrize("out", ["", "sub/", "r", "none/r"])
def test_names_of_reports_are_checked_before_the_run(
    words: list[str], out: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "r.json").mkdir()
    result = CliRunner().invoke(app, [*words, "--out", out])
    assert result.exit_code == 2 and "cannot be written; name a file" in result.output


def test_the_page_of_collected_reports_is_up_to_date() -> None:
    text = verified_table.document(verified_table.reports(), verified_table.compiled())
    assert text == verified_table.DOCUMENT.read_text(), "run python scripts/verified_table.py"


def test_the_page_tells_what_ran_from_what_was_compiled() -> None:
    machine = {"device": "H100", "torch": "2", "date": "d", "hybridrt": "0", "transformers": "5", "python": "3"}
    ran = {"model": "a", "note": "random weights", "status": "passed", "quick": True, "machine": machine, "results": []}
    built = [{"model": "b", "device": "H200", "torch": "2"}]
    text = verified_table.document([ran], built)
    assert "| model | H100, torch 2 | H200, torch 2 |" in text
    assert "| a (random weights) | ran | not tried |\n| b | not tried | compiled |" in text
