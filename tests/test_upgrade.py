"""What earlier versions have written is loaded, or refused with the version and what to do; newer files are refused.

tests/vectors/upgrade has files of each version, which `python -m tests.support.upgrade_files` made.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hybridrt import LLM, __version__
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import (
    CacheDumpError,
    CheckpointError,
    ConfigError,
    HandshakeError,
    HybridrtError,
    MessageError,
    RankError,
    RequestError,
    SessionError,
)
from hybridrt.base.formats import Format
from hybridrt.channel.codec import pack
from hybridrt.cli.conversation import load
from hybridrt.engine.cache import cache_dump, request_log, session_file
from hybridrt.engine.cache.explain import explain
from hybridrt.fleet import cache_messages
from hybridrt.fleet.prefix_mirror import CacheLayout
from hybridrt.models.loading import prepared_weights
from hybridrt.parallel import rank_start
from hybridrt.parallel.messages import Hello
from hybridrt.runtime.load import build_model
from hybridrt.runtime.precompile import compile_mark
from hybridrt.transfer.handshake import check_handshake
from hybridrt.verify import results
from hybridrt.verify.against import read_report
from tests.support.upgrade_files import FOLDER, NOTE, OPTIONS, TEXT, ask, handshake

VERSIONS = sorted(folder.name for folder in FOLDER.iterdir())
EARLIER = re.compile(r"its format is 'hybridrt [a-z ]+ \d+', of an earlier version; hybridrt \S+ reads '.+': \w+")


@pytest.fixture(params=VERSIONS)
def files(request: pytest.FixtureRequest) -> Path:
    return FOLDER / str(request.param)


@pytest.fixture
def llm(files: Path) -> Iterator[LLM]:
    with closing(engine(files)) as made:
        yield made


def engine(files: Path) -> LLM:
    """The engine of this version, with a checkpoint and a configuration of an earlier one."""
    return LLM(str(files / "model"), **OPTIONS)  # type: ignore[arg-type]


def loaded(read: Callable[[], Any], error: type[HybridrtError]) -> Any:
    """What was read; None if this version says that its reader is newer, and what to do."""
    try:
        return read()
    except error as e:
        assert EARLIER.search(str(e)), e
        return None


def test_the_last_version_has_left_files() -> None:
    """Of a version that has no files, the next one promises nothing. Make them at a release."""
    assert __version__ in VERSIONS


@pytest.mark.slow
def test_a_session_goes_on(files: Path, llm: LLM) -> None:
    expected, cached = ask(llm, [*TEXT, 1])
    assert cached == 0 and llm.reset_prefix_cache()
    session = loaded(lambda: llm.load_session(files / "session", trusted=True), SessionError)
    if session is not None:
        assert (session.token_ids, session.note) == (TEXT[: len(session.token_ids)], NOTE)
        assert ask(llm, [*TEXT, 1]) == (expected, len(session.token_ids))


@pytest.mark.slow
def test_a_log_of_requests_is_explained(files: Path) -> None:
    log = loaded(lambda: request_log.read_log(files / "requests.jsonl"), CacheDumpError)
    if log is not None:
        assert [request.why for request in explain(*log)] == ["new"]


@pytest.mark.slow
def test_a_dump_of_the_cache_is_read(files: Path) -> None:
    dump = loaded(lambda: cache_dump.read_dump(files / "cache.json"), CacheDumpError)
    if dump is not None:
        assert dump.page_size == 4 and max(node.end for node in dump.nodes) >= len(TEXT)


@pytest.fixture
def prepared(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[int]]:
    """An earlier version's prepared weights, where this version looks for its own; and what weights of the checkpoint
    answer."""
    monkeypatch.setenv(prepared_weights.VARIABLE, str(tmp_path))
    with engine(files) as made:
        expected, _ = ask(made, TEXT)
    (file,) = tmp_path.iterdir()
    file.write_bytes((files / "prepared.safetensors").read_bytes())
    return file, expected


@pytest.mark.slow
def test_prepared_weights_are_the_checkpoints(
    files: Path, prepared: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("the checkpoint is loaded")

    monkeypatch.setattr(build_model, "load_weights", fail)
    made = loaded(lambda: engine(files), CheckpointError)
    if made is not None:
        with made:
            assert ask(made, TEXT)[0] == prepared[1]


@pytest.mark.slow
def test_prepared_weights_and_compiled_kernels_of_another_version_have_other_names(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made again."""
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    monkeypatch.setenv(prepared_weights.VARIABLE, str(tmp_path / "weights"))
    config = EngineConfig(str(files / "model"))
    compile_mark.write_mark(compile_mark._folder(config) / "gpu", 3)
    with engine(files):
        pass
    assert compile_mark.has_marks(config)
    for module in (compile_mark, prepared_weights):
        monkeypatch.setattr(module, "__version__", "99.0.0")
    assert not compile_mark.has_marks(config)
    with engine(files):
        pass
    assert len(list((tmp_path / "weights").iterdir())) == 2


@pytest.mark.slow
def test_workers_agree_or_name_the_version(files: Path, llm: LLM) -> None:
    theirs = json.loads((files / "handshake.json").read_text())
    if theirs["version"] == handshake(llm)["version"]:
        check_handshake(handshake(llm), theirs)
    newer = theirs | {"version": 99}
    with pytest.raises(HandshakeError, match=r"version is \d+ here and 99 there; start both workers with the same"):
        check_handshake(handshake(llm), newer)


@pytest.mark.slow
def test_a_conversation_is_loaded(files: Path, tmp_path: Path) -> None:
    """It has the form of /v1/chat/completions, and no number of ours."""
    assert [message.text for message in load(files / "conversation.json")] == ["Hello", "Hi"]
    (tmp_path / "cut.json").write_bytes((files / "conversation.json").read_bytes()[:-9])
    with pytest.raises(RequestError, match="is not a conversation"):
        load(tmp_path / "cut.json")


@pytest.mark.slow
def test_a_report_is_read(files: Path) -> None:
    report = loaded(lambda: read_report(str(files / "report.json")), ConfigError)
    assert report is None or report["model"] == "tiny"


class Reader(NamedTuple):
    """How a file is read, and the format that this version reads."""

    file: str
    format: Format
    error: type[HybridrtError]
    read: Callable[[Path, Path], Any]  # of the file and of its version's files


def read_session(file: Path, files: Path) -> Any:
    with engine(files) as made:
        return made.load_session(file, trusted=True)


def read_prepared(file: Path, files: Path) -> Any:
    """With this name instead of the one that the checkpoint gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(prepared_weights.VARIABLE, str(file.parent))
        patch.setattr(prepared_weights.PreparedWeights, "__init__", lambda self, *_: setattr(self, "file", file))
        engine(files).close()


READERS = (
    Reader("session", session_file.FORMAT, SessionError, read_session),
    Reader("prepared.safetensors", prepared_weights.FORMAT, CheckpointError, read_prepared),
    Reader("requests.jsonl", request_log.FORMAT, CacheDumpError, lambda file, _: request_log.read_log(file)),
    Reader("cache.json", cache_dump.FORMAT, CacheDumpError, lambda file, _: cache_dump.read_dump(file)),
    Reader("report.json", results.FORMAT, ConfigError, lambda file, _: read_report(str(file))),
)
BY_FILE = pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.file)


def changed(data: bytes, old: str, new: str) -> bytes:
    """With another text of the same length, so that headers stay whole."""
    assert data.count(old.encode()) == 1 and len(old) == len(new)
    return data.replace(old.encode(), new.encode())


@pytest.mark.slow
@BY_FILE
def test_files_of_newer_and_of_no_versions_are_refused(reader: Reader, tmp_path: Path) -> None:
    """Nothing else of them is read: a newer form may have any fields."""
    files, file = FOLDER / __version__, tmp_path / "changed"
    data, own = (files / reader.file).read_bytes(), str(reader.format)
    file.write_bytes(changed(data, own, f"{reader.format.name} 9"))
    with pytest.raises(reader.error) as caught:
        reader.read(file, files)
    text = str(caught.value)
    assert f"'{reader.format.name} 9', of a newer version; hybridrt {__version__} reads '{own}'" in text, text
    assert f"use that version, or {reader.format.remedy}" in text and str(file) in text
    for other in (own[:-1] + "x", "something else"[: len(own)].ljust(len(own))):
        file.write_bytes(changed(data, own, other))
        with pytest.raises(reader.error, match="its format is"):
            reader.read(file, files)
    file.write_bytes(changed(data, '"format":', '"former":'.ljust(9)) if b'"format":' in data else data)
    with pytest.raises(reader.error, match="its format is None"):
        reader.read(file, files)


@pytest.mark.slow
@BY_FILE
def test_damaged_files_are_refused(reader: Reader, tmp_path: Path) -> None:
    files, file = FOLDER / __version__, tmp_path / "damaged"
    data = (files / reader.file).read_bytes()
    half = len(data) // 2
    damages = [b"", data[:9], data[: 60 if reader.file.endswith("jsonl") else half], b"\xff" * len(data), b"[" * 5000]
    damages.append(b"\x00" * 8 + data[8:])
    for damaged in damages:
        file.write_bytes(damaged)
        with pytest.raises(reader.error):
            reader.read(file, files)


def test_events_of_another_version_are_refused() -> None:
    message = cache_messages.layout_message(CacheLayout(16, True))
    newer = message.replace(b"hybridrt cache events 2", b"hybridrt cache events 3")
    assert newer != message
    with pytest.raises(MessageError, match=r"of a newer version.*the same version"):
        cache_messages.read_layout(newer)


class Presents:
    """A link whose other end sends one message first."""

    def __init__(self, message: bytes) -> None:
        self.message, self.closed = message, False

    def listen(self, seconds: float) -> list[bytes]:
        return [self.message]

    def put_back(self, messages: list[bytes]) -> None:
        assert not messages

    def close(self) -> None:
        self.closed = True


def test_a_rank_of_another_version_is_refused() -> None:
    own, other = Presents(pack(Hello(1, __version__))), Presents(pack(Hello(1, "99.0.0")))
    assert rank_start._presented(own, 0.0) == 1  # type: ignore[arg-type]
    with pytest.raises(RankError, match=rf"rank 1 has version 99.0.0 .* rank 0 has {__version__}: install one version"):
        rank_start._presented(other, 0.0)  # type: ignore[arg-type]
    assert other.closed and not own.closed


def test_a_format_says_what_to_do() -> None:
    format = Format("hybridrt thing", 3, "make it again")
    assert str(format) == "hybridrt thing 3" and format.refusal("hybridrt thing 3") is None
    reads = f"hybridrt {__version__} reads 'hybridrt thing 3'"
    assert (
        format.refusal("hybridrt thing 2")
        == f"its format is 'hybridrt thing 2', of an earlier version; {reads}: make it again"
    )
    newer = f"its format is 'hybridrt thing 12', of a newer version; {reads}: use that version, or make it again"
    assert format.refusal("hybridrt thing 12") == newer
    for found in (None, 3, "hybridrt thing", "hybridrt thing 1234567890", "hybridrt thing -1", "another thing 3", {}):
        assert format.refusal(found) == f"its format is {found!r}, not 'hybridrt thing 3'"
