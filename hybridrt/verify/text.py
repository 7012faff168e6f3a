"""Checks of the tokenizer and of the chat template."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridrt.base.config_json import read_object
from hybridrt.base.errors import HybridrtError, shown
from hybridrt.base.files import CONFIG_BYTES, read_text
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.renderer import RENDERER
from hybridrt.engine.text.tokenizer import load_tokenizer
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject

TEXTS = (
    "The quick brown fox jumps over the lazy dog.", "def f(x: int) -> str:\n    return f'{x:>8}'\n", "  two  spaces\t",
    "Zwölf Boxkämpfer jagen Viktor über den großen Sylter Deich.", "日本語のテキスト", "1234567890 3.14159", "🙂👩‍🚀",
)  # fmt: skip
LEAST_SHARE = 0.75  # of the vocabulary that a tokenizer has
# Words that occur in no template.
SYSTEM, FIRST, ANSWER, SECOND = "Qsystem7x", "Qfirst7x", "Qanswer7x", "Qsecond7x"
_MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]|<\uff5c[^<>\s]{1,40}\uff5c>")
_TURNS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start_of_role|>", "[INST]")
_JOINED = re.compile(rf"(system|user|assistant|model|tool)(?:{SYSTEM}|{FIRST}|{ANSWER}|{SECOND})")
_THINKING = re.compile(r"\s*</?think[^>]*>\s*")


def check_tokenizer(subject: Subject, result: Result) -> None:
    """The tokenizer loads without code of the checkpoint, fits the vocabulary, and decodes what it has
    encoded."""
    subject.tokenizer = tokenizer = load_tokenizer(subject.path)
    if tokenizer is None:
        return result.leave_out("the checkpoint has no tokenizer")
    vocabulary = tokenizer.hf.get_vocab()
    size = len(subject.raw) and subject.text_fields.get("vocab_size")
    largest = max(vocabulary.values())
    if isinstance(size, int) and largest >= size:
        result.fail(f"the tokenizer has token {largest}; config.json's vocab_size is {size}")
    elif isinstance(size, int) and largest + 1 < LEAST_SHARE * size:
        result.warn(
            f"the tokenizer has {largest + 1} tokens; config.json's vocab_size is {size}: the model can give tokens "
            "without a text. Is the tokenizer of another model?"
        )
    _compare_tokens(subject, result)
    for text in TEXTS:
        back = tokenizer.decode(tokenizer.encode_bare(text), skip_special_tokens=False)
        if back.strip() != text.strip():
            result.warn(f"the tokenizer reads {shown(text)} back as {shown(back)}")
    _check_special(subject, result)
    result.done(f"{len(vocabulary)} tokens; {len(TEXTS)} texts give the same tokens as transformers' tokenizer")


def _compare_tokens(subject: Subject, result: Result) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(subject.path), local_files_only=True, trust_remote_code=False)
    for text in TEXTS:
        if subject.tokenizer.encode(text) != list(theirs.encode(text)):
            result.fail(f"{shown(text)} gives other tokens than transformers' tokenizer")


def _check_special(subject: Subject, result: Result) -> None:
    hf, config = subject.tokenizer.hf, subject.config
    for name in ("bos_token", "eos_token", "pad_token"):
        token = getattr(hf, name, None)
        if token is not None and len(subject.tokenizer.encode_bare(str(token))) != 1:
            result.fail(f"tokenizer_config.json: {name} {shown(str(token))} is no token of the vocabulary")
    eos = getattr(hf, "eos_token_id", None)
    if config is not None and eos is not None and config.eos_token_ids and eos not in config.eos_token_ids:
        result.warn(
            f"the tokenizer's eos_token is token {eos}; config.json and generation_config.json end answers at "
            f"{list(config.eos_token_ids)}"
        )
    if config is not None:
        _check_ends(subject, config.eos_token_ids, result)


def _check_ends(subject: Subject, ends: Iterable[int], result: Result) -> None:
    hf = subject.tokenizer.hf
    special = {*hf.added_tokens_decoder, *hf.all_special_ids}
    for token in sorted(set(ends) - special):
        piece = hf.convert_ids_to_tokens(token) if token < len(hf) else None
        named = "no token of the tokenizer" if piece is None else f"{shown(piece)}, an ordinary token of texts"
        result.warn(f"eos_token_id {token} ends answers, and is {named}")


def check_template(subject: Subject, result: Result) -> None:
    """The template renders as in transformers, keeps all messages, and fits the vocabulary."""
    if subject.tokenizer is None:
        return result.leave_out("without a tokenizer no template is used")
    template = subject.tokenizer.hf.chat_template
    _compare_sources(subject, result)
    if not template:
        if any(not text.strip() for text in _sources(subject).values()):
            return result.fail("chat template: it is empty")
        return result.leave_out("the checkpoint has no chat template")
    texts = {name: _render(subject, *case) for name, case in _conversations().items()}
    for name, found in texts.items():
        if isinstance(found, HybridrtError) and name == "question":
            result.fail(f"chat template: {found}")
    if not isinstance(texts["question"], str):
        return
    compared = _compare_renderings(subject, texts, result)
    _check_contents(texts, result)
    _check_roles(texts, result)
    _check_prompt(texts, result)
    _check_markers(subject, texts, result)
    _check_turns(subject, texts, result)
    _check_end(subject, texts, result)
    _check_beginning(subject, texts, result)
    result.done(f"{compared} renderings equal transformers'")


def _conversations() -> dict[str, tuple[Sequence[Mapping[str, Any]], bool]]:
    """Messages, and whether an answer follows."""
    system = {"role": "system", "content": SYSTEM}
    first, answer = {"role": "user", "content": FIRST}, {"role": "assistant", "content": ANSWER}
    second = {"role": "user", "content": SECOND}
    return {
        "question": ([first], True), "said": ([first], False), "answered": ([first, answer], False),
        "system": ([system, first], True), "second": ([first, answer, second], True),
    }  # fmt: skip


def _render(subject: Subject, messages: Sequence[Mapping[str, Any]], asked: bool) -> str | HybridrtError:
    talk = read_conversation([dict(message) for message in messages], add_generation_prompt=asked)
    try:
        return Chat(subject.tokenizer).render(talk)
    except HybridrtError as e:
        return e


def _compare_renderings(subject: Subject, texts: Mapping[str, Any], result: Result) -> int:
    """Both run in the child process, which has limits; transformers' sandbox has none."""
    hf, count = subject.tokenizer.hf, 0
    template = hf.chat_template if isinstance(hf.chat_template, str) else hf.chat_template.get("default", "")
    for name, (messages, asked) in _conversations().items():
        options = {**hf.special_tokens_map, "tools": None, "add_generation_prompt": asked}
        try:
            theirs: str | None = RENDERER.render(template, [dict(m) for m in messages], options)
        except HybridrtError:
            theirs = None  # ours adapts messages that the template refuses
        if theirs is not None and texts[name] != theirs:
            result.fail(f"chat template: {name} is {shown(texts[name])}; transformers renders {shown(theirs)}")
        count += theirs is not None
    return count


def _check_contents(texts: Mapping[str, Any], result: Result) -> None:
    for name, words in (
        ("question", (FIRST,)), ("answered", (FIRST, ANSWER)), ("system", (SYSTEM, FIRST)),
        ("second", (FIRST, ANSWER, SECOND)),
    ):  # fmt: skip
        text = texts[name]
        if not isinstance(text, str):
            result.warn(f"chat template: it refuses a conversation ({name}): {text}")
            continue
        lost = [word for word in words if text.count(word) < 1]
        twice = [word for word in words if text.count(word) > 1]
        places = [text.find(word) for word in words]
        roles = {SYSTEM: "the system prompt", FIRST: "the first question", ANSWER: "the answer", SECOND: "the second"}
        for word in lost:
            result.fail(f"chat template: {roles[word]} is lost ({name}): {shown(text)}")
        if not lost and places != sorted(places):
            result.fail(f"chat template: messages are in another order ({name}): {shown(text)}")
        for word in twice:
            result.warn(f"chat template: {roles[word]} is written twice ({name}): {shown(text)}")


def _check_roles(texts: Mapping[str, Any], result: Result) -> None:
    found = {match[1]: match[0] for text in texts.values() if isinstance(text, str) for match in _JOINED.finditer(text)}
    for role, joined in found.items():
        result.fail(f"chat template: the role {role} and the text after it are not separated: {shown(joined)}")


def _check_prompt(texts: Mapping[str, Any], result: Result) -> None:
    """A prompt is a prefix of the same conversation with its answer."""
    question, said, answered = texts["question"], texts["said"], texts["answered"]
    if not (isinstance(answered, str) and ANSWER in answered):
        return
    before = answered[: answered.index(ANSWER)]
    if _plain(question) == _plain(before):
        ends = {text[len(text.rstrip()) :] for text in (question, before)}
        if len(ends) > 1 and "\n" in "".join(ends) and not _THINKING.search(question + before):
            result.warn(
                f"chat template: the prompt for an answer ends with {shown(question[-40:])}; in a conversation an "
                f"answer begins after {shown(before[-40:])}: other blanks"
            )
        return
    if question == said:
        result.fail(
            f"chat template: add_generation_prompt changes nothing, but an answer begins after {shown(before[-40:])}: "
            "the generation prompt is missing"
        )
    else:
        result.fail(
            f"chat template: the prompt for an answer ends with {shown(question[-40:])}; in a conversation an answer "
            f"begins after {shown(before[-40:])}"
        )


def _plain(text: str) -> str:
    """Without thinking tags: templates begin some answers with them."""
    return _THINKING.sub("", text).rstrip()


def _check_markers(subject: Subject, texts: Mapping[str, Any], result: Result) -> None:
    vocabulary = subject.tokenizer.hf.get_vocab()
    found = {marker for text in texts.values() if isinstance(text, str) for marker in _MARKER.findall(text)}
    for marker in sorted(found - vocabulary.keys()):
        parts = len(subject.tokenizer.encode_bare(marker))
        result.fail(
            f"chat template: it writes {marker}, which is no token of the vocabulary ({parts} tokens): the template is "
            "of another model"
        )


def _check_turns(subject: Subject, texts: Mapping[str, Any], result: Result) -> None:
    """A vocabulary with a token that begins turns is made for a template that writes it."""
    vocabulary, text = subject.tokenizer.hf.get_vocab(), texts["answered"]
    made_for = [token for token in _TURNS if token in vocabulary]
    if not isinstance(text, str) or not made_for or any(token in text for token in made_for):
        return
    if any(token in text for token in subject.tokenizer.hf.get_added_vocab()):
        return
    result.warn(
        f"chat template: it writes no special token, and the vocabulary has {made_for[0]}: is the template of another "
        "model?"
    )


def _check_end(subject: Subject, texts: Mapping[str, Any], result: Result) -> None:
    """A token that ends generation follows an answer."""
    answered = texts["answered"]
    if not (isinstance(answered, str) and ANSWER in answered) or subject.config is None:
        return
    rest = subject.tokenizer.encode_bare(answered.split(ANSWER)[-1])
    ends = set(subject.config.eos_token_ids)
    if not ends & set(rest[:2]):
        piece = subject.tokenizer.decode(rest[:1], skip_special_tokens=False) if rest else ""
        text = (
            f"chat template: an answer is followed by {shown(piece)}, which ends no answer (eos_token_id "
            f"{sorted(ends)}): the model may go on after its turn"
        )
        # Template and tokenizer agree on another end than the configuration.
        agreed = subject.tokenizer.hf.eos_token_id in rest[:1]
        result.fail(text) if agreed else result.warn(text)


def _check_beginning(subject: Subject, texts: Mapping[str, Any], result: Result) -> None:
    """Nothing is added before a rendered conversation: the template writes the token that begins it, once."""
    begin, text = subject.tokenizer.hf.bos_token, texts["question"]
    if begin and text.startswith(begin * 2):
        result.warn(f"chat template: a conversation begins with {shown(begin)} twice")


def _compare_sources(subject: Subject, result: Result) -> None:
    found = _sources(subject)
    if len({text.strip() for text in found.values()}) > 1:
        result.warn(f"chat template: {' and '.join(found)} have different templates; runtimes differ in which they use")


def _sources(subject: Subject) -> dict[str, str]:
    """A template may be in three files."""
    found: dict[str, str] = {}
    file = subject.path / "chat_template.jinja"
    if file.is_file():
        found[file.name] = read_text(file, CONFIG_BYTES)
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (subject.path / name).is_file():
            told = read_object(subject.path / name).get("chat_template")
            found |= {name: told} if isinstance(told, str) else {}
    return found
