"""Memory of GPUs by name, for plans without the GPU."""

_GIB = 2**30
# As CUDA reports it, a little less than the data sheets.
GPUS = {
    "h100": int(79.1 * _GIB),
    "h200": int(139.8 * _GIB),
    "b200": int(178.3 * _GIB),
    "a100": int(79.1 * _GIB),
    "a100-40gb": int(39.4 * _GIB),
    "l40s": int(44.4 * _GIB),
    "l4": int(22.0 * _GIB),
    "rtx4090": int(23.5 * _GIB),
    "rtx5090": int(31.4 * _GIB),
}
