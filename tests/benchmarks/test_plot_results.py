import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import plot_results


def test_pictures_hold_our_numbers_the_peers_and_the_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"what": "decode batch 32", "ms": 5.25, "floor_ms": 4.5}, {"what": "prefill 1x8192", "tok/s": 41234.4}]
    (tmp_path / "falcon-h1-7b.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "falcon-h1-7b-classic.json").write_text(json.dumps({"rows": [rows[0] | {"ms": 6.5}]}))
    monkeypatch.setattr(sys, "argv", ["plot_results", "--results", str(tmp_path), "--out", str(tmp_path)])
    plot_results.main()
    decode, prefill = (ElementTree.parse(tmp_path / f"{name}.svg").getroot() for name in ("decode", "prefill"))
    texts, bars = ([e for e in decode.iter() if e.tag.endswith(tag)] for tag in ("text", "rect"))
    assert {"5.25 ms", "6.50 ms", "10.02 ms", "12.49 ms", "bytes floor"} <= {e.text for e in texts}
    widths = {e.get("fill"): float(e.get("width", "")) for e in bars if e.get("width", "").count(".")}
    assert widths["#2563eb"] / widths["#9ca3af"] == pytest.approx(5.25 / 10.02, rel=1e-2)
    assert {"41,234", "35,800", "22,905"} <= {e.text for e in prefill.iter()}


def test_models_without_results_have_no_panel(tmp_path: Path) -> None:
    assert list(plot_results.decode_panels(tmp_path)) == list(plot_results.prefill_panels(tmp_path)) == []


def test_latency_by_size_of_chunks(tmp_path: Path) -> None:
    shared = {"requests/s": 900.0, "first token p99 ms": 60.0, "between tokens p99 ms": 33.0}
    runs = [{"chunk": 512, "target_itl_ms": None}, {"chunk": 512, "target_itl_ms": 15.0}]
    rows = [run | shared | {"load": load} for run in runs for load in ("saturated", "80%")]
    (tmp_path / "serving-chunks.json").write_text(json.dumps({"rows": rows}))
    panels = plot_results.chunk_panels(tmp_path)
    assert [[group.label for group in panel.groups] for panel in panels] == [["512", "target 15 ms"]] * 3
    assert [panel.groups[0].values[plot_results.OURS] for panel in panels] == [33.0, 60.0, 900.0]


def test_what_the_prefix_cache_saves(tmp_path: Path) -> None:
    both = {"with the cache": 60.0, "without": 240.0}
    runs = [{"model": "qwen3-next-12l", "run": run, "first token p50 ms": ms} for run, ms in both.items()]
    (tmp_path / "prefix-chat.json").write_text(json.dumps({"rows": runs}))
    (panel,) = plot_results.prefix_panels(tmp_path)  # no throughput was measured
    assert [(group.label, group.values) for group in panel.groups] == [("qwen3-next", both)]
