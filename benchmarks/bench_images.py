"""A model that sees: its encoder, first tokens of images, and decode steps next to images.

    python -m benchmarks.bench_images benchmarks/configs/qwen3.5-9b-vl-like --name images

Weights are seeded random numbers, pictures random pixels of `--side`. Only the folder's own config.json and image
processor are read, no tokenizer. Times are medians on the host, after warm-up, with the device waited for. `limit` is
what a figure is compared with.

- encoder: all images at once, as the runtime encodes them without decode rows; of one image, too.
- first token: one new image and `--text` tokens, against the encoder alone and a text prompt of as many tokens.
- steps: `--rows` decode rows, quiet and while the images are encoded, one request each. Steps that also compute a part
  of a prompt are apart: text prompts of as many tokens are next to them.
- repeated image: with another text after it, against that text alone; and after another text, against a text prompt of
  as many tokens.
- text alone: decode steps and first tokens, against the same model without its tower (`images=False`), in turns.
  First tokens begin with an empty prefix cache.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_offline import decode_ms, most_tokens, sizes
from benchmarks.common import PRODUCT_FLOPS_PER_S, environment, plain_vocab, prompts, save, settle
from benchmarks.short_prompts import WARM, decoding, first_token_ms
from hybridrt import LLM, SamplingParams
from hybridrt.base.dtypes import STATE_DTYPES
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.spans import EncoderInput
from hybridrt.base.vision import VisionSpec
from hybridrt.bench.floor import encoder_flops
from hybridrt.images.lfm2 import all_marks
from hybridrt.images.nemotron import END, START
from hybridrt.images.reader import ImageReader
from hybridrt.images.settings import Lfm2Images, read_image_settings
from hybridrt.images.source import ImageSource
from hybridrt.models.config.read_config import read_model_config
from hybridrt.runtime.run.span_encoder import BATCH_PATCHES, SLICE_PATCHES

ENCODER_SHARE, FIRST_TOKEN, STEP, REPEATED, TEXT, TEXT_FULL = 0.5, 1.3, 1.2, 1.2, 1.01, 1.02  # limits
FULL_BATCH = 128
ENDS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Pictures:
    """Makes prompts with pictures of random pixels."""

    def __init__(self, llm: LLM, model: str, side: int) -> None:
        settings, vision = read_image_settings(Path(model)), llm.model_config.vision
        assert settings is not None and vision is not None, "make_llm has checked it"
        marks = all_marks(settings) if isinstance(settings, Lfm2Images) else [START, END]
        self._reader = ImageReader(settings, vision.token, {**dict.fromkeys(marks, 3), "<an image>": vision.token})
        self._token, self._side, self._most = vision.token, side, llm.plan.max_model_len

    def pixels(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, (self._side, self._side, 3), dtype=np.uint8)

    def prompt(self, seed: int, after: Sequence[int], before: Sequence[int] = ()) -> dict[str, Any]:
        """A picture between two texts."""
        source = ImageSource(self.pixels(seed), "images.0")
        tokens, spans = self._reader.expand([*before, self._token, *after], [source], self._most)
        return {"prompt_token_ids": tokens, "spans": spans}


class Bench:
    """Its rows: what was measured, a figure, and perhaps what it is compared with.

    Args:
        args: the options of the command line.
    """

    def __init__(self, args: argparse.Namespace, llm: LLM) -> None:
        self.args, self.llm, self.rows = args, llm, list[dict[str, Any]]()
        self.runner: Any = llm.engine.executor
        self.pictures = Pictures(llm, args.model, args.side)
        self._seed = 0

    def note(self, what: str, unit: str, value: float, ratio: float | None = None, limit: float | None = None) -> None:
        """`ratio`: the value over what it is compared with, which may be `limit` at most."""
        row = {"what": what, unit: value, "ratio": ratio, "limit": limit}
        self.rows.append({key: entry for key, entry in row.items() if entry is not None})
        shown = f"{what:62} {value:9.3f} {unit:8}" + ("" if ratio is None else f" ratio {ratio:6.3f}")
        print(shown + ("" if limit is None else f" (limit {limit:g})"), flush=True)

    def new_prompt(self, text: int) -> dict[str, Any]:
        """An image that no prompt has had, and a text."""
        self._seed += 1
        return self.pictures.prompt(self._seed, self.texts(1, text, self._seed)[0])

    def texts(self, count: int, length: int, seed: int) -> list[list[int]]:
        return prompts(count, length, plain_vocab(self.llm.model_config), seed)

    def first_ms(self, given: Sequence[Any]) -> float:
        """Of prompts that come one by one, the first of them to warm up."""
        return statistics.median([first_token_ms(self.llm, prompt) for prompt in given][WARM:])

    # the encoder

    def encoder(self) -> None:
        inputs = [self.new_prompt(1)["spans"] for _ in range(self.args.images)]
        flat = [span.input for spans in inputs for span in spans]
        ms, flops = self._encode_ms(flat), encoder_flops(self.runner.model.tower, [each.grid for each in flat])
        share = flops / (ms * 1e-3) / PRODUCT_FLOPS_PER_S
        self.note(f"encoder, {self.args.images} images of {self.args.side} x {self.args.side}", "ms", ms)
        self.note("  TFLOP/s; ratio: of 700; limit: at least", "TFLOP/s", share * 700, share, ENCODER_SHARE)
        self.one_ms = self._encode_ms([span.input for span in inputs[0]])
        self.note("encoder, one image", "ms", self.one_ms)

    def _encode_ms(self, inputs: Sequence[EncoderInput]) -> float:
        batches, patches = list[list[EncoderInput]](), BATCH_PATCHES
        for each in inputs:
            patches += len(each.patches)
            if patches > BATCH_PATCHES or not batches:
                batches.append([])
                patches = len(each.patches)
            batches[-1].append(each)
        times = []
        for _ in range(2 + self.args.repeats):
            self._wait()
            start = time.perf_counter()
            with torch.inference_mode():
                for batch in batches:
                    self.runner.model.encode(batch)
            self._wait()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times[2:])

    def _wait(self) -> None:
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()

    # first tokens

    def first_tokens(self) -> None:
        """After `encoder`."""
        count = WARM + self.args.prompts
        seeing = [self.new_prompt(self.args.text) for _ in range(count)]
        length = len(seeing[0]["prompt_token_ids"])
        text_ms = self.first_ms(self.texts(count, length, 1))
        self.note(f"first token, text of {length} tokens", "ms", text_ms)
        ms = self.first_ms(seeing)
        what = f"first token, a new image and {self.args.text} tokens"
        self.note(what, "ms", ms, ms / (self.one_ms + text_ms), FIRST_TOKEN)
        start = time.perf_counter()
        for _ in range(4):
            self.new_prompt(self.args.text)
        self.note("processor on the host, an image (random pixels made too)", "ms", (time.perf_counter() - start) * 250)

    def repeated(self) -> None:
        count, text = WARM + self.args.prompts, self.args.text
        alone = self.first_ms(self.texts(count, text, 2))
        self.note(f"first token, text of {text} tokens", "ms", alone)
        ms = self.first_ms([self.pictures.prompt(0, each) for each in self.texts(count, text, 3)])
        self.note(f"first token, a repeated image, then {text} tokens", "ms", ms, ms / alone, REPEATED)
        befores = self.texts(count, text, 4)
        later = [self.pictures.prompt(0, (5,), before) for before in befores]
        same = self.first_ms(self.texts(count, len(later[0]["prompt_token_ids"]), 5))
        ms = self.first_ms(later)
        self.note(f"first token, {text} new tokens, then a repeated image", "ms", ms, ms / same, REPEATED)

    # decode steps

    def steps(self) -> None:
        rows, found = self.args.rows, list[tuple[list[float], list[float], list[float], list[float]]]()
        for turn in range(1 + self.args.repeats):
            seeing = [self.new_prompt(1) for _ in range(self.args.images)]
            text = self.texts(len(seeing), len(seeing[0]["prompt_token_ids"]), 100 + turn)
            steps = most_steps(len(seeing), self.llm.model_config.vision)
            with decoding(self.llm, self.texts(rows, self.args.ctx, turn), steps):
                quiet = self._timed_steps(64)
                encoding, chunks = self._apart(seeing)
                found.append(([ms for ms, _ in quiet], encoding, chunks, self._apart(text)[1]))
        quiets, encodings, chunked, texts = zip(*found[1:])
        quiet_ms = statistics.median(map(statistics.median, quiets))
        self.note(f"decode step of {rows} rows, quiet", "ms", quiet_ms)
        self.note("  longest", "ms", _longest(quiets), _longest(quiets) / quiet_ms)
        if not all(encodings):
            print("no step has encoded images without a chunk: these are too few, or too small")
        for part, share in (("median", 0.5), ("99 of 100", 0.99)):
            ms = statistics.median(float(np.quantile(times or [0.0], share)) for times in encodings)
            self.note(f"  while images are encoded, {part}", "ms", ms, ms / quiet_ms)
        ms = _longest(encodings)
        self.note("  while images are encoded, longest", "ms", ms, ms / quiet_ms, STEP)
        self.note("  with a chunk of a prompt, text alone: longest", "ms", _longest(texts))
        ms = _longest(chunked)
        self.note("  with a chunk of a prompt, with images: longest", "ms", ms, ms / _longest(texts), STEP)
        self.note("steps that encode the images", "steps", statistics.median(map(len, encodings)))

    def _apart(self, given: Sequence[Any]) -> tuple[list[float], list[float]]:
        """Times of the steps until all of `given` have ended: without chunks of prompts, and those with one, or next
        to one, since a step may be launched before the one in front has ended."""
        ids = {self.llm.engine.add_request(prompt, ENDS) for prompt in given}
        timed = self._timed_steps(None, ids)
        near = [any(chunk for _, chunk in timed[max(0, i - 1) : i + 2]) for i in range(len(timed))]
        return [ms for (ms, _), by in zip(timed, near) if not by], [ms for (ms, _), by in zip(timed, near) if by]

    def _timed_steps(self, count: int | None, ids: set[str] = frozenset()) -> list[tuple[float, bool]]:  # type: ignore[assignment]
        """Milliseconds of `count` steps, or of those until all of `ids` have ended, and whether the step that was
        launched computes a part of a prompt."""
        left, timed, chunks = set(ids), list[tuple[float, bool]](), list[bool]()
        launch = self.runner.launch

        def noted(plan: Any) -> Any:
            chunks.append(bool(plan.extend))
            return launch(plan)

        self.runner.launch = noted
        try:
            while len(timed) < count if count is not None else bool(left):
                chunks.clear()
                start = time.perf_counter()
                deltas = self.llm.engine.step()
                timed.append(((time.perf_counter() - start) * 1e3, any(chunks)))
                left -= {delta.request_id for delta in deltas if delta.token_ids}
        finally:
            del self.runner.launch
        return timed


def most_steps(images: int, vision: VisionSpec | None) -> int:
    """Decode steps of the rows: 64 quiet ones, and more than the images need, a block and a chunk at a time."""
    assert vision is not None, "make_llm has checked it"
    return 96 + images * (vision.num_layers + 6)


def _longest(turns: Sequence[Sequence[float]]) -> float:
    """The median of the turns' longest; 0 if they have no steps."""
    return statistics.median(max(times, default=0.0) for times in turns)


def compare_text(args: argparse.Namespace, seeing: LLM, bench: Bench) -> None:
    """Text alone, with the tower and without it, in turns."""
    blind = make_llm(args, images=False)
    llms = {"seeing": seeing, "blind": blind}
    params = SamplingParams(max_tokens=most_tokens(args), temperature=0.0, ignore_eos=True)
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(1 + args.turns):
        for name in sorted(llms, reverse=bool(turn % 2)):
            for batch in args.batches:
                times.setdefault((f"decode step, text, batch {batch}", name), []).append(
                    decode_ms(llms[name], batch, args.ctx, params)
                )
            # Without this the model with less memory would evict states for each prompt, and the other one would not.
            llms[name].reset_prefix_cache()
            for length in args.first:
                given = bench.texts(WARM + args.prompts, length, 1000 + turn)
                ms = statistics.median([first_token_ms(llms[name], prompt) for prompt in given][WARM:])
                times.setdefault((f"first token, text of {length} tokens", name), []).append(ms)
    for what in dict.fromkeys(what for what, _ in times):
        ours, theirs = (statistics.median(times[what, name][1:]) for name in llms)
        full = what.endswith(f"batch {FULL_BATCH}")
        bench.note(f"{what}, without a tower", "ms", theirs)
        bench.note(what, "ms", ours, ours / theirs, TEXT_FULL if full else TEXT)


def make_llm(args: argparse.Namespace, images: bool) -> LLM:
    """The first of two shares a GPU with the second."""
    vision = read_model_config(Path(args.model)).vision
    if vision is None:
        raise SystemExit(f"{args.model} has no tower, or no image processor")
    of_image = (args.side // (vision.patch_size * vision.merge) + 1) ** 2 + 64
    rows = args.ctx + max(most_steps(args.images, vision) + 64, most_tokens(args))
    longest = 16 + max([rows, 2 * args.text + of_image, *args.first])
    fraction = None if not torch.cuda.is_available() or args.device == "cpu" or not args.turns else 0.43
    return LLM(
        args.model, load_format="dummy", device=args.device, images=images, max_model_len=longest,
        max_running_requests=max([args.rows + args.images, *args.batches]), mamba_ssm_dtype=args.state_dtype,
        memory_fraction=fraction if images else None, chunked_prefill_size=args.chunk,
    )  # fmt: skip


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with a config.json and an image processor; weights are random")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--text", type=int, default=128, help="tokens next to an image")
    parser.add_argument("--rows", type=int, default=32, help="decode rows next to the encoder")
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of context of decode rows")
    parser.add_argument("--batches", type=sizes, default=[1, 32, 128], help="of decode steps with text alone")
    parser.add_argument("--first", type=sizes, default=[128, 1024], help="tokens of prompts with text alone")
    parser.add_argument("--turns", type=int, default=5, help="of text with a tower and without; 0: none")
    parser.add_argument("--prompts", type=int, default=10, help="of which a first token is the median")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=EngineConfig.chunked_prefill_size, help="chunked_prefill_size")
    parser.add_argument("--state-dtype", default="bfloat16", choices=sorted(STATE_DTYPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    return parser.parse_args(given)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    llm = make_llm(args, images=True)
    print(llm.plan.summary())
    llm.generate([[5, 6, 7]], ENDS)
    print(f"{environment()}; patches of a slice: {SLICE_PATCHES}", flush=True)
    settle()
    bench = Bench(args, llm)
    bench.encoder()
    bench.first_tokens()
    bench.repeated()
    bench.steps()
    if args.turns:
        compare_text(args, llm, bench)
    return bench.rows


def main() -> None:
    args = parse()
    found = measure(args)
    if args.name:
        print(save(args.name, found))


if __name__ == "__main__":
    main()
