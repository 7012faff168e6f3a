"""Device tables from a request row to its KV token slots and its recurrent state slot."""

import torch

from hybridrt.kernels.core.slots import check_range
from hybridrt.kernels.state.row_tables import enter_pages
from hybridrt.mem_cache.pools.mamba_pool import LayerCache, MambaPool


class HybridReqToTokenPool:
    """Rows of running requests. Row 0 is padding: its token slots are page 0 and its state slot is
    0. The host decides who owns an entry (slots.py); kernels read these tables.

    Args:
        num_groups: page groups of the KV pool.
        mrope: positions have three axes.

    Attributes:
        tables: [R + 1, G, max_context] int32 token slots in each page group, contiguous within a
            page. A model without attention layers has max_context 0: all of its tokens are at slot 0.
        req_to_token: [R + 1, max_context], the table of the first page group.
        req_to_state_slot: [R + 1] int32 state slots, which the state pool owns if there is one.
        mamba_pool: None for a model without recurrent layers.
        mrope_deltas: [R + 1] int32, position of a row's generated token, less its index; None:
            without `mrope`.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_context: int,
        page_size: int,
        mamba_pool: MambaPool | None,
        device: torch.device | str,
        num_groups: int = 1,
        mrope: bool = False,
    ) -> None:
        self.num_rows = num_rows
        self.page_size = page_size
        self.max_context = -(-max_context // page_size) * page_size
        self.mamba_pool = mamba_pool
        self.num_groups = num_groups
        self.tables = torch.zeros((num_rows + 1, num_groups, self.max_context), dtype=torch.int32, device=device)
        self.req_to_token = self.tables[:, 0]
        self._enter_pages = enter_pages.for_device(self.tables.device)
        self.mrope_deltas = torch.zeros(num_rows + 1, dtype=torch.int32, device=device) if mrope else None
        no_slots = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.req_to_state_slot = no_slots if mamba_pool is None else mamba_pool.req_to_state_slot

    @staticmethod
    def row_bytes(max_context: int, page_size: int, num_groups: int = 1) -> int:
        """Bytes of one row: its page tables and its state slot."""
        return 4 * (-(-max_context // page_size) * page_size * num_groups + 1)

    def admit_rows(self, rows: torch.Tensor, state_slots: torch.Tensor, phases: torch.Tensor | None = None) -> None:
        """Gives each of `rows` its zeroed state slot. [n] integers each; `phases` and padding as in
        MambaPool. PoolError for a row or a slot that the state pool does not have.
        """
        if self.mamba_pool is not None:
            self.mamba_pool.admit_rows(rows, state_slots, phases)

    def write_pages(self, rows: torch.Tensor, page_indices: torch.Tensor, pages: torch.Tensor) -> None:
        """Makes KV page `pages[i, g]` page number `page_indices[i]` of row `rows[i]` in each page
        group g. [n], [n] and [n, G] integers ([n] for one group); page 0 as the first page of row 0
        is padding. Does nothing for a model without attention layers.

        Raises:
            PoolError: a row that this pool does not have, or a page after the last one of a row.
        """
        if not self.max_context:
            return
        check_range("rows", rows, self.num_rows + 1)
        check_range("page_indices", page_indices, self.max_context // self.page_size)
        self._enter_pages(rows, page_indices, pages.view(len(pages), self.num_groups), self.tables, self.page_size)

    def state_slots(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """State slots of rows: [B] int32 to [B] int32."""
        return self.req_to_state_slot[req_pool_indices]

    def get_mamba_indices(self, req_indices: torch.Tensor) -> torch.Tensor:
        """`state_slots` under SGLang's name: request rows [n] to state slots [n] int32."""
        return self.state_slots(req_indices)

    def token_slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """KV slots of (row, position) pairs: [T] int32, or [G, T] with G > 1 page groups."""
        if not self.max_context:
            return torch.zeros_like(positions, dtype=torch.int32)
        if self.num_groups == 1:
            return self.req_to_token[rows, positions]
        return self.tables.transpose(0, 1)[:, rows, positions]  # kernels read each group's slots as one run

    def mamba2_layer_cache(self, layer_id: int) -> LayerCache:
        assert self.mamba_pool is not None, "the model has no recurrent layers"
        return self.mamba_pool.layer_cache(layer_id)
