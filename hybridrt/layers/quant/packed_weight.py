"""Quantised matrices in memory: codes, grids of scales, and which scale each number has.

    w[r, c] = (number(codes[r, c]) - zeros[R, C]) * scales[R, C] * factor[r],   R = row_of[r], C = column_of[c]

The number of an int4 code is the code less 8, that of e2m1 and e4m3 what its bits mean (`Codes.decode`). Zero points
are less the same 8, and so int8 (`layouts.CENTRES`); `QuantWeight` has those of int4 with it.

Parts of a merged matrix keep their own scales, and a part or a rank may begin within a block: both
tables are made of the places that a part's numbers have in the checkpoint.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from hybridrt.base.errors import CheckpointError
from hybridrt.base.quantization import Scheme
from hybridrt.kernels.quant.decode import decode_fp4, decode_fp8, decode_int4, decode_int8, take_pairs
from hybridrt.layers.quant.layouts import LAYOUTS, bits_of, stored_width
from hybridrt.layers.weights import Build, parameter

BLOCK = 1 << 18  # numbers of a block of rows that is decoded at once


@dataclass(frozen=True)
class Grid:
    """Scales or zero points of a part: values [R, C], the row of each output [n], and the column of
    each input [width]; None: input // block."""

    values: Tensor
    row_of: Tensor
    column_of: Tensor | None


@dataclass(frozen=True)
class Codes:
    """A format of codes: how it is stored and decoded. dummy_scale: of random codes."""

    dtype: torch.dtype
    decode: Callable[[Tensor, int], Tensor]
    dummy_scale: float


CODES = {
    "fp8": Codes(torch.float8_e4m3fn, decode_fp8, 2.0**-6),
    "int8": Codes(torch.int8, decode_int8, 2.0**-12),
    "int4": Codes(torch.uint8, decode_int4, 2.0**-8),
    "fp4": Codes(torch.uint8, decode_fp4, 2.0**-7),
}


class PackedWeight:
    """`count` matrices [sum of sizes, width] of one scheme.

    Args:
        sizes: rows of the merged parts.

    Attributes:
        codes: [E, rows, `stored_width`] in the normal form of `layouts`, or in torch's if there is `for_torch`.
        scales: [E, R, C] in `scheme.scale_dtype`; zeros: int8 [E, R, C], or None.
        factor: float32 [E, rows], or None.
        row_of: int32 [rows], the scale row of each row; None if R is 1 or `rows`.
        column_of: int32 [E, parts, width], or [1, 1, width] if it is one for all; None: input // block.
        for_torch: [E, groups, rows rounded up to 16, 2], scales and zero points of torch's kernel on a CPU.
    """

    def __init__(self, scheme: Scheme, sizes: tuple[int, ...], width: int, build: Build, count: int = 1) -> None:
        self.scheme, self.sizes, self.width, self.count = scheme, sizes, width, count
        self.format = CODES[scheme.method]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        device, rows, (high, wide) = build.device, self.starts[-1], scheme.block
        self.heights = [block_count(size, high) for size in sizes]
        grid = (sum(self.heights), block_count(width, wide))
        stored = stored_width(scheme, width)
        self.codes = parameter(count, rows, stored, dtype=self.format.dtype, device=device, dummy="codes")
        self.scales = parameter(count, *grid, dtype=scheme.scale_dtype, device=device, dummy=self.format.dummy_scale)
        self.zeros: nn.Parameter | None = None
        if scheme.zeros:
            self.zeros = parameter(count, *grid, dtype=torch.int8, device=device, dummy="zeros")
        self.factor = self._ones() if LAYOUTS[scheme.layout].factor else None
        self.row_of = None if grid[0] in (1, rows) else _index(self._regular_rows(), device)
        self.column_of: nn.Parameter | None = None
        self.for_torch: nn.Parameter | None = None  # scales and zero points, if the codes are stored for torch's kernel
        self._grids: dict[tuple[int, int], tuple[Grid, Grid | None]] = {}

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in vars(self).items() if isinstance(value, nn.Parameter)}

    def _regular_rows(self) -> Tensor:
        """The scale row of each row, if each part begins with a block."""
        high, tops = self.scheme.block[0], [sum(self.heights[:i]) for i in range(len(self.sizes))]
        each = [top + torch.arange(size) // (high or size) for top, size in zip(tops, self.sizes, strict=True)]
        return torch.cat(each)

    def set_grids(self, e: int, part: int, scales: Grid, zeros: Grid | None) -> None:
        """The scales and zero points of a part. Those of the last part complete the weight."""
        self._grids[e, part] = scales, zeros
        if len(self._grids) == self.count * len(self.sizes):
            self._join()

    def _join(self) -> None:
        parts = range(len(self.sizes))
        found = [[self._grids[e, p] for p in parts] for e in range(self.count)]
        self._grids = {}
        if any(not torch.equal(each[p][0].row_of, found[0][p][0].row_of) for each in found[1:] for p in parts):
            raise CheckpointError(
                "matrices of a layer's experts lie differently in the blocks of their scales; store each matrix as a "
                "module of its own"
            )
        self.scales.data = _stacked([[scales.values for scales, _ in each] for each in found], self.codes.device)
        if self.zeros is not None:
            values = [[zeros.values for _, zeros in each if zeros is not None] for each in found]
            self.zeros.data = _stacked(values, self.codes.device)
        tops = [sum(len(scales.values) for scales, _ in found[0][:p]) for p in parts]
        rows = torch.cat([top + scales.row_of for top, (scales, _) in zip(tops, found[0], strict=True)])
        trivial = self.scales.shape[1] == 1 or torch.equal(rows, torch.arange(len(rows)))
        self.row_of = None if trivial else _index(rows, self.codes.device)
        self._join_columns([scales.column_of for each in found for scales, _ in each])

    def _join_columns(self, found: list[Tensor | None]) -> None:
        if all(each is None for each in found):
            self.column_of = None
            return
        wide = self.scheme.block[1]
        regular = torch.arange(self.width) // (wide or self.width)
        table = torch.stack([regular if each is None else each for each in found])
        if bool((table == table[0]).all()):
            table = table[:1]
        shape = (self.count, len(self.sizes), self.width) if len(table) > 1 else (1, 1, self.width)
        self.column_of = _index(table.view(shape), self.codes.device)

    def row_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows that `dequantize` decodes at once, in order."""
        step = max(1, BLOCK // self.width)
        own = self.column_of is not None and self.column_of.shape[1] > 1
        edges = self.starts if own else [0, self.starts[-1]]
        for start, end in pairwise(edges):
            yield from ((at, min(at + step, end)) for at in range(start, end, step))

    def dequantize(self, start: int = 0, end: int | None = None, e: int = 0) -> Tensor:
        """float32 [end - start, width], for rows of one part if parts have columns of their own."""
        end = self.starts[-1] if end is None else end
        values = self.decoded(start, end, e)
        scales = self._rows(self.scales, e, start, end).float()
        if self.factor is not None:
            scales = scales * self.factor[e, start:end, None]
        zeros = None if self.zeros is None else self._rows(self.zeros, e, start, end).float()
        return self._scaled(values, scales, zeros, self._columns(e, start))

    def decoded(self, start: int, end: int, e: int = 0) -> Tensor:
        """float32 [end - start, width] without scales."""
        return self.format.decode(self.codes[e, start:end], self.width)

    def row_scales(self, start: int, end: int, e: int = 0) -> Tensor | None:
        """float32 [end - start], or one number, if each row has one scale and no zero point."""
        if self.scales.shape[2] > 1 or self.zeros is not None or self.column_of is not None:
            return None
        scales = self._rows(self.scales, e, start, end).float().flatten()
        return scales if self.factor is None else scales * self.factor[e, start:end]

    def lookup(self, ids: Tensor) -> Tensor:
        """float32 [T, width]: rows `ids` of the one matrix."""
        values = self.format.decode(taken_rows(self.codes[0], ids), self.width)
        rows = ids if self.row_of is None else self.row_of[ids]
        scales, zeros = (
            None if grid is None else (grid[0] if grid.shape[1] == 1 else taken_rows(grid[0], rows)).float()
            for grid in (self.scales, self.zeros)
        )
        assert scales is not None
        if self.factor is not None:
            scales = scales * self.factor[0, ids, None]
        return self._scaled(values, scales, zeros, self._columns(0, 0))

    def _rows(self, grid: Tensor, e: int, start: int, end: int) -> Tensor:
        """[rows or 1, C] of a grid."""
        if grid.shape[1] == 1:
            return grid[e]
        return grid[e, start:end] if self.row_of is None else taken_rows(grid[e], self.row_of[start:end])

    def _columns(self, e: int, start: int) -> Tensor | None:
        table = self.column_of
        if table is None:
            return None
        part = sum(edge <= start for edge in self.starts[1:]) if table.shape[1] > 1 else 0
        return table[min(e, len(table) - 1), part]

    def _scaled(self, values: Tensor, scales: Tensor, zeros: Tensor | None, columns: Tensor | None) -> Tensor:
        wide, count = self.scheme.block[1] or self.width, scales.shape[1]
        if columns is None and count > 1 and wide * count != self.width:  # the last group is partial
            columns = torch.arange(self.width, device=values.device) // wide
        if columns is not None:
            values = values if zeros is None else values - zeros[:, columns]
            return values.mul_(scales[:, columns])
        grouped = values.view(values.shape[0], count, -1)
        if zeros is not None:
            grouped = grouped.sub_(zeros.unsqueeze(-1))
        return grouped.mul_(scales.unsqueeze(-1)).view(values.shape[0], self.width)

    def fill_codes(self, e: int, part: int, codes: Tensor, rows: Tensor, columns: Tensor | None) -> None:
        """Fills a part. codes: normal form of a whole matrix, of which the part has `rows` and
        `columns`; None: all."""
        place = self.codes.data[e, self.starts[part] : self.starts[part + 1]].view(torch.uint8)
        taken = codes.view(torch.uint8)[_as_slice(rows)]
        if columns is not None:
            paired = bits_of(self.scheme) == 4
            taken = take_pairs(taken, columns.to(taken.device)) if paired else taken[:, _as_slice(columns)]
        place.copy_(taken)

    def grids(self, e: int) -> tuple[Tensor, Tensor | None]:
        """float32 scales and zero points of a matrix, [rows or 1, C]."""
        end = self.starts[-1]
        zeros = None if self.zeros is None else self._rows(self.zeros, e, 0, end).float()
        return self._rows(self.scales, e, 0, end).float(), zeros

    def hand_over(self, grids: nn.Parameter) -> None:
        """The codes are now in torch's layout, and `grids` has scales and zero points. From now on only
        `cpu_product.product` reads this weight, with bfloat16 inputs."""
        self.for_torch, self.row_of = grids, None
        for grid in (self.scales, self.zeros):
            if grid is not None:
                grid.data = grid.data.new_empty(0)

    def clear(self) -> None:
        """Frees the tensors, which another layout has now."""
        for param in self.parameters().values():
            param.data = param.data.new_empty(0)

    def scale_part(self, e: int, part: int, factor: float) -> None:
        """Multiplies a part's rows."""
        if factor == 1.0:
            return
        if self.factor is None:
            self.factor = self._ones()
        self.factor.data[e, self.starts[part] : self.starts[part + 1]] *= factor

    def _ones(self) -> nn.Parameter:
        shape = (self.count, self.starts[-1])
        param = parameter(*shape, dtype=torch.float32, device=self.codes.device, dummy="ones")
        param.data.fill_(1.0)
        return param


def block_count(size: int, block: int) -> int:
    """Blocks along a side of a matrix; a block of 0 is the whole side."""
    return -(-size // block) if block else 1


def _index(values: Tensor, device: torch.device) -> nn.Parameter:
    """Numbers on a device; `on_host` gives them again."""
    param = parameter(*values.shape, dtype=torch.int32, device=device, dummy="kept")
    param.data.copy_(values)
    param.on_host = values  # type: ignore[attr-defined]
    return param


def on_host(index: nn.Parameter) -> Tensor:
    """int64 numbers of a table of rows or columns, also where parameters have no data."""
    found: Tensor = index.on_host  # type: ignore[attr-defined]
    return found.long()


def _stacked(values: list[list[Tensor]], device: torch.device) -> Tensor:
    """[E, R, C] of the parts' [R, C]."""
    bytes_alike = values[0][0].dtype.itemsize == 1
    each = [torch.cat([t.view(torch.uint8) if bytes_alike else t for t in parts]) for parts in values]
    joined = torch.stack(each).to(device)
    return joined.view(values[0][0].dtype) if bytes_alike else joined


def taken_rows(grid: Tensor, rows: Tensor) -> Tensor:
    """Rows of a grid, also of dtypes that torch does not index."""
    if grid.dtype.itemsize == 1:
        return grid.view(torch.uint8).index_select(0, rows).view(grid.dtype)
    return grid.index_select(0, rows)


def _as_slice(index: Tensor) -> Tensor | slice:
    """A run of neighbours as a slice, which copies nothing."""
    first, last = int(index[0]), int(index[-1])
    run = last - first + 1 == len(index) and bool((index.diff() == 1).all())
    return slice(first, last + 1) if run else index
