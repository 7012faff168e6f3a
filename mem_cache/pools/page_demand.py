"""How many KV pages a request holds at a time: those of its whole context, or of a sliding window over it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PageDemand:
    """How many KV pages requests need.

    If every attention layer has a window, a page is freed as soon as all windows of later steps are past it. So the
    number of pages that a request holds has a bound that does not depend on its length.

    Attributes:
        window: keys that a token sees in the layer that sees most, its own included; None if a layer sees all.
        step_tokens: most tokens of one request in one step: the prefill chunk.
        verify_tokens: tokens of a row in a decode step, drafts included.
    """

    page_size: int
    window: int | None = None
    step_tokens: int = 1
    verify_tokens: int = 1

    def whole(self, num_tokens: int) -> int:
        """Pages of `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def least(self, num_tokens: int) -> int:
        """Pages without which a request of `num_tokens` tokens cannot run even alone, a token a step."""
        return self._bounded(num_tokens, 1)

    def decoding(self, num_tokens: int) -> int:
        """Pages of a request that decodes, with one step launched ahead, and one to spare for its growth."""
        return self._bounded(num_tokens, 1 + self.verify_tokens, spare=1)

    def prefilling(self, num_tokens: int) -> int:
        """Pages that let a prompt of `num_tokens` tokens be computed in whole chunks, with one launched ahead."""
        return self._bounded(num_tokens, 2 * self.step_tokens)

    def pool(self, rows: int, num_tokens: int) -> int:
        """Pages that `rows` requests of up to `num_tokens` tokens can use: all decoding but for the chunks in work."""
        chunks = self.whole(2 * self.step_tokens) + 1
        return min(rows * self.whole(num_tokens), rows * self.decoding(num_tokens) + chunks)

    @property
    def kept(self) -> int:
        """Pages at most that a cached state needs where every layer has a window: those of the tokens in it."""
        return 0 if self.window is None else self._bounded(2**31, 0)

    def first_page(self, position: int) -> int:
        """The first page that a step whose tokens stand at `position` or later reads."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    def _bounded(self, num_tokens: int, step_tokens: int, spare: int = 0) -> int:
        if self.window is None:
            return self.whole(num_tokens)
        # The first of the step's tokens sees window - 1 before it; n tokens in a row touch at most this many pages.
        span = self.window - 1 + step_tokens
        return min(self.whole(num_tokens), (span + self.page_size - 2) // self.page_size + 1 + spare)
