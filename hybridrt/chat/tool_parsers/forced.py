"""Calls that a JSON schema forces: the whole answer is a list of them (`hybridrt.chat.constraints`)."""

from hybridrt.chat.tool_parsers.json_calls import JsonCalls


class ForcedCalls(JsonCalls):
    """[{"name": "f", "arguments": {...}}, ...] without tags. Not registered: no model writes this by itself."""

    opens = ("[",)
    markers = ()
    alone = True
