"""What kernels add to a step."""

from benchmarks.profile_step import added_us
from benchmarks.timeline import Span


def test_a_kernel_that_starts_early_adds_what_it_ends_later() -> None:
    """A gap is not counted. A kernel that runs next to another is counted once it ends first."""
    spans = [
        Span("a", 7, 0, 10),
        Span("b", 7, 12, 20),
        Span("c", 7, 15, 26),
        Span("d", 8, 13, 19),
        Span("a", 7, 26, 28),
    ]
    assert added_us(spans) == {"a": 12, "b": 1, "c": 6, "d": 6}
