"""One grammar of an answer: forced calls, strict arguments, a form.

Reasoning before the answer is no part of the grammar if its tags are tokens
(hybridrt.base.structured_outputs.Thinking).

Grammars are llguidance's variant of Lark (base/structured_outputs.py). A tag that is a token is
`<[ID]>`; text holds no
such token.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridrt.base.errors import RequestError
from hybridrt.base.structured_outputs import WHITESPACE, StructuredOutputs, Thinking
from hybridrt.chat.conversation import Conversation
from hybridrt.chat.reasoning import END, Channels, ReasoningTags
from hybridrt.chat.schemas import calls, json_text, one_call
from hybridrt.chat.tool_parser import ToolParser
from hybridrt.chat.tools import NamedTool, Tool

# A character after a backslash is escaped already.
_MARKS = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_ESCAPED_OR_MARK = re.compile(r"\\.|[/\n]", re.DOTALL)
_ANY_ARGUMENTS = {"type": "object", "additionalProperties": True}
# The parser removes line breaks after reasoning, and no spaces.
_RULES = ["TEXT: /(?s:.*)/", r"GAP: /[ \n]{1,4}/", r"LINES: /\n{1,4}/"]


@dataclass(frozen=True)
class Constraints:
    """Grammars for one model.

    Args:
        tokens: ids of tags that are tokens, without those that end an output.
    """

    tokens: Mapping[str, int]

    def limits(self, tags: ReasoningTags) -> bool:
        """Whether a thinking budget can hold: the reasoning begins and ends with single tokens."""
        return any(tag in self.tokens for tag in tags.opens) and all(tag in self.tokens for tag in tags.closes)

    def grammar(
        self,
        conversation: Conversation,
        given: StructuredOutputs | None,
        tools: ToolParser | None,
        reasoning: ReasoningTags | None,
        prompt: str,
    ) -> StructuredOutputs | None:
        """The grammar of an answer; None: anything.

        Args:
            given: the caller's own constraints on the content.
            prompt: the rendered conversation, which may have opened the reasoning.

        Raises:
            RequestError: the model's formats do not allow it.
        """
        if given is None and not asks_for_grammar(conversation):
            return None
        budget, body, more = conversation.thinking_budget, None, list[str]()
        fixed = given is not None or forces_calls(conversation)
        given = conversation.forced_form or given
        if forces_calls(conversation) and conversation.forced_form is None:
            given, body = None, _forced(conversation)
        elif given is not None:
            body, more = _body(given)
            if tools is not None and (section := self._section(_loose(conversation.tools), tools)):
                sections = f"GAP? ({self._literals(tools.opens[:1])} GAP? {section[0]} GAP?)+"
                given, body, more = None, f"({body} | {sections})", [*more, *section[1]]
        elif tools is not None and _is_strict(conversation):
            body, more = self._strict(conversation, tools)
        if reasoning is None and budget is not None:
            raise RequestError(
                "a thinking budget needs a model whose tags of reasoning are known: leave it out, or name a reasoning "
                "parser",
                "thinking_token_budget",
            )
        closing, rules, thinking = "", list[str](), None
        if reasoning is not None:
            opened = reasoning.opened_by(prompt, conversation.continued)
            closed = not opened and reasoning.closed_by(prompt)
            # With closed reasoning, an answer of a fixed form has none.
            if not closed or (budget is not None and not fixed):
                closing, rules, thinking = self._thought(reasoning, budget, opened)
        if not closing:
            return given if given is not None or body is None else _lark([f"start: {body}", *more])
        body = body or f"(TEXT | {self._any()})*"
        return _lark([f"start: {closing} body", f"body: {body}", *more, *rules], thinking)

    def _thought(self, tags: ReasoningTags, budget: int | None, begun: bool) -> tuple[str, list[str], Thinking | None]:
        """Returns the start rule before the content, its rules, and what the grammar leaves out; ""
        if nothing. If the prompt has not `begun` the reasoning, the model may, if the tag is one
        token.
        """
        if isinstance(tags, Channels) and budget is None:
            return tags.before_content(self._literals, begun, END in self.tokens), [], None
        opens = () if begun else tuple(self.tokens[tag] for tag in tags.opens if tag in self.tokens)
        tokens = all(tag in self.tokens for tag in tags.closes)
        if tokens and (begun or opens):
            closing = f"{self._literals(tags.closes)} LINES?"
            thinking = Thinking(opens, tuple(self.tokens[tag] for tag in tags.closes), budget)
            return closing if begun else f"({closing})?", [], thinking
        if budget is not None:
            raise RequestError(
                "a thinking budget needs tags of reasoning that are single tokens, which this model does not have: "
                "leave it out, or lower max_tokens",
                "thinking_token_budget",
            )
        if not begun:
            return "", [], None
        return "thinking LINES?", [f"thinking[lazy]: /(?s:.*)({'|'.join(map(_regex, tags.closes))})/"], None

    def _strict(self, conversation: Conversation, tools: ToolParser) -> tuple[str, list[str]]:
        """Returns the body and its rules: text, and sections of calls with arguments by schema."""
        section = self._section(conversation.tools, tools)
        if section is None:
            raise RequestError(
                "this model's format of tool calls cannot be held to a schema: leave strict out, or set tool_choice to "
                "'required'",
                "tools",
            )
        call, rules = section
        # Nothing would constrain what follows other literals that open a section.
        others = "|".join(_regex(tag) for tag in tools.opens[1:] if tag not in self.tokens)
        without = f" & ~/(?s:.*)({others})(?s:.*)/" if others else ""
        rules = [f"PLAIN: /(?s:.*)/{without}", *rules]
        if tools.opens[0] in self.tokens:
            opened = self._literals(tools.opens[:1])
            return f"PLAIN? (({self._any(tools.opens)} | {opened} GAP? {call}) PLAIN?)*", rules
        begin = f"BEGIN: /(?s:.*){_regex(tools.opens[0])}/{without}"
        return f"(begin GAP? {call})* PLAIN", ["begin[lazy]: BEGIN", begin, *rules]

    def _section(self, offered: Sequence[Tool], tools: ToolParser) -> tuple[str, list[str]] | None:
        """Covers the text after the literal that opens a section. None: the format has no rules."""
        rules = tools.section_rules(offered, lambda text: self._literals([text]))
        close = f" GAP? {self._literals(tools.closes[:1])}" if tools.closes and tools.writes_close else ""
        return None if rules is None else ("section" + close, [*rules])

    def _literals(self, tags: Sequence[str]) -> str:
        each = [f"<[{self.tokens[tag]}]>" if tag in self.tokens else json_text(tag) for tag in tags]
        return each[0] if len(each) == 1 else f"({' | '.join(each)})"

    def _any(self, without: Sequence[str] = ()) -> str:
        ids = sorted({token for tag, token in self.tokens.items() if tag not in without})
        return f"<[{','.join(map(str, ids))}]>" if ids else "TEXT"


def forces_calls(conversation: Conversation) -> bool:
    return conversation.tool_choice not in ("auto", "none")


def asks_for_grammar(conversation: Conversation) -> bool:
    """Whether a conversation by itself limits what the answer looks like."""
    return forces_calls(conversation) or _is_strict(conversation) or conversation.thinking_budget is not None


def _is_strict(conversation: Conversation) -> bool:
    return any(tool.strict for tool in conversation.offered)


def _loose(tools: Sequence[Tool]) -> list[Tool]:
    """Allows any arguments for tools that are not strict."""
    return [tool if tool.strict else replace(tool, parameters=_ANY_ARGUMENTS) for tool in tools]


def _forced(conversation: Conversation) -> str:
    choice = conversation.tool_choice
    tools = [t for t in conversation.tools if not isinstance(choice, NamedTool) or t.name == choice.name]
    one = isinstance(choice, NamedTool) or not conversation.parallel_tool_calls
    schema = {"type": "array", "items": one_call(tools), "minItems": 1} | ({"maxItems": 1} if one else {})
    return f"%json {calls(tools, schema)}"


def _body(given: StructuredOutputs) -> tuple[str, list[str]]:
    if given.regex is not None:
        return f"/{_ESCAPED_OR_MARK.sub(_marked, given.regex)}/", []
    if given.choice is not None:
        return "CHOICE", [f"CHOICE: {' | '.join(map(json_text, given.choice))}"]
    if given.grammar is not None:
        return f"%lark {{\n{given.grammar}\n}}", []
    return f"%json {json_text({'x-guidance': {'whitespace_pattern': WHITESPACE}} | given.schema)}", []


def _marked(found: re.Match[str]) -> str:
    return _MARKS.get(found[0], found[0])


def _lark(rules: Sequence[str], thinking: Thinking | None = None) -> StructuredOutputs:
    return StructuredOutputs(grammar="\n".join([*rules, *_RULES]), thinking=thinking)


def _regex(text: str) -> str:
    return "".join(f"\\{c}" if c in r"\/.*+?()[]{}|^$" else c for c in text)
