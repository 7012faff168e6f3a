"""`EmbeddedRuntime`: a model with its pools and backends that runs a host engine's steps."""

from collections.abc import Sequence

import numpy as np
import torch

from hybridrt.base.config_json import check_fields, integer
from hybridrt.base.errors import BackendError, PoolError
from hybridrt.base.forward_batch import ForwardBatch, SpecInfo
from hybridrt.base.turns import in_undisturbed
from hybridrt.embedding.batches import Batches
from hybridrt.embedding.decode_graphs import DecodeGraphs
from hybridrt.embedding.numbers import Array, Numbers, check_equal, check_on_device, check_within, host_integers
from hybridrt.kernels.core.slots import check_range, may_look
from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.runtime.load.runtime import Runtime
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.step.pack import PageEntries


class EmbeddedRuntime:
    """Runs the steps that a host engine plans; `hybridrt.embedding.build` makes it.

    Rows, state slots and pages are the host engine's own numbers. An Array is a list, a numpy array
    or a CPU tensor of integers, [n]. Methods queue work on the device and do not wait for it. Each
    checks all arguments before it changes anything. Not thread-safe.

    Attributes:
        plan: rows, slots and pages that the host engine may hand out.
        numbers: translates the host engine's numbers.
        model, pools, backend: the parts, where scratch entries are 0.
    """

    def __init__(self, runtime: Runtime, numbers: Numbers) -> None:
        self.config, self.plan, self.numbers = runtime.config, runtime.plan, numbers
        self.model, self.pools, self.backend = runtime.model, runtime.pools, runtime.backend
        self.device = runtime.target.device
        self._batches = Batches(runtime, numbers)
        self._positions, self._owners = self._batches.positions, self._batches.owners
        self._open: ForwardBatch | None = None  # its `commit` is missing

    # -- memory -------------------------------------------------------------------------------------------------

    @in_undisturbed
    @torch.inference_mode()
    def admit(self, rows: Array, state_slots: Array | None = None) -> None:
        """Each of `rows` begins a request. It owns its state slot, which is zeroed, and has no
        pages.

        Args:
            state_slots: one for each row; None for a model without recurrent layers.

        Raises:
            PoolError: a number is scratch, outside its table or there twice; slots are missing; a
                step waits for its commit, or names the row or the slot and has not run.
        """
        self._require_commit("admit")
        lines = self.numbers.rows.own("rows", rows)
        if self.pools.req_to_token.mamba_pool is None:
            self._owners.check_free(lines, np.zeros_like(lines))
            self._batches.admit_rows(lines, np.zeros_like(lines))
            return
        if state_slots is None:
            raise PoolError("the model has recurrent layers: admit needs a state slot for each row")
        places = self.numbers.state_slots.own("state_slots", state_slots)
        check_equal("rows", lines, "state_slots", places)
        self._owners.check_free(lines, places)
        self._batches.admit_rows(lines, places)
        self.pools.req_to_token.admit_rows(*self._batches.staging.upload((lines, places)))

    @in_undisturbed
    @torch.inference_mode()
    def write_pages(self, rows: Array, page_indices: Array, pages: Array) -> None:
        """KV page `pages[i]` holds the tokens of row `rows[i]` from page_indices[i] * page_size on.
        Does nothing without attention layers.

        Args:
            pages: [n], or [n, G] for a model with G page groups: a page of each group
                (`plan.groups`). A window group may have the scratch page where all windows of later
                tokens have passed.

        Raises:
            PoolError: a row or page is scratch or outside its table; a row would have a page at two
                places; a step that has not run uses the page that the place has.
            BackendError: a page index is outside the row's table, or the arrays differ in length or
                number of page groups.
        """
        table = self.pools.req_to_token
        if not table.max_context:
            return
        lines, places = self.numbers.rows.real("rows", rows), self._page_sets(pages)
        indices = host_integers("page_indices", page_indices)
        check_equal("rows", lines, "page_indices", indices)
        check_equal("rows", lines, "pages", places)
        check_within("page_indices", indices, table.max_context // table.page_size)
        self._batches.note_pages(self._batches.checked_places(lines, indices, places))
        entries = self._batches.staging.upload(PageEntries(lines, indices, places))
        table.write_pages(entries.rows, entries.indices, entries.pages)

    def _page_sets(self, pages: Array) -> np.ndarray:
        """[n, G] int32 numbers of the pools, of a host engine's."""
        groups = self.plan.groups
        columns = [pages] if len(groups) < 2 else _columns("pages", pages, len(groups))
        own = [
            places.real("pages", column) if group.window is None else places.all("pages", column)
            for column, places, group in zip(columns, self.numbers.pages, groups)
        ]
        return np.stack(own, 1)

    @in_undisturbed
    @torch.inference_mode()
    def write_tokens(self, rows: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> None:
        """Token `positions[i]` of row `rows[i]` has KV place `places[i]`, page * page_size +
        offset: for engines that compute their table on the device. A page has its tokens in order,
        from offset 0 on. Does nothing without attention layers.

        Args:
            rows, positions: [n] int32 or int64 on the runtime's device; places also [n, G], as in
                `write_pages`. Values are checked on a CPU, and elsewhere with HYBRIDRT_DEBUG=1.

        Raises:
            BackendError: shapes, dtypes or devices are wrong.
            PoolError: the errors of `write_pages`; or a token is at another offset in its page.
        """
        table, numbers = self.pools.req_to_token, self.numbers
        if not table.max_context:
            return
        for name, tensor, end in (("rows", rows, numbers.rows.count), ("positions", positions, table.max_context)):
            check_on_device(name, tensor, self.device)
            if tensor.ndim != 1 or tensor.shape != rows.shape:
                raise BackendError(f"{name} has shape {tuple(tensor.shape)}; rows and positions are [n] each")
            check_range(name, tensor, end)
        check_on_device("places", places, self.device)
        groups = table.num_groups
        if places.shape not in ((len(rows), groups), rows.shape if groups == 1 else ()):
            raise BackendError(
                f"places has shape {tuple(places.shape)}; {len(rows)} tokens in {groups} page groups need "
                f"({len(rows)}{f', {groups}' if groups > 1 else ''})"
            )
        sets = places.view(len(rows), groups)
        for group, own in enumerate(numbers.tokens):
            check_range("places", sets[:, group], own.count)
        lines = numbers.rows.inside(rows).long()
        inside = torch.stack([own.inside(sets[:, group]) for group, own in enumerate(numbers.tokens)], 1).int()
        self._batches.note_pages(self._batches.places_of_tokens(lines, positions, inside))
        table.tables[lines, :, positions.long()] = inside

    @in_undisturbed
    @torch.inference_mode()
    def snapshot(self, rows: Array, state_slots: Array) -> None:
        """Copies the recurrent state of `rows` into `state_slots`. A row that owned such a slot has
        lost it. KV is not copied.

        A request that uses the snapshot must continue at exactly the row's next position.

        Raises:
            PoolError: a number is scratch, outside its table or there twice; a row was not
                admitted, or has lost its slot, or the slot is its own; the model keeps no state; a
                step waits for its commit, or names the slot and has not run.
        """
        pool, lines, places = self._state_move("snapshot", rows, state_slots)
        pool.snapshot(*self._batches.staging.upload((lines, places)))
        self._owners.give(places)
        self._positions.snapshot(lines.tolist(), places.tolist())

    @in_undisturbed
    @torch.inference_mode()
    def restore(self, state_slots: Array, rows: Array) -> None:
        """Copies the states in `state_slots` into the slots of `rows`. PoolError as in `snapshot`,
        and if a step that has not run names a row."""
        pool, lines, places = self._state_move("restore", rows, state_slots)
        pool.restore(*self._batches.staging.upload((places, lines)))
        self._positions.restore(places.tolist(), lines.tolist())

    # -- steps --------------------------------------------------------------------------------------------------

    @in_undisturbed
    @torch.inference_mode()
    def batch(
        self,
        *,
        input_ids: Array,
        rows: Array,
        seq_lens: Array,
        query_lens: Array | None = None,
        num_decode_rows: int = 0,
        read_state_slots: Array | None = None,
        spec_info: SpecInfo | None = None,
    ) -> ForwardBatch:
        """A step of B rows and N tokens: decode rows first, padding rows last. Write the pages of
        its tokens before.

        Args:
            input_ids: [N] tokens, row after row. An int32 tensor on the runtime's device is used
                without a copy, and may be filled until `forward`.
            rows: [B]; the scratch row is a padding row.
            seq_lens: [B] tokens of each request after this step.
            query_lens: [B] tokens of each row in this step; None: all are decode rows.
            num_decode_rows: first rows, which decode one token or verify spec_info.tokens_per_row.
            read_state_slots: [B - num_decode_rows] from which the other rows start; scratch: the
                row's own. A row always leaves its state in its own slot.
            spec_info: drafts of the decode rows, tensors on the runtime's device.

        Raises:
            BackendError: an array of the wrong kind, dtype or length; lengths or tokens out of
                range.
            PoolError: a number outside its table; a row that was not admitted, is there twice,
                lacks a page, or has lost its slot or a page to another row; a page that one row of
                the step writes and another one has.
        """
        return self._batches.make(input_ids, rows, seq_lens, query_lens, num_decode_rows, read_state_slots, spec_info)

    @in_undisturbed
    @torch.inference_mode()
    def prepare(self, batch: ForwardBatch) -> None:
        """Makes the metadata of a step: host work and copies. Call it once a step, before
        `forward`. Several steps may be prepared; run them in the same order.

        Raises:
            BackendError: the batch contradicts itself or the pools, or a row does not continue at
                the end of its state.
            PoolError: rows, slots or pages have changed hands since the batch was made.
        """
        step, use = self._positions.step_of_batch(batch), self._owners.use_of_batch(batch)
        self._positions.check_step(step)
        self._owners.check_step(use)
        self._owners.check_seen(use)
        self.backend.prepare(batch)
        self._positions.prepared(step)
        self._owners.prepared(use)

    @in_undisturbed
    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Runs the layers of a prepared step. Writes KV, and the states of the rows that do not
        decode.

        Returns:
            [N, hidden] in the model's dtype.

        Raises:
            BackendError: the step was not prepared, or the step before has not run or waits for its
                commit.
        """
        self._require_commit("forward", BackendError)
        self._owners.check_next(self._owners.use_of_batch(batch))
        check_range("input_ids", batch.input_ids, self._batches.vocab_size, BackendError)  # they may be filled late
        hidden: torch.Tensor = self.model(batch)
        self._positions.ran(self._positions.step_of_batch(batch))
        self._owners.ran(self._owners.use_of_batch(batch))
        self._open = batch if batch.num_decode_rows else None
        return hidden

    @in_undisturbed
    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of any tokens to [n, vocab]."""
        return self.model.logits(hidden)

    @in_undisturbed
    @torch.inference_mode()
    def commit(self, batch: ForwardBatch, accepted: Array | None = None, path: torch.Tensor | None = None) -> None:
        """Makes the accepted tokens of decode rows part of their states. Call it after `forward` of
        each step with decode rows, in every state mode.

        Args:
            accepted: [n] tokens that stay of the first n verify rows, the root included: 1 to T, 0
                for padding rows. It may be an integer tensor on the device. None for plain decode.
            path: [n, T] int64 places of the accepted inputs in their row; None: the first ones.

        Raises:
            BackendError: this batch was not the last to run, or `accepted` does not fit it.
        """
        if batch is None or batch is not self._open:
            raise BackendError("commit is for the batch that forward ran last, once, if it has decode rows")
        self.backend.commit(batch, self._accepted(batch, accepted), path)
        if accepted is not None:
            self._positions.accepted(self._positions.step_of_batch(batch), accepted)
        self._open = None

    @in_undisturbed
    def drop(self) -> None:
        """Discards all prepared steps after a failure. States and KV of their rows are unknown:
        admit their requests again."""
        self.backend.drop_step()
        self._positions.drop(self._positions.step_of_batch(self._open) if self._open else None)
        self._owners.drop()
        self._open = None

    @in_undisturbed
    def capture(self, max_rows: int | None = None, sizes: Sequence[int] = ()) -> DecodeGraphs:
        """Records decode steps of one token a row; see `DecodeGraphs`.

        Args:
            max_rows: rows of the largest graph; None: all rows of the plan.
            sizes: rows of the graphs' batches; (): a default choice.

        Raises:
            ConfigError: max_rows is below 1. PoolError: a step waits for its commit.
        """
        self._require_commit("capture")
        for size in (*sizes, 1 if max_rows is None else max_rows):
            check_fields({"max_rows and sizes": size}, {"max_rows and sizes": integer(-(2**31), 2**31)})
        last_tokens = torch.zeros(self.plan.num_rows + 1, dtype=torch.int32, device=self.device)
        graphs = GraphRunner(
            model=self.model,
            backend=self.backend,
            req_to_token_pool=self.pools.req_to_token,
            last_tokens=last_tokens,
            max_bs=self.plan.num_rows if max_rows is None else max_rows,
        )
        graphs.capture(sizes=sizes)
        return DecodeGraphs(graphs, last_tokens, self._batches, self._require_commit)

    # -- checks -------------------------------------------------------------------------------------------------

    def _require_commit(self, what: str, error: type[Exception] = PoolError) -> None:
        if self._open is not None:
            raise error(f"{what} while a step waits for its commit: call commit(batch), or drop() to give it up")

    def _state_move(self, what: str, rows: Array, state_slots: Array) -> tuple[MambaPool, np.ndarray, np.ndarray]:
        self._require_commit(what)
        pool = self.pools.req_to_token.mamba_pool
        if pool is None:
            raise PoolError(f"the model has no recurrent layers: there is no state to {what}")
        lines, places = self.numbers.rows.own("rows", rows), self.numbers.state_slots.own("state_slots", state_slots)
        check_equal("rows", lines, "state_slots", places)
        self._owners.check_rows(lines)
        own = self._owners.slot_of[lines] == places
        if own.any():
            slot = self.numbers.state_slots.outside(int(places[own.argmax()]))
            raise PoolError(f"{what}: slot {slot} is the row's own")
        nothing = lines[:0]
        self._owners.check_free(*((nothing, places) if what == "snapshot" else (lines, nothing)))
        return pool, lines, places

    def _accepted(self, batch: ForwardBatch, accepted: Array | None) -> torch.Tensor | None:
        if (batch.spec_info is None) != (accepted is None):
            raise BackendError("accepted is for verify steps, which need it: how many tokens of each row stay")
        if accepted is None:
            return None
        if isinstance(accepted, torch.Tensor) and accepted.device == self.device:
            check_on_device("accepted", accepted, self.device)
            kept = accepted.int()
        else:
            (kept,) = self._batches.staging.upload((host_integers("accepted", accepted),))
        split = batch.num_decode_rows
        if kept.ndim != 1 or not min(batch.num_real, split) <= len(kept) <= split:
            raise BackendError(f"accepted has shape {tuple(kept.shape)}; the step verified {split} rows")
        check_range("accepted", kept, batch.tokens_per_row + 1, BackendError)
        if may_look(self.device) and not kept[: batch.num_real].all():
            raise BackendError("accepted is 0 for a real row; its first token always stays: pass 1 or more")
        return kept


def _columns(name: str, values: Array, count: int) -> list[np.ndarray]:
    """The columns of [n, count] integers. BackendError for another shape."""
    try:
        found = values if isinstance(values, torch.Tensor) else np.asarray(values)
    except ValueError as e:  # lists of different lengths
        raise BackendError(f"{name} is no array of integers: {e}") from e
    if found.ndim != 2 or found.shape[1] != count:
        raise BackendError(
            f"{name} has shape {tuple(found.shape)}; {count} page groups need [n, {count}], a page of each"
        )
    return [host_integers(name, found[:, column]) for column in range(count)]
