"""Traces of requests that begin alike, for benchmarks.bench_prefix: four generators, and files.

A prompt is made of parts: tokens, and pieces of other requests' answers, which are known once these have run. A file
of our own is JSON lines, one request each, such as

    {"id": "1", "parts": [[5, 7, 9], {"of": "0", "start": 2}], "max_tokens": 16, "after": ["0"], "delay": 0.5}

Mooncake's files (https://github.com/kvcache-ai/Mooncake) are JSON lines, too: `timestamp` in milliseconds,
`input_length`, `output_length`, and `hash_ids`, one number for each block of 512 tokens and all before it.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hybridrt.base.config_json import integer, list_of, number
from hybridrt.base.errors import ConfigError

BLOCK = 512  # tokens of one of Mooncake's hashes
COUNT, SECONDS, TOKENS = integer(0, 2**31 - 1), number(0, 1e9), list_of(integer(0, 2**31 - 1))


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of another request's answer; end None is its end."""

    of: str
    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Item:
    """One request.

    Attributes:
        parts: of the prompt, in order.
        max_tokens: length of the answer.
        after: requests that have ended before this one is sent.
        delay: seconds from their end, or from the start of the trace, to this request.
        salt: SamplingParams.cache_salt.
    """

    id: str
    parts: tuple[tuple[int, ...] | Piece, ...]
    max_tokens: int
    after: tuple[str, ...] = ()
    delay: float = 0.0
    salt: str | None = None

    def prompt(self, answers: Mapping[str, Sequence[int]]) -> list[int]:
        """The prompt's tokens, once the requests that it quotes have ended."""
        pieces = (answers[p.of][p.start : p.end] if isinstance(p, Piece) else p for p in self.parts)
        return [token for piece in pieces for token in piece]


@dataclass(frozen=True)
class Shape:
    """What the generators make.

    Attributes:
        units: conversations, agents, users or problems.
        turns: of a conversation or an agent, or levels of a tree.
        prompt, output: mean new tokens and mean answer of a turn; the lengths are between half and one and a half times
            as many.
        vocab: token ids are below.
    """

    units: int
    turns: int
    prompt: int
    output: int
    vocab: int
    seed: int = 0


class _Draw:
    """Random numbers of one trace."""

    def __init__(self, shape: Shape) -> None:
        self._random, self._vocab = random.Random(shape.seed), shape.vocab

    def around(self, mean: int) -> int:
        return max(self._random.randint(mean // 2, mean + mean // 2), 1)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(3, self._vocab) for _ in range(count))

    def few(self, things: Sequence[str], count: int) -> list[str]:
        return self._random.sample(things, min(count, len(things)))


def chat(shape: Shape) -> list[Item]:
    """Conversations after one system prompt. The first half of each answer is thinking, which the history lacks."""
    draw, items = _Draw(shape), list[Item]()
    system = draw.tokens(shape.prompt)
    for unit in range(shape.units):
        parts: tuple[tuple[int, ...] | Piece, ...] = (system,)
        for turn in range(shape.turns):
            parts += (draw.tokens(draw.around(shape.prompt)),)
            item = Item(f"{unit}.{turn}", parts, draw.around(shape.output), _before(unit, turn))
            items.append(item)
            parts += (Piece(item.id, item.max_tokens // 2),)
    return _in_turns(items, shape)


def agents(shape: Shape) -> list[Item]:
    """Agents after one description of their tools. Each answer calls a tool, whose output is longer turn by turn."""
    draw, items = _Draw(shape), list[Item]()
    tools = draw.tokens(2 * shape.prompt)
    for unit in range(shape.units):
        parts: tuple[tuple[int, ...] | Piece, ...] = (tools,)
        for turn in range(shape.turns):
            parts += (draw.tokens(draw.around(max(shape.prompt * (turn + 1) * 2 // (shape.turns + 1), 1))),)
            item = Item(f"{unit}.{turn}", parts, draw.around(shape.output), _before(unit, turn))
            items.append(item)
            parts += (Piece(item.id),)
    return _in_turns(items, shape)


def shared(shape: Shape) -> list[Item]:
    """Users who ask `turns` unrelated questions each, after one system prompt of four times a question's length."""
    draw = _Draw(shape)
    system = draw.tokens(4 * shape.prompt)
    return [
        Item(f"{unit}.{turn}", (system, draw.tokens(draw.around(shape.prompt))), draw.around(shape.output),
             _before(unit, turn))
        for turn in range(shape.turns) for unit in range(shape.units)
    ]  # fmt: skip


def branching(shape: Shape, width: int = 3, beam: int = 2) -> list[Item]:
    """Tree search: each level continues the `beam` chosen nodes `width` times, and waits for all before it chooses."""
    draw, items = _Draw(shape), list[Item]()
    for unit in range(shape.units):
        nodes = {"": (draw.tokens(2 * shape.prompt),)}
        level: dict[str, Item] = {}
        for turn in range(shape.turns):
            chosen = draw.few(sorted(nodes), beam)
            after, level = tuple(level), {}
            for i, name in enumerate(chosen):
                for j in range(width):
                    step = draw.tokens(draw.around(max(shape.prompt // 8, 1)))
                    item = Item(f"{unit}.{turn}.{i}.{j}", (*nodes[name], step), draw.around(shape.output), after)
                    level[item.id] = item
            items += level.values()
            nodes = {name: (*item.parts, Piece(name)) for name, item in level.items()}  # type: ignore[misc]
    return items


TRACES: dict[str, Callable[[Shape], list[Item]]] = {
    "chat": chat, "agents": agents, "shared": shared, "branching": branching,
}  # fmt: skip


def arriving(items: Sequence[Item], rate: float, seed: int) -> list[Item]:
    """The same trace; requests that wait for no other come as a Poisson process of `rate` a second."""
    draw, now, found = random.Random(seed), 0.0, []
    for item in items:
        now += 0.0 if item.after else draw.expovariate(rate)
        found.append(item if item.after else replace(item, delay=now))
    return found


def write(path: Path, items: Sequence[Item]) -> None:
    """Writes a file that `read` takes."""
    path.write_text("".join(json.dumps(asdict(item)) + "\n" for item in items))


def read(path: Path, vocab: int, block: int = BLOCK) -> list[Item]:
    """Requests of a file, our own or Mooncake's.

    Args:
        vocab: Mooncake's prompts get random token ids below.
        block: tokens to make of Mooncake's 512; all lengths shrink or grow alike.

    Raises:
        ConfigError: the file cannot be read, it holds no request, or a line is none; the text names the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"the trace {path} cannot be read: {e}") from e
    items, known = list[Item](), set[str]()
    for number_, line in enumerate(lines, 1):
        if line.strip():
            try:
                fields = json.loads(line)
                _require(isinstance(fields, dict), "it is no object")
                item = _mooncake(fields, vocab, block, len(items)) if "hash_ids" in fields else _own(fields)
                _require(item.id not in known and _names(item) <= known, "id, after or of names no earlier request")
            except (ValueError, TypeError, KeyError, RecursionError) as e:
                raise ConfigError(f"line {number_} of the trace {path} is no request: {e!r}") from e
            known.add(item.id)
            items.append(item)
    if not items:
        raise ConfigError(f"the trace {path} holds no request")
    return items


def _before(unit: int, turn: int) -> tuple[str, ...]:
    return (f"{unit}.{turn - 1}",) if turn else ()


def _in_turns(items: list[Item], shape: Shape) -> list[Item]:
    """All first turns, then all second ones."""
    return [items[unit * shape.turns + turn] for turn in range(shape.turns) for unit in range(shape.units)]


def _names(item: Item) -> set[str]:
    return {*item.after, *(part.of for part in item.parts if isinstance(part, Piece))}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _own(fields: dict[str, Any]) -> Item:
    unknown = set(fields) - {"id", "parts", "max_tokens", "after", "delay", "salt"}
    _require(not unknown, f"unknown fields {sorted(unknown)}")
    after, delay, salt = tuple(fields.get("after", ())), fields.get("delay", 0.0), fields.get("salt")
    _require(isinstance(fields["id"], str) and all(isinstance(name, str) for name in after), "ids are strings")
    _require(integer(1, 2**31 - 1).holds(fields["max_tokens"]), "max_tokens is a positive integer")
    _require(SECONDS.holds(delay), f"delay is {SECONDS.text}")
    _require(salt is None or isinstance(salt, str), "salt is a string")
    return Item(fields["id"], tuple(map(_part, fields["parts"])), fields["max_tokens"], after, float(delay), salt)


def _part(part: Any) -> tuple[int, ...] | Piece:
    if not isinstance(part, dict):
        _require(TOKENS.holds(part), "a part is a list of token ids, or an object")
        return tuple(part)
    start, end = part.get("start", 0), part.get("end")
    _require(set(part) <= {"of", "start", "end"} and isinstance(part["of"], str), "a piece has of, start and end")
    _require(COUNT.holds(start) and (end is None or COUNT.holds(end)), "start and end are counts of tokens")
    return Piece(part["of"], start, end)


def _mooncake(fields: dict[str, Any], vocab: int, block: int, index: int) -> Item:
    lengths = fields["input_length"], fields["output_length"]
    _require(all(map(COUNT.holds, lengths)) and SECONDS.holds(fields["timestamp"]), "lengths and timestamp are counts")
    _require(TOKENS.holds(fields["hash_ids"]), "hash_ids are integers")
    prompt, output = (max(-(-length * block // BLOCK), 1) for length in lengths)
    tokens = [token for name in fields["hash_ids"] for token in _block(name, vocab, block)]
    _require(len(tokens) >= prompt, f"{len(fields['hash_ids'])} hash_ids are too few for {lengths[0]} tokens")
    return Item(str(index), (tuple(tokens[:prompt]),), output, delay=fields["timestamp"] / 1e3)


def _block(name: int, vocab: int, block: int) -> Iterator[int]:
    draw = random.Random(name)
    return (draw.randrange(3, vocab) for _ in range(block))
