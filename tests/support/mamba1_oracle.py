"""A slow loop over tokens, written from the formula of Mamba-1, and inputs for it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.mamba2_oracle import ScanInputs


def selective_inputs(
    *leading: int, channels: int = 6, state: int = 5, dtype: torch.dtype = torch.float32
) -> ScanInputs:
    """Random inputs. The states of a channel decay at rates from a hundredth to ten a unit of time: the slow ones show
    stale states, the fast ones reach zero within a chunk."""
    widths = [channels, channels, state, state, channels]
    merged = (torch.randn(*leading, sum(widths)) * 0.5).to(dtype)
    x, dt, B, C, z = merged.split(widths, dim=-1)
    A = -torch.logspace(-2, 1, channels * state)[torch.randperm(channels * state)].view(channels, state)
    return ScanInputs(x, dt, B, C, z, A, torch.randn(channels), torch.linspace(-3.0, 0.5, channels))


def selective_loop(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [L, I] and the states [L, I, N] after each of L tokens, in float64."""
    i, outs, states, state = inputs, [], [], state.double()
    for t in range(len(i.x)):
        step, x = F.softplus(i.dt[t].double() + i.dt_bias.double()), i.x[t].double()
        decay = (i.A.double() * step[:, None]).exp()
        state = decay * state + (step * x)[:, None] * i.B[t].double()[None, :]
        y = (state * i.C[t].double()).sum(-1) + i.D.double() * x
        outs.append(y * F.silu(i.z[t].double()))
        states.append(state)
    return torch.stack(outs), torch.stack(states)
