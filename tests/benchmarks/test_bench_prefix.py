"""Traces: what generators make and files hold. And one small run of the benchmark."""

import json
from pathlib import Path

import pytest

from benchmarks import bench_prefix, traces
from benchmarks.traces import TRACES, Item, Piece, Shape, read, write
from hybridrt.base.errors import ConfigError
from tests.support.tiny import write_tiny

SHAPE = Shape(units=3, turns=3, prompt=12, output=6, vocab=50, seed=1)


@pytest.mark.parametrize("name", sorted(TRACES))
def test_a_trace_is_the_same_each_time_and_names_only_earlier_requests(name: str, tmp_path: Path) -> None:
    items = TRACES[name](SHAPE)
    assert items == TRACES[name](SHAPE) != TRACES[name](Shape(3, 3, 12, 6, 50, 2))
    write(tmp_path / "trace", items)
    assert read(tmp_path / "trace", 50) == items  # which checks names
    answers = {item.id: list(range(item.max_tokens)) for item in items}
    assert all(0 <= token < 50 for item in items for token in item.prompt(answers))


def test_thinking_is_not_in_the_history() -> None:
    first, second = (item for item in traces.chat(Shape(1, 2, 4, 6, 50)))
    answers = {first.id: [100 + i for i in range(first.max_tokens)]}
    half = first.max_tokens // 2
    assert second.prompt(answers)[: len(first.prompt({})) + 1] == [*first.prompt({}), 100 + half]


def test_children_continue_a_node_of_the_level_above() -> None:
    items = {item.id: item for item in traces.branching(SHAPE)}
    for item in items.values():
        pieces = [part.of for part in item.parts if isinstance(part, Piece)]
        assert len(pieces) == int(item.id.split(".")[1]) and set(pieces[-1:]) <= set(item.after)
        if pieces:
            above = items[pieces[-1]]
            assert item.parts[: len(above.parts)] == above.parts and len(item.after) == (6 if len(pieces) > 1 else 3)


def test_mooncake_blocks_are_equal_where_their_hashes_are(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 40, "hash_ids": [7, 8]},
        {"timestamp": 2500, "input_length": 700, "output_length": 1, "hash_ids": [7, 9]},
    ]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    a, b = read(tmp_path / "trace", 5000)
    assert (len(a.prompt({})), len(b.prompt({})), b.delay, a.max_tokens) == (1024, 700, 2.5, 40)
    assert a.prompt({})[:512] == b.prompt({})[:512] and a.prompt({})[512:520] != b.prompt({})[512:520]
    small, _ = read(tmp_path / "trace", 5000, 16)
    assert (len(small.prompt({})), small.max_tokens) == (32, 2)


@pytest.mark.parametrize(
    "line",
    [
        "[]", "3", "{", '{"id": "a"}', '{"id": "a", "parts": [[1]], "max_tokens": 0}',
        '{"id": "a", "parts": [[-1]], "max_tokens": 1}', '{"id": "a", "parts": [{"of": "b"}], "max_tokens": 1}',
        '{"id": "a", "parts": [[1]], "max_tokens": 1, "after": ["b"]}', '{"id": "ok", "parts": [[1]], "max_tokens": 1}',
        '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["x"]}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"id": "ok", "parts": [[1]], "max_tokens": 1}\n' + line)
    with pytest.raises(ConfigError, match="line 2 of the trace"):
        read(tmp_path / "trace", 50)


def test_a_trace_without_a_request_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no request"):
        read(tmp_path / "trace", 50)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    model = str(write_tiny(tmp_path, tokenizer=False))
    args = bench_prefix.parse([
        model, "--trace", "chat", "--units", "4", "--turns", "3", "--prompt", "24", "--output", "6", "--max-running",
        "4", "--cache-slots", "16", "--max-model-len", "200", "--state-dtype", "float32", "--device", "cpu", "--load",
        "50", "--alone",
    ])  # fmt: skip
    rows = bench_prefix.measure(args)
    assert [row["run"] for row in rows] == [
        "saturated, off", "load 5000%, off", "new tokens alone", "saturated, on", "load 5000%, on",
    ]  # fmt: skip
    for row in rows:
        on = row["run"].endswith("on")
        assert bool(row["hit"]) == on and 0 < row["first token p50 ms"] <= row["first token p99 ms"]
        if on:
            assert 0.4 < row["hit rate"] <= row["bound"] <= row["unlimited"] < 1


def test_delays_count_from_the_end_of_the_requests_before() -> None:
    item = Item("b", ((1,), Piece("a", 1, 2)), 1, ("a",), 0.5)
    assert item.prompt({"a": [7, 8, 9]}) == [1, 8]
    (first, second) = traces.arriving([Item("a", ((1,),), 1), item], 10.0, 0)
    assert first.delay > 0 and second == item
