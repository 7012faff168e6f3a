"""What a step must know of every running request, as columns over the request rows."""

import numpy as np

UNLIMITED = 2**31 - 1


class RowColumns:
    """Columns by request row, [R + 1] int32 each. An entry means something while a request holds the row.

    What the host knows trails what is launched: `computed` and `pending` are upper bounds that hold once every launched
    step has run. A verify step may gain fewer tokens than it could; its result then lowers both.

    Attributes:
        computed: tokens with KV and state.
        prefill_end: tokens to compute before decoding starts.
        known: output tokens of which a consumed step has told.
        pending: tokens sampled but not read yet.
        max_output: output tokens at which the request ends.
        capacity: tokens that the lent KV pages hold; UNLIMITED in a model without attention.
    """

    def __init__(self, num_rows: int) -> None:
        self.computed, self.prefill_end, self.known, self.pending, self.max_output, self.capacity = np.zeros(
            (6, num_rows + 1), np.int32
        )

    def prefilled(self, rows: np.ndarray) -> np.ndarray:
        """Whether the launched steps compute all of the prompt. [n] bool of rows [n]."""
        return self.computed[rows] >= self.prefill_end[rows]

    def unfinished(self, rows: np.ndarray) -> np.ndarray:
        """Whether the launched steps leave a token to sample. [n] bool of rows [n]."""
        return self.known[rows] + self.pending[rows] < self.max_output[rows]

    def launch(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """A decode step of rows [n] with `tokens` [n] inputs each."""
        self.computed[rows] += tokens
        self.pending[rows] += tokens

    def complete(self, rows: np.ndarray, most: np.ndarray, gained: np.ndarray) -> None:
        """A step that could gain `most` [n] tokens for each of rows [n], 0 for a chunk that samples nothing, gained
        `gained` [n]."""
        self.pending[rows] -= most
        self.computed[rows] -= most - gained
        self.known[rows] += gained
