"""The digest of Triton's own files, which is part of every key in its cache, computed early.

They have half a gigabyte, and every process that launches a kernel would read them first.
"""

import contextlib
import threading


class TritonKey:
    """Computes the digest in a thread, which releases Python's lock while it reads. Triton keeps it
    for this process; `wait` returns it for other processes."""

    def __init__(self) -> None:
        self._found: tuple[str, str] | None = None
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()

    def wait(self) -> tuple[str, str] | None:
        """Triton's file and its digest. None: it failed, and a launch will say why."""
        self._thread.join()
        return self._found

    def _compute(self) -> None:
        with contextlib.suppress(Exception):
            import triton
            from triton.runtime.cache import triton_key

            self._found = str(triton.__file__), triton_key()


def use_key(file: str, key: str) -> None:
    """Uses another process's digest, if it is of the same Triton."""
    import triton
    from triton.runtime import cache

    if triton.__file__ == file:
        cache.triton_key = lambda: key
