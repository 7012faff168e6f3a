"""Fields of SamplingParams that need no kernel: what the text holds, how long the prompt is, whose turn it is."""

from typing import Any

import pytest

from hybridrt.base.errors import PromptTooLongError, RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.text.stop_strings import StopStrings
from hybridrt.engine.text.tokenizer import Detokenizer
from tests.support.engine_harness import ByteTokenizer, Rig, expected

VOCAB = 300  # bytes, and special tokens after them


@pytest.mark.parametrize("pieces", [["aENDb"], list("aENDb"), ["aEN", "Db"], ["a", "END", "b"]])
@pytest.mark.parametrize(("include", "want"), [(False, "a"), (True, "aEND")])
def test_the_text_ends_before_or_behind_a_stop_string(pieces: list[str], include: bool, want: str) -> None:
    stop = StopStrings(["ENDING", "END", "zEND"])
    detokenizer = Detokenizer(ByteTokenizer(), [65], stop, include_stop=include)
    text = ""
    for piece in pieces:
        stopped = detokenizer.advance(list(piece.encode()))
        text += detokenizer.take_text(stopped)
        if stopped:
            break
    assert stopped and text == want


def test_of_two_that_begin_together_the_shorter_one_ends_the_text() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [65], StopStrings(["ENDING", "END"]), include_stop=True)
    assert detokenizer.advance(list(b"aENDINGb")) and detokenizer.take_text(True) == "aEND"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_requests_end_behind_their_stop_string_or_token(include: bool, stream: bool) -> None:
    rig = Rig(vocab=VOCAB, tokenizer=ByteTokenizer())
    whole = rig.finish("a", max_tokens=30, ignore_eos=True, seed=4)
    params = SamplingParams(
        max_tokens=30,
        ignore_eos=True,
        seed=4,
        stop_token_ids=[whole.token_ids[9]],
        include_stop_str_in_output=include,
        skip_special_tokens=False,
    )
    name = rig.engine.add_request("a", params, stream=stream)
    rig.run()
    got = rig.outputs[name, 0]
    assert got.finish_reason == "stop" and len(got.token_ids) == 10
    want = ByteTokenizer().decode(whole.token_ids[: 10 if include else 9], False)
    assert got.text.rstrip("\ufffd") == want.rstrip("\ufffd")


def test_special_tokens_show_where_they_are_asked_for() -> None:
    rig = Rig(vocab=VOCAB, tokenizer=ByteTokenizer())
    hidden = rig.finish("a", max_tokens=40, ignore_eos=True, seed=4)
    shown = rig.finish("a", max_tokens=40, ignore_eos=True, seed=4, skip_special_tokens=False)
    special = [t for t in hidden.token_ids if t >= 256]
    assert shown.token_ids == hidden.token_ids and special
    assert all(f"<{t}>" in shown.text and f"<{t}>" not in hidden.text for t in special)


@pytest.mark.parametrize(("kept", "left"), [(5, 5), (62, 62), (63, 63), (-1, 63), (200, 100)])
@pytest.mark.parametrize("text", [True, False])
def test_long_prompts_are_cut_to_their_end(text: bool, kept: int, left: int) -> None:
    rig = Rig(vocab=256, tokenizer=ByteTokenizer(), max_model_len=64)
    prompt: Any = "".join(chr(65 + i % 26) for i in range(100))
    ids = list(prompt.encode())
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=kept)
    if left > 63:
        with pytest.raises(RequestError, match="the prompt has 100 tokens"):
            rig.engine.prepare(prompt if text else ids, params)
        return
    assert rig.engine.prepare(prompt if text else ids, params).tokens == ids[-left:]
    assert rig.engine.prepare([1, 2], params).tokens == [1, 2]
    assert rig.finish(prompt, max_tokens=1, truncate_prompt_tokens=kept).finish_reason is not None


def test_a_text_that_is_too_long_to_be_cut_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(vocab=256, tokenizer=ByteTokenizer(), max_model_len=64)
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=2)
    assert rig.engine.prepare("a" * (2**20 - 1) + "b", params).tokens == list(b"ab")
    monkeypatch.setattr(ByteTokenizer, "encode", None)
    with pytest.raises(PromptTooLongError, match="takes up to 1048576 characters") as info:
        rig.engine.prepare("a" * (2**20 + 1), params)
    assert info.value.field == "prompt"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
        ({"truncate_prompt_tokens": 1.0}, "truncate_prompt_tokens is 1.0"),
        ({"priority": 2**31}, "priority is 2147483648"),
        ({"priority": "high"}, "priority is 'high'"),
    ],
)
def test_values_that_cannot_be(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text) as info:
        SamplingParams(**change)
    assert info.value.field == next(iter(change))


def test_requests_are_started_by_priority_then_by_arrival() -> None:
    rig = Rig(rows=1)
    first = rig.add([1], max_tokens=3, ignore_eos=True, seed=1)
    rig.step()
    names = {p: [rig.add([1], max_tokens=3, ignore_eos=True, seed=1, priority=p) for _ in range(2)] for p in (1, 0, -5)}
    ended: list[str] = []
    while rig.engine.has_unfinished():
        ended += [delta.request_id for delta in rig.step() if delta.finish_reason is not None]
    assert ended == [first, *names[-5], *names[0], *names[1]], "one that runs is not ended for another"
    rig.assert_empty()


@pytest.mark.parametrize("priority", [-1, 1])
def test_who_gives_memory_back_is_decided_by_priority(priority: int) -> None:
    """Two grow until one has to go: the later one, unless the earlier one has the higher number."""
    rig = Rig(rows=2, pages=8, page_size=4, max_model_len=32)
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    earlier = rig.add([1, 2], max_tokens=20, ignore_eos=True, seed=1, priority=priority)
    later = rig.add([1, 3], max_tokens=20, ignore_eos=True, seed=1)
    rig.run()
    retracted = {name for name in (earlier, later) if rig.outputs[name, 0].metrics.retractions}  # type: ignore[union-attr]
    assert retracted == {later if priority < 0 else earlier}
    for name, prompt in ((earlier, [1, 2]), (later, [1, 3])):
        assert rig.outputs[name, 0].token_ids == expected(prompt, params, 1, 32)[0]
