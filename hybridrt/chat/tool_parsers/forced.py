"""Calls that a JSON schema forces: the whole answer is a list (`hybridrt.chat.constraints`)."""

from hybridrt.chat.tool_parsers.json_calls import JsonCalls


class ForcedCalls(JsonCalls):
    """[{"name": "f", "arguments": {...}}, ...] without tags. Not registered."""

    opens = ("[",)
    markers = ()
    alone = True
