"""Prompts with images through the whole runtime: greedy tokens are transformers'."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.base.spans import EncoderInput, Span, mrope_delta, mrope_positions
from hybridrt.images.reader import ImageReader
from hybridrt.images.settings import read_image_settings
from hybridrt.images.source import ImageSource
from hybridrt.models.config.read_config import read_model_config
from hybridrt.speculative.drafter import Draft, DraftRequest
from hybridrt.speculative.head import HeadStep, _along_path
from hybridrt.speculative.mtp import MTPDrafter
from tests.models.test_models_parity import rewrite
from tests.models.test_vision import (
    LFM2,
    LFM3,
    OMNI,
    QWEN,
    QWEN_MOE,
    lfm2_inputs,
    omni_inputs,
    pictures,
    qwen_inputs,
    seeing,
)
from tests.support.checkpoints import CheckpointStore
from tests.support.mtp_oracle import NaiveHead, write_with_head
from tests.support.newer_checkpoints import qwen35_seeing
from tests.support.pictures import noise
from tests.support.sizes import VOCAB
from tests.support.speculation import first_children
from tests.support.ties import check_greedy

IMAGE, STEPS = VOCAB - 1, 8
# Prompts by numbers of text tokens and grids of patches.
PROMPTS: list[list[int | tuple[int, int]]] = [
    [3, (4, 6), 5],
    [1, (2, 8), 1, (8, 2), 2, (4, 4)],
    [(4, 4), 7],
    [9],
]


def prompt(parts: Sequence[int | tuple[int, int]], inputs: Sequence[EncoderInput]) -> tuple[list[int], list[Span]]:
    tokens, spans, left = list[int](), list[Span](), list(inputs)
    for part in parts:
        if isinstance(part, int):
            tokens += [4 + (7 * len(tokens) + i) % (VOCAB - 8) for i in range(part)]
            continue
        grid = part[0] // 2, part[1] // 2
        length, read = grid[0] * grid[1], left.pop(0)
        digest = sha256(read.patches.tobytes() + bytes(grid)).digest()
        spans.append(Span(len(tokens), length, digest, grid, read))
        tokens += [IMAGE] * length
    return tokens, spans


@torch.no_grad()
def check(model: Any, name: str, tokens: list[int], inputs: Sequence[EncoderInput], output: list[int]) -> None:
    """Each token is the likeliest one of transformers after those before it, or as good as."""
    ids = torch.tensor([[*tokens, *output[:-1]]])
    given: dict[str, Any] = {}
    if inputs and name == LFM2:
        given = dict(zip(("pixel_values", "spatial_shapes", "pixel_attention_mask"), lfm2_inputs(inputs)))
    elif inputs and name == OMNI:
        given = dict(zip(("pixel_values", "image_grid_hw"), omni_inputs(inputs)))
    elif inputs:
        given = dict(zip(("pixel_values", "image_grid_thw"), qwen_inputs(inputs)))
        if name != LFM3:
            given["mm_token_type_ids"] = (ids == IMAGE).int()
            model.model.rope_deltas = None
    logits: Tensor = model(input_ids=ids, use_cache=False, **given).logits[0, len(tokens) - 1 :]
    short = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert short.max() < 1e-4, (name, tokens, output, short)


def run(path: Path, prompts: list[tuple[list[int], list[Span]]], **options: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    with LLM(str(path), **{"device": "cpu", "max_model_len": 96, **options}) as llm:
        given: list[Any] = [{"prompt_token_ids": tokens, "spans": spans} for tokens, spans in prompts]
        return [out.token_ids for out in llm.generate(given, params)]


def sample_prompts(path: Path) -> tuple[list[tuple[list[int], list[Span]]], list[list[EncoderInput]]]:
    """PROMPTS with their spans, and their pictures."""
    spec = read_model_config(path).vision
    assert spec is not None
    seen = [pictures(spec, [part for part in parts if isinstance(part, tuple)]) for parts in PROMPTS]
    return [prompt(parts, inputs) for parts, inputs in zip(PROMPTS, seen)], seen


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(QWEN, {}, marks=pytest.mark.slow),
        pytest.param(QWEN_MOE, {"chunked_prefill_size": 5}, marks=pytest.mark.slow),
        (QWEN, {"chunked_prefill_size": 3, "cuda_graph": False}),
        pytest.param(QWEN, {"speculative": SpeculativeConfig("ngram", num_draft_tokens=3)}, marks=pytest.mark.slow),
        (QWEN, {"speculative": SpeculativeConfig("ngram", num_draft_tokens=3, topk=2)}),
        pytest.param(LFM2, {}, marks=pytest.mark.slow),
        (LFM2, {"chunked_prefill_size": 5}),
        (LFM3, {}),
        (OMNI, {"chunked_prefill_size": 5}),
        pytest.param(QWEN, {"tp_size": 2, "chunked_prefill_size": 5}, marks=pytest.mark.slow),
        pytest.param(OMNI, {"tp_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    name: str, options: dict[str, Any], checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = checkpoints[name]
    path = seeing(checkpoint.path, tmp_path / "model")
    prompts, seen = sample_prompts(path)
    outputs = run(path, prompts, **options)
    for (tokens, _), inputs, output in zip(prompts, seen, outputs, strict=True):
        check(checkpoint.model, name, tokens, inputs, output)


def test_tiles_of_nemotron_nano_vl(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    checkpoint, name = checkpoints[OMNI], "NemotronH_Nano_VL_V2"
    processor = {"image_processor_type": "NemotronNanoVLV2ImageProcessor", "max_num_tiles": 4, "image_size": 16}
    seen = seeing(checkpoint.path, tmp_path / "seeing", patch_size=4, **processor)
    path = rewrite(seen, tmp_path / "model", architectures=[name], model_type=name)
    settings, marks = read_image_settings(path), {"<img>": 4, "</img>": 5, "<image>": IMAGE}
    assert settings is not None
    given = [ImageSource(noise(1, width, 20), "images.0") for width in (30, 16)]
    tokens, found = ImageReader(settings, IMAGE, marks).expand([7, IMAGE, IMAGE, 9], given, 90)
    assert tokens == [7, 4, *[IMAGE] * 20, 5, 4, *[IMAGE] * 4, 5, 9], "four tiles and a thumbnail, and a tile"
    (output,) = run(path, [(tokens, list(found))])
    check(checkpoint.model, OMNI, tokens, [span.input for span in found], output)


class SeeingHead(NaiveHead):
    """The head of a model with images, after one prompt."""

    spans: Sequence[Span] = ()
    images: Sequence[EncoderInput] = ()

    def states(self, tokens: list[int]) -> Tensor:
        given: dict[str, Any] = {}
        if self.images:
            given = dict(zip(("pixel_values", "image_grid_thw"), qwen_inputs(self.images)))
            given["mm_token_type_ids"] = torch.tensor([tokens]).eq(IMAGE).int()
        self.model.model.rope_deltas = None
        found: Tensor = self.model.model(input_ids=torch.tensor([tokens]), use_cache=False, **given).last_hidden_state
        return found[0]

    def embedded(self, tokens: list[int]) -> Tensor:
        found = super().embedded(tokens).clone()
        if self.images:
            features = self.model.model.get_image_features(*qwen_inputs(self.images)).pooler_output
            for span, feature in zip(self.spans, features, strict=True):
                found[max(span.start - 1, 0) : span.start + span.length - 1] = feature[span.start == 0 :]
        return found

    def angles(self, count: int, turns: Tensor) -> Tensor:
        places = torch.from_numpy(mrope_positions(self.spans, 0, count))
        sections = self.config.rope_parameters["mrope_section"]
        axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(len(turns))]
        return places[axes].T * turns


@pytest.mark.parametrize("topk", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_prediction_head_sees_images(topk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prompts, after accepted and refused drafts, and drafting ahead; and it changes no token."""
    make = qwen35_seeing(num_hidden_layers=2, full_attention_interval=2, mtp_num_hidden_layers=1)
    naive = SeeingHead(tmp_path / "saved", write_with_head(make, tmp_path / "saved"))
    path = seeing(naive.path, tmp_path / "model")
    prompts, seen = sample_prompts(path)
    drafted = list[tuple[Sequence[int], Sequence[int], list[int]]]()
    original = MTPDrafter.propose

    def propose(drafter: MTPDrafter, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
        drafts = original(drafter, requests, most)
        drafted.extend((r.prompt, list(r.output), first_children(draft)) for r, draft in zip(requests, drafts))
        return drafts

    moved, advance = set[int](), HeadStep.__call__

    def advanced(head: HeadStep, batch: ForwardBatch) -> Tensor:
        moved.update((batch.rope_positions - batch.positions).tolist())
        return advance(head, batch)

    monkeypatch.setattr(MTPDrafter, "propose", propose)
    monkeypatch.setattr(HeadStep, "__call__", advanced)
    outputs = run(path, prompts, speculative=SpeculativeConfig("mtp", num_draft_tokens=2 * topk, topk=topk))
    assert outputs == run(path, prompts)
    for tokens, output, draft in drafted:
        number = [text for text, _ in prompts].index(list(tokens))
        naive.spans, naive.images = prompts[number][1], seen[number]
        logits = naive.logits([*tokens, *output], list(draft)[:-1])
        check_greedy(list(draft), logits[: len(draft)], f"prompt {number} after {len(output)} tokens")
    assert max(len(draft) for *_, draft in drafted) >= 2
    assert moved == {mrope_delta(spans) for _, spans in prompts}


def test_accepted_drafts_keep_their_distance_from_their_index() -> None:
    """Of two rows of three inputs, the third one follows the root; a chunk of two tokens comes after them."""
    positions = torch.tensor([7, 8, 8, 20, 21, 21, 0, 1], dtype=torch.int32)
    moved = torch.tensor([-3, -3, -3, -9, -9, -9], dtype=torch.int32)
    axes = torch.stack([torch.cat((positions[:6] + moved, torch.tensor([0, axis]))) for axis in (1, 5, 6)]).int()
    lens, starts = torch.tensor([10, 23, 2]), torch.tensor([0, 3, 6, 8])
    for turning in (axes, axes[0]):
        batch = ForwardBatch(
            ForwardMode.MIXED, positions, positions, torch.tensor([1, 2, 3]), lens, starts, positions, 3, 2, None,  # type: ignore[arg-type]
            spec_info=SpecInfo(3), mrope_positions=turning,
        )  # fmt: skip
        path = torch.tensor([[0, 2, 1], [0, 1, 2]])
        kept, hidden = _along_path(batch, torch.arange(8.0)[:, None], path)
        assert kept.positions.tolist() == [7, 8, 9, 20, 21, 22, 0, 1]
        assert hidden.flatten().tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
        want = torch.cat(((kept.positions[:6] + moved).expand_as(turning[..., :6]), turning[..., 6:]), -1)
        assert torch.equal(kept.rope_positions, want)
