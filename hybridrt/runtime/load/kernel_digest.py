"""Digest of this package's kernels, which names what was compiled or measured."""

import hashlib
from functools import cache
from pathlib import Path

_KERNELS = Path(__file__).parents[2] / "kernels"


@cache
def kernel_digest() -> bytes:
    """SHA-256 of all files of kernels. Cached: opening a file may take milliseconds."""
    digest = hashlib.sha256()
    for file in sorted(_KERNELS.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()
