"""Requests of a benchmark: prompts, lengths and arrivals."""

import base64
import io
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from hybridrt.base.errors import ConfigError, shown
from hybridrt.base.files import read_lines

_BLOCK = 512  # tokens of one hash in a trace
# Of a mix: shares up to here, mean tokens of prompts (within a quarter) and outputs.
MIX = ((0.80, 512, 128), (0.95, 4096, 256), (1.0, 32768, 256))
_FIRST_ID = 3  # ids below are often special
_MAX_TOKENS = 1 << 22  # tokens of a prompt or an output
_MAX_IMAGES = 128
_SIZE = re.compile(r"[1-9]\d{0,3}x[1-9]\d{0,3}")


@dataclass(frozen=True)
class Work:
    """One request. `arrival`: seconds since the start of the run; 0 for requests that come at once,
    or in turn. `images`: data: URIs, for a server."""

    prompt: list[int]
    max_tokens: int
    seed: int
    arrival: float = 0.0
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkloadConfig:
    """What requests look like.

    Args:
        data: "random": unrelated prompts. "mix": such of the lengths of MIX. "shared-prefix": each
            begins with one of `prefixes` texts of `prefix_tokens` tokens. Else a file with a line
            of JSON a request: `input_length`, `output_length`, `timestamp` (milliseconds), and
            optional `hash_ids`, one for each 512 tokens of the prompt: equal hashes are equal
            tokens (the Mooncake traces, Qin et al. 2024).
        requests: how many; of a file at most so many.
        prompt_tokens, output_tokens: means; lengths are uniform between half and one and a half
            times these.
        fixed: all lengths are the means.
        rate: requests a second, a Poisson process; infinite: all at once. None for a file: its
            timestamps.
        vocab: token ids are below.
        images: pictures of a request, each another one.
        image_size: their width and height, such as 1024x768.
    """

    data: str = "random"
    requests: int = 100
    prompt_tokens: int = 128
    output_tokens: int = 64
    fixed: bool = False
    prefixes: int = 4
    prefix_tokens: int = 256
    rate: float | None = None
    vocab: int = 1000
    seed: int = 0
    images: int = 0
    image_size: str = "512x512"

    def __post_init__(self) -> None:
        if not 0 <= self.images <= _MAX_IMAGES:
            raise ConfigError(f"images is {self.images}; it must be from 0 to {_MAX_IMAGES}")
        if not _SIZE.fullmatch(self.image_size):
            raise ConfigError(f"image_size is {self.image_size!r}; it must be like 1024x768, each from 1 to 9999")
        for name in ("requests", "prompt_tokens", "output_tokens", "prefixes", "prefix_tokens"):
            if not 1 <= getattr(self, name) <= _MAX_TOKENS:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to {_MAX_TOKENS}")
        if self.vocab <= _FIRST_ID:
            raise ConfigError(f"vocab is {self.vocab}; it must be more than {_FIRST_ID}")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate is {self.rate}; it must be more than 0 requests a second")


def make_work(config: WorkloadConfig) -> list[Work]:
    """The requests, by arrival. Equal configurations give equal requests.

    Raises:
        ConfigError: the trace cannot be read.
    """
    draw = random.Random(config.seed)
    if config.data in ("random", "shared-prefix", "mix"):
        work = list(_drawn(config, draw))
    else:
        work = list(_traced(config, draw))
    if config.images:
        work = [replace(each, images=_images(config, i)) for i, each in enumerate(work)]
    if config.rate is None or math.isinf(config.rate):
        return work
    now, due = 0.0, []
    for each in work:
        now += draw.expovariate(config.rate)
        due.append(replace(each, arrival=now))
    return due


def _images(config: WorkloadConfig, request: int) -> tuple[str, ...]:
    """Smooth pictures: their files are short."""
    from PIL import Image

    width, height = map(int, config.image_size.split("x"))
    found = []
    for i in range(config.images):
        few = random.Random(f"{config.seed} {request} {i}").randbytes(12 * 9 * 3)
        file = io.BytesIO()
        Image.frombytes("RGB", (12, 9), few).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG")
        found.append(f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}")
    return tuple(found)


def _drawn(config: WorkloadConfig, draw: random.Random) -> Iterator[Work]:
    def around(mean: int) -> int:
        return mean if config.fixed else max(draw.randint(mean // 2, mean + mean // 2), 1)

    if config.data == "mix":
        for i in range(config.requests):
            share = draw.random()
            mean, output = next(each[1:] for each in MIX if share < each[0])
            yield Work(_ids(draw.randint(mean * 3 // 4, mean * 5 // 4), config, draw), output, i)
        return
    shared = config.data == "shared-prefix"
    prefixes = [_ids(config.prefix_tokens, config, draw) for _ in range(config.prefixes if shared else 1)]
    for i in range(config.requests):
        prompt = _ids(around(config.prompt_tokens), config, draw)
        yield Work(prefixes[i % len(prefixes)] + prompt if shared else prompt, around(config.output_tokens), i)


def _traced(config: WorkloadConfig, draw: random.Random) -> Iterator[Work]:
    blocks: dict[int, list[int]] = {}
    try:
        lines = islice(read_lines(config.data), config.requests)
        entries = [json.loads(line) for line in lines if line.strip()]
        if not entries:
            raise ValueError("it has no lines")
        start = _timestamp(entries[0])
        for i, entry in enumerate(entries):
            length = _length(entry, "input_length")
            hashes = entry.get("hash_ids", [])[: -(-length // _BLOCK)]
            for block in hashes:
                blocks.setdefault(block, _ids(_BLOCK, config, random.Random(f"{config.seed} {block}")))
            prompt = [t for block in hashes for t in blocks[block]][:length]
            prompt += _ids(length - len(prompt), config, draw)
            yield Work(prompt, _length(entry, "output_length"), i, (_timestamp(entry) - start) / 1000)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ConfigError(
            f"the trace {config.data} cannot be used ({type(e).__name__}: {e}); each line must be a JSON object with "
            "input_length, output_length and perhaps timestamp and hash_ids"
        ) from e


def _length(entry: dict[str, Any], name: str) -> int:
    if not 1 <= (found := int(entry[name])) <= _MAX_TOKENS:
        raise ValueError(f"{name} is {shown(entry[name])}; it must be from 1 to {_MAX_TOKENS}")
    return found


def _timestamp(entry: dict[str, Any]) -> float:
    if not math.isfinite(found := float(entry.get("timestamp", 0))):
        raise ValueError(f"timestamp is {found}")
    return found


def _ids(count: int, config: WorkloadConfig, draw: random.Random) -> list[int]:
    return [draw.randrange(_FIRST_ID, config.vocab) for _ in range(count)]
