"""`hybridrt verify` finds each damage of a checkpoint and names it, and nothing in a sound one."""

from pathlib import Path
from typing import Any

import pytest

from hybridrt.verify.files import check_config, check_keys_of, check_tensors
from hybridrt.verify.results import FAILED, PASSED, WARNED, Result
from hybridrt.verify.rope import check_rope
from hybridrt.verify.run import verify
from hybridrt.verify.subject import Subject
from hybridrt.verify.text import check_template, check_tokenizer
from tests.support import damages
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import sweep

TEN = (
    "falcon-plain", "qwen35-plain", "granite-plain", "bamba-plain", "lfm2-plain", "kimi-plain", "ling-plain",
    "olmo-plain", "zamba2-plain", "nemotron-experts",
)  # fmt: skip
STATIC = (check_config, check_rope, check_tokenizer, check_template, check_keys_of, check_tensors)


def checked(path: Path, *checks: Any) -> list[Result]:
    """The results of some checks; the first one reads the configuration."""
    subject, results = Subject(str(path), device="cpu"), []
    for check in checks:
        results.append(Result(check.__name__))
        check(subject, results[-1])
    return results


def found(results: list[Result]) -> str:
    return "\n".join(line for result in results for line in result.findings)


@pytest.fixture
def sound(checkpoints: CheckpointStore, tmp_path: Path) -> Path:
    return damages.copied(checkpoints["falcon-plain"].path, tmp_path / "model")


def test_a_sound_checkpoint_has_no_finding(sound: Path) -> None:
    results = checked(sound, *STATIC)
    assert not any("lost" in line or "chat template" in line for line in found(results).splitlines())
    assert [result.status for result in results if result.name != "check_tokenizer"] == [PASSED] * 5


@pytest.mark.parametrize("name", sweep(damages.TENSORS, every=2))
def test_a_damaged_tensor_is_named(sound: Path, name: str) -> None:
    key = damages.some_matrix(sound)
    change, told = damages.TENSORS[name]
    damages.change_tensor(sound, key, change)
    result = checked(sound, check_config, check_tensors)[1]
    assert result.status == FAILED
    assert any(key in line and told in line for line in result.findings), result.findings


@pytest.mark.parametrize("name", sweep(damages.TEMPLATES, every=2))
def test_a_wrong_template_is_named(sound: Path, name: str) -> None:
    template, told = damages.TEMPLATES[name]
    (sound / "chat_template.jinja").write_text(template)
    result = checked(sound, check_config, check_tokenizer, check_template)[2]
    assert result.status == FAILED and told in found([result]), result.findings


def test_other_line_ends_before_an_answer_are_a_doubt(sound: Path) -> None:
    changed = damages.TEMPLATE.replace("<|im_start|>assistant {%", "<|im_start|>assistant\n{%")
    (sound / "chat_template.jinja").write_text(changed)
    result = checked(sound, check_config, check_tokenizer, check_template)[2]
    assert result.status == WARNED and "other blanks" in found([result]), result.findings


def test_two_templates_that_differ_are_named(sound: Path) -> None:
    settings = sound / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("{", '{"chat_template": "other", ', 1))
    result = checked(sound, check_config, check_tokenizer, check_template)[2]
    assert "chat_template.jinja and tokenizer_config.json have different templates" in found([result])


@pytest.mark.parametrize(("change", "told"), [
    (lambda raw: raw.update(rope_theta=1e6), "rope_theta is 1000000.0"),
    (lambda raw: raw["rope_parameters"].update(
        rope_type="yarn", factor=2.0, original_max_position_embeddings=64), "reaches 128"),
    (lambda raw: raw.update(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_type is 'default'"),
])  # fmt: skip
def test_a_wrong_rope_is_named(sound: Path, change: Any, told: str) -> None:
    damages.change_config(sound, change)
    result = checked(sound, check_config, check_rope)[1]
    assert result.status == FAILED and told in found([result]), result.findings


def test_a_rope_theta_that_is_not_the_usual_one_is_a_doubt(sound: Path) -> None:
    damages.change_config(sound, lambda raw: raw["rope_parameters"].update(rope_theta=500.0))
    subject, result = Subject(str(sound), device="cpu", quick=True), Result("rope")
    check_config(subject, Result("config"))
    check_rope(subject, result)
    assert "rope_theta is 500; transformers' own value for falcon_h1 is 10000" in found([result])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if i % 5 else pytest.mark.slow) for i, name in enumerate(TEN)]
)
def test_ten_families_next_to_transformers(checkpoints: CheckpointStore, tmp_path: Path, name: str) -> None:
    """As a stranger would: sound ones pass; each of three damages is found and named."""
    source = checkpoints[name].path
    report = verify(Subject(str(source), "cpu", quick=True))
    assert report.status == PASSED, [result.findings for result in report.results]
    assert {r.name for r in report.results if r.status == "left out"} <= {"tokenizer", "template"}
    damaged = damages.copied(source, tmp_path / "tensor")
    key = damages.some_matrix(damaged)
    damages.change_tensor(damaged, key, damages.TENSORS["not a number"][0])
    assert key in found(checked(damaged, check_config, check_tensors))
    template = damages.copied(source, tmp_path / "template")
    (template / "chat_template.jinja").write_text(damages.TEMPLATES["of another model"][0])
    assert "<|start_header_id|>" in found(checked(template, check_config, check_tokenizer, check_template))
    rope = damages.copied(source, tmp_path / "rope")
    damages.change_config(rope, lambda raw: raw.update(rope_theta=123.0, rope_parameters={"rope_theta": 456.0}))
    assert "only one of them can be right" in found(checked(rope, check_config, check_rope))
