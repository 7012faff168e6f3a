"""The digest of Triton's own files, which is part of every key in its cache. Its library alone has half a gigabyte, and
each process that launches a kernel would read it first: that takes a second or more."""

import contextlib
import threading


class TritonKey:
    """Computes the digest in a thread, which leaves the interpreter to others while it reads. Triton keeps it for the
    launches of this process, and `wait` gives it for other processes."""

    def __init__(self) -> None:
        self._found: tuple[str, str] | None = None
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()

    def wait(self) -> tuple[str, str] | None:
        """The file of the Triton that was looked at, and its digest. None: it failed, and a launch will say why."""
        self._thread.join()
        return self._found

    def _compute(self) -> None:
        with contextlib.suppress(Exception):
            import triton
            from triton.runtime.cache import triton_key

            self._found = str(triton.__file__), triton_key()


def use_key(file: str, key: str) -> None:
    """Takes the digest of another process for this process's, if it is that of the same Triton."""
    import triton
    from triton.runtime import cache

    if triton.__file__ == file:
        cache.triton_key = lambda: key
