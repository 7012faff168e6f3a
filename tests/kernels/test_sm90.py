"""Kernels compiled for sm_90: they compile, do not spill, and leave room on a multiprocessor for other programs."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import triton

from tests.support.sm90_process import ROOT, Compiler

SHARED = 227 * 1024  # bytes of a multiprocessor

# Bytes of registers that newer versions of Triton than 3.6 park in kernels of Gluon.
NEWER = 0 if triton.__version__.startswith("3.6.") else 48


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    compiler = Compiler(tmp_path_factory.mktemp("sm90") / "errors")
    yield compiler
    compiler.close()


def table(name: str) -> pytest.MarkDecorator:
    """A test that gets the name of a table: in the slow level few of each kernel's launches, in the soak level all."""
    levels = [pytest.param(name, marks=pytest.mark.slow), pytest.param(f"{name} whole", marks=pytest.mark.soak)]
    return pytest.mark.parametrize("table", levels)


def check(usages: list[dict[str, Any]], shared: int, spills: dict[str, int] | None = None) -> None:
    """No kernel needs more shared memory, or parks more bytes of its registers than named."""
    for usage in usages:
        allowed = (spills or {}).get(usage["kernel"], 0)
        assert usage["stack"] <= allowed, f"{usage} spills (Triton {triton.__version__})"
        assert usage["shared"] <= shared, usage


@table("mamba2")
def test_mamba2(table: str, compiled: Compiler) -> None:
    """Two programs or more share a multiprocessor, but for those that walk through a prompt with what comes next on its
    way. Their registers are full, and a few addresses are parked."""
    usages = compiled(table)
    expected = {
        "_state_update_kernel", "_mamba2_stream_kernel", "_fold_kernel", "_few_tokens_states_kernel",
        "_mamba2_outputs_kernel", "_conv_varlen_kernel", "_fixed_decay_walk_kernel",
    }  # fmt: skip
    assert {u["kernel"] for u in usages} >= expected
    walks = [u for u in usages if u["kernel"] == "_fixed_decay_walk_kernel"]
    assert len(walks) == (4 if table.endswith("whole") else 1)
    check(walks, SHARED, {"_fixed_decay_walk_kernel": 80})  # 72 with one saved state a prompt
    # The outputs of 257 to 512 tokens with states of 256 columns have all registers that there are. Triton 3.6, which
    # their tiles were measured with, parks nothing, and Triton 3.9 eight numbers.
    parked = 0 if triton.__version__.startswith("3.6.") else 32
    check([u for u in usages if u not in walks], SHARED // 2, {"_mamba2_outputs_kernel": parked})


@table("mamba1")
def test_mamba1(table: str, compiled: Compiler) -> None:
    """The scan keeps a channel in one thread, so that its loops over tokens need no shared memory and so few registers
    that twenty programs share a multiprocessor's 64 K."""
    usages = compiled(table)
    assert {u["kernel"] for u in usages} == {
        "_mamba1_update_kernel",
        "_mamba1_chunks_kernel",
        "_mamba1_entry_states_kernel",
        "_mamba1_outputs_kernel",
    }
    check(usages, 2048)
    for usage in usages:
        loop = usage["kernel"] in ("_mamba1_chunks_kernel", "_mamba1_outputs_kernel")
        assert usage["registers"] <= (100 if loop else 168), usage
        assert not loop or usage["shared"] == 0, usage


@table("skinny_linear")
def test_skinny_linear(table: str, compiled: Compiler) -> None:
    """The kernel of one token leaves registers for eight programs of its kind on a multiprocessor. ptxas parks an
    address or two of the other one, far from any limit, to fit one more program."""
    usages = compiled(table)
    count = Counter(u["kernel"] for u in usages)
    found = (count["_matvec_kernel"], count["_matmul_kernel"], count["_pipeline_kernel"])
    assert found == ((4, 9, 3) if table.endswith("whole") else (1, 1, 1))
    check(usages, SHARED, {"_matmul_kernel": 16})
    assert all(u["registers"] <= 64 for u in usages if u["kernel"] == "_matvec_kernel")


@pytest.mark.parametrize(
    "table",
    [pytest.param("quant", marks=pytest.mark.slow), pytest.param("quant, all formats whole", marks=pytest.mark.soak)],
)
def test_weights_of_8_and_4_bits(table: str, compiled: Compiler) -> None:
    """ptxas parks two values of int8 experts with zero points, in blocks of 64 pairs."""
    usages = compiled(table)
    own = {"_one_token_kernel", "_pipeline_kernel", "_decode_weight_kernel", "_few_pairs_kernel"}
    assert {u["kernel"] for u in usages} >= {"_matvec_kernel", "_matmul_kernel", "_quant_grouped_kernel"} | own
    check(usages, SHARED, {"_quant_grouped_kernel": 8, "_one_token_kernel": NEWER})


@table("fp8")
def test_products_of_quantised_inputs(table: str, compiled: Compiler) -> None:
    """Warpgroups that add the parts of others after the last product have no registers for all loads at once."""
    usages = compiled(table)
    own = {"_fp8_linear_kernel", "_one_token_kernel", "_pipeline_kernel"}
    assert {u["kernel"] for u in usages} == {"_quantize_kernel"} | own
    check(usages, SHARED, {"_pipeline_kernel": 16 + NEWER, "_one_token_kernel": NEWER})


@table("others")
def test_attention_gated_delta_net_experts_and_sampling(table: str, compiled: Compiler) -> None:
    usages = compiled(table)
    expected = {
        "_attention_decode_kernel",
        "_attention_copy_kernel",
        "_attention_extend_kernel",
        "_attention_pipeline_kernel",
        "_argmax_kernel",
        "_grouped_kernel",
        "_few_kernel",
        "_token_rules_kernel",
    }
    assert {u["kernel"] for u in usages} >= expected
    # Triton 3.6's ptxas keeps the first kernel, which runs once a step, at 64 registers and parks three values. The
    # second one has all registers that there are; with Triton 3.6, which its figures are of, it parks more. The third
    # one's limit of 64 suits Triton 3.6, and Triton 3.9 parks two values of few rows. Warpgroups of the pipeline park
    # addresses while they walk through the keys.
    old = triton.__version__.startswith("3.6.")
    spills = {"_threshold_kernel": 16 if old else 0, "_channels_kernel": 160 if old else 0}
    spills |= {"_classic_kernel": 0 if old else 8, "_attention_pipeline_kernel": 24 if old else 40}
    check(usages, SHARED, spills)


@table("latent")
def test_latent_attention(table: str, compiled: Compiler) -> None:
    """The accumulator of 512 numbers a head fills the registers, and does not leave them. Warpgroups of long prompts
    park addresses, and Triton 3.9 two numbers of 256 queries of one with a window."""
    usages = compiled(table)
    count = Counter(u["kernel"] for u in usages)
    whole = table.endswith("whole")
    kernels = ("_attention_decode_kernel", "_attention_extend_kernel", "_attention_pipeline_kernel")
    assert [count[kernel] for kernel in kernels] == ([8, 8, 2] if whole else [1, 1, 1])
    assert count["_write_latent_kernel"] == (2 if whole else 1)
    check(usages, SHARED, {"_attention_pipeline_kernel": 16, "_attention_extend_kernel": 8})


@pytest.mark.slow
def test_latent_attention_of_absorbed_prompts(compiled: Compiler) -> None:
    """Four warps have all registers that there are, and Triton 3.9 parks some. With Triton 3.6 no tile of eleven was
    faster."""
    usages = [u for u in compiled("absorbed") if u["kernel"] == "_attention_extend_kernel"]
    assert len(usages) == 1
    check(usages, SHARED, {"_attention_extend_kernel": 776})


@pytest.mark.soak
def test_attention_over_codes(compiled: Compiler) -> None:
    """Tiles are so small that converted numbers stay in registers. ptxas parks an address of one decode kernel, and of
    256 queries of a long prompt with a window over latent vectors two numbers, as with plain ones."""
    usages = compiled("codes whole")
    assert {u["kernel"] for u in usages} >= {
        "_attention_decode_kernel",
        "_attention_extend_kernel",
        "_write_latent_kernel",
        "_rotary_kernel",
    }
    parked = {"_attention_decode_kernel": 8, "_attention_extend_kernel": 8, "_attention_pipeline_kernel": 40}
    check(usages, SHARED, parked)


@table("states")
def test_states_in_8_bits(table: str, compiled: Compiler) -> None:
    """A step over codes leaves registers for five programs or more on a multiprocessor. Folds have all registers that
    there are, as those of other states."""
    usages = compiled(table)
    assert {u["kernel"] for u in usages} >= {
        "_stream_kernel",
        "_mamba2_stream_kernel",
        "_few_kernel",
        "_fold_kernel",
        "_fold_words_kernel",
        "_load_kernel",
        "_store_kernel",
    }
    check(usages, SHARED // 4)
    decoding = ("_stream_kernel", "_mamba2_stream_kernel", "_few_kernel", "_store_kernel")
    assert all(u["registers"] <= 104 for u in usages if u["kernel"] in decoding)


@pytest.mark.parametrize(
    "table", [pytest.param("optional", marks=pytest.mark.slow), pytest.param("optional whole", marks=pytest.mark.soak)]
)
def test_every_kernel_compiles_with_and_without_its_optional_arguments(table: str, compiled: Compiler) -> None:
    """Triton's front end tells whether a branch fits its arguments. The tests above compile most kernels to the end:
    here that is left to the soak level, but for kernels that they do not launch."""
    names = {f"{usage['module']} {usage['kernel']}" for usage in compiled(table)}
    launched = {
        f"{file.stem} {name}" for file in (ROOT / "hybridrt" / "kernels").rglob("*_triton.py")
        for name in re.findall(r"^    *(?:return )?(_\w+_kernel)\[", file.read_text(), re.MULTILINE)
    }  # fmt: skip
    assert len(launched) > 40 and launched - names == set()
