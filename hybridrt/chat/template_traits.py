"""Finds what a chat template supports, and fits messages to it.

OpenAI's API allows more than a template knows: it raises, drops text, or writes turns that its
model has never seen. Short conversations are rendered once to find out; names of models are not
used.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrt.base.errors import CheckpointError, RequestError
from hybridrt.base.pace import with_rests
from hybridrt.chat.efforts import supported_efforts
from hybridrt.chat.renderer import RENDERER, Renderer

MAX_SECONDS = 10.0  # time for all trials of a template
ROLES = ("system", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")
# A part's own key shows up where the part is written as data.
_A, _B, _DUMPED = "Qa7xkz", "Qb9wvj", "Qd4yhn"
_PARTS = [{"type": "text", "text": mark, "probe": _DUMPED} for mark in (_A, _B)]
_UNKNOWN_ROLE = "qrole5"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": {}}}
_SLOW = 1.0  # seconds for a short conversation
_log = logging.getLogger(__name__)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class TemplateTraits:
    """What a template supports.

    Attributes:
        developer: it knows the role developer.
        second: roles of instructions that it writes after a system message at the beginning.
        late: roles of instructions that it writes after other messages.
        parts: roles whose content may be a list of text parts.
        only_parts: roles of `parts` whose content may not be plain text.
        images: roles whose parts may be images: it writes one placeholder for each.
        needs_description: it fails on a tool without description.
        efforts: the effort to pass for each that a caller may ask for.
    """

    developer: bool = False
    second: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    only_parts: frozenset[str] = frozenset()
    images: frozenset[str] = frozenset()
    needs_description: bool = True
    efforts: Mapping[str, str] = field(default_factory=dict)


class _Trials:
    def __init__(self, template: str, variables: Mapping[str, Any], renderer: Renderer) -> None:
        self._renderer = renderer
        self._template, self._variables = template, {**variables, "add_generation_prompt": True}
        self._deadline = time.monotonic() + MAX_SECONDS
        self.cut_off = False
        self.slow_failure: CheckpointError | None = None

    def render(self, messages: Sequence[Message], **options: Any) -> str | None:
        """Returns None if the template fails or there is no time."""
        start = time.monotonic()
        if start > self._deadline:
            self.cut_off = True
            return None
        try:
            return self._renderer.render(self._template, messages, {**self._variables, **options})
        except CheckpointError as e:
            if time.monotonic() - start > _SLOW:
                self.slow_failure = e
            return None

    def takes_the_plainest(self) -> bool:
        """Whether the template renders a plain conversation. If it does so only with tools, all later trials have
        one. A trial that fails slowly is the last one."""
        for tools, content in ((None, "Hi"), ([_tool(description="")], "Hi"), (None, _PARTS)):
            self._variables["tools"] = tools
            if self.render([_said("user", content)]) is not None:
                return True
            if self.slow_failure is not None:
                break
        return False

    def writes(self, *messages: Message) -> bool:
        found = self.render(messages)
        wanted = [mark for mark in (_A, _B) if any(mark in str(message["content"]) for message in messages)]
        return found is not None and all(mark in found for mark in wanted)


def find_traits(
    template: str,
    variables: Mapping[str, Any],
    renderer: Renderer = RENDERER,
    placeholder: str | None = None,
    *,
    refuses_slow: bool = False,
) -> TemplateTraits:
    """Tries a template, in milliseconds; at most MAX_SECONDS and one rendering.

    Args:
        variables: for every rendering, such as the special tokens.
        placeholder: text of the token that it writes for an image; None: the model takes none.
        refuses_slow: raise the error of a plain conversation that fails slowly. A second one would take as long.

    Raises:
        CheckpointError: the process for templates does not start, or see `refuses_slow`.
    """
    renderer.start()
    trials = _Trials(template, variables, renderer)
    if not trials.takes_the_plainest():
        if refuses_slow and trials.slow_failure is not None:
            raise trials.slow_failure
        return TemplateTraits()  # conversations will say why
    developer = _knows_developer(trials)
    instructions = INSTRUCTIONS if developer else INSTRUCTIONS[:1]
    parts = frozenset(role for role in ROLES if _writes_parts(trials, role))
    found = TemplateTraits(
        developer=developer,
        second=frozenset(r for r in instructions if trials.writes(_said("system", _A), _said(r, _B), _said("user"))),
        late=frozenset(role for role in instructions if _writes_late(trials, role)),
        parts=parts,
        only_parts=frozenset(role for role in parts if not trials.writes(*_turns(role, _A))),
        images=frozenset(role for role in ROLES if placeholder and _writes_images(trials, role, placeholder)),
        needs_description=_needs_description(trials),
        efforts=supported_efforts(lambda **options: trials.render([_said("user")], **options)),
    )
    if trials.cut_off:
        _log.warning(
            "the chat template takes more than %g seconds for short conversations: what it supports is not known",
            MAX_SECONDS,
        )
        # A model that sees has a template that reads parts. Its placeholders are counted later.
        seeing = frozenset(ROLES if placeholder else ())
        return TemplateTraits(parts=seeing, images=seeing)
    return found


def fitted(messages: Sequence[Message], traits: TemplateTraits, *, continued: bool) -> list[Message]:
    """Messages as such a template takes them. Idempotent.

    Args:
        continued: the answer continues the last message, whose parts become one text.
    """
    found = _with_few_instructions(messages, traits)
    last = len(found) - 1 if continued else None
    return [_with_content(message, traits, i == last) for i, message in enumerate(with_rests(found))]


def fitted_tool(definition: Mapping[str, Any], traits: TemplateTraits) -> Mapping[str, Any]:
    """A tool's definition, with an empty description where the template fails without one."""
    function = definition["function"]
    if not traits.needs_description or "description" in function:
        return definition
    return {**definition, "function": {**function, "description": ""}}


def _with_few_instructions(messages: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """Joins instructions that the template would refuse or drop to the first message, and those of
    unknown developers to the system's.
    """
    unknown = () if traits.developer else ("developer",)
    found = [{**message, "role": "system"} if message["role"] in unknown else message for message in messages]
    leading = next((i for i, message in enumerate(found) if message["role"] not in INSTRUCTIONS), len(found))
    late = [message for message in found[leading:] if message["role"] in INSTRUCTIONS]
    if not traits.late.issuperset(message["role"] for message in late):
        rest = [message for message in found[leading:] if message["role"] not in INSTRUCTIONS]
        return [_merged([*found[:leading], *late], traits), *rest]
    has_changed = any(message["role"] in unknown for message in messages[:leading])
    others = {message["role"] for message in found[1:leading]}
    if leading > 1 and (has_changed or not traits.second >= others):
        return [_merged(found[:leading], traits), *found[leading:]]
    return found


def _merged(instructions: Sequence[Message], traits: TemplateTraits) -> Message:
    """Puts blank lines between them, as vLLM does."""
    role = "developer" if all(message["role"] == "developer" for message in instructions) else "system"
    texts = [_joined(message.get("content", ""), traits, role) for message in instructions]
    return {**instructions[0], "role": role, "content": "\n\n".join(filter(None, texts))}


def _with_content(message: Message, traits: TemplateTraits, continued: bool) -> Message:
    content, role = message.get("content"), _kind(message["role"])
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]} if role in traits.only_parts else message
    if content is None:
        return message
    if has_images(message) and role not in traits.images:
        raise RequestError(f"the model's chat template writes no images into messages of role {role}", "messages")
    if role in traits.parts and not continued:
        return message
    return _with_content({**message, "content": _joined(content, traits, role)}, traits, False)


def _joined(content: Any, traits: TemplateTraits, role: str) -> str:
    """Templates that read lists write parts next to each other; for others a part is a line."""
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise RequestError(
            "images cannot be in instructions that are joined, nor in a message that goes on", "messages"
        )
    return ("" if _kind(role) in traits.parts else "\n").join(part["text"] for part in content)


def has_images(message: Message) -> bool:
    content = message.get("content")
    return not isinstance(content, str) and any(part["type"] == "image" for part in content or ())


def _kind(role: str) -> str:
    return "system" if role in INSTRUCTIONS else role


def _said(role: str, content: Any = "Hi") -> Message:
    return {"role": role, "content": content}


def _turns(role: str, content: Any) -> list[Message]:
    call = {**_said("assistant", ""), "tool_calls": [_CALL]}
    result = {**_said("tool", content), "tool_call_id": _CALL["id"], "name": "probe"}
    return {
        "system": [_said("system", content), _said("user")],
        "user": [_said("user", content)],
        "assistant": [_said("user"), _said("assistant", content), _said("user")],
        "tool": [_said("user"), call, result],
    }[role]


def _knows_developer(trials: _Trials) -> bool:
    """Compares the role with an unknown one."""
    turns = [trials.render([_said(role, _A), _said("user")]) for role in ("developer", _UNKNOWN_ROLE)]
    if turns[0] is None or _A not in turns[0]:
        return False
    return turns[1] is None or turns[0].replace("developer", _UNKNOWN_ROLE) != turns[1].replace(
        "developer", _UNKNOWN_ROLE
    )


def _writes_late(trials: _Trials, role: str) -> bool:
    """Tries with and without earlier ones, and as the last message."""
    user, late = _said("user"), _said(role, _B)
    talk = [user, _said("assistant"), late, user]
    return all(trials.writes(*turns) for turns in (talk, [_said("system", _A), *talk], [user, late]))


def _writes_parts(trials: _Trials, role: str) -> bool:
    """Looks for the texts, and not for the parts as data."""
    found = trials.render(_turns(role, _PARTS))
    return found is not None and _A in found and _B in found and _DUMPED not in found


def _writes_images(trials: _Trials, role: str, placeholder: str) -> bool:
    found = trials.render(_turns(role, [{"type": "text", "text": _A}, {"type": "image"}]))
    return found is not None and _A in found and found.count(placeholder) == 1


def _needs_description(trials: _Trials) -> bool:
    without, with_one = (trials.render([_said("user")], tools=[tool]) for tool in (_tool(), _tool(description="")))
    return without is None and with_one is not None


def _tool(**more: str) -> dict[str, Any]:
    function = {"name": "probe", "parameters": {"type": "object", "properties": {}}, **more}
    return {"type": "function", "function": function}
