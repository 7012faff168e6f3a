# ruff: noqa: E501
"""What models write when they call tools and think: samples of each format, and what they come to.

The texts follow the formats' published chat templates and the samples of the peers' parser tests: vLLM's
tests/tool_use/test_jamba_tool_parser.py and test_qwen3coder_tool_parser.py, LiquidAI's and IBM's model cards.
"""

from dataclasses import dataclass, field
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "hours": {"type": "array", "items": {"type": "number"}},
                    "exact": {"type": "boolean"},
                    "place": {"$ref": "#/$defs/place"},
                },
                "$defs": {"place": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}


@dataclass(frozen=True)
class Sample:
    """An answer's text and what it is. `calls`: names, and arguments as objects; None: arguments that are no JSON."""

    parser: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""
    name: str = field(default="", compare=False)


DALLAS = {"city": "Dallas", "days": 3}
ODD = {"city": 'Zürich </tool_call> "x" \\ \n\t😀', "place": {"at": [1, -2.5e3, None, True], "x": {}}}
_ODD_JSON = (
    '{"city": "Z\\u00fcrich </tool_call> \\"x\\" \\\\ \\n\\t\\ud83d\\ude00", "place": {"at": [1, -2.5e3, null, true], '
    '"x": {}}}'
)

SAMPLES = [
    Sample(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Dallas", "days": 3}}\n</tool_call>',
        calls=(("get_weather", DALLAS),),
        name="one",
    ),
    Sample(
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": ' + _ODD_JSON + "}\n</tool_call>\n"
        '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>\n',
        "Let me see.",
        (("get_weather", ODD), ("now", {})),
        name="two",
    ),
    Sample(
        "hermes",
        '<think>\nTwo days?\nThree.\n</think>\n\n<tool_call>{"name": "now"}</tool_call>',
        reasoning="Two days?\nThree.",
        calls=(("now", {}),),
        name="thought",
    ),
    Sample(
        "hermes",
        "<tool_call>{'name': 'get_weather', 'arguments': {'city': 'Dallas', 'days': 3,}}</tool_call>",
        calls=(("get_weather", DALLAS),),
        name="python",
    ),
    Sample(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Dallas\\", \\"days\\": 3}"}</tool_call>',
        calls=(("get_weather", DALLAS),),
        name="text",
    ),
    Sample(
        "hermes",
        "A <tool_call> begins a call, <tool_call>{} is none, nor is <tool_call>[1]</tool_call> one <tool",
        "A <tool_call> begins a call, <tool_call>{} is none, nor is <tool_call>[1]</tool_call> one <tool",
        name="talk",
    ),
    Sample(
        "hermes",
        '<tool_call>{"name": "now", "arguments": [1, 2]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1, 2]}</tool_call>',
        name="no object",
    ),
    Sample(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {city}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {city}}</tool_call>',
        name="no JSON",
    ),
    Sample("hermes", '<tool_call>{"name": "now", "argum', '<tool_call>{"name": "now", "argum', name="cut early"),
    Sample("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1, tr', calls=(("now", None),), name="cut late"),
    Sample(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": 1 2}}</tool_call> So.',
        " So.",
        (("now", None),),
        name="broken late",
    ),
    Sample(
        "nemotron",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Dallas", "days": 3}}, {"name": "now", '
        '"arguments": {}}]</TOOLCALL>',
        calls=(("get_weather", DALLAS), ("now", {})),
        name="two",
    ),
    Sample(
        "nemotron",
        '<think></think>\n\nYes. <TOOLCALL>[{"name": "now", "arguments": {}}, oh]</TOOLCALL>',
        "Yes., oh]</TOOLCALL>",
        (("now", {}),),
        name="broken behind a call",
    ),
    Sample(
        "jamba",
        ' <tool_calls>[\n    {"name": "get_weather", "arguments": ' + _ODD_JSON + '},\n    {"name": "now", '
        '"arguments": {}}\n]</tool_calls>',
        calls=(("get_weather", ODD), ("now", {})),
        name="two",
    ),
    Sample(
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Dallas", "days": 3}}]',
        calls=(("get_weather", DALLAS),),
        name="one",
    ),
    Sample("granite", 'Sure.\n<|tool_call|> {"name": "now", "arguments": {}}', "Sure.", (("now", {}),), name="no list"),
    Sample(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 99 + "]" * 99 + "}}</tool_call>",
        calls=(("now", None),),
        name="deep",
    ),
    Sample(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nDallas\n</parameter>\n",
        calls=(("get_weather", None),),
        name="cut between",
    ),
    Sample(
        "qwen3_coder", f"<function={'f' * 300}>\n</function>", f"<function={'f' * 300}>\n</function>", name="long name"
    ),
    Sample(
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Dallas", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        (("get_weather", DALLAS), ("now", {})),
        name="two",
    ),
    Sample(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.mcp:now:12<|tool_call_argument_begin|>{}<|tool_call_end|>",
        calls=(("mcp:now", {}),),
        name="colon",
    ),
    Sample(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>city",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>city",
        name="no object",
    ),
    Sample(
        "lfm2",
        'Yes.<|tool_call_start|>[get_weather(city="Dallas", days=3), now()]<|tool_call_end|>Checking.',
        "Yes.Checking.",
        (("get_weather", DALLAS), ("now", {})),
        name="two",
    ),
    Sample(
        "lfm2",
        "<|tool_call_start|>[get_weather(city='O\\'Hare \"x\" é', place={'a': (1, [2.5]), 'b': None}, "
        "exact=True)]<|tool_call_end|>",
        calls=(("get_weather", {"city": 'O\'Hare "x" é', "place": {"a": [1, [2.5]], "b": None}, "exact": True}),),
        name="literals",
    ),
    Sample(
        "lfm2",
        "<|tool_call_start|>[get weather]<|tool_call_end|>",
        "<|tool_call_start|>[get weather]<|tool_call_end|>",
        name="no call",
    ),
    Sample(
        "lfm2",
        '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>',
        calls=(("now", {}),),
        name="JSON",
    ),
    Sample("lfm2", "<|tool_call_start|>[get_weather(city='Dal", calls=(("get_weather", None),), name="cut late"),
    Sample(
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nDallas\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        (("get_weather", DALLAS),),
        name="one",
    ),
    Sample(
        "qwen3_coder",
        "<think>\nHm.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n\n  if a < b "
        'and c > d:\n\tprint("</p>")\n\n</parameter>\n<parameter=hours>\n[1, 2.5]\n</parameter>\n<parameter=units>\nnull\n'
        "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=place>\n{'a': 'é'}\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        reasoning="Hm.",
        calls=(
            (
                "get_weather",
                {
                    "city": '\n  if a < b and c > d:\n\tprint("</p>")\n',
                    "hours": [1, 2.5],
                    "units": None,
                    "exact": True,
                    "place": {"a": "é"},
                },
            ),
            ("now", {}),
        ),
        name="types",
    ),
    Sample(
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=place>\n {"a": "</parameter>\\"<parameter=b>"}\n</parameter>\n'
        "<parameter=hours>\n[1]</parameter>\n</function>\n</tool_call>",
        calls=(("get_weather", {"place": {"a": '</parameter>"<parameter=b>'}, "hours": [1]}),),
        name="tags within JSON",
    ),
    Sample(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nDallas\n<parameter=days>\nthree\n</function>",
        calls=(("get_weather", {"city": "Dallas", "days": "three"}),),
        name="tags left out",
    ),
    Sample(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nDal",
        calls=(("get_weather", None),),
        name="cut late",
    ),
    Sample(
        "qwen3_coder",
        "Write <function=f> and <tool_call>\n<funk>.",
        "Write <function=f> and <tool_call>\n<funk>.",
        name="talk",
    ),
    Sample(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\na </parameter> b </function> c\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        calls=(("get_weather", {"city": "a </parameter> b </function> c", "days": 3}),),
        name="tags within text",
    ),
    Sample(
        "glm",
        "I look.\n<tool_call>get_weather<arg_key>city</arg_key>\n<arg_value>Dallas </arg_value> </arg_value>"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "I look.",
        (("get_weather", {"city": "Dallas </arg_value> ", "days": 3}), ("now", {})),
        name="two",
    ),
    Sample(
        "olmo",
        "Yes. <function_calls>get_weather(city='Dal' r'las', hours=[1, 2.5], exact=false, units=null)\nnow()\n"
        "</function_calls>",
        "Yes.",
        (("get_weather", {"city": "Dallas", "hours": [1, 2.5], "exact": False, "units": None}), ("now", {})),
        name="two",
    ),
    Sample(
        "minimax_m1",
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Dallas", "days": 3}}\n{"name": "now", '
        '"arguments": {}}\n</tool_calls>',
        calls=(("get_weather", DALLAS), ("now", {})),
        name="two",
    ),
    Sample(
        "minimax_text",
        'Yes.<function_call>```typescript\nfunctions.get_weather({"city": "Dallas", "days": 3})\nfunctions.now({})\n```',
        "Yes.",
        (("get_weather", DALLAS), ("now", {})),
        name="two",
    ),
    Sample(
        "harmony",
        "I look.<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Dallas", "days": 3}<|call|><|channel|>commentary to=functions.now json<|message|>{}',
        "I look.",
        (("get_weather", DALLAS), ("now", {})),
        name="two",
    ),
]
