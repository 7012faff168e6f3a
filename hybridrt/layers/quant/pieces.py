"""How a quantised module's tensors fill a packed weight, tensor by tensor in any order."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridrt.base.errors import CheckpointError
from hybridrt.base.quantization import Scheme, StoredModule
from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.quant.layouts import (
    LARGEST,
    LAYOUTS,
    bits_of,
    codes_shape,
    normal_codes,
    normal_scales,
    normal_zeros,
    outputs_of,
    whole_rows,
    zeros_shape,
)
from hybridrt.layers.quant.packed_weight import BLOCK, Grid, PackedWeight, block_count, taken_rows
from hybridrt.layers.weights import Build, CheckpointMap, Transform, unchanged


@dataclass(frozen=True)
class PackedPiece:
    """A part of a packed weight, filled by one module of the checkpoint or a part of it.

    Attributes:
        name: unique in the model. The loader checks that each tensor fills it once.
        e, part: place in the weight.
        dim, total: `select` takes rows (0) or columns (1) of a matrix that has `total` of them.
        scale: multiplier.
    """

    name: str
    weight: PackedWeight
    dim: int
    total: int
    select: Transform
    e: int = 0
    part: int = 0
    scale: float = 1.0
    held: dict[str, Tensor] = field(default_factory=dict)

    def fill(self, module: StoredModule, last: str, tensor: Tensor, chosen: Transform = unchanged) -> None:
        """Takes the module's tensor `last`, or what `chosen` takes of its plain weight.

        Raises:
            CheckpointError: a shape or a value that no such tensor has.
        """
        layout, key = LAYOUTS[module.scheme.layout], f"{module.name}.{last}"
        if last in layout.advice:
            return
        stacked, rows = self._rows(module, chosen)
        if stacked is not None:
            tensor = _of_expert(tensor, stacked, module.tensors[layout.codes][1][0])
        if last == layout.codes:
            if module.scheme.layout == "mxfp4":
                tensor = tensor.flatten(-2)
            self._fill_codes(module, key, tensor, rows)
            return
        self.held[last] = tensor.cpu().clone() if stacked is not None else tensor.cpu()
        if self.held.keys() == {name for name in module.tensors if name not in (*layout.advice, layout.codes)}:
            self._fill_grids(module, rows)

    def _rows(self, module: StoredModule, chosen: Transform) -> tuple[int | None, Tensor]:
        """The expert of a stack of matrices, and the rows in the checkpoint of this part's rows."""
        _, shape = module.tensors[LAYOUTS[module.scheme.layout].codes]
        count = shape[0] if len(shape) == 3 else 1
        outputs = outputs_of(module.scheme, shape[-2:])
        index = torch.arange(count * outputs).view(*shape[:-2], outputs, 1)
        try:
            found = chosen(index)
            found = (self.select(found) if self.dim == 0 else found).flatten()
        except (RuntimeError, IndexError) as e:
            raise CheckpointError(
                f"{module.name}: {self.name} cannot take its part of {outputs} outputs ({e}); config.json and weights "
                "do not belong together"
            ) from e
        wanted = self.weight.sizes[self.part]
        if len(found) != wanted:
            raise CheckpointError(
                f"{module.name}: {self.name} has {wanted} outputs, the checkpoint's {list(shape)} gives {len(found)}; "
                "config.json and weights do not belong together"
            )
        return (None if len(shape) == 2 else int(found[0]) // outputs), found % outputs

    def _columns(self) -> Tensor | None:
        """The columns in the checkpoint; None: all."""
        if self.dim == 0:
            return None
        found = self.select(torch.arange(self.total).view(1, -1)).flatten()
        return None if len(found) == self.total else found

    def _inputs(self) -> int:
        return self.total if self.dim == 1 else self.weight.width

    def _fill_codes(self, module: StoredModule, key: str, tensor: Tensor, rows: Tensor) -> None:
        scheme, inputs = module.scheme, self._inputs()
        check_codes(scheme, key, tensor, inputs)
        codes = normal_codes(scheme, tensor, inputs)
        self.weight.fill_codes(self.e, self.part, codes, rows, self._columns())

    def _fill_grids(self, module: StoredModule, rows: Tensor) -> None:
        shape = module.tensors[LAYOUTS[module.scheme.layout].codes][1]
        outputs = outputs_of(module.scheme, shape[-2:])
        found = ModuleScales.read(module, self.held, outputs, self._inputs())
        self.held.clear()
        scales, zeros = (
            None if grid is None else selected(module.scheme, grid, rows, self._columns(), found.index)
            for grid in (found.scales, found.zeros)
        )
        assert scales is not None
        self.weight.set_grids(self.e, self.part, scales, zeros)
        self.weight.scale_part(self.e, self.part, found.factor * self.scale)


def set_multipliers(targets: CheckpointMap) -> None:
    """Gives packed weights the model's multipliers without a checkpoint: what kernels read depends on them."""
    for pieces in targets.values():
        for piece in pieces:
            if isinstance(piece, PackedPiece):
                piece.weight.scale_part(piece.e, piece.part, piece.scale)


def decoded(module: StoredModule, tensors: Mapping[str, Tensor]) -> Tensor:
    """The float32 numbers of a module's tensors, in the shape of its weight: for layers that take plain
    weights only (routers, convolutions, latent projections), and for copies.

    Raises:
        CheckpointError: a shape or a value that no such tensor has.
    """
    last_codes = LAYOUTS[module.scheme.layout].codes
    codes, shape = tensors[last_codes], module.tensors[last_codes][1]
    if not codes.numel():
        raise CheckpointError(f"{module.name}.{last_codes} has shape {list(codes.shape)}; no side may be empty")
    if len(shape) == 2:
        return _decoded_matrix(module, tensors)
    if codes.dim() == 3 and shape[1] == 1:  # a convolution, which has one input channel
        return _decoded_matrix(module, {**tensors, last_codes: codes.flatten(1)}).unsqueeze(1)
    experts = ({last: _of_expert(t, e, shape[0]) for last, t in tensors.items()} for e in range(shape[0]))
    return torch.stack([_decoded_matrix(module, own) for own in experts])


def _decoded_matrix(module: StoredModule, tensors: Mapping[str, Tensor]) -> Tensor:
    """float32 [out, in] of one matrix of a module."""
    scheme, layout = module.scheme, LAYOUTS[module.scheme.layout]
    shape = whole_rows(scheme, tensors[layout.codes].shape)
    shapes = {last: (t.dtype, tuple(t.shape)) for last, t in tensors.items()}
    own = StoredModule(module.name, scheme, shapes | {layout.codes: (tensors[layout.codes].dtype, shape)})
    outputs, inputs = outputs_of(scheme, shape), _inputs_of(own, tensors.get(layout.shape))
    weight = PackedWeight(scheme, (outputs,), inputs, Build(TPGroup(), torch.float32, torch.device("cpu")))
    piece = PackedPiece(module.name, weight, 0, outputs, unchanged)
    for last, tensor in tensors.items():
        piece.fill(own, last, tensor)
    return weight.dequantize()


def _of_expert(tensor: Tensor, e: int, count: int) -> Tensor:
    """What a stack's tensor has for one of `count` experts: its own part, or one for all."""
    return tensor[e] if tensor.shape[:1] == (count,) else tensor


def _inputs_of(module: StoredModule, stored_shape: Tensor | None) -> int:
    """Inputs of a module of one matrix. Packed ones may be fewer than their words hold. CheckpointError: the file's
    shape says another number of words."""
    scheme, layout = module.scheme, LAYOUTS[module.scheme.layout]
    (_, shape), bits = module.tensors[layout.codes], bits_of(scheme)
    if stored_shape is not None:
        said, word = stored_shape.flatten().tolist(), 32 // bits
        if len(said) != 2 or not (shape[1] - 1) * word < said[1] <= shape[1] * word:
            raise CheckpointError(
                f"{module.name}.{layout.shape} is {said}; {module.name}.{layout.codes} has room for {shape[1] * word} "
                "inputs"
            )
        return int(said[1])
    if scheme.layout == "awq":
        return shape[0]
    if scheme.layout.startswith("gptq"):
        return shape[0] * 32 // bits
    return shape[1] * (32 // bits if scheme.layout == "compressed-packed" else 8 // bits)


@dataclass(frozen=True)
class ModuleScales:
    """A module's scales and zero points [R, C], the group of each input, and a factor of all."""

    scales: Tensor
    zeros: Tensor | None
    index: Tensor | None
    factor: float

    @classmethod
    def read(cls, module: StoredModule, held: Mapping[str, Tensor], outputs: int, inputs: int) -> "ModuleScales":
        """Checks and normalises a module's small tensors."""
        scheme, layout, name = module.scheme, LAYOUTS[module.scheme.layout], module.name
        grid = grid_of(scheme, name, outputs, inputs)
        key, found = f"{name}.{layout.scale}", held[layout.scale]
        scales = normal_scales(scheme, found, grid)
        if scales is None:
            raise CheckpointError(
                f"{key} has shape {list(found.shape)}; a matrix [{outputs}, {inputs}] in blocks of "
                f"{_shown(scheme)} has {list(grid)} scales"
            )
        check_scales(scheme, key, scales)
        zeros, index, factor = held.get(layout.zeros), held.get(layout.index), held.get(layout.factor)
        if zeros is not None:
            wanted = zeros_shape(scheme, grid, outputs)
            zeros = zeros.reshape(wanted) if zeros.shape in ((), (1,)) and wanted == (1, 1) else zeros
            check_shape(f"{name}.{layout.zeros}", zeros, wanted)
            zeros = normal_zeros(scheme, zeros, outputs)
        if index is not None:
            index = checked_index(f"{name}.{layout.index}", index, inputs, grid[1])
        if layout.shape in held:
            check_stored_shape(f"{name}.{layout.shape}", held[layout.shape], (outputs, inputs))
        value = 1.0 if factor is None else _factor(module, factor)
        check_range(scheme, key, scales, value)
        return cls(scales, zeros, index, value)


def selected(scheme: Scheme, grid: Tensor, rows: Tensor, columns: Tensor | None, index: Tensor | None) -> Grid:
    """The part of a grid for `rows` and `columns` of its matrix."""
    high, wide = scheme.block
    used, row_of = torch.unique_consecutive(rows // high if high else torch.zeros_like(rows), return_inverse=True)
    grid = taken_rows(grid, used)
    if columns is None and index is None:
        return Grid(grid, row_of, None)
    if index is not None:  # all groups, because parts of a weight have equally many
        own = index if columns is None else index[columns]
        regular = columns is None and torch.equal(own, torch.arange(len(own)) // (wide or len(own)))
        return Grid(grid, row_of, None if regular else own)
    assert columns is not None
    kept, column_of = (columns // wide if wide else torch.zeros_like(columns)).unique_consecutive(return_inverse=True)
    regular = torch.equal(column_of, torch.arange(len(columns)) // (wide or len(columns)))
    return Grid(taken_rows(grid.t(), kept).t().contiguous(), row_of, None if regular else column_of)


def grid_of(scheme: Scheme, name: str, outputs: int, inputs: int) -> tuple[int, int]:
    """The size of a grid of scales. CheckpointError: groups do not divide the inputs."""
    wide, partial = scheme.block[1], scheme.method == "fp8" or scheme.layout.startswith("gptq")
    if wide and inputs % wide and not partial:
        raise CheckpointError(f"{name} has {inputs} inputs, which group_size {wide} does not divide")
    return block_count(outputs, scheme.block[0]), block_count(inputs, wide)


def check_codes(scheme: Scheme, key: str, tensor: Tensor, inputs: int) -> None:
    """CheckpointError: codes of another shape, or that are no numbers."""
    check_shape(key, tensor, codes_shape(scheme, outputs_of(scheme, tensor.shape), inputs))
    if scheme.method == "fp8" and _has_nan(tensor):
        raise CheckpointError(f"{key} contains NaN; the file is damaged: download it again")


def _has_nan(codes: Tensor) -> bool:
    """Of e4m3 codes; by blocks of rows, because loading holds no more than a matrix and its codes."""
    rows = codes.view(torch.uint8).split(max(1, BLOCK // codes.shape[1]))
    return any(bool(((each & 0x7F) == 0x7F).any()) for each in rows)


def check_shape(key: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{key} has shape {list(tensor.shape)}; it must be {list(shape)} by config.json and quantization_config"
        )


def check_scales(scheme: Scheme, key: str, scales: Tensor) -> None:
    """CheckpointError: scales that are not finite; negative ones, or nothing but zeros."""
    numbers = scales.float()
    if not bool(numbers.isfinite().all()):
        raise CheckpointError(f"{key} contains NaN or infinity; the file is damaged: download it again")
    if scheme.method in ("fp8", "fp4") and bool((numbers < 0).any()):
        raise CheckpointError(f"{key} contains negative scales; the file is damaged: download it again")
    if not bool(numbers.any()):
        raise CheckpointError(f"{key} is zero: the whole matrix would be; the file is damaged: download it again")


def check_range(scheme: Scheme, key: str, scales: Tensor, factor: float) -> None:
    """CheckpointError: a code of the matrix may be more than float32 holds, or all of them are less."""
    largest = float(scales.float().abs().max()) * abs(factor) * LARGEST[scheme.method]
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= largest <= limits.max:
        raise CheckpointError(
            f"{key}: numbers of this matrix would be up to {largest:.3g}, and float32 has {limits.tiny:.3g} to "
            f"{limits.max:.3g}; the file is damaged: download it again"
        )


def check_positive(key: str, tensor: Tensor) -> None:
    numbers = tensor.float()
    if not bool((numbers.isfinite() & (numbers > 0)).all()):
        raise CheckpointError(f"{key} is not positive and finite; the file is damaged: download it again")


def checked_index(key: str, index: Tensor, inputs: int, groups: int) -> Tensor:
    check_shape(key, index, (inputs,))
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        raise CheckpointError(f"{key} names groups from {low} to {high}; there are groups 0 to {groups - 1}")
    return index.long()


def check_stored_shape(key: str, tensor: Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.flatten().tolist()) != shape:
        raise CheckpointError(f"{key} is {tensor.flatten().tolist()}; the packed matrix is {list(shape)}")


def _factor(module: StoredModule, tensor: Tensor) -> float:
    layout = LAYOUTS[module.scheme.layout]
    key = f"{module.name}.{layout.factor}"
    if tensor.numel() != 1:
        raise CheckpointError(f"{key} has shape {list(tensor.shape)}; it must be one number")
    check_positive(key, tensor)
    value = float(tensor.double())
    return 1 / value if layout.divides else value


def _shown(scheme: Scheme) -> str:
    rows, columns = (size or "all" for size in scheme.block)
    return f"{rows} x {columns}"
