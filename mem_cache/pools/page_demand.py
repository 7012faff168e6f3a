"""How many KV pages of a page group a request holds at a time, with or without a window."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PageDemand:
    """How many KV pages of a page group requests need.

    A page of a window group is given up as soon as the windows of all later steps are past it. Then
    a request holds a bounded number of pages, whatever its length.

    Attributes:
        window: keys that a token sees, its own included; None: all.
        step_tokens: most tokens of one request in one step: the prefill chunk.
        verify_tokens: tokens of a row in a decode step, drafts included.
        back: tokens before the window that a request holds too, so that the prefix up to its last
            whole page is usable.
    """

    page_size: int
    window: int | None = None
    step_tokens: int = 1
    verify_tokens: int = 1
    back: int = 0

    def whole(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def least(self, num_tokens: int) -> int:
        """Fewest pages with which a request of `num_tokens` tokens can run alone, one token a step."""
        return self._bounded(num_tokens, 1)

    def fitting(self, num_pages: int) -> int:
        """Tokens of the longest request that can run alone in so many pages; 2**31 if a window
        bounds its pages to fewer."""
        if self.window is not None and self.least(2**31) <= num_pages:
            return 2**31
        return num_pages * self.page_size

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
        """Most pages that a cached state needs in a window group."""
        return 0 if self.window is None else self._bounded(2**31, 0)

    def first_page(self, position: int) -> int:
        """First page that a step reads if its first token is at `position` or later."""
        return 0 if self.window is None else first_page(position, self.window, self.page_size)

    def first_held(self, position: int) -> int:
        """First page that a request holds whose next token is at `position`."""
        return self.first_page(position - self.back)

    def _bounded(self, num_tokens: int, step_tokens: int, spare: int = 0) -> int:
        if self.window is None:
            return self.whole(num_tokens)
        # The step's first token sees window - 1 before it; n adjacent tokens touch at most this
        # many pages.
        span = self.window - 1 + self.back + step_tokens
        return min(self.whole(num_tokens), (span + self.page_size - 2) // self.page_size + 1 + spare)


def first_page(position: int, window: int, page_size: int) -> int:
    """First page that the token at `position` sees through a window of so many keys, its own
    included.
    """
    return max(position - window + 1, 0) // page_size
