"""Choosing by measurement: candidates run under the interpreter, and a timer says what a test wants."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from hybridrt.base.device import KNOWN
from hybridrt.kernels.attention.paged_attention_triton import DECODES, Decode
from hybridrt.kernels.core.launch_choice import LAUNCHES, LaunchChoice, Values
from hybridrt.kernels.delta_rule import delta_rule_triton
from hybridrt.kernels.delta_rule.delta_rule_triton import Pass
from hybridrt.kernels.dense.linear import LibraryProduct
from hybridrt.kernels.dense.skinny_linear import Product
from hybridrt.kernels.dense.skinny_linear_triton import TILES, TiledProduct
from hybridrt.kernels.mamba.mamba2_scan_triton import Scan
from hybridrt.runtime.load.tuned_choices import Origin, TunedFile, fields_of, table_of
from hybridrt.runtime.tune import tune as tuning
from hybridrt.runtime.tune.measure import TURNS, LocalBench, Measured, measure
from hybridrt.runtime.tune.trial import Call, MakeTrial, Trial, error_of
from hybridrt.runtime.tune.tune import TRIALS, file_of, local_benches, shapes_to_measure, tune

CPU, F32 = torch.device("cpu"), torch.float32
SHAPE = TiledProduct(128, 64, 16, F32)


class Timer:
    """Says how long each choice takes, instead of a clock. `order`: choices in the order in which they were timed."""

    def __init__(self, launch: LaunchChoice[Any, Any], shape: Any, seconds: Callable[[Any], float]) -> None:
        self._launch, self._shape, self._seconds = launch, shape, seconds
        self.order: list[Any] = []

    def prepare(self, calls: Sequence[Call]) -> Callable[[], float]:
        choice = self._launch(self._shape, CPU)

        def time() -> float:
            self.order.append(choice)
            return self._seconds(choice)

        return time


class Constant:
    """All choices are equally fast."""

    def prepare(self, calls: Sequence[Call]) -> Callable[[], float]:
        return lambda: 1.0


def quiet(done: int, total: int, what: str) -> None: ...


def measured(timer: Any, make: MakeTrial = TRIALS["skinny_linear"]) -> Measured:
    """SHAPE, in this process."""
    return measure(TILES, SHAPE, CPU, LocalBench(TILES, SHAPE, CPU, make, timer))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("skinny_linear", TiledProduct(128, 64, 1, F32)),
        ("skinny_linear", SHAPE),
        ("product of a library", LibraryProduct(128, 64, 96, F32)),
        ("attention_decode", Decode(2, 1, 4, 2, 16, 0, 48, 0, False, F32)),
        ("attention_decode", Decode(2, 1, 4, 1, 32, 16, 48, 0, False, F32)),
        ("attention_decode", Decode(2, 2, 4, 2, 16, 0, 48, 20, False, F32)),
        ("chunk_gated_delta_rule: pass", Pass(1, 2, 1, 16, 16, 16, False, F32)),
        ("chunk_gated_delta_rule: pass", Pass(1, 1, 1, 16, 16, 16, True, F32)),
        ("mamba2_chunk_scan: outputs", Scan(64, 2, 1, 16, 16, 16, F32)),
        ("mamba2_chunk_scan: gains", Scan(64, 2, 1, 16, 16, 16, F32)),
    ],
)
def test_candidates_compute_what_the_plain_implementation_does(
    name: str, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in choice and another one, as far as the interpreter is quick enough."""
    monkeypatch.setattr("hybridrt.runtime.tune.scans.ROW_TOKENS", (16, 48))
    launch = LAUNCHES[name]
    trial, built_in = TRIALS[name](shape, CPU), launch.built_in(shape, CPU)
    wanted = trial.reference()
    others = [values for values in launch.candidates(shape, CPU) if values != built_in]
    for values in (built_in, *others[-1:]):
        with launch.trying(shape, CPU, values):
            assert error_of(trial.outputs(), wanted) < 1e-5, values
    assert trial.calls and all(torch.isfinite(each.double()).all() for each in wanted)


@pytest.mark.parametrize(("gpu", "fewest"), [("h200", 2), ("l40s", 1)])
def test_a_pass_of_one_stage_is_no_candidate_where_products_read_shared_memory(
    gpu: str, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200 those of 16 and 32 columns read outside of shared memory, or computed something else."""
    monkeypatch.setattr(delta_rule_triton, "shared_memory", lambda _: KNOWN[gpu].shared_memory)
    for by_channel in (False, True):
        shape = Pass(2, 32, 32, 128, 128, 64, by_channel, torch.bfloat16)
        candidates = LAUNCHES["chunk_gated_delta_rule: pass"].candidates(shape, CPU)
        assert min(values["num_stages"] for values in candidates) == fewest


def few_candidates(monkeypatch: pytest.MonkeyPatch, *tiles: Values) -> list[Values]:
    """The tiled product has these candidates; the first is built in."""
    monkeypatch.setattr(TILES, "built_in", lambda *_: tiles[0])
    monkeypatch.setattr(TILES, "candidates", lambda *_: list(tiles))
    return list(tiles)


def tile(block_k: int, split: int = 1) -> dict[str, int]:
    return {"block_n": 64, "block_k": block_k, "num_warps": 4, "stages": 2, "split": split}


@pytest.mark.parametrize(("seconds", "wins"), [(0.96, True), (0.98, False), (1.5, False)])
def test_a_candidate_replaces_the_built_in_choice_if_it_is_clearly_faster(
    seconds: float, wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_in, other = few_candidates(monkeypatch, tile(32), tile(64))
    timer = Timer(TILES, SHAPE, lambda choice: seconds if choice.block_k == 64 else 1.0)
    found = measured(timer)
    assert found.values == (other if wins else built_in) and found.won == wins
    assert (found.seconds, found.built_in_seconds) == (seconds if wins else 1.0, 1.0)
    assert found.candidates == 1 and not found.refused


def test_candidates_take_turns_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the candidate one turn is fast, of the built-in choice one is slow: neither decides."""
    few_candidates(monkeypatch, tile(32), tile(64))
    turns = {32: [9.0] + [1.0] * TURNS, 64: [0.1] + [1.0] * TURNS}
    timer = Timer(TILES, SHAPE, lambda choice: turns[choice.block_k].pop(0))
    found = measured(timer)
    assert not found.won and found.built_in_seconds == 1.0
    assert [choice.block_k for choice in timer.order] == [32, 64] * TURNS


def test_slow_candidates_leave_the_race_and_the_built_in_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = few_candidates(monkeypatch, *(tile(16, split) for split in range(1, 8)))
    timer = Timer(TILES, SHAPE, lambda choice: 10.0 if choice.split == 1 else float(choice.split))
    found = measured(timer)
    assert found.values == tiles[1] and found.built_in_seconds == 10.0
    assert {choice.split for choice in timer.order[-10:]} == {1, 2, 3, 4, 5}


def broken(error: Callable[[int], float]) -> Callable[[Any, torch.device], Trial]:
    """A trial whose outputs are wrong for tiles of 64 columns. `error`: by the number of the call."""

    def make(shape: Any, device: torch.device) -> Trial:
        right, calls = TRIALS["skinny_linear"](shape, device), list[int]()

        def outputs() -> Sequence[torch.Tensor]:
            (y,) = right.outputs()
            if TILES(shape, device).block_k != 64:
                return [y]
            calls.append(1)
            return [y * (1.0 + error(len(calls)))]

        return Trial(right.calls, outputs, right.reference)

    return make


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (lambda call: 1e-3, "its error is 1.0e-03"),
        (lambda call: float("nan"), "its error is inf"),
        (lambda call: call * 1e-7, "different bits"),
    ],
)
def test_a_candidate_with_other_numbers_cannot_win(
    error: Callable[[int], float], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_candidates(monkeypatch, tile(32), tile(64))
    found = measured(Timer(TILES, SHAPE, lambda choice: 0.1), broken(error))
    assert not found.won and [refused.values for refused in found.refused] == [tile(64)]
    assert why in found.refused[0].why


def test_a_candidate_that_does_not_fit_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(shape: Any, device: torch.device) -> Trial:
        right = TRIALS["skinny_linear"](shape, device)

        def outputs() -> Sequence[torch.Tensor]:
            if TILES(shape, device).block_k == 64:
                raise OutOfResources(200_000, 100_000, "shared memory")
            return right.outputs()

        return Trial(right.calls, outputs, right.reference)

    few_candidates(monkeypatch, tile(32), tile(64))
    found = measured(Constant(), make)
    assert [refused.why for refused in found.refused] == ["it does not fit this GPU: OutOfResources"]


def test_what_was_measured_becomes_a_file_that_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later trials run with earlier winners, and shapes of the file are not measured again."""
    built_in, other = few_candidates(monkeypatch, tile(32), tile(64))
    second = SHAPE._replace(rows=64)
    timer = Timer(TILES, SHAPE, lambda choice: 0.5 if choice.block_k == 64 else 1.0)
    found = tune([("skinny_linear", SHAPE)], CPU, local_benches(CPU, timer), 60.0, {}, quiet)
    assert TILES(SHAPE, CPU).block_k == 64, "in use for later trials"
    origin = Origin.of_gpu(KNOWN["h200"])
    file = file_of(found, origin, None)
    assert [(c.launch, c.shape, c.values) for c in file.choices] == [("skinny_linear", fields_of(SHAPE), other)]
    assert (file.choices[0].microseconds, file.choices[0].built_in_microseconds) == (0.5e6, 1e6)
    known = table_of(file, CPU, "a file")  # type: ignore[arg-type]
    again = tune(
        [("skinny_linear", SHAPE), ("skinny_linear", second)], CPU, local_benches(CPU, Constant()), 60.0, known, quiet
    )
    assert again.known == 1 and [m.shape for m in again.measured] == [second]
    both = file_of(again, origin, file)
    assert [c.values for c in both.choices] == [other, built_in]
    assert table_of(both, CPU, "a file")  # type: ignore[arg-type]


def test_a_shape_that_is_measured_again_replaces_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in, _ = few_candidates(monkeypatch, tile(32), tile(64))
    origin = Origin.of_gpu(KNOWN["h200"])
    fast = Timer(TILES, SHAPE, lambda choice: 0.5 if choice.block_k == 64 else 1.0)
    before = file_of(tune([("skinny_linear", SHAPE)], CPU, local_benches(CPU, fast), 60.0, {}, quiet), origin, None)
    after = file_of(
        tune([("skinny_linear", SHAPE)], CPU, local_benches(CPU, Constant()), 60.0, {}, quiet), origin, before
    )
    assert [choice.values for choice in after.choices] == [built_in]


def test_nothing_is_begun_after_the_time_and_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    few_candidates(monkeypatch, tile(32), tile(64))
    shapes = [("skinny_linear", SHAPE), ("skinny_linear", SHAPE._replace(rows=64))]
    assert tune(shapes, CPU, local_benches(CPU, Constant()), 1e-9, {}, quiet).left == 2

    errors = [torch.OutOfMemoryError("CUDA out of memory. Tried"), OutOfResources(200_000, 100_000, "shared memory")]

    def full(shape: Any, device: torch.device) -> Trial:
        raise errors.pop(0)

    monkeypatch.setitem(tuning.TRIALS, "skinny_linear", full)
    found = tune(shapes, CPU, local_benches(CPU, Constant()), 60.0, {}, quiet)
    assert not found.measured and "CUDA out of memory" in found.skipped[0] and "shared memory" in found.skipped[1]
    assert isinstance(file_of(found, Origin.of_gpu(KNOWN["h200"]), None), TunedFile)


def test_a_product_that_is_not_fused_yet_gets_a_tile_first() -> None:
    """Else it could only win with a tile that nobody measured. One token has one way."""
    wide = Product(32768, 1024, 64, torch.bfloat16, "")
    found = shapes_to_measure(
        [("product of few tokens", wide), ("product of few tokens", wide._replace(tokens=1))], CPU
    )
    tiles = [TiledProduct(32768, 1024, tokens, torch.bfloat16) for tokens in (64, 1)]
    assert found == [*(("skinny_linear", each) for each in tiles), ("product of few tokens", wide)]


def test_every_launch_has_a_trial_and_its_built_in_choice_runs() -> None:
    assert set(TRIALS) == set(LAUNCHES)
    shape = Decode(1, 1, 16, 1, 512, 64, 4096, 0, False, torch.bfloat16)
    assert DECODES.built_in(shape, CPU) in DECODES.candidates(shape, CPU)
