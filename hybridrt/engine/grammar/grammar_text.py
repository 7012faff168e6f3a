"""Grammar texts for llguidance, and checks for what is too large for it."""

import json
import math
import re

from hybridrt.base.structured_outputs import WHITESPACE, StructuredOutputs

# llguidance tries the remainders of "multipleOf" one by one: ten million need a minute and
# gigabytes. Powers of ten cost nothing. Combined parts of a schema have the least common multiple.
MAX_REMAINDERS = 100_000
_MOST_DIGITS = 40  # llguidance itself refuses more
# Begins at the end of a key: a search that reads keys and other strings holds up the other threads.
_NUMBER_OF_KEY = re.compile(r'"\s*:\s*(-?[0-9][0-9.]*)')
_LONGEST_KEY = len("multipleOf") * len(r"\u006d") + 1
# If only one text can follow, llguidance would walk through all of it for each mask. This option
# allows any token that begins the text. The last such line counts.
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'


def grammar_text(outputs: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if outputs.regex is not None:
        own = json.loads(LLMatcher.grammar_from_regex(outputs.regex))
        return str(own["grammars"][0]["lark_grammar"]) + NO_FORCING
    if outputs.choice is not None:
        # One terminal: the parser has at most 2000 items, and alternatives would be items.
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in outputs.choice)
        return f"start: CHOICE\nCHOICE: {texts}{NO_FORCING}"
    if outputs.grammar is not None:
        return LLMatcher.grammar_from_lark(outputs.grammar + NO_FORCING)
    schema = outputs.schema
    if "x-guidance" not in schema:
        schema = schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    parts = [
        {"name": "start", "lark_grammar": f"start: @schema{NO_FORCING}"},
        {"name": "schema", "json_schema": schema},
    ]
    return json.dumps({"grammars": parts})


def remainders(grammar: str) -> int:
    """The least common multiple of the digits of all "multipleOf" in a grammar, without trailing
    zeros; MAX_REMAINDERS + 1 if it is more.
    """
    found = 1
    for match in _NUMBER_OF_KEY.finditer(grammar):
        key, number = grammar[max(0, match.start() - _LONGEST_KEY) : match.start()].rpartition('"')[2], match[1]
        digits = number.replace(".", "").replace("-", "").strip("0")
        if (_unescaped(key) if "\\" in key else key) != "multipleOf" or not digits or len(digits) > _MOST_DIGITS:
            continue
        found = math.lcm(found, int(digits))
        if found > MAX_REMAINDERS:
            return MAX_REMAINDERS + 1
    return found


def _unescaped(key: str) -> str:
    try:
        return str(json.loads(f'"{key}"'))
    except ValueError:
        return key
