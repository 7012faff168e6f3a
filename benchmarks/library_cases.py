"""Calls of libraries for bench_kernels, made from the arguments of one of our operations.

What a library wants in a layout of its own is copied when the arguments are made, so a time is of its kernels alone.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.mamba.mamba2_scan import split_conv_channels

Args = dict[str, Any]
Call = Callable[[], object]
Plan = Callable[[Args], Call]
Peers = Mapping[str, tuple[tuple[str, ...], Plan]]  # by name: the modules of which one must be there, and the plan


def beside(
    make: Callable[[], Args], device: str, peers: Peers
) -> tuple[Callable[[], Args], dict[str, Callable[[Args], object]]]:
    """`make`, and by name the call of each installed library from arguments that it made. The calls are planned when
    the arguments are made, because a graph cannot hold that. A plan that fails shows when it is called."""
    found = {name: plan for name, (modules, plan) in peers.items() if device == "cuda" and any(map(find_spec, modules))}
    planned: dict[int, dict[str, Call]] = {}

    def made() -> Args:
        args = make()
        planned[id(args)] = {name: _planned(plan, args) for name, plan in found.items()}
        return args

    def by(name: str) -> Callable[[Args], object]:
        return lambda args: planned[id(args)][name]()

    return made, {name: by(name) for name in found}


def _planned(plan: Plan, args: Args) -> Call:
    try:
        return plan(args)
    except Exception as e:
        failure = RuntimeError(f"{type(e).__name__} {e}")

    def fail() -> None:
        raise failure

    return fail


def _tokens(args: Args, names: str, add_batch: bool) -> list[Tensor]:
    """Arguments [B, T, ...], contiguous; packed ones get a batch of one."""
    return [(args[name][None] if add_batch else args[name]).contiguous() for name in names.split()]


def _prompts(args: Args) -> Args:
    """What fla's functions of packed prompts share."""
    starts = args["query_start_loc"].long()
    return {"cu_seqlens": starts, "cu_seqlens_cpu": starts.cpu(), "output_final_state": True, "state_v_first": True}


def _kda_gates(args: Args) -> Args:
    """KDA's gates from raw inputs, computed by fla's kernels."""
    bound = args.get("lower_bound")
    return {
        "A_log": args["A_log"], "dt_bias": args["dt_bias"].flatten(), "lower_bound": bound,
        "safe_gate": bound is not None, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def _chunk_kda(args: Args) -> Call:
    from fla.ops.kda import chunk_kda

    tokens, options = _tokens(args, "q k v g beta", True), _kda_gates(args) | _prompts(args)
    return lambda: chunk_kda(*tokens, **options)


def _kda_step(args: Args) -> Call:
    """One token of each row. The state is updated where it stands."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    tokens = _tokens(args, "q k v g beta", False)
    options = _kda_gates(args) | {
        "initial_state": args["states"], "inplace_final_state": True, "state_v_first": True,
        "ssm_state_indices": args["read_state_slots"], "out": torch.empty_like(tokens[2]),
    }  # fmt: skip
    return lambda: fused_recurrent_kda_fwd(*tokens, **options)


def _chunk_lightning(args: Args) -> Call:
    from fla.ops.simple_gla import chunk_simple_gla

    tokens, options = _tokens(args, "C B x", True), _prompts(args)
    return lambda: chunk_simple_gla(*tokens, g_gamma=args["A"], scale=1.0, **options)


def _lightning_step(args: Args) -> Call:
    """One token of each row, after SiLU. The state after it is a new float32 tensor: fla has no pool here."""
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    states = args["states"]
    v, k, q = (part.contiguous() for part in split_conv_channels(F.silu(args["xBC"]), states.shape))
    options = {
        "initial_state": states.index_select(0, args["read_state_slots"]), "output_final_state": True,
        "state_v_first": True, "g_gamma": args["A"], "scale": 1.0,
    }  # fmt: skip
    return lambda: fused_recurrent_simple_gla(q, k, v, **options)


CHUNK_KDA: Peers = {"fla alone": (("fla",), _chunk_kda)}
KDA_STEP: Peers = {"fla alone": (("fla",), _kda_step)}
CHUNK_LIGHTNING: Peers = {"fla alone": (("fla",), _chunk_lightning)}
LIGHTNING_STEP: Peers = {"fla alone": (("fla",), _lightning_step)}
