"""Engines whose KV cache holds e4m3 codes: models, prefixes, sessions, main memory, drafts, and the scales."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt import LLM, SpeculativeConfig, embedding
from hybridrt.attention import paged
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, DeviceError, EngineError, SessionError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.attention import paged_attention
from hybridrt.kernels.attention.kv_codes import encode
from hybridrt.kernels.attention.paged_attention import CellPlaces, NewCells
from hybridrt.mem_cache.pools.kv_pool import KVPool, KVScales
from hybridrt.runtime.run import kv_scales
from tests.models.test_models_parity import prompts
from tests.speculative.test_schedules import MAKERS
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import sweep
from tests.support.mtp_oracle import write_with_head
from tests.support.session import Session

CODES: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
# Attention next to Mamba-2, gated attention, windows, sinks with windows, latent attention.
MODELS = ("falcon-plain", "qwen-plain", "swa_ssm-plain", "gpt_oss-plain", "kimi-plain")
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)


def pool(llm: LLM) -> KVPool:
    runner: Any = llm.engine.executor
    found: KVPool = runner.pools.kv
    return found


def build(path: Path | str, **config: Any) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_running_requests": 2}
    return LLM(str(path), **(defaults | CODES | config))


def answers(llm: LLM, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    return [out.token_ids for prompt in asked for out in llm.generate([list(prompt)], GREEDY)]


@pytest.mark.parametrize("name", sweep(MODELS, 2))
def test_a_model_computes_with_what_the_codes_stand_for(
    name: str, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle keeps plain numbers, which are rounded to codes and back when they are written."""
    asked = [(prompt, 6) for prompt in prompts(5, 40, seed=2)]
    coded = Session(checkpoints[name].path, **CODES)
    kv = coded.runner.pools.kv
    assert all(tensor.dtype == torch.uint8 for tensor in kv.tensors) and all(
        0 < scale.keys < 1 for scale in kv.scales.values()
    )
    got = [sample.logits for sample in coded.run(asked, chunk=16)]
    plain = Session(checkpoints[name].path)
    exact = [sample.logits for sample in plain.run(asked, chunk=16)]
    plain.runner.pools.kv.scales.update(kv.scales)
    store_at = paged_attention.store_at

    def rounded(caches: NewCells, places: CellPlaces) -> None:
        store_at([(cache, encode(new, scale).float() * scale, scale) for cache, new, scale in caches], places)

    for module in (paged_attention, paged):
        monkeypatch.setattr(module, "store_at", rounded)
    wanted = [sample.logits for sample in plain.run(asked, chunk=16)]
    for ours, theirs, before in zip(got, wanted, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
        assert not torch.allclose(ours, before, rtol=2e-4, atol=2e-4)


def test_a_page_takes_a_quarter_of_float32(checkpoints: CheckpointStore) -> None:
    plain, coded = (Session(checkpoints["qwen-plain"].path, **config).plan for config in ({}, CODES))
    assert [4 * page for page in coded.costs.pages] == [*plain.costs.pages]


@pytest.mark.parametrize("name", sweep(["kimi-plain", "swa_ssm-plain", "qwen-plain"], 3))
def test_prefixes_come_back_from_the_cache_a_file_and_main_memory(
    name: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    path, first = checkpoints[name].path, prompts(70, seed=3)[0]
    with build(path, prefix_cache=False) as llm:
        (answer,) = answers(llm, [first])
        asked = [first, [*first, *answer, 9, 8], [*first[:66], 3, 4]]
        wanted, scales = answers(llm, asked), pool(llm).scales
    with build(path, host_cache_bytes=1 << 20) as llm:
        assert pool(llm).scales == scales, "measured again"
        found = answers(llm, asked[:1])
        llm.save_session(tmp_path / "turn", [*first, *answer])
        assert found + answers(llm, asked[1:]) == wanted
        llm.engine.prefixes.evict([group.total for group in llm.engine._coordinator.pages.groups], 99)
        again = llm.generate([asked[1]], GREEDY)[0]
        assert again.token_ids == wanted[1] and again.metrics.cached_tokens >= 78
        assert llm.engine.counters().cache_fetched >= 78
    with build(path) as llm:
        llm.load_session(tmp_path / "turn")
        out = llm.generate([asked[1]], GREEDY)[0]
        assert (out.token_ids, out.metrics.cached_tokens) == (wanted[1], 78)
    for other, field in ({"kv_scales": "one"}, "kv_scales"), ({"kv_cache_dtype": "auto"}, "kv_codes"):
        with build(path, **other) as llm, pytest.raises(SessionError, match=field):
            llm.load_session(tmp_path / "turn")


@pytest.mark.parametrize(("method", "topk"), [("ngram", 1), ("mtp", 1), ("mtp", 2)])
def test_drafts_change_no_answer(method: str, topk: int, tmp_path: Path) -> None:
    """Drafts that fork move the codes of accepted tokens."""
    write_with_head(MAKERS["mamba2 with a head"], tmp_path / "model", seed=0)
    asked = [prompts(24, seed=3)[0], [5, 6, 7, 8] * 6]
    with build(tmp_path / "model") as llm:
        wanted = answers(llm, asked)
    with build(tmp_path / "model", speculative=SpeculativeConfig(method=method, num_draft_tokens=4, topk=topk)) as llm:
        assert answers(llm, asked) == wanted
        kv = pool(llm)
        assert len(kv.scales) == len(kv.specs) and all(scale.keys < 1 for scale in kv.scales.values())


def test_scales_are_powers_of_two_with_room() -> None:
    assert kv_scales.scale_for(112.0) == 1.0 and kv_scales.scale_for(112.5) == 2.0
    assert kv_scales.scale_for(0.25) == 2.0**-8 and kv_scales.scale_for(0.0) == 1.0
    ids = kv_scales.prompt_ids(512, 1000)
    assert len(set(ids)) > 500 and 0 <= min(ids) < 5 and 995 < max(ids) < 1000


def test_the_numbers_of_a_text_are_inside_the_scales(checkpoints: CheckpointStore) -> None:
    """No key or value of other prompts saturates."""
    coded = Session(checkpoints["falcon-plain"].path, **CODES)
    for tensor in coded.runner.pools.kv.tensors:
        tensor.zero_()
    coded.run([(prompt, 6) for prompt in prompts(30, 60, seed=5)])
    table, kv = coded.runner.pools.req_to_token.tables[1:], coded.runner.pools.kv
    pages = (table[table > 0] // kv.page_size).unique().long()  # other bytes of these tensors are states
    for tensor in kv.tensors:
        assert 0 < int((tensor[:, pages] & 0x7F).amax()) < 0x7E


def test_numbers_that_are_not_finite_fail_their_request_alone(checkpoints: CheckpointStore) -> None:
    """In a model of attention alone, the last token meets them in the cache."""
    with build(checkpoints["nemotron-attention_alone"].path) as llm:
        runner: Any = llm.engine.executor
        wanted = answers(llm, [[3, 8, 4]])
        bad = next(token for token in range(9, 40) if token not in wanted[0])
        runner.model.embed.weight.data[bad] = torch.inf
        with pytest.raises(EngineError, match="not finite"):
            llm.generate([[3, bad, 4]], GREEDY)
        assert answers(llm, [[3, 8, 4]]) == wanted


def test_numbers_without_a_scale_are_an_error(checkpoints: CheckpointStore) -> None:
    runner = Session(checkpoints["falcon-plain"].path, **CODES).runner
    runner.model.embed.weight.data.fill_(torch.nan)
    with pytest.raises(ConfigError, match=r'layer 0 gives nan .*kv_scales="one"'):
        kv_scales.find_kv_scales(runner.config, runner.target, runner.model, runner.model_path)


def test_engines_with_a_scheduler_of_their_own_have_the_scales(checkpoints: CheckpointStore) -> None:
    session = Session(checkpoints["falcon-plain"].path, **CODES)
    loaded = embedding.load(session.config)
    runtime = embedding.build(loaded, embedding.plan_memory(loaded, budget_bytes=1 << 22))
    assert runtime.pools.kv.scales == session.runner.pools.kv.scales
    assert all(tensor.dtype == torch.uint8 for tensor in runtime.pools.kv.tensors)


def test_scales_of_one_need_no_measuring(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_scales, "_measured", None)
    with build(checkpoints["falcon-plain"].path, kv_scales="one") as llm:
        assert set(pool(llm).scales.values()) == {KVScales(1.0, 1.0)}


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8'"):
        EngineConfig("x", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="kv_scales"):
        EngineConfig("x", kv_scales="two", **CODES)
    with pytest.raises(ConfigError, match='set kv_cache_dtype="fp8_e4m3"'):
        EngineConfig("x", kv_scales="one")
    from hybridrt.base import device, dtypes

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(dtypes, "gpu_name", lambda *_: "an A100")
    assert not device.has_float8(torch.device("cuda")) and device.has_float8(torch.device("cpu"))
    assert dtypes.resolve_kv_codes("auto", torch.device("cuda")) is None
    with pytest.raises(DeviceError, match="an A100 has no e4m3"):
        dtypes.resolve_kv_codes("fp8_e4m3", torch.device("cuda"))
