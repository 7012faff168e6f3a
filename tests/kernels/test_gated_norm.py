from typing import Any

import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.dense import gated_norm_triton
from hybridrt.kernels.dense.gated_norm import GateActivation, gated_rms_norm
from tests.support.mamba2_oracle import close

pytestmark = pytest.mark.usefixtures("provider")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("channels", "group_size"), [(12, 12), (63, 21), (500, 100)])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_equals_formula(dtype: torch.dtype, channels: int, group_size: int, norm_before_gate: bool) -> None:
    torch.manual_seed(channels)
    merged = torch.randn(5, 2 * channels + 7).to(dtype)
    x, gate, weight, eps = merged[:, 7 : 7 + channels], merged[:, 7 + channels :], torch.randn(channels), 0.01
    out = gated_rms_norm(x, gate, weight, eps, group_size=group_size, norm_before_gate=norm_before_gate)
    assert out.dtype == dtype
    for row in range(5):
        for start in range(0, channels, group_size):
            part = slice(start, start + group_size)
            h, g = x[row, part].double(), gate[row, part].double()
            silu = g / (1 + (-g).exp())
            h = h if norm_before_gate else h * silu
            h = h / ((h * h).mean() + eps).sqrt() * weight[part].double()
            close(out[row, part], h * silu if norm_before_gate else h, TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_tokens_that_share_a_program_get_the_bits_they_get_alone(
    provider: str, norm_before_gate: bool, activation: GateActivation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of four tokens, the last of which has one."""
    if provider == "torch":
        pytest.skip("no programs")
    torch.manual_seed(1)
    (x, gate), weight = torch.randn(2, 9, 15), torch.randn(15)
    kwargs: dict[str, Any] = {"group_size": 5, "norm_before_gate": norm_before_gate, "activation": activation}
    alone = torch.cat([gated_rms_norm(x[t : t + 1], gate[t : t + 1], weight, 0.01, **kwargs) for t in range(9)])
    monkeypatch.setattr(gated_norm_triton, "_tokens_of_a_program", lambda rows, block: 4)
    assert torch.equal(gated_rms_norm(x, gate, weight, 0.01, **kwargs), alone)


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_a_sigmoid_gate(norm_before_gate: bool) -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    kwargs = {"group_size": 4, "norm_before_gate": norm_before_gate, "activation": "sigmoid"}
    out = gated_rms_norm(x, gate, weight, 0.01, **kwargs)  # type: ignore[arg-type]
    h = (x if norm_before_gate else x * gate.sigmoid()).unflatten(-1, (2, 4))
    h = (h / (h.square().mean(-1, keepdim=True) + 0.01).sqrt()).flatten(-2) * weight
    close(out, h * gate.sigmoid() if norm_before_gate else h, 1e-6)


def test_no_rows() -> None:
    x = torch.empty(0, 8)
    assert gated_rms_norm(x, x, torch.ones(8), 1e-5, group_size=4, norm_before_gate=False).shape == (0, 8)


def test_group_size_that_does_not_divide() -> None:
    x = torch.ones(1, 8)
    with pytest.raises(ConfigError, match="group_size 3 does not divide 8"):
        gated_rms_norm(x, x, torch.ones(8), 1e-5, group_size=3, norm_before_gate=False)
