"""Kernels that are kept are those that Triton's own launch takes, with the same parameters."""

import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from hybridrt.kernels.core.jit_kernel_triton import FUSION, JitKernel, jit_kernel


class Pair(NamedTuple):
    first: int
    second: int


MEMORY = torch.zeros(64, dtype=torch.float32)
TILES = [TensorDescriptor.from_tensor(MEMORY.view(4, 16), [rows, 16]) for rows in (2, 4)]
SIZES = (0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 16, 2**63 - 1, 2**63, 2**63 + 1)
# Of each parameter: values of several types, of which Triton tells some apart.
VALUES: dict[str, tuple[Any, ...]] = {
    "x": (
        MEMORY, MEMORY[4:], MEMORY[2:], MEMORY[1:], MEMORY[:0], MEMORY[::3], MEMORY.int(), MEMORY.bfloat16()[2:],
        torch.nn.Parameter(MEMORY), triton.reinterpret(MEMORY, tl.int32), None, 2.5, 3, MEMORY.data_ptr(),
        MEMORY.data_ptr() + 4,
    ),
    "n": (*SIZES, True, False, 1.0, 0.5, None),
    "count": (*SIZES, MEMORY, MEMORY[1:], None),
    "place": (*SIZES, True),
    "pair": (
        (1, 16), (16, 1), (2, 17), (2, 17, 17), (2**31, None), (MEMORY, 3), (MEMORY[1:], 3), (True, 1), (1.0, 2),
        (tl.constexpr(3), 2), (tl.constexpr(4), 2), Pair(2, 3), (None, 2), (2.5, 2), ((1, 2), 16),
    ),
    "tile": (*TILES, TensorDescriptor.from_tensor(MEMORY.view(4, 16).bfloat16(), [2, 16]), MEMORY, MEMORY[1:], None),
    "K": (1, True, 1.0, 2, None, "silu", torch.float32, tl.bfloat16, (1, 2), 0.5),
    "num_warps": (1, 2),
    "launch_pdl": (True, False, 1),
    "launch_cooperative_grid": (True, False),
}  # fmt: skip
USUAL: dict[str, Any] = {"x": MEMORY, "n": 3, "count": 5, "place": 7, "pair": (2, 3), "tile": None, "K": 2}
FUSED = {"enable_fp_fusion": True}
OPTIONS = {"do_not_specialize": ["count"], "do_not_specialize_on_alignment": ["x"]}


def function(x, n, count, place: tl.int64, pair, tile, K: tl.constexpr, REST: tl.constexpr = 7):  # type: ignore[no-untyped-def]
    pass


def untouched(x, count):  # type: ignore[no-untyped-def]
    pass


@dataclass(eq=False)
class Compiled:
    """As Triton's CompiledKernel."""

    run: Callable[..., None]
    function: str
    packed_metadata: int = 4

    def launch_metadata(self, *_: object) -> None: ...


class Device:
    """Triton's driver without a GPU. `launched`: grids, streams, kernels and their arguments. `fused`: of each
    compiled kernel, whether products and sums become one instruction."""

    def __init__(self) -> None:
        self.device, self.stream, self.compiled = 0, 0, 0
        self.fused: list[bool] = []
        self.launched: list[tuple[Any, ...]] = []

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def compile(self, kernel: JITFunction[Any], key: str, *given: Any, **__: object) -> Any:
        self.compiled += 1
        self.fused.append(given[3].enable_fp_fusion)
        name = f"{self.device}: {key}"

        def run(x: int, y: int, z: int, stream: int, handle: object, metadata: object, *given: object) -> None:
            assert (handle, metadata) == (name, 4)
            self.launched.append(((x, y, z), stream, name, given[3:]))

        made = Compiled(run, name)
        kernel.device_caches[self.device][0][key] = made
        return made


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()
    monkeypatch.delenv(FUSION, raising=False)
    monkeypatch.setattr(driver, "_active", found)
    monkeypatch.setattr(
        JITFunction, "_do_compile", lambda kernel, *given, **named: found.compile(kernel, *given, **named)
    )
    yield found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Grows by the arguments of each launch that Triton is asked for."""
    found: list[tuple[Any, ...]] = []
    run = JitKernel.run

    def note(kernel: JitKernel, *args: Any, **named: Any) -> Any:
        found.append(args)
        return run(kernel, *args, **named)

    monkeypatch.setattr(JitKernel, "run", note)
    return found


def compare(
    device: Device, kept: JitKernel, own: JITFunction[Any], given: dict[str, Any], positional: int = 6,
    grid: tuple[int, ...] = (3, 2),
) -> None:  # fmt: skip
    """Launches both, of which `kept` may have kept the kernel."""
    args, named = list(given.values())[:positional], dict(list(given.items())[positional:])
    kept[grid](*args, **named)
    own[grid](*args, **named, **FUSED)
    *where, found = device.launched[-2]
    *own_where, own_found = device.launched[-1]
    assert where == own_where, given
    assert all(value is same for value, same in zip(found, own_found, strict=True)), given


def test_as_triton_launches(device: Device) -> None:
    """Each value twice, and after each other one, so that no kernel is taken for another's arguments."""
    for parameter, values in VALUES.items():
        kept, own = JitKernel(function, **OPTIONS), JITFunction(function, **OPTIONS)
        for value in (*values, *values):
            compare(device, kept, own, USUAL | {parameter: value})


def test_as_triton_launches_any_arguments(device: Device, asked: list[tuple[Any, ...]]) -> None:
    """What Triton compiles differently shares no kernel, and most launches find theirs."""
    choose = random.Random(36)
    kept, own = JitKernel(function, **OPTIONS), JITFunction(function, **OPTIONS)
    some = {parameter: choose.sample(values, min(3, len(values))) for parameter, values in VALUES.items()}
    for _ in range(4000):
        changed = {parameter: choose.choice(some[parameter]) for parameter in choose.sample(sorted(VALUES), 2)}
        compare(device, kept, own, USUAL | changed, choose.randrange(len(USUAL)))
    assert len(device.launched) == 8000 and len(asked) < 1000


def test_by_position_and_by_name(device: Device) -> None:
    kept, own = JitKernel(function), JITFunction(function)
    for _ in range(2):
        for positional in range(len(USUAL) + 1):
            for more in ({"n": 3.5}, {"n": 1}, {}, {"REST": 4}, {"num_warps": 4}, {"num_stages": 4}):
                compare(device, kept, own, USUAL | more, positional)


@pytest.mark.parametrize("grid", [(5,), (5, 3), (5, 3, 2)])
def test_grid(device: Device, grid: tuple[int, ...]) -> None:
    kept, own = JitKernel(function), JITFunction(function)
    for _ in range(2):
        compare(device, kept, own, USUAL, grid=grid)


def test_a_kind_is_kept(device: Device, asked: list[tuple[Any, ...]]) -> None:
    """Sizes of one kind, and other addresses of one alignment, ask Triton for nothing."""
    kept = JitKernel(function)
    for n in (3, 5, 7, 2**30 + 1):
        kept[(1,)](**USUAL | {"x": MEMORY if n == 3 else MEMORY[8:], "n": n})
    assert len(asked) == 1 and [given[1] for *_, given in device.launched] == [3, 5, 7, 2**30 + 1]


def test_device_and_stream_are_the_current_ones(device: Device) -> None:
    kept = JitKernel(function)
    for number, stream in ((0, 5), (0, 6), (1, 7), (0, 8), (1, 9)):
        device.device, device.stream = number, stream
        kept[(1,)](*USUAL.values())
    assert [stream for _, stream, *_ in device.launched] == [5, 6, 7, 8, 9]
    assert [name[0] for _, _, name, _ in device.launched] == ["0", "0", "1", "0", "1"] and device.compiled == 2


def test_a_kept_kernel_stays_loaded(device: Device) -> None:
    """Triton unloads a compiled kernel that nobody holds."""
    kept = JitKernel(function)
    kept[(1,)](*USUAL.values())
    (made,) = map(weakref.ref, kept.device_caches[0][0].values())
    kept.device_caches.clear()
    assert made() is not None


def test_products_and_sums_are_fused_whatever_the_default(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton 3.6 and 3.9 do by default. Triton 3.9 warns where nobody says so, once in a process."""
    monkeypatch.setattr(triton.knobs, "propagate_env", False)
    if hasattr(triton._utils, "warn_once"):
        triton._utils.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with triton.knobs.language.scope():
            triton.knobs.language.default_fp_fusion = False
            JitKernel(function)[(1,)](*USUAL.values())
        for value in ("0", "1"):
            monkeypatch.setenv(FUSION, value)
            JitKernel(function)[(1,)](*USUAL.values())
    assert device.fused == [True, False, True]


def test_what_listens_sees_every_launch(device: Device, asked: list[tuple[Any, ...]]) -> None:
    kept, seen = JitKernel(function), list[Any]()

    def launch() -> int:
        before = len(asked)
        kept[(1,)](*USUAL.values())
        return len(asked) - before

    assert [launch(), launch()] == [1, 0]
    kept.add_pre_run_hook(lambda *_, **__: seen.append("before"))
    assert launch() == 1 and seen == ["before"]
    kept.pre_run_hooks.clear()
    for chain in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        chain.add(seen.append)
        try:
            assert launch() == 1
        finally:
            chain.remove(seen.append)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.debug = True
        assert launch() == 1 and "'debug': True" in device.launched[-1][2]
    assert launch() == 0 and len(device.launched) == 7


def test_what_replaces_a_launch_gets_every_one(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `compile_trace.py` and tests do, with a driver or without one."""
    kept, seen = JitKernel(function), list[Any]()
    kept[(1,)](*USUAL.values())
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **named: seen.append((args, named)))
    monkeypatch.setattr(driver, "_active", None)
    for _ in range(2):
        kept[(1,)](*USUAL.values(), num_warps=4)
    assert seen == 2 * [(tuple(USUAL.values()), FUSED | {"grid": (1, 1, 1), "warmup": False, "num_warps": 4})]


def test_a_kernel_that_was_not_compiled_is_not_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, compiled = JitKernel(function), JITFunction._do_compile
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *_, **__: None)  # a hook of the compiler refuses
    kept[(1,)](*USUAL.values())
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    kept[(1,)](*USUAL.values())
    assert len(device.launched) == 1


def test_wrong_arguments_are_refused_as_by_triton(device: Device) -> None:
    kept = JitKernel(function)
    usual = tuple(USUAL.values())
    for args, named in ((usual[:2], {}), ((*usual, 1, 2), {}), (usual, {"n": 2}), (usual, {"warps": 4})):
        with pytest.raises((TypeError, KeyError), match=r"dynamic_func|warps"):
            kept[(1,)](*args, **named)
    assert not device.launched


def test_decorator() -> None:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        made = cast(JITFunction[Any], jit_kernel(do_not_specialize=["count"])(untouched))
        assert type(made) is JitKernel and made.params[1].do_not_specialize
        triton.knobs.runtime.interpret = True
        assert type(jit_kernel(untouched)) is not JitKernel
