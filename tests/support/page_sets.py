"""Page numbers of plans."""

from collections.abc import Iterable

import numpy as np


def page_sets(*pages: Iterable[int]) -> np.ndarray:
    """[n, G] int32 of the page numbers of each page group."""
    return np.array([list(group) for group in pages], np.int32).T
