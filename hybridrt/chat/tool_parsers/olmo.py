"""OLMo: `<function_calls>`, a call as in Python a line, `f(a="x", b=true)`, `</function_calls>`.

Source: the chat template of allenai/Olmo-3-7B-Instruct, and the tests of vLLM's olmo3 parser: constants may be JSON's.
"""

from hybridrt.chat.tool_parsers.python_calls import PythonCalls


class Olmo(PythonCalls):
    """The format of OLMo 3 and OLMo-Hybrid."""

    opens = ("<function_calls>", "<function_call>")
    closes = ("</function_calls>", "</function_call>")
    markers = ("<function_calls>",)
    listed = False
