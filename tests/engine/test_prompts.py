"""What counts as a prompt: text or token ids, as they are or under their name, and lists of both; no more."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt import LLM, RequestError, SamplingParams
from hybridrt.engine.text.tokenizer import HFTokenizer, encode_prompt
from tests.support.engine_harness import ByteTokenizer, Rig
from tests.support.tiny import write_tiny

PARAMS = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
TEXT, IDS = "ab", [67, 68]  # the tiny tokenizer's ids of the text
SPELLINGS: list[Any] = [
    TEXT,
    {"prompt": TEXT},
    IDS,
    tuple(IDS),
    {"prompt_token_ids": IDS},
    {"prompt_token_ids": np.array(IDS)},
    np.array(IDS),
    np.array(IDS, np.uint8),
    torch.tensor(IDS),
    torch.tensor(IDS, dtype=torch.int16),
    [np.int64(i) for i in IDS],
    [torch.tensor(i) for i in IDS],
    [IDS[0], np.int32(IDS[1])],
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny(tmp_path_factory.mktemp("tiny"))
    with LLM(str(path), load_format="dummy", device="cpu", max_model_len=32, max_running_requests=4) as model:
        assert model.tokenizer is not None and model.tokenizer.encode(TEXT) == IDS
        yield model


@pytest.mark.parametrize("index", range(len(SPELLINGS)))
def test_a_prompt_is_the_same_however_it_is_spelt(llm: LLM, index: int) -> None:
    prompt = SPELLINGS[index]
    want = llm.generate(IDS, PARAMS)[0].token_ids
    (one,), (of_list,) = llm.generate(prompt, PARAMS), llm.generate([prompt], PARAMS)
    assert one.prompt_token_ids == of_list.prompt_token_ids == IDS
    assert {type(t) for t in one.prompt_token_ids} == {int}
    assert one.token_ids == of_list.token_ids == want
    assert [t for delta in llm.stream(prompt, PARAMS) for t in delta.token_ids] == want


def test_a_list_may_mix_them(llm: LLM) -> None:
    outputs = llm.generate(SPELLINGS, PARAMS)
    assert [output.prompt_token_ids for output in outputs] == [IDS] * len(SPELLINGS)
    assert [o.prompt_token_ids for o in llm.generate(tuple(SPELLINGS[:5]), PARAMS)] == [IDS] * 5


NO_PROMPTS: list[tuple[Any, str]] = [
    (None, "a NoneType"),
    (5, "an int"),
    (1.5, "a float"),
    (True, "a bool"),
    (b"abc", "a bytes"),
    (bytearray(b"abc"), "a bytearray"),
    ({1, 2}, "a set"),
    (iter([1, 2]), "a list_iterator"),
    (object(), "an object"),
    (np.array([1.0]), "a 1-D ndarray of float64"),
    (np.ones((2, 2), int), "a 2-D ndarray of int64"),
    (np.array(5), "a 0-D ndarray of int64"),
    (np.array(["a"]), "a 1-D ndarray of <U1"),
    (np.array([True]), "a 1-D ndarray of bool"),
    (torch.tensor([1.0]), "a 1-D Tensor of torch.float32"),
    (torch.tensor([[1]]), "a 2-D Tensor of torch.int64"),
    (torch.tensor([True]), "a 1-D Tensor of torch.bool"),
    (np.array([1], "m8[s]"), "a 1-D ndarray of timedelta64[s]"),
    (torch.tensor([1, 2], device="meta"), "a 1-D meta Tensor of torch.int64"),
    (torch.tensor([1, 2]).to_sparse(), "a 1-D sparse_coo Tensor of torch.int64"),
    ({}, "a dictionary with {}"),
    ({"text": "a"}, "a dictionary with {'text': str}"),
    ({"prompt": 5}, "a dictionary with {'prompt': int}"),
    ({"prompt": [1]}, "a dictionary with {'prompt': list}"),
    ({"prompt_token_ids": "ab"}, "a dictionary with {'prompt_token_ids': str}"),
    ({"prompt_token_ids": None}, "a NoneType"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "a dictionary with {'prompt': str, 'prompt_token_ids': list}"),
]


@pytest.mark.parametrize("index", range(len(NO_PROMPTS)))
def test_what_is_no_prompt_is_refused_by_its_type(llm: LLM, index: int) -> None:
    prompt, text = NO_PROMPTS[index]
    before = llm.engine.counters()
    for call in (llm.generate, llm.stream, llm.engine.add_request, lambda p, params: llm.generate([TEXT, p], params)):
        with pytest.raises(RequestError) as info:
            call(prompt, PARAMS)
        assert f"the prompt is {text}; a prompt is a string, token ids" in str(info.value)
    assert llm.engine.counters() == before


@pytest.mark.parametrize("bad", ["a", 1.0, None, True, np.float32(1), torch.tensor([1]), np.array([1]), [1],
                                 np.timedelta64(3, "s"), torch.tensor(3, device="meta")])  # fmt: skip
def test_what_is_no_token_id_is_refused_by_its_place_and_type(llm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError, match=r"token id 1 of the prompt is .*, a (\d-D )?(meta )?" + type(bad).__name__):
        llm.generate([5, bad], PARAMS)


def test_huge_token_ids_are_refused(llm: LLM) -> None:
    for bad in (2**31, 2**63, -(2**70), 10**5000):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            llm.generate([5, bad], PARAMS)


def test_a_prepared_prompt_is_not_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of 8,192 tokens takes longer to walk than all else that a request takes before its first step."""
    rig = Rig()
    tokens = [7] * 24
    prepared = rig.engine.prepare(tokens, PARAMS)
    array = np.array

    def no_list(values: Any, *args: Any, **kwargs: Any) -> Any:
        assert values is not prepared.tokens, "the prompt's list has been walked"
        return array(values, *args, **kwargs)

    monkeypatch.setattr(np, "array", no_list)
    rig.engine.submit(prepared)
    (request,) = rig.engine._scheduler.waiting
    assert request.prompt_ids.dtype == np.int32 and request.prompt_ids.tolist() == tokens


@pytest.mark.parametrize("text", ["\ud800", "abc\udfff", "\udc80" * 20], ids=["one", "last", "many"])
def test_a_lone_surrogate_is_refused_with_its_place(llm: LLM, text: str) -> None:
    place = next(i for i, c in enumerate(text) if c >= "\ud800")
    with pytest.raises(RequestError, match=rf"character {place} is U\+D.*half of a surrogate pair"):
        llm.generate(text, PARAMS)


class CountingTokenizer(ByteTokenizer):
    """Says how many characters it was asked to tokenise."""

    read = 0

    def encode(self, text: str) -> list[int]:
        self.read += len(text)
        return super().encode(text)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    tokenizer = CountingTokenizer()
    rig = Rig(tokenizer=tokenizer, vocab=300, max_model_len=64)
    with pytest.raises(RequestError, match="10000000 characters; it may have at most 63 tokens"):
        rig.engine.add_request("a" * 10**7, PARAMS)
    assert tokenizer.read == 0
    with pytest.raises(RequestError, match="64 characters"):
        rig.engine.add_request("a" * 64, PARAMS)
    assert len(rig.engine.prepare("a" * 63, PARAMS).tokens) == 63


def test_ids_that_cannot_fit_are_refused_before_they_are_read() -> None:
    class Long(list):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 10**9

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("its elements were read")

    with pytest.raises(RequestError, match="1000000000 tokens"):
        Rig().engine.prepare(Long(), PARAMS)


def tokenizer(*words: str, normalizer: Any = None, byte_level: bool = True) -> HFTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*letters, "aa", "aaaa"])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "a"), ("aa", "aa")]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.add_tokens(list(words))
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw))


@pytest.mark.parametrize(
    "text", ["a" * 96, "<tool_call>" * 8, "\N{GRINNING FACE}aaaa", "e\N{COMBINING ACUTE ACCENT}" * 8]
)
def test_text_that_fits_is_never_refused_for_its_length(text: str) -> None:
    from tokenizers import normalizers

    for made in (
        tokenizer(), tokenizer("<tool_call>"), tokenizer(normalizer=normalizers.NFC()),
        tokenizer("\N{LATIN SMALL LETTER E WITH ACUTE}", normalizer=normalizers.NFC()),
    ):  # fmt: skip
        count = len(made.encode(text))
        assert encode_prompt(made, text, count) == made.encode(text)
        assert len(text) <= count * made.characters_per_token


def test_a_token_is_as_long_as_the_longest_entry_of_the_vocabulary() -> None:
    from tokenizers import normalizers

    assert tokenizer().characters_per_token == 4
    assert tokenizer("<tool_call>").characters_per_token == 11
    assert tokenizer(normalizer=normalizers.NFC()).characters_per_token == 16
