"""States in 8 bits and stochastic rounding on a GPU: kernels against the reference, and engines against float32."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.common import gdn_of, kda_of, mamba2_of
from hybridrt import LLM, SamplingParams
from hybridrt.kernels.core.providers import select
from hybridrt.kernels.core.records import StateSlots
from hybridrt.kinds.registry import state_shape
from tests.gpu.kernel_cases import KIMI, copied, model_config
from tests.gpu.rig import DEVICE, GPU
from tests.support import kernel_cases as kernels
from tests.support.coded_states import DTYPES, EIGHT_BITS, coded, flat_codes, numbers, one_layer
from tests.support.flat import flat
from tests.support.kernel_cases import Case, DecodeRows

pytestmark = GPU
EMBEDDED = str(Path(__file__).parents[2] / "hybridrt" / "assets" / "embedded")
LAYERS: dict[str, tuple[Any, Callable[..., Case]]] = {
    "falcon-h1-7b": (mamba2_of, partial(kernels.mamba2_decode, mode="replay")),
    "nemotron-h-8b": (mamba2_of, partial(kernels.mamba2_decode, mode="replay")),
    "qwen3-next-12l": (gdn_of, partial(kernels.gdn_decode, mode="replay")),
    KIMI: (kda_of, partial(kernels.kda_decode, mode="replay")),
}


@pytest.fixture
def on_device() -> Iterator[None]:
    """Tensors are made on the GPU."""
    with torch.device(DEVICE):
        yield


def case_of(model: str, tokens: int, batch: int) -> Case:
    config = model_config(model)
    of, make = LAYERS[model]
    rows = DecodeRows(state_shape(of(config)), tokens, batch=batch)
    return make(config, rows) if of is mamba2_of else make(rows)


def relative(got: Tensor, wanted: Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.parametrize(("tokens", "batch"), [(1, 3), (1, 30), (5, 18)])
@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.usefixtures("on_device")
def test_a_step_reads_what_the_codes_say(model: str, dtype: torch.dtype, tokens: int, batch: int) -> None:
    torch.manual_seed(0)
    case = case_of(model, tokens, batch)
    states, codes = coded(case.args["states"], dtype)
    step = select(case.op, DEVICE, "triton")
    exact = flat(step, **copied(case) | {"states": numbers(states, codes)})
    got = flat(step, **copied(case) | {"states": states, **flat_codes(codes)})
    real = batch - 2
    assert relative(got[:real], exact[:real]) < 4e-3
    assert not got[real:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.usefixtures("on_device")
def test_folds_and_stores_round_as_the_reference(model: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    of, _ = LAYERS[model]
    gate = kernels.time_step_gate if of is mamba2_of else kernels.log_decay_gate
    rows = DecodeRows(state_shape(of(model_config(model))), 1)
    case = kernels.fold(rows, gate, -torch.linspace(1.0, 16.0, rows.shape.temporal[0]) if of is mamba2_of else None)
    folds = case.args["folds"]
    lengths = torch.arange(len(rows.slots), dtype=torch.int32) * 37 + 5
    found = []
    for provider in ("triton", "torch"):
        states, codes = coded(case.args["states"][0], dtype)
        args: dict[str, Any] = copied(case) | {"states": states[None], "codes": one_layer(codes)}
        args["folds"] = replace(folds, state_lengths=lengths)
        flat(select("fold_ring", DEVICE, provider), **args)
        written = folds.write_state_slots[: len(rows.used_slots)].long()
        found.append((numbers(states, codes)[written], codes.state_lengths[written]))
    assert relative(found[0][0], found[1][0]) < 4e-3
    assert torch.equal(found[0][1], found[1][1])
    stored_alike(found[1][0], dtype)


def stored_alike(new: Tensor, dtype: torch.dtype) -> None:
    slots, pools = torch.arange(1, len(new) + 1, dtype=torch.int32), []
    lengths = slots * 300
    for provider in ("triton", "torch"):
        states, codes = coded(torch.zeros(len(new) + 1, *new.shape[1:]), dtype)
        state = StateSlots(states, slots, slots, codes=codes)
        select("store_states", DEVICE, provider)(state, new.contiguous(), lengths)
        read = select("load_states", DEVICE, provider)(state, torch.ones(len(new), dtype=torch.bool))
        pools.append(read)
    assert relative(pools[0], pools[1]) < 1e-3
    assert not pools[0][0].any()


def logprobs(prompts: list[str], **options: Any) -> list[list[float]]:
    with LLM(EMBEDDED, max_model_len=1024, max_running_requests=32, **options) as llm:
        params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, logprobs=0)
        llm.generate(prompts[:1], params)  # some prompt is cached, where there is a cache
        outputs = llm.generate(prompts, params)
        return [[next(iter(entry.values())) for entry in output.logprobs] for output in outputs]  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{"mamba_ssm_dtype": "int8"}, {"mamba_ssm_dtype": "fp8"}])
def test_an_engine_with_graphs_stays_near_float32(options: dict[str, Any]) -> None:
    """Likelihoods of the tokens that it chooses: the text may differ where two tokens are alike."""
    prompts = [f"def read_{i}(path):\n    " for i in range(20)]
    exact, found = logprobs(prompts), logprobs(prompts, **options)
    means = [sum(map(sum, each)) / sum(map(len, each)) for each in (exact, found)]
    assert abs(means[1] - means[0]) < 0.02


def test_results_repeat_in_any_row_and_batch() -> None:
    """The same kernels run for 17 and for 20 rows."""
    prompts = [f"class Reader{i}:\n    def " for i in range(20)]
    options = {"mamba_ssm_dtype": "int8", "prefix_cache": False, "dtype": "float32"}
    whole, part = logprobs(prompts, **options), logprobs(prompts[3:], **options)
    same = sum(abs(a - b) < 1e-3 for row, other in zip(whole[3:], part) for a, b in zip(row, other))
    assert same > 0.9 * sum(map(len, part))
