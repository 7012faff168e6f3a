"""The plugin of vLLM: its layer and vLLM's own (a stub in plain torch) compute the same steps over the same blocks."""

import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrt.errors import ConfigError
from tests.support import vllm_stub
from tests.support.gdn_loops import relative_error
from tests.support.peer_modules import installed

pytestmark = pytest.mark.usefixtures("provider")
BLOCKS, PADDED = 12, 64  # blocks of pages; bytes that vLLM adds to a page
SIZES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.fixture
def plugin() -> Iterator[SimpleNamespace]:
    vllm_stub.op_registry_oot.clear()
    vllm_stub.ModelRegistry.models.clear()
    with installed(vllm_stub, vllm_stub.MODULES, "vllm"):
        names = ("layer", "replay", "settings")
        parts = {name: importlib.import_module(f"hybridrt_vllm.{name}") for name in names}
        yield SimpleNamespace(package=importlib.import_module("hybridrt_vllm"), **parts)
    vllm_stub.op_registry_oot.clear()


def vllm_config(columns: int = 4, **changed: Any) -> Any:
    """What the plugin and the stubs read of vLLM's VllmConfig."""
    cache = {"mamba_cache_mode": "none", "mamba_ssm_cache_dtype": "float32", "mamba_page_size_padded": None}
    model = {"architecture": "Qwen3NextForCausalLM", "dtype": torch.float32, "hf_text_config": SimpleNamespace(**SIZES)}
    top: dict[str, Any] = {
        "speculative_config": None,
        "kv_transfer_config": None,
        "additional_config": {"hybridrt": {"columns": columns}},
    }
    for name, value in changed.items():
        (cache if name in cache else model if name in model else top)[name] = value
    return SimpleNamespace(
        cache_config=SimpleNamespace(**cache), model_config=SimpleNamespace(**model), **top,
        parallel_config=SimpleNamespace(tensor_parallel_size=1), scheduler_config=SimpleNamespace(max_num_seqs=8),
    )  # fmt: skip


def made_layer(config: Any) -> Any:
    """As a model of vLLM makes it, with memory as vLLM gives it: pages of NaN, longer than what they hold."""
    hf = SimpleNamespace(**SIZES, hidden_act="silu")
    layer = vllm_stub.QwenGatedDeltaNetAttention(hf, config, prefix="layers.0")
    config.cache_config.mamba_page_size_padded = layer.get_kv_cache_spec(config).page_size_bytes + PADDED
    spec = layer.get_kv_cache_spec(config)
    layer.bind_kv_cache(torch.full((BLOCKS, 1, 1, spec.page_size_bytes), -1, dtype=torch.int8))
    return layer


def both_layers(config: Any) -> tuple[Any, Any]:
    """vLLM's layer, and the plugin's with the same weights."""
    torch.manual_seed(0)
    own = made_layer(config)
    config.cache_config.mamba_page_size_padded = None
    importlib.import_module("hybridrt_vllm.models")
    ours = made_layer(config)
    ours.load_state_dict(own.state_dict())
    return own, ours


class Steps:
    """Steps of requests that both layers compute. Rows of decode come first, as vLLM orders them."""

    def __init__(self, layers: tuple[Any, Any], dtype: torch.dtype = torch.float32) -> None:
        self.layers, self.dtype = layers, dtype
        self.channels = layers[0].conv1d.weight.shape[0]

    def run(self, decodes: list[int], prefills: dict[int, int] | None = None, begun: tuple[int, ...] = ()) -> float:
        """decodes: blocks of one token each, 0 for padding. prefills: tokens by block; those in `begun` go on with a
        prompt. Returns the relative error of the plugin's outputs."""
        prefills = prefills or {}
        counts = [1] * len(decodes) + list(prefills.values())
        total = sum(counts)
        initial = [True] * len(decodes) + [block in begun for block in prefills]
        metadata = vllm_stub.GDNAttentionMetadata(
            len(prefills), len(decodes), total, torch.tensor(initial),
            torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            torch.tensor([*decodes, *prefills], dtype=torch.int32),
        )  # fmt: skip
        vllm_stub.context.attn_metadata = {"layers.0": metadata}
        inputs = torch.randn(total + 3, self.channels + 8).to(self.dtype)  # more rows than tokens, as in a graph
        qkv, a, b = inputs.split([self.channels, 4, 4], -1)
        outs = torch.zeros(2, total + 3, 4, 5, dtype=self.dtype)
        for layer, out in zip(self.layers, outs):
            layer._forward_core(qkv.clone(), b.contiguous(), a.contiguous(), out)
        assert not outs[1][total:].any() and all(not outs[1][i].any() for i, block in enumerate(decodes) if not block)
        return float(relative_error(outs[1], outs[0]))


def test_register_names_the_models_and_imports_none(plugin: SimpleNamespace) -> None:
    plugin.package.register()
    plugin.package.register()  # vLLM may call it several times
    models = vllm_stub.ModelRegistry.models
    assert set(models) == set(plugin.package.ARCHITECTURES) and not vllm_stub.op_registry_oot
    module = importlib.import_module("hybridrt_vllm.models")
    for architecture, target in models.items():
        assert target == f"hybridrt_vllm.models:{architecture}"
        assert issubclass(getattr(module, architecture), getattr(vllm_stub, architecture))
    made = vllm_stub.op_registry_oot["QwenGatedDeltaNetAttention"]
    assert issubclass(made, vllm_stub.QwenGatedDeltaNetAttention)


@pytest.mark.parametrize("columns", [2, 5])
def test_decode_steps_are_those_of_vllms_layer(plugin: SimpleNamespace, columns: int) -> None:
    """Through several folds, next to padding, with steps that vLLM computes in between, and over blocks that others
    have left."""
    steps = Steps(both_layers(vllm_config(columns)))
    assert type(steps.layers[1]).__name__ == "ReplayGatedDeltaNetAttention"
    assert steps.run([], {3: 5, 7: 2}) < 1e-5
    for _ in range(7):
        assert steps.run([7, 3, 0]) < 1e-5
    assert steps.run([7, 3], {5: 4}) < 1e-5, "rings of 7 and 3 are written before vLLM's kernels read the states"
    assert steps.run([3, 5], {9: 3}) < 1e-5
    assert steps.run([5, 7], {9: 2}, begun=(9,)) < 1e-5, "a prompt's second chunk"
    for _ in range(columns + 1):
        assert steps.run([9, 7, 5]) < 1e-5
    assert steps.run([3, 0]) < 1e-5
    assert steps.run([5], {3: 1}) < 1e-5, "block 3 has another request, and its ring an entry of the last one"
    for _ in range(columns + 1):
        assert steps.run([3, 5, 9]) < 1e-5
    assert not steps.layers[1].blocks._lengths[vllm_stub.NULL_BLOCK_ID], "padding has entered nothing"


def test_states_are_written_once_in_as_many_tokens_as_a_ring_has_columns(plugin: SimpleNamespace) -> None:
    steps = Steps(both_layers(vllm_config(3)))
    steps.run([], {4: 2})
    states, written = steps.layers[1].kv_cache[1], []
    for _ in range(7):
        before = states[4].clone()
        steps.run([4])
        written.append(not torch.equal(before, states[4]))
    assert written == [False, False, True, False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_a_served_model(plugin: SimpleNamespace, provider: str, dtype: torch.dtype) -> None:
    """Activations and rings are rounded, states are float32: the error is that of the rounding."""
    if dtype == torch.bfloat16 and provider != "torch":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 matrices as integers")
    steps = Steps(both_layers(vllm_config(4, dtype=dtype)), dtype)
    steps.run([], {3: 5, 7: 2})
    errors = [steps.run([3, 7]) for _ in range(9)]
    assert max(errors) < 2e-2, errors


def test_a_run_that_measures_memory_is_left_to_vllm(plugin: SimpleNamespace) -> None:
    _, layer = both_layers(vllm_config())
    for metadata in (None, {}):
        vllm_stub.context.attn_metadata = metadata
        assert layer._forward_core(*[torch.zeros(1)] * 4) is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_model_plans_what_a_layer_needs(plugin: SimpleNamespace, ranks: int) -> None:
    """Else vLLM would give a layer pages that are too small."""
    config = vllm_config(16, dtype=torch.bfloat16)
    config.parallel_config.tensor_parallel_size = ranks
    _, layer = both_layers(config)
    module = importlib.import_module("hybridrt_vllm.models")
    model = module.Qwen3NextForCausalLM
    spec = layer.get_kv_cache_spec(config)
    assert model.get_mamba_state_shape_from_config(config) == spec.shapes
    assert model.get_mamba_state_dtype_from_config(config) == spec.dtypes
    assert spec.shapes[2:] == ((4 // ranks, 16, 5), (4 // ranks, 16), (2 // ranks, 16, 6))
    assert spec.dtypes[2:] == (torch.bfloat16, torch.float32, torch.bfloat16)
    with pytest.raises(ConfigError, match="another plugin"):
        layer.bind_kv_cache(torch.zeros(2, 1, 1, spec.page_size_bytes - PADDED - 4, dtype=torch.int8))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"mamba_cache_mode": "align"}, "--no-enable-prefix-caching"),
        ({"speculative_config": SimpleNamespace()}, "--speculative-config"),
        ({"kv_transfer_config": SimpleNamespace()}, "--kv-transfer-config"),
        ({"dtype": torch.float64}, "torch.float64"),
        ({"mamba_ssm_cache_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"architecture": "InternS2MobiusForCausalLM"}, "InternS2MobiusForCausalLM is not one of"),
    ],
)
def test_what_the_plugin_does_not_serve_is_vllms_and_logged(
    plugin: SimpleNamespace, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], reason: str
) -> None:
    config = vllm_config(**changed)
    with caplog.at_level(logging.WARNING, "vllm.hybridrt"):
        assert plugin.settings.resolve(config, on_cuda=True) is None
        assert plugin.settings.resolve(config, on_cuda=True) is None
    assert len(caplog.records) == 1 and reason in caplog.text, "once, not by layer"


def test_other_devices_are_vllms(plugin: SimpleNamespace) -> None:
    assert "CUDA" in plugin.settings.reason_against(vllm_config(), on_cuda=False)
    assert plugin.settings.reason_against(vllm_config(), on_cuda=True) is None


@pytest.mark.parametrize("off", ["by the switch", "by a rule"])
def test_without_replay_layer_and_model_are_vllms(plugin: SimpleNamespace, off: str) -> None:
    config = vllm_config(mamba_cache_mode="align")
    if off == "by the switch":
        config = vllm_config(additional_config={"hybridrt": {"replay": False}})
    own, ours = both_layers(config)
    assert ours.get_kv_cache_spec(config).shapes == own.get_kv_cache_spec(config).shapes
    module = importlib.import_module("hybridrt_vllm.models")
    assert len(module.Qwen3NextForCausalLM.get_mamba_state_shape_from_config(config)) == 2
    assert len(module.Qwen3NextForCausalLM.get_mamba_state_dtype_from_config(config)) == 2
    steps = Steps((own, ours))
    assert steps.run([], {3: 2}) == steps.run([3, 0]) == 0


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"rows": 3}, "rows"), ([], "an object"), ({"columns": 1}, "from 2"), ({"columns": 65}, "to 64"),
        ({"columns": 4.0}, "integer"), ({"columns": True}, "integer"), ({"replay": 1}, "true or false"),
    ],
)  # fmt: skip
def test_settings_are_checked(plugin: SimpleNamespace, given: Any, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        plugin.settings.resolve(vllm_config(additional_config={"hybridrt": given}), on_cuda=True)


def test_more_rows_than_were_planned_are_refused(plugin: SimpleNamespace) -> None:
    _, layer = both_layers(vllm_config())
    with pytest.raises(ConfigError, match=r"9 rows.*--max-num-seqs"):
        layer.blocks.rows(torch.ones(9, dtype=torch.int32))
