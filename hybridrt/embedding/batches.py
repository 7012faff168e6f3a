"""Batches from a host engine's arrays: checked, translated to the pools' numbers, copied at once."""

from typing import Generic, NamedTuple

import numpy as np
import torch

from hybridrt.base.errors import BackendError, PoolError
from hybridrt.base.forward_batch import ForwardBatch, SpecInfo
from hybridrt.embedding.numbers import Array, Numbers, check_equal, check_within, host_integers
from hybridrt.embedding.owners import Owners, StepUse
from hybridrt.embedding.page_owners import GroupOwners, PageOwners, PagePlaces
from hybridrt.embedding.positions import Positions
from hybridrt.kernels.core.chunk_plan import chunk_lists
from hybridrt.kernels.core.packed import A, int32_array, map_arrays
from hybridrt.kernels.core.records import TokenInputs
from hybridrt.kernels.core.slots import may_look
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.runtime.load.runtime import Runtime
from hybridrt.runtime.step.pack import StagingRing, make_batch
from hybridrt.runtime.step.recurrent_arrays import RecurrentArrays, set_recurrent

_NO_READS = np.zeros(0, np.int32)


class BatchArrays(NamedTuple, Generic[A]):
    """What a batch needs on the device.

    Attributes:
        rows, seq_lens: [B]; query_start_loc: [B + 1].
        token_rows, positions: [N] of the new tokens; input_ids: None if they are on the device
            already.
    """

    rows: A
    seq_lens: A
    query_start_loc: A
    token_rows: A
    positions: A
    input_ids: A | None
    recurrent: RecurrentArrays[A]


class Batches:
    """Makes batches. Rows and slots have the pools' numbers here; `make` translates its arguments.

    Attributes:
        owners: who owns rows, state slots and pages.
        positions: how many tokens each state includes.
        staging: copies columns to the device.
    """

    def __init__(self, runtime: Runtime, numbers: Numbers) -> None:
        self.numbers, self.backend, self.table = numbers, runtime.backend, runtime.pools.req_to_token
        self.max_pages = self.table.max_context // self.table.page_size
        self.device, self.vocab_size = runtime.target.device, runtime.target.model_config.vocab_size
        self.max_len = runtime.plan.max_model_len + runtime.config.num_verify_tokens - 1
        plan = runtime.plan
        groups = [(group.demand, group.num_pages) for group in plan.groups] or [(PageDemand(plan.page_size), 0)]
        pages = [PageOwners(plan.num_rows, self.max_pages, *group, numbers, g) for g, group in enumerate(groups)]
        self.owners = Owners(self.table.num_rows, plan.num_slots, GroupOwners(pages), numbers)
        self.positions = Positions(numbers.rows)
        self.staging = StagingRing(self.device)

    def make(
        self,
        input_ids: Array,
        rows: Array,
        seq_lens: Array,
        query_lens: Array | None,
        num_decode_rows: int,
        read_state_slots: Array | None,
        spec_info: SpecInfo | None,
    ) -> ForwardBatch:
        """`EmbeddedRuntime.batch` has the arguments and errors."""
        tokens = spec_info.tokens_per_row if spec_info else 1
        lines, lens = self.numbers.rows.all("rows", rows), host_integers("seq_lens", seq_lens)
        new = np.full(len(lines), tokens, np.int32) if query_lens is None else host_integers("query_lens", query_lens)
        split = len(lines) if query_lens is None else num_decode_rows
        if not len(lines) or not 0 <= split <= len(lines):
            raise BackendError(f"num_decode_rows is {split} in a batch of {len(lines)} rows")
        check_equal("rows", lines, "query_lens", new)
        self.check_lengths(lines, lens, new)
        if (new[:split] != tokens).any():
            raise BackendError(f"query_lens of decode rows is {new[:split].tolist()}; each has {tokens} tokens")
        num_real = self.check_rows(lines)
        reads = None
        if read_state_slots is not None:
            reads = self.numbers.state_slots.all("read_state_slots", read_state_slots)
        padded = split if spec_info is not None and spec_info.num_drafts is not None else 0
        use = self.use(lines[:num_real], lens, new, split, tokens > 1, reads, padded)
        sizes = self.backend.chunk_sizes if split < len(lines) else ()
        computed, added = (lens - new)[split:].tolist(), new[split:].tolist()
        chunks = tuple(map_arrays(int32_array, chunk_lists(computed, added, size)) for size in sizes)
        given, ids = self.take_ids(input_ids, int(new.sum()))
        on_host = _pack(lines, lens, new, ids, RecurrentArrays(reads, chunks))
        arrays: BatchArrays[torch.Tensor] = self.staging.upload(on_host)
        batch = make_batch(
            self.backend, arrays.rows, arrays.seq_lens, arrays.query_start_loc,
            self._inputs(arrays, given, split * tokens, spec_info), split, spec_info, num_real,
            seq_lens_cpu=lens.tolist(), query_lens_cpu=new.tolist(),
        )  # fmt: skip
        set_recurrent(batch, on_host.recurrent, arrays.recurrent, sizes)
        self.owners.note(batch, use)
        if self.table.mamba_pool is not None:
            self.positions.note(batch, lines, lens - new, lens, reads)
        return batch

    def check_rows(self, lines: np.ndarray) -> int:
        """The number of real rows. They come first, were admitted, and share neither row nor slot."""
        num_real = int(np.count_nonzero(lines))
        real = lines[:num_real]
        if not real.all():
            raise BackendError("a padding row (the scratch row) comes before a real one; padding rows come last")
        self.numbers.rows.check_once("rows", real)
        self.owners.check_rows(real)
        return num_real

    def use(
        self, real: np.ndarray, lens: np.ndarray, new: np.ndarray, decodes: int, verifies: bool = False,
        reads: np.ndarray | None = None, padded: int = 0,
    ) -> StepUse:  # fmt: skip
        """What a step of these real rows names.

        Args:
            lens, new: tokens of the rows after the step, and in it; padding rows may follow.
            padded: first rows whose drafts may be padding, which needs no page.

        Raises:
            PoolError: a row has lost its slot or a page, or a token of the step, or one that it sees,
                has no page.
        """
        ends, starts = lens[: len(real)], (lens - new)[: len(real)]
        if reads is None or len(reads) != len(lens) - decodes:  # the backend refuses another number
            reads = _NO_READS
        use = self.owners.use(real, starts, ends, decodes, verifies, reads)
        for writes in use.writes if self.owners.pages.known else ():
            missing = writes.pages == 0
            if missing.any():
                missing &= ~np.isin(writes.lines, real[:padded])
                self._refuse_missing(use, writes, missing)
        self.owners.check_seen(use)
        return use

    def _refuse_missing(self, use: StepUse, writes: PagePlaces, missing: np.ndarray) -> None:
        if missing.any():
            i = int(missing.argmax())
            line, start = int(writes.lines[i]), int(writes.indices[i]) * self.table.page_size
            position = max(start, int(use.starts[(use.lines == line).argmax()]))
            row = self.numbers.rows.outside(line)
            raise PoolError(f"row {row} has no page for position {position}: call write_pages, and admit before it")

    def admit_rows(self, lines: np.ndarray, state_slots: np.ndarray) -> None:
        """Rows begin new requests, with these slots and without pages."""
        self.owners.admit_rows(lines, state_slots)
        self.positions.admit_rows(lines.tolist(), state_slots.tolist())

    def places_of_tokens(
        self, lines: torch.Tensor, positions: torch.Tensor, places: torch.Tensor
    ) -> tuple[PagePlaces, ...] | None:
        """The checked pages of tokens that tensors on the device enter: `places` [n, G]. None where
        values are not read; then pages are not checked any more.

        Raises:
            PoolError: a token is at another offset in its page, or as PageOwners.checked.
        """
        if not may_look(self.device):
            return None
        size, rows = self.table.page_size, lines.cpu().numpy().astype(np.int32)
        at, to = (values.cpu().numpy().astype(np.int32) for values in (positions, places))
        wrong = (at[:, None] % size != to % size) & (to >= size)
        if wrong.any():
            i, group = (int(place) for place in np.argwhere(wrong)[0])
            raise PoolError(
                f"position {at[i]} gets offset {to[i, group] % size} of a page; the tokens of a page lie side by side, "
                f"so its offset is {at[i] % size}"
            )
        return self.checked_places(rows, at // size, to // size)

    def checked_places(self, lines: np.ndarray, indices: np.ndarray, pages: np.ndarray) -> tuple[PagePlaces, ...]:
        """`pages`: [n, G]."""
        real = lines > 0
        return self.owners.pages.checked(lines[real], indices[real], pages[real], self.owners.lengths_ahead())

    def note_pages(self, places: tuple[PagePlaces, ...] | None) -> None:
        """Enters pages of rows; None: only the device knows them."""
        if places is None:
            self.owners.pages.forget_tables()
        elif self.owners.pages.known:
            self.owners.pages.map(places)

    def check_lengths(self, lines: np.ndarray, lens: np.ndarray, new: np.ndarray) -> None:
        """BackendError if a length excludes new tokens or exceeds the longest request."""
        check_equal("rows", lines, "seq_lens", lens)
        wrong = np.flatnonzero((new < 0) | (lens < new) | (lens > self.max_len))
        if len(wrong):
            i = int(wrong[0])
            raise BackendError(
                f"seq_lens[{i}] is {lens[i]} with {new[i]} new tokens; a length counts the new tokens, and is at most "
                f"{self.max_len}"
            )

    def take_ids(self, input_ids: Array, count: int) -> tuple[torch.Tensor | None, np.ndarray | None]:
        """Checks `input_ids` [count]. Returns an int32 tensor on the device as it is, anything else
        as an array to be copied; the other one is None."""
        if isinstance(input_ids, torch.Tensor) and input_ids.device == self.device and input_ids.dtype == torch.int32:
            if input_ids.shape != (count,):
                raise BackendError(f"input_ids has shape {tuple(input_ids.shape)}; the rows have {count} new tokens")
            return input_ids, None
        ids = host_integers("input_ids", input_ids)
        if len(ids) != count:
            raise BackendError(f"input_ids has {len(ids)} tokens; the rows have {count} new tokens")
        check_within("input_ids", ids, self.vocab_size)
        return None, ids

    def _inputs(
        self, arrays: BatchArrays[torch.Tensor], given: torch.Tensor | None, decoded: int, spec: SpecInfo | None
    ) -> TokenInputs:
        """The first `decoded` tokens are of decode rows. `given`: ids that were not copied."""
        ids, positions = arrays.input_ids if given is None else given, arrays.positions
        assert ids is not None
        places = self.table.token_slots(arrays.token_rows, positions)
        if spec is not None and spec.num_drafts is not None:  # padding drafts have no place
            order = torch.arange(spec.tokens_per_row, device=self.device)
            padding = order > spec.num_drafts[: decoded // spec.tokens_per_row, None]
            places[..., :decoded].masked_fill_(padding.flatten(), 0)
        if spec is not None and spec.mask is not None:
            positions[:decoded] = spec.positions(positions[:decoded])
        return TokenInputs(ids, positions, places)


def _pack(
    lines: np.ndarray,
    lens: np.ndarray,
    new: np.ndarray,
    ids: np.ndarray | None,
    recurrent: RecurrentArrays[np.ndarray],
) -> BatchArrays[np.ndarray]:
    ends = np.cumsum(new, dtype=np.int32)
    offsets = np.repeat(lens - ends, new)  # position minus place in the batch
    starts, positions = np.concatenate((np.zeros(1, np.int32), ends)), offsets + np.arange(len(offsets), dtype=np.int32)
    return BatchArrays(lines, lens, starts, np.repeat(lines, new), positions, ids, recurrent)
