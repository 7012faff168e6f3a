"""LFM2: `<|tool_call_start|>[f(a="x", b=1), g()]<|tool_call_end|>`, calls as in Python with arguments by name.

Source: the chat templates and the model cards of LiquidAI/LFM2-1.2B, LiquidAI/LFM2-8B-A1B and
LiquidAI/LFM2.5-8B-A1B.
"""

from hybridrt.chat.tool_parsers.python_calls import PythonCalls


class Lfm2(PythonCalls):
    """The format of LFM2 and LFM2.5."""

    opens = ("<|tool_call_start|>",)
    closes = ("<|tool_call_end|>",)
    markers = (("<|tool_call_start|>", "<|tool_list_start|>"),)
    tokens = ("<|tool_call_start|>", "<|tool_call_end|>")
