"""Views and copies have the strides of their sources, because kernels are compiled by them."""

import torch

from hybridrt.kernels.core.slots import by_head, take_tokens


def test_heads_of_one_token_keep_the_stride_between_tokens() -> None:
    """torch's own `unflatten` gives a single token the stride that a contiguous tensor has."""
    x, B = torch.randn(1, 80).split([48, 32], dim=-1)
    assert by_head(x, 6, 8).stride() == (80, 8, 1) != x.unflatten(-1, (6, 8)).stride()
    assert torch.equal(by_head(B, 2, 16), B.unflatten(-1, (2, 16)))
    turned = torch.randn(3, 80, 5).transpose(1, 2)[..., 48:]
    assert torch.equal(by_head(turned, 2, 16), turned.unflatten(-1, (2, 16)))


def test_taken_tokens_have_the_strides_of_their_sources() -> None:
    projected, other = torch.randn(9, 30), torch.randn(9, 2, 5)
    z, xBC, dt = projected[2:].split([8, 16, 6], dim=-1)
    inputs = {"xBC": xBC, "dt": dt, "z": z.unflatten(-1, (2, 4)), "b": other[2:, 1], "row 0": projected[:7, :4]}
    for tokens in (torch.tensor([3]), torch.tensor([6, 0, 0])):
        *taken, none = take_tokens([*inputs.values(), None], tokens)
        assert none is None
        for name, t in zip(inputs, taken, strict=True):
            assert t is not None and t.stride() == inputs[name].stride() and torch.equal(t, inputs[name][tokens]), name
    turned, same = torch.randn(6, 7).t(), torch.randn(6).expand(7, 6)
    for source, t in zip((turned, same), take_tokens((turned, same), torch.tensor([2, 5])), strict=True):
        assert t is not None and torch.equal(t, source[[2, 5]])
    one, other = take_tokens((xBC, dt), torch.arange(5))
    assert one is not None and other is not None
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr(), "one copy holds both"
