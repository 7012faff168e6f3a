"""Prompts with pictures: placeholders, spans, limits, and child processes that are lost."""

import base64
import io
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hybridrt.base.errors import CheckpointError, PromptTooLongError, QueueFullError, RequestError
from hybridrt.images.jobs import Job
from hybridrt.images.lfm2 import all_marks
from hybridrt.images.pool import PoolLimits
from hybridrt.images.reader import ImageReader, PromptLimits
from hybridrt.images.source import ImageSource, read_image, read_image_part
from tests.images.test_processors import LFM2, QWEN
from tests.support.pictures import noise, png

PAD = 7
VOCABULARY = {"<|image_pad|>": PAD}
MARKS = {mark: 100 + i for i, mark in enumerate(all_marks(LFM2))}


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    made = ImageReader(QWEN, PAD, VOCABULARY, pool_limits=PoolLimits(children=1, seconds=10, max_pixels=2**20))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tiles() -> Iterator[ImageReader]:
    made = ImageReader(LFM2, PAD, {"<image>": PAD, **MARKS}, pool_limits=PoolLimits(children=2))
    yield made
    made.close()


def test_a_placeholder_becomes_as_many_as_the_picture_has_tokens(reader: ImageReader) -> None:
    sources = [read_image(uri(png(1, 96, 64)), "a"), read_image(png(2, 64, 64), "b")]
    tokens, spans = reader.expand([1, PAD, 2, PAD], sources, 1000)
    assert tokens == [1, *[PAD] * 6, 2, *[PAD] * 4]
    assert [(span.start, span.length, span.grid) for span in spans] == [(1, 6, (2, 3)), (8, 4, (2, 2))]
    assert spans[0].input.grid == (4, 6) and spans[0].input.patches.shape == (24, 768)
    assert len({span.digest for span in spans}) == 2 and all(len(span.digest) == 32 for span in spans)


def test_tiles_are_spans_after_their_marks(tiles: ImageReader) -> None:
    tokens, spans = tiles.expand([1, PAD, 2], [read_image(png(1, 500, 340), "a")], 1000)
    marks = [token for token in tokens if token != PAD]
    names = [f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)]
    assert marks == [1, *(MARKS[name] for name in ("<|image_start|>", *names, "<|img_thumbnail|>", "<|image_end|>")), 2]
    assert [span.length for span in spans] == [4, 4, 4, 4, 12]
    assert all(set(tokens[span.start : span.start + span.length]) == {PAD} for span in spans)
    tokens, spans = tiles.expand([PAD], [read_image(png(1, 96, 64), "a")], 1000)
    assert tokens == [MARKS["<|image_start|>"], *[PAD] * 6, MARKS["<|image_end|>"]] and spans[0].start == 1


def test_all_forms_of_a_picture_have_one_digest(reader: ImageReader, tmp_path: Path) -> None:
    data, pixels = png(1, 96, 64), noise(1, 96, 64)
    file = tmp_path / "a.png"
    file.write_bytes(data)
    clear = np.dstack([pixels, np.full((64, 96), 255, np.uint8)])
    forms = [uri(data), data, file, pixels, clear, Image.open(io.BytesIO(data))]
    parts = [{"type": "image_url", "image_url": {"url": form}} for form in forms]
    parts += [{"type": "image", "image": pixels}, {"type": "input_image", "image_url": uri(data), "detail": "high"}]
    parts += [{"type": "image_url", "image_url": pixels}, {"type": "image_pil", "image_pil": pixels}]
    parts += [{"type": "image_url", "image_url": "DATA:IMAGE/PNG;name=a.png;BASE64," + uri(data).partition(",")[2]}]
    _, spans = reader.expand([PAD] * len(parts), [read_image_part(part, "p") for part in parts], 1000)
    assert len({span.digest for span in spans}) == 1
    _, other = reader.expand([PAD], [read_image(png(3, 96, 64), "p")], 1000)
    assert other[0].digest != spans[0].digest


def test_a_grey_array_is_a_picture(reader: ImageReader) -> None:
    grey = noise(1, 96, 64)[..., 0]
    sources = [read_image(array, "p") for array in (grey, grey[..., None], np.dstack([grey] * 3))]
    _, spans = reader.expand([PAD] * 3, sources, 1000)
    assert len({span.digest for span in spans}) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "it must be a"),
        (7, "it must be a"),
        ({}, "it must be a"),
        ("", "an image must be a"),
        ("/etc/passwd", "a path is read from Python alone"),
        ("file:///etc/passwd", "scheme file: is not allowed"),
        ("  http://localhost/a.png", "http: addresses of images are never fetched"),
        ("HTTP://localhost/a.png", "never fetched"),
        ("ftp://localhost/a.png", "scheme ftp:"),
        ("javascript:alert(1)", "scheme javascript:"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png" + ";" * 1024 + ";base64,AAAA", "no comma within 1024"),
        ("data:image/png,%89PNG", "no base64"),
        ("https://user:secret@example.org/a.png", "no https address"),
        ("https:///a.png", "no https address"),
        ("https://exam ple.org/a.png", "no https address"),
        ("https://example.org:x/a.png", "no https address"),
        (np.zeros((4, 4, 2), np.uint8), "an image is uint8"),
        (np.zeros((4, 4, 3), np.float32), "an image is uint8"),
        (np.zeros((0, 4, 3), np.uint8), "an image is uint8"),
        (Path("/no/such/picture.png"), "cannot be read"),
    ],
    ids=range(21),
)
def test_other_values_are_refused(value: object, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        read_image(value, "messages.0.content.1.image_url.url")
    assert caught.value.field == "messages.0.content.1.image_url.url"
    assert str(caught.value).startswith("messages.0.content.1.image_url.url")


def test_details_are_known_words() -> None:
    part = {"type": "image_url", "image_url": {"url": uri(b"x"), "detail": "low"}}
    assert read_image_part(part, "p").low
    with pytest.raises(RequestError, match="detail is 'ultra'"):
        read_image_part({"type": "image_url", "image_url": {"url": uri(b"x"), "detail": "ultra"}}, "p")
    with pytest.raises(RequestError, match="file_id: this server keeps no files"):
        read_image_part({"type": "input_image", "file_id": "file-1"}, "p")


@pytest.mark.parametrize("data", ["@@@", "AAAA", "", "iVBORw0K\nGgo=", "iVBORw0KGg", "ä", "\ud800"])
def test_an_unreadable_picture_names_its_part(reader: ImageReader, data: str) -> None:
    with pytest.raises(RequestError, match=r"^messages.3.content.1: the image cannot be read: ") as caught:
        reader.expand([PAD], [ImageSource(data, "messages.3.content.1")], 1000)
    assert caught.value.field == "messages.3.content.1"


def test_limits_of_a_prompt(reader: ImageReader) -> None:
    source = read_image(png(1, 256, 256), "p")
    with pytest.raises(RequestError, match=r"1 image placeholders <.image_pad.> and 2 images"):
        reader.expand([1, PAD], [source, source], 1000)
    with pytest.raises(PromptTooLongError, match="first 2 images of the prompt have 128 tokens"):
        reader.expand([PAD] * 100, [source] * 100, 180)
    with pytest.raises(RequestError, match="129 images; at most 128"):
        reader.expand([PAD] * 129, [source] * 129, 100_000)
    before, reader.limits = reader.limits, replace(PromptLimits(), patch_bytes=250_000)
    with pytest.raises(RequestError, match="more than 250000 bytes of patches"):
        reader.expand([PAD] * 3, [source] * 3, 1000)
    reader.limits = before


def test_a_process_lost_while_it_decodes_is_the_pictures_fault(reader: ImageReader) -> None:
    source, pid = read_image(png(1, 96, 64), "p"), started(reader).pid
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(RequestError, match="p: the image cannot be read: decoding it has ended its process"):
        reader.expand([PAD], [source], 1000)
    assert reader.expand([PAD], [source], 1000)[1]


def test_a_process_that_hangs_is_replaced(reader: ImageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    source, child = read_image(png(1, 96, 64), "p"), started(reader)
    os.kill(child.pid, signal.SIGSTOP)
    monkeypatch.setattr(reader.pool, "limits", replace(reader.pool.limits, seconds=0.2))
    with pytest.raises(RequestError, match=r"takes more than 0.2 seconds"):
        reader.expand([PAD], [source], 1000)
    monkeypatch.undo()
    assert child.poll() is not None
    assert reader.expand([PAD], [source], 1000)[1]


def started(reader: ImageReader) -> "subprocess.Popen[bytes]":
    reader.pool.start()
    process = reader.pool._children[0].process
    assert process is not None
    return process


def test_memory_of_a_process_is_limited() -> None:
    limits = PoolLimits(children=1, max_bytes=1 << 24, max_pixels=2**26)
    small = ImageReader(QWEN, PAD, VOCABULARY, pool_limits=limits)
    try:
        large = io.BytesIO()
        Image.new("1", (3000, 3000)).save(large, "PNG")
        with pytest.raises(RequestError, match="memory"):
            small.expand([PAD], [read_image(large.getvalue(), "p")], 1000)
        assert small.expand([PAD], [read_image(png(1, 96, 64), "p")], 1000)[1]
    finally:
        small.close()


def test_tokens_that_pictures_need_are_in_the_vocabulary() -> None:
    with pytest.raises(CheckpointError, match="no token 7"):
        ImageReader(QWEN, PAD, {})
    fewer = {mark: token for mark, token in MARKS.items() if mark != "<|img_row_2_col_1|>"}
    with pytest.raises(CheckpointError, match="img_row_2_col_1"):
        ImageReader(LFM2, PAD, {"<image>": PAD, **fewer})


def test_patches_of_all_prompts_are_limited_while_they_are_kept(reader: ImageReader) -> None:
    source = read_image(png(1, 96, 64), "a")
    kept = [reader.expand([PAD], [source], 1000) for _ in range(2)]
    reader.most_held = held = sum(reader._held.by_client().values())
    assert held == 2 * 24 * 768
    kept.append(reader.expand([PAD], [source], 1000))
    try:
        with pytest.raises(QueueFullError, match=f"{held + 24 * 768} bytes of patches, and {held} may"):
            reader.expand([PAD], [source], 1000)
        kept.pop()
        reader.expand([PAD], [source], 1000)
    finally:
        reader.most_held = None
    kept.clear()
    assert reader._held.by_client() == {}


def test_a_client_with_a_name_keeps_half_of_the_bytes(reader: ImageReader) -> None:
    source, size = read_image(png(1, 96, 64), "a"), 24 * 768
    kept = [reader.expand([PAD], [source], 1000, "a") for _ in range(2)]
    reader.most_held = 2 * size
    try:
        with pytest.raises(QueueFullError, match=f"of this client that have not ended have {2 * size} .* and {size} "):
            reader.expand([PAD], [source], 1000, "a")
        kept.append(reader.expand([PAD], [source], 1000, "b"))
        with pytest.raises(QueueFullError, match=f"of requests that have not ended have {3 * size} "):
            reader.expand([PAD], [source], 1000, "b")
    finally:
        reader.most_held = None


def test_slow_pictures_of_one_client_delay_no_other(tiles: ImageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has as many processes as it may, and many pictures wait."""
    begun, release, decode, slow = threading.Event(), threading.Event(), tiles.pool.decode, png(1, 96, 64)

    def held(job: Job) -> tuple[np.ndarray, bytes]:
        if job.data == slow:
            begun.set()
            assert release.wait(60.0)
        return decode(job)

    monkeypatch.setattr(tiles.pool, "decode", held)
    prompt = partial(tiles.expand, [PAD] * 5, [ImageSource(slow, "a")] * 5, 1000, "slow")
    with ThreadPoolExecutor(3) as others:
        waiting = [others.submit(prompt) for _ in range(2)]
        try:
            assert begun.wait(60.0)
            quick = others.submit(tiles.expand, [PAD], [ImageSource(png(2, 96, 64), "a")], 1000, "quick")
            assert len(quick.result(60.0)[1]) == 1
            assert not any(each.done() for each in waiting)
        finally:
            release.set()
        assert all(len(each.result(60.0)[1]) == 5 for each in waiting)


def test_a_broken_picture_ends_the_others_of_its_prompt(tiles: ImageReader) -> None:
    sources = [ImageSource(data, "a") for data in (b"x", png(1, 96, 64))]
    with pytest.raises(RequestError, match="cannot be read"):
        tiles.expand([PAD] * 2, sources, 1000)
    assert tiles.expand([PAD], sources[1:], 1000)[1]


def test_slow_pictures_of_one_prompt_are_given_up(reader: ImageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [read_image(png(1, 96, 64), "a")] * 3
    monkeypatch.setattr(reader, "limits", PromptLimits(seconds=0))
    with pytest.raises(RequestError, match="first 1 of 3 images") as caught:
        reader.expand([PAD] * 3, sources, 1000)
    assert caught.value.field == "prompt"
    reader.expand([PAD], sources[:1], 1000)  # it is there
