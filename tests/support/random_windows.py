"""Windows of page groups, drawn at random."""

from hypothesis import strategies as st


def random_windows(least: int, most: int, widest: int = 9) -> st.SearchStrategy[tuple[int | None, ...]]:
    """`least` to `most` groups with windows of up to `widest` tokens in order, some after a group without one."""
    windows = st.lists(st.integers(1, widest), min_size=least, max_size=most).map(sorted)
    return st.builds(lambda full, groups: (*full, *groups), st.sampled_from([(), (None,)]), windows)
