"""Families of models: their records, and one that another package brings."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hybridrt import LLM, SamplingParams
from hybridrt.base import plugins
from hybridrt.base.errors import BackendError, UnsupportedModelError
from hybridrt.models.config.family_registry import KNOWN_FAMILIES, family_of
from hybridrt.models.config.read_config import read_model_config
from hybridrt.models.registry import model_class
from tests.support import outside_family
from tests.support.checkpoints import jamba
from tests.support.outside_family import ARCHITECTURE, FAMILY, OutsideForCausalLM
from tests.support.tiny import write_tiny

POINTS = {
    ARCHITECTURE: "tests.support.outside_family:FAMILY",
    "WrongForCausalLM": "tests.support.outside_family:FAMILY",
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package whose entry points name a family, and one under a wrong name."""
    points = [EntryPoint(name, value, "hybridrt.families") for name, value in POINTS.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == "hybridrt.families" else [])
    family_of.cache_clear()
    yield
    family_of.cache_clear()


@pytest.mark.parametrize("architecture", KNOWN_FAMILIES.names())
def test_a_record_names_what_there_is(architecture: str) -> None:
    family = family_of(architecture)
    assert family.architecture == architecture == model_class(architecture).__name__
    assert bool(family.model_type) != (family.read is not None)
    assert family.mtp_head is None or plugins.load_object(family.mtp_head)


def test_a_family_of_another_package_runs(installed: None, tmp_path: Path) -> None:
    assert family_of(ARCHITECTURE) is FAMILY and model_class(ARCHITECTURE) is OutsideForCausalLM
    file = write_tiny(tmp_path, jamba(), tokenizer=False) / "config.json"
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)

    def tokens() -> list[int]:
        with LLM(str(tmp_path), load_format="dummy", device="cpu", max_model_len=64, max_running_requests=2) as llm:
            return llm.generate([[5, 6, 7]], params)[0].token_ids

    theirs = tokens()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [ARCHITECTURE]}))
    assert tokens() == theirs


def test_families_that_are_unknown_or_wrong_are_refused(installed: None) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'Nope' is not supported; supported are .*FalconH1ForCausalLM"):
        family_of("Nope")
    with pytest.raises(BackendError, match="must name a Family of that name"):
        family_of("WrongForCausalLM")


def test_a_field_with_another_type_than_a_field_type_is_named(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_family, "FAMILY", replace(FAMILY, fields={**FAMILY.fields, "heads": int}))
    family_of.cache_clear()
    with pytest.raises(BackendError, match=r"family of \w+ gives <class 'int'> as the type of heads; .* FieldType"):
        family_of(ARCHITECTURE)


def test_a_family_that_reads_an_absent_field_is_named(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tiny(tmp_path, jamba(), tokenizer=False) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [ARCHITECTURE]}))
    monkeypatch.setattr(outside_family, "FAMILY", replace(FAMILY, describe=lambda hf: {"layers": hf.no_such_field}))
    with pytest.raises(BackendError, match=f"family of {ARCHITECTURE} reads no_such_field, .* give it a default"):
        read_model_config(tmp_path)
    monkeypatch.setattr(outside_family, "FAMILY", replace(FAMILY, describe=lambda hf: {"layers": file.no_such_method}))
    family_of.cache_clear()
    with pytest.raises(AttributeError):  # a mistake of another sort keeps its traceback
        read_model_config(tmp_path)
