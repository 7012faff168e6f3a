"""How answers are compared with transformers': what is compared, and what no comparison can pass."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrt.verify import oracle, outputs
from hybridrt.verify.oracle import OracleAnswer
from hybridrt.verify.ours import SMALLEST, GreedyAnswer, compare_with_theirs, within
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject
from tests.support import damages
from tests.support.checkpoints import CheckpointStore

FAMILIES = ("qwen-plain", "falcon-norm_after_gate", "nemotron-experts", "jamba-plain")
VOCAB, PROMPT, COUNT, LIMITS = 100_000, [5, 6, 7], 2, (2e-3, 1e-3)


def theirs(spread: float) -> OracleAnswer:
    scores = (torch.randn(len(PROMPT), VOCAB, generator=torch.manual_seed(0)) * spread).log_softmax(-1)
    steps = [scores[-1], scores[0]]
    return OracleAnswer(scores, [int(each.argmax()) for each in steps], steps)


def ours(told: OracleAnswer, off: float = 0.0) -> GreedyAnswer:
    likely = [{int(t): float(each[t]) + off for t in each.topk(8).indices} for each in told.steps]
    prompt = [None, *({token: float(told.scores[i, token]) + off} for i, token in enumerate(PROMPT[1:]))]
    return GreedyAnswer(told.tokens, likely, prompt, 0)


@pytest.mark.parametrize("spread", [0.01, 10.0])
def test_unlikely_tokens_are_compared_if_all_are_unlikely(spread: float) -> None:
    """Random weights make every token of a large vocabulary unlikely."""
    told = theirs(spread)
    for off, fine in ((1e-4, True), (0.1, False)):
        result = Result("transformers")
        largest = compare_with_theirs("prompt 0", PROMPT, ours(told, off), told, LIMITS, result)
        assert largest == pytest.approx(off, rel=0.05) and (result.status != "failed") == fine
    assert within(torch.bfloat16, [theirs(spread)], [theirs(2 * spread)])[0] > SMALLEST


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_nan_is_no_equal_answer(whose: str) -> None:
    told, result = theirs(0.01), Result("transformers")
    found = ours(told, math.nan if whose == "ours" else 0.0)
    if whose == "theirs":
        told.steps[1].fill_(math.nan)
    assert compare_with_theirs("prompt 0", PROMPT, found, told, LIMITS, result) == math.inf
    assert result.status == "failed"


def test_nothing_compared_is_a_failure() -> None:
    told, result = theirs(0.01), Result("transformers")
    compare_with_theirs("prompt 0", PROMPT[:1], GreedyAnswer([], [], [None], 0), told, LIMITS, result)
    assert result.findings == ["failed: prompt 0: no log-probability could be compared with transformers'"]


@pytest.fixture
def halved(checkpoints: CheckpointStore, tmp_path: Path) -> Path:
    """A checkpoint in bfloat16."""
    return in_bfloat16(checkpoints["qwen-plain"].path, tmp_path / "model")


def in_bfloat16(path: Path, copy: Path) -> Path:
    path = damages.copied(path, copy)
    for file in path.glob("*.safetensors"):
        tensors = {key: tensor.to(torch.bfloat16) for key, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    damages.change_config(path, lambda raw: raw.update(dtype="bfloat16"))
    return path


def test_layer_by_layer_gives_what_the_whole_model_gives(halved: Path) -> None:
    """Bit for bit. Between runs the layers are as the checkpoint stores them."""
    architecture, prompt = json.loads((halved / "config.json").read_text())["architectures"][0], [5, 9, 2, 40]
    answers = []
    for by_layer in (False, True):
        with oracle.loaded(halved, architecture, torch.float32, torch.device("cpu"), by_layer=by_layer) as model:
            answers.append(oracle.ask(model, prompt, 3))
            layers = [p.dtype for layer in model.model.layers for p in layer.parameters()]
            assert set(layers) == {torch.bfloat16 if by_layer else torch.float32}
            assert model.get_input_embeddings().weight.dtype == torch.float32
    whole, parts = answers
    assert torch.equal(whole.scores, parts.scores) and whole.tokens == parts.tokens


def test_what_does_not_fit_is_compared_layer_by_layer(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in float32 is too large; in bfloat16 it is not."""
    subject = Subject(str(halved), device="cpu", dtype="bfloat16", quick=True)
    subject.read_config()
    float32 = 4 * outputs.parameter_count(subject)
    monkeypatch.setattr(oracle, "fits", lambda needed, device: needed < float32)
    result = Result("transformers")
    outputs.check_transformers(subject, result)
    assert result.status == "passed", result.findings
    assert any("float32 ran layer by layer" in note for note in result.notes)
    assert any("hybridrt did not run in float32" in note for note in result.notes)
    assert list(result.figures) == ["largest_difference_bfloat16"]


def test_a_dtype_in_which_hybridrt_alone_fits_is_compared(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers needs more memory than the weights take."""
    subject = Subject(str(halved), device="cpu", dtype="bfloat16", quick=True)
    subject.read_config()
    half, asked = 2 * outputs.parameter_count(subject), list[int]()

    def fits(needed: int, device: torch.device) -> bool:  # main memory first, then "the device"
        asked.append(needed)
        return needed < half or (needed == half and asked.count(half) == 1)

    monkeypatch.setattr(oracle, "fits", fits)
    result = Result("transformers")
    outputs.check_transformers(subject, result)
    assert result.status == "passed", result.findings
    assert list(result.figures) == ["largest_difference_bfloat16"]
    assert any("transformers in bfloat16 needs" in note and "left out" in note for note in result.notes)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_made_float32_as_if_it_were_read_so(
    checkpoints: CheckpointStore, tmp_path: Path, name: str, by_layer: bool
) -> None:
    """Bit for bit, from files in bfloat16: numbers that transformers computes, too."""
    path, cpu = in_bfloat16(checkpoints[name].path, tmp_path / "model"), torch.device("cpu")
    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    read = oracle.model_class_of(architecture).from_pretrained(path, dtype=torch.float32).eval()
    with oracle.loaded(path, architecture, torch.float32, cpu, by_layer=by_layer) as model:
        found, expected = oracle.ask(model, [5, 9, 2, 40], 2), oracle.ask(read, [5, 9, 2, 40], 2)
        assert torch.equal(found.scores, expected.scores) and found.tokens == expected.tokens
        tensors = dict(model.named_buffers()) if by_layer else dict(model.named_buffers()) | model.state_dict()
        for key, tensor in tensors.items():
            assert torch.equal(tensor.float(), (dict(read.named_buffers()) | read.state_dict())[key]), key
            assert by_layer or tensor.dtype in (torch.float32, torch.int64), key


def test_files_of_several_dtypes_are_not_rounded(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = in_bfloat16(checkpoints["qwen-plain"].path, tmp_path / "model")
    assert oracle.stored_dtype(path) == torch.bfloat16
    file, key = path / "model.safetensors", "model.layers.0.linear_attn.A_log"
    tensors = load_file(file)
    tensors[key] = tensors[key].float() + 1e-3
    save_file(tensors, file, {"format": "pt"})
    assert oracle.stored_dtype(path) is None
    with oracle.loaded(path, "Qwen3NextForCausalLM", torch.float32, torch.device("cpu")) as model:
        assert torch.equal(model.state_dict()[key], tensors[key])


def test_weights_in_the_dtype_of_the_run_are_read_once(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' model is made float32 where it is, after its answers in the dtype of the run."""
    loaded, models = oracle.loaded, list[torch.dtype]()

    def noted(path: Path, architecture: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        models.append(dtype)
        return loaded(path, architecture, dtype, *args, **kwargs)

    monkeypatch.setattr(oracle, "loaded", noted)
    subject = Subject(str(halved), device="cpu", dtype="bfloat16")
    subject.read_config()
    told = outputs._ask_all(subject, halved, [[5, 9, 2]], 2, torch.device("cpu"), Result("transformers"))
    assert models == [torch.bfloat16] and list(told) == [torch.float32, torch.bfloat16]
    for dtype, (answer,) in told.items():
        with loaded(halved, "Qwen3NextForCausalLM", dtype, torch.device("cpu")) as model:
            assert torch.equal(answer.scores, oracle.ask(model, [5, 9, 2], 2).scores)


def test_a_layer_that_does_not_fit_is_said(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(str(halved), device="cpu", dtype="bfloat16", quick=True)
    subject.read_config()
    monkeypatch.setattr(oracle, "fits", lambda needed, device: needed == 2 * outputs.parameter_count(subject))
    result = Result("transformers")
    outputs.check_transformers(subject, result)
    assert result.status == "left out" and "even layer by layer" in "".join(map(str, (result.findings, result.notes)))
