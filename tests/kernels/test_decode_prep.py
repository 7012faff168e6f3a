"""The small launches at the head of a decode step, against plain torch."""

from typing import Any

import pytest
import torch

from hybridrt.kernels.core.records import RowTables
from hybridrt.kernels.state.decode_inputs import decode_inputs
from hybridrt.kernels.state.row_tables import DecodeBuffers, fill_decode_metadata
from tests.support.flat import flat

ROWS, CONTEXT, PAGE = 12, 32, 4
POISON = -(2**30)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(tokens: int, context: int = CONTEXT) -> dict[str, Any]:
    """Rows far apart whose last token is on a new page, on an old one, at a page's first or last slot; padding."""
    torch.manual_seed(tokens)
    rows, drafted = int32([7, 2, 11, 0, 5]), int32([tokens - 1, 0, (tokens - 1) // 2, 0, tokens - 1])
    lens = int32([tokens + 8, tokens, tokens + 3, tokens, 32])
    out = {name: torch.full((len(rows) * tokens,), POISON, dtype=torch.int32)
           for name in ("input_ids", "positions", "out_cache_loc")}  # fmt: skip
    return out | {
        "rows": rows, "seq_lens": lens, "last_tokens": torch.arange(13).int(),
        "new_pages": int32([40, -1, 41, -1, 42] if context else [-1] * 5),
        "req_to_token": torch.randint(4, 160, (ROWS + 1, context), dtype=torch.int32), "page_size": PAGE,
        "drafts": torch.randint(100, (len(rows), tokens - 1), dtype=torch.int32) if tokens > 1 else None,
        "num_drafts": drafted if tokens > 1 else None,
    }  # fmt: skip


def test_the_kernel_that_fills_the_metadata_starts_alone() -> None:
    """Kernels of the layers read the metadata before the kernel in front of them has ended (pdl_triton)."""
    from hybridrt.kernels.state import decode_prep_triton

    kernel = decode_prep_triton._fill_decode_metadata_kernel
    assert "PDL" not in kernel.arg_names and "PDL" in decode_prep_triton._decode_inputs_kernel.arg_names


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("context", [CONTEXT, 0])
def test_decode_inputs(provider: str, tokens: int, context: int) -> None:
    args = inputs(tokens, context)
    own = {name: part.clone() if isinstance(part, torch.Tensor) else part for name, part in args.items()}
    flat(decode_inputs, **own)
    flat(decode_inputs.reference, **args)
    for name in ("input_ids", "positions", "out_cache_loc", "req_to_token"):
        assert torch.equal(own[name], args[name]), name
    assert context == 0 or not torch.equal(args["req_to_token"], inputs(tokens, context)["req_to_token"])


@pytest.mark.parametrize(("rows", "real", "tokens"), [(5, 3, 1), (5, 5, 4), (300, 257, 2), (1, 0, 1)])
def test_fill_decode_metadata(provider: str, rows: int, real: int, tokens: int) -> None:
    """More rows than a program takes, in buffers that are a prefix of larger ones."""
    torch.manual_seed(0)
    indices, lens = torch.randint(1, 400, (rows,), dtype=torch.int32), torch.randint(tokens, 99, (rows,)).int()
    lens[0] = tokens  # a real row of length 1 is real
    tables = torch.randint(1, 1000, (3, 400), dtype=torch.int32)
    whole = [DecodeBuffers.allocate(rows + 3, "cpu") for _ in range(2)]
    for buffers, fill in zip(whole, (fill_decode_metadata, fill_decode_metadata.reference)):
        fill(buffers.prefix(rows), indices, lens, real, tokens, RowTables(*tables))
    for name, part in whole[0]._asdict().items():
        assert torch.equal(part, getattr(whole[1], name)), name
        assert not part[rows:].any(), f"{name} written past its prefix"
