"""Time for tests of pauses."""


class Clock:
    """Time that passes only while somebody sleeps, or when it is told."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_in_loop(self, seconds: float) -> None:
        """In place of asyncio.sleep."""
        self.sleep(seconds)
