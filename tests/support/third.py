"""A third of the tests, so that a long level is quick to run, and thirds that change from run to run."""

from zlib import crc32

import pytest


class Third:
    """A plugin of pytest. Each third test of those that marks and names have left, in their order: neighbours are often
    parameters of one test, of which each third so has some.

    Args:
        text: decides where to begin; the same text always means the same third.
    """

    def __init__(self, text: str) -> None:
        self._first = crc32(text.encode()) % 3

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for i, item in enumerate(items) if i % 3 != self._first]
        items[:] = items[self._first :: 3]
        config.hook.pytest_deselected(items=left_out)
