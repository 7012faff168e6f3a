"""hybridrt's replay decode of Gated Delta Nets in SGLang. README.md says what it does and what was run."""

import os

SWITCH = "HYBRIDRT_SGLANG"
TARGET = "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel.packed_decode"


def register() -> None:
    """The entry point of the group `sglang.srt.plugins`. SGLang calls it in each of its processes, and applies the
    hook afterwards. `HYBRIDRT_SGLANG=off` registers nothing.

    Raises ValueError for another value of the switch than on and off; SGLang logs it and starts without the plugin.
    """
    if (switch := os.environ.get(SWITCH, "on")) not in ("on", "off"):
        raise ValueError(f"{SWITCH} is {switch!r}: it is 'on' or 'off'")
    if switch == "off":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hybridrt_sglang.decode import packed_decode

    HookRegistry.register(TARGET, packed_decode, HookType.AROUND)
