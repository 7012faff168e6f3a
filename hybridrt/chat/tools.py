"""Tools of a conversation, and the choice among them, checked before a template sees them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hybridrt.base.errors import RequestError, shown
from hybridrt.base.structured_outputs import StructuredOutputs

MAX_TOOLS = 1024
MAX_NAME_CHARACTERS = 256
MAX_GRAMMARS = 8  # of custom tools; each takes the time of a compilation
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments.
        definition: what templates read, {"type": "function", "function": {...}}.
        strict: its arguments must follow the schema.
        grammar: what the text of a custom tool must look like, where no schema can say it. It holds
            where the tool is forced; else its description alone has it.
    """

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]
    strict: bool = False
    grammar: StructuredOutputs | None = None


@dataclass(frozen=True)
class NamedTool:
    """A choice of one tool: the answer calls it."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def read_tools(tools: object) -> list[Tool]:
    """Checked definitions of tools."""
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)) or len(tools) > MAX_TOOLS:
        raise RequestError(f"tools is {shown(tools)}; it must be a list of at most {MAX_TOOLS} functions", "tools")
    found = [_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)]
    names = Counter(tool.name for tool in found)
    if twice := [name for name, times in names.items() if times > 1]:
        raise RequestError(f"tools defines {shown(min(twice))} twice; give each function a name of its own", "tools")
    if sum(tool.grammar is not None for tool in found) > MAX_GRAMMARS:
        raise RequestError(f"tools has more than {MAX_GRAMMARS} grammars of custom tools; pass fewer", "tools")
    return found


def allowed_tools(tools: list[Tool], choice: object) -> tuple[list[Tool], object]:
    """The tools that a choice of type allowed_tools leaves, and its mode; other choices leave all."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    allowed = choice.get("allowed_tools", choice)
    mode, listed = (allowed.get(key) if isinstance(allowed, Mapping) else None for key in ("mode", "tools"))
    if mode not in ("auto", "required") or not isinstance(listed, list) or len(listed) > MAX_TOOLS:
        text = "tool_choice of type allowed_tools needs mode, 'auto' or 'required', and tools, a list"
        raise RequestError(text, "tool_choice")
    names = {_name_of(tool) for tool in listed}
    if unknown := names - {tool.name for tool in tools}:
        raise RequestError(f"tool_choice allows {shown(min(unknown))}, which is none of tools", "tool_choice")
    return [tool for tool in tools if tool.name in names], mode


def _name_of(tool: object) -> str:
    """The name in a reference to a tool, in the form of any API of OpenAI."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    inner = tool.get(kind, tool) if isinstance(tool, Mapping) and kind in ("function", "custom") else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else str(kind)


def read_tool_choice(choice: object) -> ToolChoice:
    """A checked tool choice. None is "auto"."""
    if choice is None:
        return "auto"
    if isinstance(choice, NamedTool) or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom"):
        function = choice.get(choice["type"], choice)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return NamedTool(function["name"])
    raise RequestError(
        f"tool_choice is {shown(choice)}; it must be 'auto', 'none', 'required' or "
        '{"type": "function", "function": {"name": ...}}',
        "tool_choice",
    )


def _tool(tool: object, place: str) -> Tool:
    if isinstance(tool, Mapping) and tool.get("type") == "custom":
        return custom_tool(tool.get("custom"), place)
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(f'{place} is {shown(tool)}; it must be {{"type": "function", "function": {{...}}}}', place)
    name, parameters = function.get("name"), function.get("parameters")
    good = isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and " " not in name
    if not good:
        allowed = f"1 to {MAX_NAME_CHARACTERS} characters without spaces"
        raise RequestError(f"{place}.function.name is {shown(name)}; it must have {allowed}", f"{place}.function.name")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"{place}.function.parameters is {shown(parameters)}; it must be a JSON schema, an object",
            f"{place}.function.parameters",
        )
    for key, kind in (("description", str), ("strict", bool)):
        if not isinstance(function.get(key), (kind, type(None))):
            where = f"{place}.function.{key}"
            raise RequestError(f"{where} is {shown(function[key])}; it must be a {kind.__name__}", where)
    definition = {key: value for key, value in function.items() if value is not None}
    definition["parameters"] = dict(parameters or _NO_PARAMETERS)  # templates read it without a check that it exists
    return Tool(
        name=str(name),
        parameters=definition["parameters"],
        definition={"type": "function", "function": definition},
        strict=bool(function.get("strict")),
    )


def custom_tool(custom: object, place: str) -> Tool:
    """A tool that takes one text, for the model a function with the parameter `input`.

    Args:
        custom: {"name", "description", "format"}; `format` is {"type": "text"}, or {"type":
            "grammar", "syntax": "regex" or "lark", "definition"}.
    """
    if not isinstance(custom, Mapping):
        raise RequestError(f'{place} is {shown(custom)}; it must be {{"type": "custom", "custom": {{...}}}}', place)
    text, grammar, said = dict[str, Any](type="string"), None, custom.get("description")
    if (form := _grammar_of(custom.get("format"), f"{place}.format")) is not None:
        syntax, definition = form
        said = f"{said or custom.get('name')}\nThe input must match this {syntax} grammar:\n{definition}"
        if syntax == "lark":
            grammar = StructuredOutputs(grammar=definition)
        else:
            text["pattern"] = f"^(?:{definition})$"
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    function = {"name": custom.get("name"), "description": said, "parameters": schema, "strict": "pattern" in text}
    return replace(_tool({"type": "function", "function": function}, place), grammar=grammar)


def _grammar_of(form: object, place: str) -> tuple[str, str] | None:
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return None
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        inner = form.get("grammar", form)
        syntax, definition = (inner.get(k) if isinstance(inner, Mapping) else None for k in ("syntax", "definition"))
        if syntax in ("lark", "regex") and isinstance(definition, str) and definition:
            return syntax, definition
    raise RequestError(
        f'{place} is {shown(form)}; it must be {{"type": "text"}} or {{"type": "grammar", "syntax": "lark" or "regex", '
        '"definition": text}',
        place,
    )
