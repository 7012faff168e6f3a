"""For tests of verify: a check of speed that takes no time."""

import pytest

from hybridrt.verify import speed


@pytest.fixture(autouse=True)
def one_short_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test looks at the figures, and half of a quick run's time went into measuring them well."""
    monkeypatch.setattr(speed, "COPIED", {"cpu": 1 << 16})
    monkeypatch.setattr(speed, "SIDE", {"cpu": 16})
    monkeypatch.setattr(speed, "REPEATS", 1)
    monkeypatch.setattr(speed, "LAST", speed.FIRST + 2)
