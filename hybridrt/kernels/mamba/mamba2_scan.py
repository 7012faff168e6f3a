"""Chunked scan of Mamba-2 over ragged prompts: the SSD form of Dao & Gu 2024, section 6.

    dt = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T          [P, N] per head
    y_t = (h_t C_t + D x_t) * silu(z_t)

T tokens in all, B requests, H heads of P channels, G groups of B and C, N state columns.
"""

from functools import partial

from torch import Tensor

from hybridrt.kernels.core.decay_sums import decay_sums, exp_of, finite_rates
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.mamba.mamba2_common import scan_prompts


@operation(By("triton"), By("mamba_ssm", priority=5, needs_host=True))
def mamba2_chunk_scan(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts, out: Tensor | None = None
) -> Tensor:
    """Scans the new tokens of each request from its state; the state after them goes to the pool.

    Args:
        inputs: packed.
        out: [T, H, P] in x's dtype, of any token stride, for the result; None for a new tensor.

    Returns:
        [T, H, P] in x's dtype: `out`, if given.
    """
    # On a CPU this is fastest with chunks of 64 to 128 tokens.
    y = scan_prompts(inputs, weights, state, prompts, partial(_chunk_step, finite_rates(weights.A)))
    return y if out is None else out.copy_(y)


def _chunk_step(A: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of b rows: x [b,Q,H,P], dt [b,Q,H], B, C [b,Q,G,N], state [b,H,P,N] -> y [b,Q,H,P], new state."""
    batch, size, heads, dim = x.shape
    groups = B.shape[2]
    sums = decay_sums(dt * A, 1)
    # Pairs take float32 sums; the rounded-off rest is a factor of tokens.
    cum = sums.float()
    rest = exp_of(sums - cum)
    x = x * (dt / rest)[..., None]
    keys, queries = B.transpose(1, 2), C.transpose(1, 2)
    from_state = queries @ state.view(batch, groups, -1, state.shape[-1]).transpose(2, 3)
    y = from_state.transpose(1, 2).reshape(x.shape) * cum.exp()[..., None]

    scores = (queries @ keys.transpose(2, 3)).tril_()
    weights = _decays(cum).view(batch, groups, -1, size, size).mul_(scores[:, :, None])
    y += (weights.view(batch, heads, size, size) @ x.transpose(1, 2)).transpose(1, 2)
    y *= rest[..., None]

    to_end = exp_of(sums[:, -1:] - sums).mul_(rest)
    inputs = (x * to_end[..., None]).view(batch, size, groups, -1).permute(0, 2, 3, 1)
    decayed = state * exp_of(sums[:, -1])[..., None, None]
    return y, decayed.add_((inputs @ keys).view(batch, heads, dim, -1))


def _decays(cum: Tensor) -> Tensor:
    """exp(cum_t - cum_s) where s <= t (elsewhere 1): cum [b, Q, H] -> [b, H, Q, Q]."""
    cum = cum.transpose(1, 2).contiguous()
    # exp is several times slower for subnormal results: e^-80 is nothing already.
    return (cum[..., :, None] - cum[..., None, :]).clamp_(-80.0, 0.0).exp_()
