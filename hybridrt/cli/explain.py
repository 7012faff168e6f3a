"""`hybridrt explain`: why requests reused no more of the prefix cache, and what would help."""

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hybridrt.cli.options import JsonOption

if TYPE_CHECKING:
    from hybridrt.engine.cache.explain import Explanation


def explain(
    dump: Annotated[str, typer.Argument(metavar="LOG", help="A file that --request-log has written.")],
    as_json: JsonOption = False,
) -> None:
    """Show why requests reused no more of the prefix cache.

    For each request of a log: the reason, and what would help.
    """
    from hybridrt.engine.cache.explain import explain as explain_log
    from hybridrt.engine.cache.request_log import read_log

    found = list(explain_log(*read_log(dump)))
    if as_json:
        typer.echo(json.dumps([asdict(each) | {"helps": each.helps} for each in found], indent=2))
    else:
        _print(found)


def _print(found: "list[Explanation]") -> None:
    from hybridrt.cli.tables import console, print_table

    out, lost = console(), Counter[str]()
    rows = [
        (each.request_id, str(each.prompt), str(each.cached), each.why or "-", str(each.token), str(each.tokens))
        for each in found
    ]
    numbers = ("prompt", "cached", "from token", "tokens")
    print_table(out, "Requests", ("request", "prompt", "cached", "why", "from token", "tokens"), rows, right=numbers)
    for each in found:
        lost[each.why] += each.tokens
    helps = {each.why: each.helps for each in found}
    causes = [(why, str(tokens), helps[why]) for why, tokens in lost.most_common() if why]
    if causes:
        out.print()
        print_table(out, "Causes", ("why", "tokens", "what helps"), causes, right=("tokens",))
