"""Which tokens a row may draw, and what is added to their logits: tables by request row, on the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybridrt.kernels.sampling import LogitBiases, biased_logits
from hybridrt.runtime.step import Admission, int32s
from hybridrt.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, SamplingParams

MAX_BIASES = MAX_LOGIT_BIASES + MAX_STOP_TOKEN_IDS
ALWAYS = 2**31 - 1  # an entry's `until`


def num_biases(params: SamplingParams) -> int:
    """Entries that a request needs."""
    return len(params.biases) + (len(params.stop_token_ids) if params.min_tokens else 0)


def _biases(params: SamplingParams) -> list[tuple[int, float, int]]:
    """(token, what is added, the output index from which nothing is). A token that would end the output too early is
    ruled out."""
    early = [(t, -np.inf, params.min_tokens) for t in params.stop_token_ids] if params.min_tokens else []
    return [*((t, bias, ALWAYS) for t, bias in params.biases), *early]


class TokenRules:
    """Biases [R + 1, MAX_BIASES], of which a row's first ones are in use, and sets of tokens [R + 1, ceil(V / 32)] as
    bits. What is in use stands beside the other constants of a row (SamplingTable.integers)."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._ids = torch.zeros(num_rows + 1, MAX_BIASES, dtype=torch.int32, device=device)
        self._values = torch.zeros(num_rows + 1, MAX_BIASES, device=device)
        self._until = torch.zeros(num_rows + 1, MAX_BIASES, dtype=torch.int32, device=device)
        self._allowed = torch.zeros(num_rows + 1, -(-vocab_size // 32), dtype=torch.int32, device=device)

    @staticmethod
    def row_bytes(vocab_size: int) -> int:
        """Bytes of one row."""
        return 12 * MAX_BIASES + 4 * -(-vocab_size // 32)

    @staticmethod
    def pack(admissions: Sequence[Admission]) -> dict[str, np.ndarray]:
        """int32 sections of the step's packed copy, flat: (row, place, token, bits of the bias, until) of each bias,
        (row, word, bits) of the words that are not 0 of each set, and the rows with sets."""
        biases = [(a.row, i, *bias) for a in admissions for i, bias in enumerate(_biases(a.params))]
        sets = [a for a in admissions if a.params.allowed_token_ids is not None]
        table = np.zeros((len(biases), 5), np.int32)
        if biases:
            columns = list(zip(*biases))
            table[:, [0, 1, 2, 4]] = np.array([columns[i] for i in (0, 1, 2, 4)], np.int32).T
            table[:, 3] = np.array(columns[3], np.float32).view(np.int32)
        words = [word for a in sets for word in _words(a.row, a.params.allowed_token_ids or ())]
        return {
            "biases": table.reshape(-1),
            "allowed_rows": int32s(a.row for a in sets),
            "allowed_words": np.array(words, np.int64).astype(np.uint32).view(np.int32).reshape(-1),
        }

    def admit(self, sections: dict[str, Tensor]) -> None:
        """Stores what `pack` packed."""
        if len(sections["biases"]):
            rows, places, ids, values, until = sections["biases"].view(-1, 5).t().contiguous().unbind()
            at = rows.long(), places.long()
            self._ids[at], self._values[at], self._until[at] = ids, values.view(torch.float32), until
        if len(sections["allowed_rows"]):
            self._allowed.index_fill_(0, sections["allowed_rows"].long(), 0)
            rows, words, bits = sections["allowed_words"].view(-1, 3).unbind(1)
            self._allowed[rows.long(), words.long()] = bits

    def biased(self, logits: Tensor, rows: Tensor, counts: Tensor, output_indices: Tensor) -> Tensor:
        """logits [n, V] with the biases of rows [n], of which `counts` [n] are in use, for the tokens at
        output_indices [n]."""
        places = torch.arange(MAX_BIASES, device=rows.device)
        until = self._until[rows].masked_fill_(places >= counts[:, None], 0)
        return biased_logits(logits, LogitBiases(self._ids[rows], self._values[rows], until), output_indices)

    def bitmask(self, rows: Tensor, restricted: Tensor) -> Tensor:
        """[n, ceil(V / 32)] int32: all bits for rows that are not restricted [n]."""
        return self._allowed[rows].masked_fill_(restricted[:, None] == 0, -1)


def _words(row: int, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """(row, word, bits) of a set of tokens: bit i % 32 of word i // 32."""
    bits: dict[int, int] = {}
    for token in tokens:
        bits[token // 32] = bits.get(token // 32, 0) | 1 << token % 32
    return [(row, word, value) for word, value in bits.items()]
