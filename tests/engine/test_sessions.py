"""Sessions on disk: what one process has computed serves another, and no file can do harm."""

import json
import os
import resource
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hybridrt import LLM, RequestOutput, SamplingParams, Session, SessionError, SpeculativeConfig
from hybridrt.engine.cache import session_file
from hybridrt.engine.core.engine import Engine
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey
from tests.models.test_models_parity import prompts
from tests.speculative.test_schedules import MAKERS
from tests.support.cache_ledger import check_cache
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import sweep
from tests.support.mtp_oracle import write_with_head

MODELS = ("falcon-plain", "qwen-plain", "falcon_mamba-plain", "lfm2-plain", "nemotron-attention_alone")
KEYS = "layers.0.keys"
TEXT = prompts(60, seed=3)[0]


def build(path: Path, **config: Any) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_running_requests": 2, "page_size": 4}
    return LLM(str(path), **(defaults | config))


def ask(llm: LLM, prompt: list[int], count: int = 8, **params: Any) -> RequestOutput:
    (found,) = llm.generate([prompt], SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **params))
    with llm.engine.turns:
        check_cache(llm.engine._coordinator)
    return found


@pytest.mark.parametrize(
    "name, mode", sweep([*((n, "classic") for n in MODELS), *((n, "replay") for n in MODELS[:2])], 3, thin=2)
)
def test_another_process_continues_where_this_one_ended(
    name: str, mode: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """Into pools of another page size, and of another state mode. The prompts' own states come along."""
    path, file = checkpoints[name].path, tmp_path / "talk.safetensors"
    with build(path, state_mode=mode) as llm:
        text = [*TEXT[:33], *ask(llm, TEXT[:33], 9).token_ids]
        saved = llm.save_session(file, text, note="a talk")
        wanted = ask(llm, [*text, 5, 6]), ask(llm, [*TEXT[:33], 9, 9])
    assert len(saved.token_ids) >= 40 and saved.token_ids == text[: len(saved.token_ids)]
    with build(path, page_size=8) as llm:
        assert llm.load_session(file) == saved
        check_cache(llm.engine._coordinator)
        found = ask(llm, [*text, 5, 6]), ask(llm, [*TEXT[:33], 9, 9])
        assert [f.token_ids for f in found] == [w.token_ids for w in wanted]
        assert [f.metrics.cached_tokens for f in found] == [len(saved.token_ids), 32]
        assert ask(llm, [*text, 5, 6], cache_salt="other").metrics.cached_tokens == 0


def test_a_prediction_heads_keys_come_along(tmp_path: Path) -> None:
    path, file = tmp_path / "model", tmp_path / "talk.safetensors"
    write_with_head(MAKERS["mamba2 with a head"], path, seed=0)
    speculative = SpeculativeConfig(method="mtp", num_draft_tokens=3)
    with build(path, speculative=speculative) as llm:
        text = [*TEXT[:24], *ask(llm, TEXT[:24], 9).token_ids]
        saved, wanted = llm.save_session(file, text), ask(llm, [*text, 5])
    with build(path, speculative=speculative) as llm:
        assert llm.load_session(file) == saved
        found = ask(llm, [*text, 5])
        assert (found.token_ids, found.metrics.cached_tokens) == (wanted.token_ids, len(saved.token_ids))
        assert found.metrics.accepted == wanted.metrics.accepted
    with build(path) as llm, pytest.raises(SessionError, match="kv_layers"):
        llm.load_session(file)


def test_a_salt_keeps_a_session_apart(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    file = tmp_path / "talk.safetensors"
    with build(checkpoints["falcon-plain"].path) as llm:
        ask(llm, TEXT[:20], cache_salt="a")
        with pytest.raises(SessionError, match="nothing of these 20 tokens"):
            llm.save_session(file, TEXT[:20])
        assert not file.exists()
        llm.save_session(file, TEXT[:20], cache_salt="a")
        assert llm.reset_prefix_cache()
        llm.load_session(file, cache_salt="b")
        hits = [ask(llm, TEXT[:30], 1, cache_salt=salt).metrics.cached_tokens for salt in ("a", None, "b")]
        assert hits == [0, 0, 16]


@pytest.mark.parametrize("field", ["weights", "adapter"])
def test_a_session_of_other_weights_or_another_adapter_is_refused(
    field: str, checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has changed then. With the same ones it serves requests of the given salt."""

    def become(value: str) -> None:
        monkeypatch.setattr(Engine, "cache_key", lambda self, p: CacheKey(p.cache_salt or "", **{field: value}))

    path, file = checkpoints["falcon-plain"].path, tmp_path / "talk.safetensors"
    with build(path) as llm:
        become("one")
        ask(llm, TEXT[:20])
        llm.save_session(file, TEXT[:20])
    with build(path) as llm:
        for other in ("two", ""):
            become(other)
            with pytest.raises(SessionError, match=f"{field} is {other or None!r} here and 'one' there"):
                llm.load_session(file)
        assert not llm.engine.counters().cached_pages
        become("one")
        llm.load_session(file)
        assert ask(llm, TEXT[:30], 1).metrics.cached_tokens == 16
        become("two")
        assert ask(llm, TEXT[:30], 1).metrics.cached_tokens == 0


def test_what_is_cached_already_is_not_held_twice(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    file = tmp_path / "talk.safetensors"
    with build(checkpoints["qwen-plain"].path) as llm:
        ask(llm, TEXT[:30])
        llm.save_session(file, TEXT[:30])
        before = llm.engine.counters()
        llm.load_session(file)
        check_cache(llm.engine._coordinator)
        assert llm.engine.counters() == before


def test_without_room_for_all_states_the_last_one_counts(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path, file = checkpoints["falcon-plain"].path, tmp_path / "talk.safetensors"
    with build(path, cache_slots=4) as llm:
        text = [*TEXT[:40], *ask(llm, TEXT[:40], 5).token_ids]
        saved, wanted = llm.save_session(file, text), ask(llm, [*text, 7])
    with build(path, cache_slots=0, max_running_requests=1) as llm:
        llm.load_session(file)
        assert llm.engine.counters().cached_slots == 1
        found = llm.engine._coordinator.prefixes.path(torch.tensor(text, dtype=torch.int32).numpy(), DEFAULT_KEY)[0]
        assert found.length == len(saved.token_ids)
        assert ask(llm, [*text, 7]).token_ids == wanted.token_ids


def test_there_must_be_room(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """A request that runs keeps its pages and its slot; the session finds what is left."""
    path, file = checkpoints["falcon-plain"].path, tmp_path / "talk.safetensors"
    with build(path) as llm:
        ask(llm, TEXT[:40])
        llm.save_session(file, TEXT[:40])
    with build(path, cache_slots=0, max_running_requests=1) as llm:
        stream = llm.stream(TEXT[:9], SamplingParams(max_tokens=30, ignore_eos=True))
        next(stream)
        with pytest.raises(SessionError, match="running requests hold all of them"):
            llm.load_session(file)
        stream.close()
    with build(path, prefix_cache=False) as llm, pytest.raises(SessionError, match="prefix_cache=True"):
        llm.load_session(file)
    small = {"max_model_len": 16, "max_running_requests": 1, "cache_slots": 0}
    with build(path, **small) as llm, pytest.raises(SessionError, match="KV pages"):
        llm.load_session(file)


def test_from_several_threads_beside_running_requests(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Saving and loading take turns with steps, donations that wait for the next step included."""
    with build(checkpoints["qwen-plain"].path, state_mode="replay", cache_slots=60) as llm:
        wanted = [ask(llm, TEXT[i : i + 20], 12).token_ids for i in range(3)]
        errors = list[BaseException]()

        def talk(i: int) -> None:
            try:
                for turn in range(2):
                    salt = f"{i} {turn}"
                    assert ask(llm, TEXT[i : i + 20], 12, cache_salt=salt).token_ids == wanted[i]
                    llm.save_session(tmp_path / salt, TEXT[i : i + 20], cache_salt=salt)
                    llm.load_session(tmp_path / salt, cache_salt=f"{salt} again")
                    assert ask(llm, TEXT[i : i + 20], 12, cache_salt=f"{salt} again").token_ids == wanted[i]
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=talk, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], object], sign: bool) -> None:
    """Changes tensors and metadata; `sign` makes the checksum right again."""
    with safe_open(file, "pt") as old:
        tensors, metadata = {name: old.get_tensor(name) for name in old.keys()}, dict(old.metadata())  # noqa: SIM118
    change(tensors, metadata)
    if sign:
        metadata.pop("checksum")
        metadata["checksum"] = session_file._checksum(tensors, metadata)
    save_file(tensors, file, metadata)


def lie_about_a_shape(file: Path) -> None:
    """A header that promises terabytes, over the same bytes."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header[KEYS]["shape"][1] = 2**40
    header[KEYS]["data_offsets"][1] = 2**50
    changed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + size :])


def put(tensors: dict[str, torch.Tensor], name: str, at: int, value: float) -> None:
    tensors[name].view(-1)[at] = value


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut in the data": (lambda f: f.write_bytes(f.read_bytes()[:-1]), "damaged"),
    "cut in the header": (lambda f: f.write_bytes(f.read_bytes()[:99]), "cut off"),
    "empty": (lambda f: f.write_bytes(b""), "cut off"),
    "a header of exabytes": (lambda f: f.write_bytes(b"\xff" * 7 + b"\x10" + f.read_bytes()[8:]), "cut off"),
    "no safetensors": (lambda f: f.write_bytes(struct.pack("<Q", 40) + b"x" * 400), "no safetensors file"),
    "a flipped bit": (lambda f: f.write_bytes(f.read_bytes()[:-9] + b"\x7f" + f.read_bytes()[-8:]), "checksum"),
    "a shape of terabytes": (lie_about_a_shape, "damaged"),
    "another file": (lambda f: save_file({"x": torch.zeros(3)}, f), "no file of this version's LLM.save_session"),
    "another model": (lambda f: rewrite(f, lambda t, m: m.update(model="0" * 32), True), "model is"),
    "another dtype": (lambda f: rewrite(f, lambda t, m: m.update(conv_dtype="bfloat16"), True), "conv_dtype"),
    "other ranks": (lambda f: rewrite(f, lambda t, m: m.update(tp_size="2"), True), "must be"),
    "ranks that cannot be": (lambda f: rewrite(f, lambda t, m: m.update(tp_size="3"), True), "not written by 3 ranks"),
    "no ranks": (lambda f: rewrite(f, lambda t, m: m.update(tp_size="0"), True), "from 1 to 64"),
    "ranks as text": (lambda f: rewrite(f, lambda t, m: m.update(tp_size="two"), True), "from 1 to 64"),
    "an unknown field": (lambda f: rewrite(f, lambda t, m: m.update(rope="yes"), True), "rope"),
    "a changed note": (lambda f: rewrite(f, lambda t, m: m.update(note="!"), False), "checksum"),
    "a missing tensor": (lambda f: rewrite(f, lambda t, m: t.pop(KEYS), True), "layers.0.keys"),
    "a tensor too many": (lambda f: rewrite(f, lambda t, m: t.update(x=torch.zeros(1)), True), "'x'"),
    "no tokens": (lambda f: rewrite(f, lambda t, m: t.update(tokens=t["tokens"][:0]), True), "0 tokens"),
    "fewer tokens": (lambda f: rewrite(f, lambda t, m: t.update(tokens=t["tokens"][:9].clone()), True), "must be"),
    "tokens as floats": (lambda f: rewrite(f, lambda t, m: t.update(tokens=t["tokens"].float()), True), "list of I32"),
    "a token id too large": (lambda f: rewrite(f, lambda t, m: put(t, "tokens", 2, 131), True), "vocabulary"),
    "a token id below 0": (lambda f: rewrite(f, lambda t, m: put(t, "tokens", 2, -1), True), "vocabulary"),
    "states out of order": (lambda f: rewrite(f, lambda t, m: put(t, "positions", 0, 99), True), "states at"),
    "no state": (lambda f: rewrite(f, lambda t, m: t.update(positions=t["positions"][:0]), True), "0 states"),
    "a NaN": (lambda f: rewrite(f, lambda t, m: put(t, "states.0.layers.0.state", 3, torch.nan), True), "not finite"),
    "float64": (lambda f: rewrite(f, lambda t, m: t.update({KEYS: t[KEYS].double()}), True), "F64"),
}


def test_a_wrong_file_changes_nothing(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    with build(checkpoints["falcon-plain"].path) as llm:
        ask(llm, TEXT[:20])
        good = tmp_path / "good"
        llm.save_session(good, TEXT[:20])
        assert llm.reset_prefix_cache()
        before = llm.engine.counters()
        for what, (damage, text) in WRONG.items():
            file = tmp_path / "wrong"
            file.write_bytes(good.read_bytes())
            damage(file)
            with pytest.raises(SessionError, match=text):
                llm.load_session(file)
            assert llm.engine.counters() == before, what
        with pytest.raises(FileNotFoundError):
            llm.load_session(tmp_path / "none")
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        held = os.open(pipe, os.O_RDWR)  # else a reader of it would wait forever
        os.write(held, bytes(16))
        with pytest.raises(SessionError, match="not a regular file"):
            llm.load_session(pipe)
        os.close(held)
        llm.load_session(good)
        assert ask(llm, TEXT[:30]).metrics.cached_tokens == 16


def test_a_file_is_replaced_as_a_whole(
    checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"{'long' * 60}.safetensors"
    with build(checkpoints["falcon-plain"].path) as llm:
        ask(llm, TEXT[:20])
        assert llm.save_session(file, TEXT[:20]) == Session(TEXT[:16])
        before = file.read_bytes()

        def full(*args: Any) -> None:
            Path(args[1]).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(session_file, "save_file", full)
        with pytest.raises(OSError, match="No space"):
            llm.save_session(file, TEXT[:20])
        for note in ("x" * (1 << 21), "\ud800", 5):
            with pytest.raises(SessionError, match="note"):
                llm.save_session(file, TEXT[:20], note=note)  # type: ignore[arg-type]
        for name in ("a\0b", "\ud800"):
            for call in (lambda name: llm.save_session(name, TEXT[:20]), llm.load_session):
                with pytest.raises(SessionError, match="no file name may hold"):
                    call(name)
        monkeypatch.undo()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))  # as on a disk that becomes full
        try:
            with pytest.raises(OSError, match="cannot be written"):
                llm.save_session(file, TEXT[:20])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        with pytest.raises(SessionError, match="not a regular file"):
            llm.save_session(pipe, TEXT[:20])
        assert pipe.is_fifo()
        pipe.unlink()
    assert file.read_bytes() == before and [*tmp_path.iterdir()] == [file]
