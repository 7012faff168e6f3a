"""Sessions of finite, useless numbers: whoever hits them computes afresh, and files from elsewhere stay apart."""

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hybridrt import LLM, SamplingParams, SessionError, SpeculativeConfig
from hybridrt.engine.cache.session_file import NOTE, _checksum
from hybridrt.engine.request.outputs import Delta
from tests.engine.test_sessions import TEXT, ask, build, rewrite
from tests.models.test_models_parity import prompts
from tests.support.cache_ledger import check_cache
from tests.support.checkpoints import CheckpointStore, qwen, write
from tests.support.levels import sweep

OTHER = prompts(30, seed=9)[0]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def useless(tensors: dict[str, torch.Tensor], _: object) -> None:
    """The largest finite numbers, in states, keys and values alike."""
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.finfo(tensor.dtype).max)


def states_alone(tensors: dict[str, torch.Tensor], _: object) -> None:
    useless({name: tensor for name, tensor in tensors.items() if name.startswith("states.")}, _)


def spoilt(llm: LLM, file: Path, text: list[int], change: Callable[..., None] = useless) -> None:
    """Saves what is cached of a text, with other numbers and a checksum that fits, and forgets it."""
    llm.save_session(file, text)
    rewrite(file, change, sign=True)
    assert llm.reset_prefix_cache()


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {}, "drafts": {"speculative": SpeculativeConfig(method="ngram", num_draft_tokens=3)},
    "main memory": {"host_cache_bytes": 1 << 22, "cache_slots": 4}, "replay": {"state_mode": "replay"},
}  # fmt: skip
CASES = [
    *(("falcon-plain", config, useless) for config in CONFIGS), ("falcon-plain", "plain", states_alone),
    ("qwen-plain", "replay", useless), ("falcon_mamba-plain", "plain", useless),
    ("nemotron-attention_alone", "plain", useless),
]  # fmt: skip


@pytest.mark.parametrize("name, config, change", sweep(CASES, 2))
def test_who_hits_useless_numbers_computes_afresh(
    name: str, config: str, change: Callable[..., None], checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """Each request gets what it gets without a cache, those of several samples and those that come together too. Then
    the entry has gone, and what took its place is used."""
    file = tmp_path / "bad"
    with build(checkpoints[name].path, **CONFIGS[config]) as llm:
        wanted = [ask(llm, [*TEXT[:40], *end], 6).token_ids for end in ([5, 6], [9, 9])]
        spoilt(llm, file, TEXT[:40], change)
        llm.load_session(file, trusted=True)
        greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        found = llm.generate([[*TEXT[:40], 5, 6], [*TEXT[:40], 9, 9], OTHER], [greedy, replace(greedy, n=2), greedy])
        with llm.engine.turns:
            check_cache(llm.engine._coordinator)
        assert [f.token_ids for f in found[:2]] == wanted
        assert [sample.token_ids for sample in found[1].outputs] == [wanted[1]] * 2
        counters = llm.engine.counters()
        assert counters.cache_dropped >= 1 and counters.failed == 0
        again = ask(llm, [*TEXT[:40], 5, 6], 6)
        assert again.token_ids == wanted[0] and again.metrics.cached_tokens >= 16
        assert llm.engine.counters().cache_dropped == counters.cache_dropped
        assert llm.reset_prefix_cache()


def test_what_was_computed_from_a_dropped_entry_goes_with_it(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """A request that reads the entry still runs when another one finds it useless: it leaves nothing."""
    with build(checkpoints["falcon-plain"].path, max_running_requests=3) as llm:
        wanted = ask(llm, [*TEXT[:40], 5, 6], 6).token_ids
        assert llm.reset_prefix_cache()
        stream = llm.stream([*TEXT[:40], 9], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
        next(stream)
        coordinator = llm.engine._coordinator
        (child,) = llm.engine._scheduler.running.values()
        with llm.engine.turns:
            coordinator.drop_prefix(child, 41, whole=True)
            check_cache(coordinator)
        found = ask(llm, [*TEXT[:40], 5, 6], 6)
        assert (found.token_ids, found.metrics.cached_tokens) == (wanted, 0)
        for _ in stream:
            pass
        with llm.engine.turns:
            check_cache(coordinator)
        assert ask(llm, [*TEXT[:40], 9, *TEXT[:9]], 1).metrics.cached_tokens <= 40
        assert llm.reset_prefix_cache()


def test_a_request_whose_own_numbers_are_not_finite_fails_alone(tmp_path: Path) -> None:
    """After a good prefix: it is computed afresh once, and then fails. Others go on, and cache again."""
    path = tmp_path / "model"
    write(qwen(tie_word_embeddings=False), path)
    with build(path) as llm:
        (weight,) = [p for n, p in llm.engine.executor.model.named_parameters() if "embed" in n]  # type: ignore[attr-defined]
        with torch.inference_mode():
            weight[0] = torch.nan
        good = [token or 1 for token in TEXT[:40]]
        wanted = ask(llm, [*good, 5], 4).token_ids
        steps = llm.engine.counters().steps
        greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        bad, fine = (llm.engine.add_request([*good, end], greedy, stream=False) for end in (0, 5))
        ended = dict[str, Delta]()
        while llm.engine.has_unfinished():
            ended |= {delta.request_id: delta for delta in llm.engine.step()}
        assert ended[fine].token_ids == wanted and "EngineError: the model's logits" in str(ended[bad].error)
        counters = llm.engine.counters()
        assert (counters.failed, counters.cache_dropped) == (1, 1) and counters.steps - steps < 20
        with llm.engine.turns:
            check_cache(llm.engine._coordinator)
        ask(llm, [*good, 5], 4)
        assert ask(llm, [*good, 5], 4).metrics.cached_tokens >= 32


def test_a_file_from_elsewhere_serves_its_own_salt_alone(
    checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed numbers, another user's key, and a key of one's own choice."""
    file = tmp_path / "talk"
    with build(checkpoints["falcon-plain"].path) as llm:
        ask(llm, TEXT[:40])
        saved = llm.save_session(file, TEXT[:40])
        assert llm.load_session(file) == saved and saved.cache_salt == ""
        assert llm.reset_prefix_cache()
        for key, elsewhere in (("x" * 16, True), (None, False)):
            monkeypatch.setenv("HYBRIDRT_SESSION_KEY", key) if key else monkeypatch.delenv("HYBRIDRT_SESSION_KEY")
            session = llm.load_session(file)
            assert bool(session.cache_salt) == elsewhere and session.token_ids == saved.token_ids
            assert ask(llm, TEXT[:50], 1).metrics.cached_tokens == (0 if elsewhere else 32)
            salt = session.cache_salt or "other"
            assert ask(llm, TEXT[:50], 1, cache_salt=salt).metrics.cached_tokens == (32 if elsewhere else 0)
            assert llm.reset_prefix_cache()
        rewrite(file, lambda tensors, _: tensors["tokens"].add_(0), sign=True)
        assert llm.load_session(file).cache_salt == "", "nothing has changed, and the signature fits"
        rewrite(file, useless, sign=True)
        assert llm.load_session(file).cache_salt.startswith("session ")
        assert llm.load_session(file, cache_salt="mine").cache_salt == "mine"
        monkeypatch.setenv("HYBRIDRT_SESSION_KEY", "short")
        with pytest.raises(SessionError, match="has 5 characters; it must have 16 or more"):
            llm.load_session(file)


def test_the_key_file_is_its_users_alone(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    key, file = tmp_path / "state" / "hybridrt" / "session-key", tmp_path / "talk"
    with build(checkpoints["falcon-plain"].path) as llm:
        ask(llm, TEXT[:20])
        llm.save_session(file, TEXT[:20])
        assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(list(key.parent.iterdir())) == 1
        os.chmod(key, 0o644)
        with pytest.raises(SessionError, match="its user alone can read"):
            llm.load_session(file)
        key.unlink()
        assert llm.load_session(file).cache_salt, "signed with a key that has gone"


def test_a_long_note_is_kept_and_a_short_header(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    file, note = tmp_path / "talk", "ä\0" * (1 << 19)
    with build(checkpoints["falcon-plain"].path) as llm:
        ask(llm, TEXT[:20])
        llm.save_session(file, TEXT[:20], note=note)
        assert int.from_bytes(file.read_bytes()[:8], "little") < 1 << 16
        assert llm.load_session(file).note == note
        rewrite(file, lambda tensors, _: tensors.update({NOTE: torch.full((9,), 255, dtype=torch.uint8)}), sign=True)
        with pytest.raises(SessionError, match="no UTF-8"):
            llm.load_session(file)


@pytest.mark.parametrize("name", ["note", "signature", "format", "other"])
def test_half_a_surrogate_pair_in_the_header_is_refused(
    checkpoints: CheckpointStore, tmp_path: Path, name: str
) -> None:
    """JSON can hold it, and save_session refuses it. The checksum fits."""
    file = tmp_path / "talk"
    with build(checkpoints["falcon-plain"].path) as llm:
        ask(llm, TEXT[:20])
        llm.save_session(file, TEXT[:20])
        with safe_open(file, "pt") as old:
            tensors = {key: old.get_tensor(key) for key in old.keys()}  # noqa: SIM118
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        metadata = header["__metadata__"]
        metadata[name] = "\ud800"
        metadata["checksum"] = _checksum(tensors, metadata)
        changed = json.dumps(header).encode()
        file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[end:])
        with pytest.raises(SessionError, match="no Unicode text"):
            llm.load_session(file)
