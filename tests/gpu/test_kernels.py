"""Kernels in bfloat16 at the shapes of real models: near the reference, always alike, in huge pools."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.step_peers import register_peers
from hybridrt.base.errors import BackendError
from hybridrt.kernels.core import providers
from hybridrt.kernels.dense.gated_norm import gated_rms_norm
from hybridrt.kernels.dense.skinny_linear import skinny_linear
from tests.gpu import rig
from tests.gpu.kernel_cases import (
    KIMI,
    LIGHTNING,
    MAMBA1,
    MODELS,
    SHORT_CONV,
    call,
    copied,
    in_float32,
    latent_cases,
    other_cases,
    recurrent_cases,
)
from tests.gpu.rig import GPU, changed_entries, same_bits
from tests.support.kernel_cases import Case

pytestmark = GPU
KERNELS = "triton"
TOLERANCE = 4e-3  # one rounding to bfloat16 is 1.7e-3 in the mean
# Operands of tensor cores are rounded to bfloat16 on the way: probabilities, decayed values, hidden activations.
LOOSE = dict.fromkeys(
    (
        "attention_decode",
        "attention_extend",
        "latent_extend",
        "mamba2_chunk_scan",
        "chunk_gated_delta_rule",
        "fused_experts",
    ),
    1e-2,
)
# Integers and bookkeeping: test_graphs.py holds them to the reference in whole steps, bit for bit.
ELSEWHERE = {
    "accept_chain", "advance_ring", "commit_conv_window", "commit_intermediate", "decode_inputs",
    "fill_decode_metadata", "filtered_logits", "clear_slots", "enter_rows", "enter_pages", "enter_tokens",
    "load_states", "store_states",  # test_state_codes.py
    "quant_linear", "quant_experts", "decode_weight", "quantize_tokens", "fp8_linear",  # test_quant_kernels.py
    "fp8_token_linear",  # there, too
    "prefix_sum_update", "prefix_sum_varlen",  # held to the reference under the interpreter
}  # fmt: skip

PARTS = [
    *((model, part) for model in MODELS for part in ("recurrent", "other")),
    (MAMBA1, "recurrent"),
    (SHORT_CONV, "recurrent"),
    (LIGHTNING, "recurrent"),
    (KIMI, "recurrent"),
    (KIMI, "latent"),
]
CASES = {"recurrent": recurrent_cases, "other": other_cases, "latent": latent_cases}


def cases(model: str, part: str, provider: str = KERNELS) -> Iterator[tuple[str, Case]]:
    """Cases of a model whose operation a provider implements, one in memory at a time."""
    providers._import_operations()
    for what, make in CASES[part](model):
        if provider in providers._IMPLEMENTATIONS[what.split()[0]]:
            yield what, make()


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm; NaN must be where it is in `wanted` and counts as nothing."""
    assert got.shape == wanted.shape
    missing = wanted.isnan()
    assert torch.equal(got.isnan(), missing), "NaN in one and a number in the other"
    got, wanted = (t.float().masked_fill(missing, 0.0) for t in (got, wanted))
    return ((got - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def worst_error(case: Case, provider: str = KERNELS) -> float:
    """Over everything that the call returns or writes; what it may not change must keep its bytes."""
    args = copied(case)
    got, wanted = call(case, provider, args), call(case, "torch", in_float32(case))
    scratch = set() if provider == KERNELS else {0}  # where libraries that know no padding send it
    for name, entries in case.pools.items():
        changed = changed_entries(case.args[name][None], args[name][None]) - scratch
        assert changed <= set(entries), f"{name}: entries {sorted(changed - set(entries))[:5]} changed"
        got[name], wanted[name] = got[name][entries], wanted[name][entries]
    if case.exact:
        assert all(torch.equal(got[name].nan_to_num().float(), wanted[name].nan_to_num().float()) for name in wanted)
        return 0.0
    return max(relative_error(got[name], wanted[name]) for name in wanted if wanted[name].numel())


@pytest.mark.parametrize(("model", "part"), PARTS)
def test_near_the_reference(model: str, part: str, record_property: Callable[[str, object], None]) -> None:
    """NaN fills pools and fresh outputs, so that whatever is read unwritten, or not written, shows."""
    torch.manual_seed(0)
    errors, failures = {}, []
    for what, case in cases(model, part):
        try:
            errors[what] = worst_error(case)
        except AssertionError as e:
            failures.append(f"{what}: {e}")
        if errors.get(what, 0.0) > LOOSE.get(case.op, TOLERANCE):
            failures.append(f"{what}: {errors[what]:.1e}")
    record_property("relative errors", ", ".join(f"{what} {error:.1e}" for what, error in errors.items()))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("model", [*MODELS, LIGHTNING, KIMI])
def test_prompts_through_gates_that_close_states(model: str, record_property: Callable[[str, object], None]) -> None:
    """Gates of -inf and of some -10^4 among weak ones: no NaN, and what is between two tokens after one is not lost."""
    torch.manual_seed(6)
    scans = ("mamba2_chunk_scan", "chunk_gated_delta_rule")
    errors = {what: worst_error(closing(case)) for what, case in cases(model, "recurrent") if case.op in scans}
    record_property("relative errors", ", ".join(f"{what} {error:.1e}" for what, error in errors.items()))
    assert errors and max(errors.values()) <= 1e-2, errors


def closing(case: Case) -> Case:
    """The case, some of whose gates close states. In Mamba-2 a gate is a head's rate times a time step, which is a
    factor of inputs, too: so rates are high, and most time steps next to nothing."""
    args = dict(case.args)
    if case.op == "chunk_gated_delta_rule":
        gates = args["g"]
        gates[torch.rand(gates.shape, device=gates.device) < 0.03] = 3e5
        gates[torch.rand(gates.shape, device=gates.device) < 0.01] = torch.inf
        return replace(case, args=args)
    args["A"] = args["A"].clone()
    args["A"][::4], args["A"][1] = -1e4, -torch.inf
    if args.get("dt_limit", (0.0, torch.inf)) == (0.0, torch.inf):
        steps = args["dt"][:, ::4]
        steps[torch.rand(steps.shape, device=steps.device) < 0.9] = -16.0
    return replace(case, args=args)


@pytest.mark.parametrize("provider", [p for p in providers.PROVIDERS if p not in ("torch", KERNELS)])
@pytest.mark.parametrize("model", [*MODELS, KIMI])
def test_libraries_near_the_reference(
    model: str, provider: str, record_property: Callable[[str, object], None]
) -> None:
    """The same calls; those that a library cannot serve say why."""
    register_peers()
    missing = providers._missing(providers.PROVIDERS[provider])
    if missing:
        pytest.skip(missing)
    torch.manual_seed(0)
    errors, refused, failures = {}, [], []
    # What libraries have of latent attention is a provider of paged attention, not of these operations.
    parts = [part for name, part in PARTS if name == model and part != "latent"]
    for what, case in (pair for part in parts for pair in cases(model, part, provider)):
        try:
            errors[what] = worst_error(case, provider)
        except BackendError as e:
            refused.append(f"{what}: {e}")
        except (AssertionError, RuntimeError, ValueError) as e:
            failures.append(f"{what}: {type(e).__name__} {str(e)[-300:]}")
        if errors.get(what, 0.0) > LOOSE.get(case.op, TOLERANCE):
            failures.append(f"{what}: {errors[what]:.1e}")
    record_property("relative errors", ", ".join(f"{what} {error:.1e}" for what, error in errors.items()))
    record_property("refused", "; ".join(refused))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("model", "part"), PARTS)
def test_a_thousand_times_the_same(model: str, part: str) -> None:
    """While another stream keeps the multiprocessors busy in ever other ways."""
    torch.manual_seed(1)
    noise, beside = torch.cuda.Stream(), torch.randn(1024, 1024, device=rig.DEVICE)
    failures = []
    for what, case in cases(model, part):
        if not case.decode:
            continue
        different = torch.zeros((), dtype=torch.int64, device=rig.DEVICE)
        args = copied(case)
        first = {name: t.clone() for name, t in call(case, KERNELS, args).items()}
        for i in range(1000):
            for name in (*case.pools, *case.consumed):
                args[name].copy_(case.args[name])
            if i % 7 == 0:
                with torch.cuda.stream(noise):
                    torch.mm(beside, beside)
            for name, tensor in call(case, KERNELS, args).items():
                different += (as_integers(tensor) != as_integers(first[name])).any()
        if different:
            failures.append(f"{what}: {int(different)} of 1000")
    assert not failures, "\n".join(failures)


def as_integers(tensor: Tensor) -> Tensor:
    """The bits of floats, so that NaN equals NaN."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


GAP = 1024  # numbers between far slots
FAR_SLOTS = 4170  # from 4096 on, the offset of a state of 2 MiB passes 2^31


@pytest.mark.parametrize("model", [*MODELS, MAMBA1, KIMI])
def test_slots_past_4096(model: str) -> None:
    """The same call with its slots moved to the end of a pool of many gigabytes gives the same bits."""
    torch.manual_seed(2)
    failures = []
    for what, case in cases(model, "recurrent"):
        small = copied(case)
        wanted = call(case, KERNELS, small)
        large = moved_to_far_slots(case)
        got = call(case, KERNELS, large)
        moved = {name for name in ("states", "conv") if name in case.pools}
        for name in moved:
            got[name] = far(got[name], wanted[name].shape[slot_dim(case)], slot_dim(case))
        if not all(same_bits(got[name], wanted[name]) for name in wanted):
            failures.append(what)
        del got, large
    assert not failures, "\n".join(failures)


def slot_dim(case: Case) -> int:
    """Rings of all layers fold at once: there the pools have a dimension for layers before that for slots."""
    return 1 if case.op == "fold_ring" else 0


def moved_to_far_slots(case: Case) -> dict[str, object]:
    """Arguments with larger pools, where slot s is slot FAR_SLOTS + s. Slots have gaps between them, as in slabs."""
    args = copied(case)
    for name in ("states", "conv"):
        if name in args:
            small = args[name]
            args[name] = with_gaps(small, slot_dim(case))
            far(args[name], small.shape[slot_dim(case)], slot_dim(case)).copy_(small)
    for name in ("read_state_slots", "write_state_slots"):
        if name in args:
            args[name] = far_slots(args[name])
    if "folds" in args:
        folds = args["folds"]
        written = far_slots(folds.write_state_slots)
        args["folds"] = replace(folds, state_slots=far_slots(folds.state_slots), write_state_slots=written)
    return args


def with_gaps(small: Tensor, dim: int) -> Tensor:
    """A pool with FAR_SLOTS more slots than the small one, of NaN. `dim`: that of slots; the one before it has one
    layer."""
    slots = small.shape[dim]
    numbers = small.numel() // slots
    memory = small.new_full((FAR_SLOTS + slots, numbers + GAP), torch.nan)
    shape, strides = list(small.shape), list(small.stride())
    shape[dim], strides[dim] = FAR_SLOTS + slots, numbers + GAP
    return memory.as_strided(shape, strides)


def far(pool: Tensor, slots: int, dim: int) -> Tensor:
    """The slots of `with_gaps` that a small pool of so many has."""
    return pool.narrow(dim, FAR_SLOTS, slots)


def far_slots(slots: Tensor) -> Tensor:
    return torch.where(slots < 0, -1, slots + FAR_SLOTS)


def test_rows_of_intermediate_states_past_two_to_the_31() -> None:
    """Verify rows at the end of a cache of more than 2^31 numbers."""
    torch.manual_seed(3)
    case = dict(recurrent_cases("falcon-h1-7b"))["mamba2_decode intermediate 4"]()
    wanted = call(case, KERNELS, copied(case))["stored"]
    args, small = copied(case), case.args["stored"]
    far = 2**31 // small[0].numel() + 1
    args["stored"] = small.new_full((far + len(small), *small.shape[1:]), torch.nan)
    args["rows"] = case.args["rows"] + far
    got = call(case, KERNELS, args)["stored"][far:]
    assert got.shape == wanted.shape and same_bits(got, wanted)


@pytest.mark.parametrize("op", ["attention_decode 4", "attention_extend", "attention_extend long", "rotary_write_kv"])
def test_pages_past_two_to_the_31(op: str) -> None:
    """Caches of more than 2^31 numbers."""
    torch.manual_seed(4)
    case = dict(other_cases("nemotron-h-8b") if op != "rotary_write_kv" else other_cases("falcon-h1-7b"))[op]()
    args = copied(case)
    wanted = call(case, KERNELS, copied(case))
    page = args["k_cache"][0].numel()
    far = 2**31 // page + 1
    for name in ("k_cache", "v_cache"):
        small = args[name]
        args[name] = small.new_full((far + len(small), *small.shape[1:]), 1e4)
        args[name][far:] = small
    offset = far * args["k_cache"].shape[1]
    for name in ("req_to_token", "out_cache_loc"):
        if name in args:
            args[name] = torch.where(args[name] < 0, args[name], args[name] + offset)
    got = call(case, KERNELS, args)
    for name in case.pools:
        got[name] = got[name][far:]
    assert all(same_bits(got[name], wanted[name]) for name in wanted)


def test_a_product_that_is_captured_first_counts_from_zero() -> None:
    """Counters of a weight that no step has used before its capture: replays and eager calls in any order agree."""
    torch.manual_seed(5)
    x, weight = (torch.randn(*shape, device=rig.DEVICE).bfloat16() for shape in ((8, 3072), (2048, 3072)))
    wanted = skinny_linear(x, weight.clone())[0]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = skinny_linear(x, weight)[0]
    for _ in range(2):
        assert torch.equal(skinny_linear(x, weight)[0], wanted)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, wanted)


def test_tokens_that_share_a_program_of_the_gated_norm_get_the_bits_they_get_alone() -> None:
    args = dict(other_cases("qwen3-next-12l"))["gated_rms_norm 601"]().args
    together, parts = gated_rms_norm(**args), range(0, 601, 100)
    cut = {"x", "gate"}
    each = [{name: t[start : start + 100] if name in cut else t for name, t in args.items()} for start in parts]
    assert same_bits(together, torch.cat([gated_rms_norm(**part) for part in each]))


def test_every_kernel_has_a_case() -> None:
    providers._import_operations()
    ours = {op for op, by in providers._IMPLEMENTATIONS.items() if "triton" in by}
    names = [what for model, part in PARTS for what, _ in CASES[part](model)]
    assert ours - ELSEWHERE <= {what.split()[0] for what in names}
