"""/v1/responses/ID: responses that are kept, that run or that nobody waits for, and what they continue."""

import asyncio
from functools import partial
from typing import Any

from pydantic_core import from_json
from starlette.responses import Response
from starlette.types import Scope

from hybridrt.base.errors import HybridrtError
from hybridrt.engine.api.lanes import lane_of
from hybridrt.server.core.bodies import MAX_VALUES, add_body_bytes, read_body
from hybridrt.server.core.protocol import MAX_MESSAGES
from hybridrt.server.core.respond import whole_answer
from hybridrt.server.core.service import Service, owner_of
from hybridrt.server.openai.response_protocol import Item, ItemReference, ResponseRequest, StoredItems
from hybridrt.server.openai.response_reply import ResponseReply
from hybridrt.server.wire.errors import APIError, as_api_error
from hybridrt.server.wire.sse import encode

MOST_ITEMS = 100  # of a page


def shown_response(service: Service, name: str, scope: Scope) -> Response:
    """A response of this client.

    Raises:
        APIError: none of this name runs or is kept.
    """
    running = _running(service, name, scope)
    if running is not None:
        return _json(encode(running.body() | {"output": []}))
    stored = service.responses.get(owner_of(scope), name)
    if stored is None:
        raise _missing(name)
    return _json(stored.body)


def cancelled_response(service: Service, name: str, scope: Scope) -> Response:
    """The same, after it was ended. Raises as `shown_response`."""
    running = _running(service, name, scope)
    if running is None or not service.llm.abort(owner_of(scope) + name):
        return shown_response(service, name, scope)
    return _json(encode(running.body() | {"output": [], "status": "cancelled"}))


async def input_items(
    service: Service, name: str, scope: Scope, limit: int = 20, after: str | None = None, newest_first: bool = True
) -> Response:
    """A page of the items that the request of a kept response has brought, as OpenAI lists them.

    Args:
        after: the id of an item; the page begins after it.

    Raises:
        APIError: none of this name is kept, it brought no item `after`, or `limit` is out of range.
    """
    if not 1 <= limit <= MOST_ITEMS:
        raise APIError(400, f"limit is {limit}; it is 1 to {MOST_ITEMS}", "limit")
    stored = service.responses.get(owner_of(scope), name)
    if stored is None:
        raise _missing(name)
    work = partial(_page, stored.input, name, limit, after, newest_first)
    return _json(await service.llm.in_thread(work, lane=lane_of(len(stored.input))))


def _page(text: bytes, name: str, limit: int, after: str | None, newest_first: bool) -> bytes:
    items = [{"id": f"{name}_input_{i}", **item} for i, item in enumerate(from_json(text))]
    items = items[::-1] if newest_first else items
    names = [str(item["id"]) for item in items]
    if after is not None and after not in names:
        raise APIError(400, f"the request brought no item {after[:200]!r}", "after")
    start = 0 if after is None else names.index(after) + 1
    page = items[start : start + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return encode({"object": "list", "data": page, **ends, "has_more": start + limit < len(items)})


def begin_in_background(service: Service, answer: ResponseReply, seconds: float) -> Response:
    """Lets a response run to its end, which nobody waits for; GET shows it then.

    The answer says "queued", as at OpenAI. It fails after so many `seconds`.
    """
    task = asyncio.get_running_loop().create_task(_run(answer, seconds))
    service.unwatched.add(task)
    task.add_done_callback(service.unwatched.discard)
    return _json(encode(answer.body() | {"status": "queued"}))


async def _run(answer: ResponseReply, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await whole_answer(answer)
    except TimeoutError:
        answer.fail(APIError(504, f"the response has not ended within {seconds:g} seconds"))
    except HybridrtError as e:
        answer.fail(as_api_error(e))
    except Exception:
        answer.fail(APIError(500, "the response has failed; the server's log says why"))
        raise  # the loop logs it
    finally:
        answer.deltas.close()


def deleted_response(service: Service, name: str, scope: Scope) -> dict[str, Any]:
    """Says that a response is kept no longer. Raises as `shown_response`."""
    if not service.responses.delete(owner_of(scope), name):
        raise _missing(name)
    return {"id": name, "object": "response", "deleted": True}


async def whole_input(service: Service, body: ResponseRequest, scope: Scope) -> tuple[list[Item], list[Item]]:
    """The items before those of a request, and its own, with those that it names.

    Raises:
        APIError: something that it names is not kept, or all together are too long.
    """
    before, own = list[Item](), [] if isinstance(body.input, str) else list(body.input)
    if body.previous_response_id:
        chain = service.responses.chain(owner_of(scope), body.previous_response_id, service.config.max_body_bytes)
        texts = [text for stored in chain for text in (stored.input[1:-1], *stored.output.values()) if text]
        before = await _parsed(service, texts, scope)
    if any(isinstance(item, ItemReference) for item in own):
        own = await _with_named(service, own, scope)
    if len(before) + len(own) > MAX_MESSAGES:
        raise APIError(400, f"the conversation has more than {MAX_MESSAGES} items: begin a new one", "input")
    return before, own


async def _with_named(service: Service, items: list[Item], scope: Scope) -> list[Item]:
    texts, size = dict[int, bytes](), 0
    for place, item in enumerate(items):
        if isinstance(item, ItemReference):
            text = service.responses.item(owner_of(scope), item.id)
            if text is None:
                raise APIError(400, f"there is no item {item.id!r}: send the item itself", f"input.{place}.id")
            texts[place] = text
            size += len(text)
            if size > service.config.max_body_bytes:
                raise APIError(400, "the items that input names are too long: name fewer", f"input.{place}.id")
    found = dict(zip(texts, await _parsed(service, list(texts.values()), scope), strict=True))
    return [found.get(place, item) for place, item in enumerate(items)]


async def _parsed(service: Service, texts: list[bytes], scope: Scope) -> list[Item]:
    text = b'{"input":[%b]}' % b",".join(texts)
    add_body_bytes(scope, len(text))
    found = await service.off_loop(scope, lambda: read_body(text, MAX_VALUES, StoredItems))
    items: list[Item] = found.input
    return items


def _running(service: Service, name: str, scope: Scope) -> ResponseReply | None:
    found: ResponseReply | None = service.running.get(owner_of(scope) + name)
    return None if found is None or found.has_ended else found


def _missing(name: str) -> APIError:
    text = f"there is no response {name[:200]!r}: it was not stored, or had to make room for others"
    return APIError(404, text, "response_id", "response_not_found")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
