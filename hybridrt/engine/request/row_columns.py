"""Columns over the request rows: what a step must know of every running request."""

from collections.abc import Sequence

import numpy as np

UNLIMITED = 2**31 - 1


class RowColumns:
    """Columns of int32 by request row. Entries are valid while a request holds the row.

    Steps are launched before earlier results are read: `computed` and `output_index` are upper
    bounds that hold once every launched step has run. If a verify step gains fewer tokens, its
    result lowers both.

    Args:
        table: [5, R + 1], one row for each column.

    Attributes:
        computed: tokens with KV and state.
        output_index: number of sampled tokens, including those the host has not read.
        prefill_end: tokens to compute before decoding starts.
        max_output: output tokens at which the request ends.
        capacity: tokens that the lent KV pages hold; UNLIMITED in a model without attention.
    """

    def __init__(self, table: np.ndarray) -> None:
        self.table = table
        self.computed, self.output_index, self.prefill_end, self.max_output, self.capacity = table

    @classmethod
    def allocate(cls, num_rows: int) -> "RowColumns":
        return cls(np.zeros((5, num_rows + 1), np.int32))

    def select_rows(self, rows: Sequence[int] | np.ndarray) -> "RowColumns":
        """Copies the entries of rows [n] (int64), in their order."""
        return RowColumns(self.table.take(rows, axis=1))

    def advance(self, rows: np.ndarray, before: "RowColumns", tokens: np.ndarray) -> None:
        """A launched decode step computes and samples `tokens` [n] of each of rows [n] (int64).
        `before`: their entries so far.
        """
        self.computed[rows] = before.computed + tokens
        self.output_index[rows] = before.output_index + tokens

    def take_back(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """A step has gained `tokens` [n] fewer tokens for rows [n] than it could."""
        self.computed[rows] -= tokens
        self.output_index[rows] -= tokens
