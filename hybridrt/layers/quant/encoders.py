"""Plain matrices to the tensors of a quantised module, as compressed-tensors stores it."""

import torch
from torch import Tensor

from hybridrt.base.errors import CheckpointError
from hybridrt.base.quantization import Scheme, StoredModule
from hybridrt.kernels.quant.encode import encode_fp8, encode_int4, encode_nvfp4
from hybridrt.layers.quant.layouts import LAYOUTS, codes_shape
from hybridrt.layers.quant.packed_weight import block_count


def stored_tensors(scheme: Scheme, outputs: int, inputs: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of what `encode` makes, in order."""
    layout, (high, wide) = LAYOUTS[scheme.layout], scheme.block
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        layout.codes: (layout.dtypes[scheme.method], codes_shape(scheme, outputs, inputs)),
        layout.scale: (scheme.scale_dtype, (block_count(outputs, high), block_count(inputs, wide))),
        layout.shape: (torch.int64, (2,)),
        layout.factor: (torch.float32, (1,)),
    }
    return {last: told for last, told in found.items() if last}


def encode(name: str, scheme: Scheme, matrix: Tensor) -> tuple[StoredModule, dict[str, Tensor]]:
    """Module `name` in `scheme`, and its tensors by their last names. matrix: [out, in], of any float dtype.

    Raises:
        CheckpointError: a number of the matrix is NaN or infinite.
    """
    tensors, block = dict[str, Tensor](), scheme.block[1]
    if scheme.method == "fp8":
        tensors["weight"], tensors["weight_scale"] = encode_fp8(matrix, block)
    elif scheme.method == "int4":
        pairs, tensors["weight_scale"] = encode_int4(matrix, block)
        tensors["weight_packed"] = pairs.view(torch.int32)
        tensors["weight_shape"] = torch.tensor(matrix.shape)
    else:
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        tensors |= zip(names, encode_nvfp4(matrix, block), strict=True)
    layout = LAYOUTS[scheme.layout]
    checked = tensors[layout.factor or layout.scale]
    if not bool(checked.isfinite().all()):
        raise CheckpointError(f"{name} contains NaN or infinity, which has no scale; the file is damaged")
    return StoredModule(name, scheme, {last: (t.dtype, tuple(t.shape)) for last, t in tensors.items()}), tensors
