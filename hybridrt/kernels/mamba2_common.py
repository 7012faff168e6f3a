"""What the Mamba operations share: the time step and the output terms that do not pass through the state."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.records import NO_LIMIT
from hybridrt.kernels.views import by_head


def time_step(dt: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float]) -> Tensor:
    """clamp(softplus(dt + dt_bias), *dt_limit): raw dt [..., H], dt_bias [H] -> float32 [..., H]."""
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = F.softplus(dt)
    return dt if dt_limit == NO_LIMIT else dt.clamp(*dt_limit)


def skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """(y + D * x) * silu(z) in float32, in place on y: y, x, z [..., H, P], D [H]."""
    if D is not None:
        y.addcmul_(x.float(), D.float()[:, None])
    return y if z is None else y.mul_(F.silu(z.float()))


def split_conv_channels(xBC: Tensor, state_shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Views x [..., H, P], B and C [..., G, N] of the conv's channels [..., C] for a pool of states [S+1, H, P, N]."""
    _, heads, dim, state_dim = state_shape
    width = (xBC.shape[-1] - heads * dim) // 2
    x, B, C = xBC.split_with_sizes((heads * dim, width, width), -1)
    groups = (width // state_dim, state_dim)
    return by_head(x, heads, dim), by_head(B, *groups), by_head(C, *groups)
