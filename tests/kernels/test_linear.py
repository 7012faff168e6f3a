"""The dense product: large float32 cases on a CPU go to oneDNN; on a GPU a library is chosen."""

import pytest
import torch

from hybridrt.kernels.dense import linear as module
from hybridrt.kernels.dense.linear import LIBRARY, ONEDNN_FROM, LibraryProduct, add_linear, linear


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_large_products_equal_those_in_float64(tokens: int, biased: bool) -> None:
    torch.manual_seed(tokens)
    weight = torch.randn(ONEDNN_FROM // 1024, 1024)  # with one token just as large as it must be
    x = torch.randn(tokens, 2048)[:, 1024:]  # columns of a wider projection
    bias = torch.randn(len(weight)) if biased else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    residual = torch.randn(tokens, len(weight))
    with torch.inference_mode():
        out = linear(x, weight, bias)
        total = add_linear(residual.clone(), x, weight)
    torch.testing.assert_close(total, residual + linear(x, weight), rtol=1e-5, atol=1e-4)
    assert out.layout is torch.strided and out.is_contiguous()
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_the_size_of_a_product_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = []

    def record(x: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
        layouts.append(x.is_mkldnn)
        return x

    monkeypatch.setattr(module.F, "linear", record)
    monkeypatch.setattr(module, "ONEDNN_FROM", 6)
    for tokens, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.float64)):
        linear(torch.ones(tokens, 3, dtype=dtype), torch.ones(1, 3, dtype=dtype))
    assert layouts == [False, True, False]


def test_weights_that_stand_column_by_column_go_there_with_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(module, "TRANSPOSE_FROM", 4)
    weight = torch.randn(1024, 1024).t()
    for tokens in (3, 4):
        x = torch.randn(tokens, 1024)
        torch.testing.assert_close(linear(x, weight).double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 13, 64])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_a_narrow_weight_is_widened_by_blocks_of_rows(
    tokens: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rows)
    monkeypatch.setattr(module, "WIDENED", 4 * 40 + 3)
    weight, x, bias = torch.randn(rows, 40).to(dtype), torch.randn(tokens, 40), torch.randn(rows)
    exact = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(linear(x, weight, bias).double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(x, weight), linear(x, weight, torch.zeros(rows)), rtol=0, atol=0)
    torch.testing.assert_close(add_linear(bias.repeat(tokens, 1), x, weight).double(), exact, rtol=1e-5, atol=1e-5)


def test_a_row_that_is_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WIDENED", 8)
    weight, x = torch.randn(3, 40).bfloat16(), torch.randn(2, 40)
    torch.testing.assert_close(linear(x, weight), x @ weight.float().t(), rtol=1e-5, atol=1e-5)


def test_a_choice_of_the_library_holds_for_its_product_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. torch is asked before the product, and gets the answer back after it, whatever happens."""
    asked, x, weight = list[str | None](), torch.randn(96, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name=None: asked.append(name) or "before")
    shape = LibraryProduct(32, 64, 96, torch.bfloat16)
    wanted = torch.nn.functional.linear(x, weight)
    assert linear(x, weight).equal(wanted) and not asked
    with LIBRARY.trying(shape, x.device, {"lt": 1}):
        assert linear(x, weight).equal(wanted)
        assert linear(x[:95], weight).equal(wanted[:95])
    assert asked == [None, "cublaslt", "before"]
    with LIBRARY.trying(shape, x.device, {"lt": 1}), pytest.raises(RuntimeError):
        linear(x, weight, torch.zeros(31).bfloat16())
    assert asked == [None, "cublaslt", "before"] * 2
