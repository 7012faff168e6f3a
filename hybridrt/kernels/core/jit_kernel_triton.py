"""Triton functions that the host launches. They keep their compiled kernels.

Triton's own launch does four things: it tells apart arguments for which it compiles different kernels, adds its
settings, checks the globals of the kernel, and prepares what hooks would get. Once a kernel is compiled, the first is
enough. It stays Triton's: no rule about types, alignment or constants is repeated here.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

FUSION = "TRITON_DEFAULT_FP_FUSION"  # the user's variable, which decides if it is set


class JitKernel(JITFunction[Any]):
    """A Triton function whose launches find kernels that were launched before.

    Triton itself launches what is new, and everything while something listens to launches. Its settings and the
    kernel's globals are looked at only then.
    """

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        super().__init__(fn, **options)
        self._kept: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, (*grid, 1, 1)[:3])

    def run(self, *args: Any, **named: Any) -> Any:
        """As Triton's own. Products and sums become one instruction: Triton 3.9 warns where nobody says so, and names
        another default for 3.10."""
        if FUSION not in os.environ:
            named.setdefault("enable_fp_fusion", True)
        return super().run(*args, **named)

    def _launch(self, grid: tuple[int, ...], /, *args: Any, **named: Any) -> None:
        if self._is_observed():
            self.run(*args, grid=grid, warmup=False, **named)
            return
        device = driver.active.get_current_device()
        bind = self.device_caches[device][-1]
        values, kinds, options = bind(*args, **named)  # kinds: types, alignments, constants
        key = device, *kinds, str(options)  # as Triton's own
        kept = self._kept.get(key)
        if kept is None:
            self._kept[key] = self.run(*args, grid=grid, warmup=False, **named)  # None if a hook refuses to compile
            return
        stream = driver.active.get_current_stream(device)
        kept.run(*grid, stream, kept.function, kept.packed_metadata, None, None, None, *values.values())

    def _is_observed(self) -> bool:
        knobs = triton.knobs.runtime
        hooks = knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls or self.pre_run_hooks
        is_replaced = JITFunction.run.__module__ != JITFunction.__module__  # as in compile_trace.py
        return bool(hooks or is_replaced or knobs.debug)


def jit_kernel(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """As `triton.jit`, for functions that the host launches."""
    if fn is None:
        return partial(jit_kernel, **options)
    return triton.jit(fn, **options) if triton.knobs.runtime.interpret else JitKernel(fn, **options)
