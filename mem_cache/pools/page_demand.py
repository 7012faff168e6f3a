"""How many KV pages a request holds at a time, with or without a sliding window."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PageDemand:
    """How many KV pages requests need.

    If every attention layer has a window, a page is freed as soon as all windows of later steps are
    past it. Then a request holds a bounded number of pages, whatever its length.

    Attributes:
        window: keys that a token sees in the layer that sees most, its own included; None if a
            layer sees all.
        step_tokens: most tokens of one request in one step: the prefill chunk.
        verify_tokens: tokens of a row in a decode step, drafts included.
    """

    page_size: int
    window: int | None = None
    step_tokens: int = 1
    verify_tokens: int = 1

    def whole(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def least(self, num_tokens: int) -> int:
        """Fewest pages with which a request of `num_tokens` tokens can run alone, one token a step."""
        return self._bounded(num_tokens, 1)

    def decoding(self, num_tokens: int) -> int:
        """Pages of a decoding request, with one step launched ahead and one page to spare for
        growth.
        """
        return self._bounded(num_tokens, 1 + self.verify_tokens, spare=1)

    def prefilling(self, num_tokens: int) -> int:
        """Pages to compute a prompt of `num_tokens` tokens in whole chunks, with one launched
        ahead.
        """
        return self._bounded(num_tokens, 2 * self.step_tokens)

    def pool(self, rows: int, num_tokens: int) -> int:
        """Pages that `rows` requests of up to `num_tokens` tokens can use: all decode, but for the
        chunks in work.
        """
        chunks = self.whole(2 * self.step_tokens) + 1
        return min(rows * self.whole(num_tokens), rows * self.decoding(num_tokens) + chunks)

    @property
    def kept(self) -> int:
        """Most pages that a cached state needs if every layer has a window."""
        return 0 if self.window is None else self._bounded(2**31, 0)

    def first_page(self, position: int) -> int:
        """First page that a step reads if its first token is at `position` or later."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    def _bounded(self, num_tokens: int, step_tokens: int, spare: int = 0) -> int:
        if self.window is None:
            return self.whole(num_tokens)
        # The step's first token sees window - 1 before it; n adjacent tokens touch at most this
        # many pages.
        span = self.window - 1 + step_tokens
        return min(self.whole(num_tokens), (span + self.page_size - 2) // self.page_size + 1 + spare)
