"""The application: paths and their functions."""

from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from hybridrt.base.errors import HybridrtError
from hybridrt.base.version import __version__
from hybridrt.server.about import add_about
from hybridrt.server.anthropic.message_protocol import CountRequest, MessageRequest
from hybridrt.server.anthropic.messages import MESSAGE_NAMES, count_tokens, start_message
from hybridrt.server.cache_stream import CacheStream
from hybridrt.server.core.bodies import route_class
from hybridrt.server.core.engine_state import EngineState
from hybridrt.server.core.guard import SECONDS, Guard
from hybridrt.server.core.metrics import CONTENT_TYPE, Metrics
from hybridrt.server.core.model_list import model_list, one_model
from hybridrt.server.core.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from hybridrt.server.core.request_fields import refuse_values
from hybridrt.server.core.respond import join_parts, respond
from hybridrt.server.core.service import ID_PREFIXES, Service, client_of, owner_of
from hybridrt.server.core.structured import own_names
from hybridrt.server.core.tracing import Tracing
from hybridrt.server.openai.chat import CHAT_NAMES, conversation_of, start_chat
from hybridrt.server.openai.completions import start_completions
from hybridrt.server.openai.embeddings import EmbeddingRequest, start_embeddings
from hybridrt.server.openai.response_protocol import ResponseRequest
from hybridrt.server.openai.responses import RESPONSE_NAMES, start_response
from hybridrt.server.openai.stored_responses import (
    begin_in_background,
    cancelled_response,
    deleted_response,
    input_items,
    shown_response,
)
from hybridrt.server.wire.errors import APIError, as_api_error, error_response, wants_anthropic
from hybridrt.server.wire.sse import SLICE, Slices, pieces

# FastAPI would list 422, which this server does not send.
_ERROR = {"application/json": {"schema": {"type": "object", "required": ["error"], "properties": {"error": {}}}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is refused.", "content": _ERROR},
    "5XX": {"description": "The request has failed, or the server takes none.", "content": _ERROR},
}
_EITHER: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or a stream of it.", "content": {"application/json": {}, "text/event-stream": {}}}
}
# For each path: fields of SamplingParams or of a chat request, by the names that errors of the endpoint give them.
_NAMES = {
    "/v1/chat/completions": CHAT_NAMES,
    "/v1/embeddings": {"prompt": "input"},
    "/v1/responses": RESPONSE_NAMES,
    "/v1/messages": MESSAGE_NAMES,
}


def make_app(service: Service, metrics: Metrics) -> ASGIApp:
    """All endpoints over a service, guarded."""
    servers = [{"url": service.config.root_path}] if service.config.root_path else None
    # A redirect to a path with or without a slash would copy Host.
    app = FastAPI(
        title="hybridrt",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        redirect_slashes=False,
        servers=servers,
    )
    app.router.route_class = route_class(service.llm)
    _add_openai(app, service)
    _add_stored(app, service)
    _add_anthropic(app, service)
    _add_text(app, service)
    _add_health(app, service)
    _add_engine_state(app, service)
    _add_operations(app, service, metrics)
    add_about(app, service)
    for kind in (HybridrtError, APIError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    guarded = Guard(app, service.config, has_page=True)
    return Tracing(guarded, service.config.otlp_endpoint) if service.config.otlp_endpoint else guarded


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error, _NAMES.get(request.url.path)), request.scope)


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_class=Response, responses=_EITHER)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues prompts."""
        with own_names(body):
            answer = await start_completions(service, body, request.scope)
        return await respond(answer, request)

    @app.post("/v1/chat/completions", response_class=Response, responses=_EITHER)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        with own_names(body):
            answer = await start_chat(service, body, request.scope)
        return await respond(answer, request)

    @app.post("/v1/embeddings", response_class=Response)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Texts as vectors."""
        return await respond(await start_embeddings(service, body, request.scope), request)

    @app.post("/v1/responses", response_class=Response, responses=_EITHER)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """Answers a conversation, in OpenAI's newer form."""
        answer = await start_response(service, body, request.scope)
        if body.background:
            return begin_in_background(service, answer, request.scope[SECONDS])
        return await respond(answer, request)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """The model, under each of its names. With the header `anthropic-version` in Anthropic's form."""
        return model_list(service, wants_anthropic(request.scope))

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        """The model under one of its names; without a name, the list of `/v1/models`."""
        if not name:
            return await models(request)
        service.check_model(name)
        return one_model(service, name, wants_anthropic(request.scope))


def _add_stored(app: FastAPI, service: Service) -> None:
    @app.get("/v1/responses/{response_id}", response_class=Response)
    async def stored_response(response_id: str, request: Request, stream: bool = False) -> Response:
        """A response that is kept, or that is made now."""
        if stream:
            raise APIError(400, "a kept response is no stream: leave out stream", "stream", "unsupported")
        return shown_response(service, response_id, request.scope)

    @app.get("/v1/responses/{response_id}/input_items", response_class=Response)
    async def items_of_response(
        response_id: str,
        request: Request,
        limit: int = 20,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The items that the request of a kept response has brought."""
        return await input_items(service, response_id, request.scope, limit, after, order == "desc")

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        """Deletes a kept response."""
        return deleted_response(service, response_id, request.scope)

    @app.post("/v1/responses/{response_id}/cancel", response_class=Response)
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Ends a response that is made now. One that has ended stays as it is."""
        return cancelled_response(service, response_id, request.scope)


def _add_anthropic(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", response_class=Response, responses=_EITHER)
    async def messages(body: MessageRequest, request: Request) -> Response:
        """Answers a conversation, in Anthropic's form."""
        return await respond(await start_message(service, body, request.scope), request)

    @app.post("/v1/messages/count_tokens")
    async def count(body: CountRequest, request: Request) -> dict[str, int]:
        """Tokens of such a conversation."""
        return {"input_tokens": await count_tokens(service, body, request.scope)}


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", response_class=Response)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Token ids of a prompt, or of a conversation in the chat template."""
        service.check_model(body.model)
        refuse_values("chat", body.model_extra or {})
        if (body.prompt is None) == (body.messages is None):
            raise APIError(400, "pass prompt or messages, and one of them alone", "prompt")
        if body.messages is not None:
            client = client_of(request.scope)
            conversation = await service.off_loop(request.scope, partial(conversation_of, body, client))
            tokens = await service.chat_tokens(conversation, body.chat_template)
        else:
            tokens = await service.encode(body.prompt or "", bare=not body.add_special_tokens)
        limit = service.llm.llm.plan.max_model_len
        texts = partial(_texts, service, tokens) if body.return_token_strs else None
        parts = pieces({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": texts})
        made = await join_parts(partial(service.llm.in_thread, lane="answer"), parts, len(tokens))
        return Response(b"".join(made), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        vocab = service.llm.llm.model_config.vocab_size
        if max(body.tokens, default=0) >= vocab:
            raise APIError(400, f"tokens holds {max(body.tokens)}; the vocabulary ends at {vocab - 1}", "tokens")
        return {"prompt": await service.llm.in_thread(service.tokenizer.decode, body.tokens, False)}


def _texts(service: Service, tokens: list[int]) -> Slices:
    starts = range(0, len(tokens), SLICE)
    return Slices([service.tokenizer.piece(t) for t in tokens[start : start + SLICE]] for start in starts)


def _state(problem: str | None, code: str, request: Request) -> Response:
    return Response() if problem is None else error_response(APIError(503, problem, code=code), request.scope)


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_class=Response)
    @app.head("/health", include_in_schema=False)
    async def health(request: Request) -> Response:
        """200 while the engine works."""
        return _state(service.problem(), "unhealthy", request)

    @app.get("/ping", response_class=Response)
    @app.post("/ping", response_class=Response, include_in_schema=False)
    async def ping(request: Request) -> Response:
        """The same as /health."""
        return _state(service.problem(), "unhealthy", request)

    @app.get("/ready", response_class=Response)
    @app.head("/ready", include_in_schema=False)
    async def ready(request: Request) -> Response:
        """200 while requests are wanted: the model is warm, and the server is not shutting down."""
        problem = service.problem() if service.ready else "not ready: starting, or shutting down"
        return _state(problem, "not_ready", request)


def _add_engine_state(app: FastAPI, service: Service) -> None:
    state = EngineState(service)

    @app.get("/engine", response_class=Response)
    async def engine() -> Response:
        """The engine now: running rows, memory, the prefix tree and the latest steps, as counts."""
        if (problem := service.problem()) is not None:
            raise APIError(503, problem, code="unhealthy")
        return Response(await state.read(), media_type="application/json", headers={"Cache-Control": "no-store"})


def _add_operations(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/version")
    async def version() -> dict[str, str]:
        """Answers with the version of hybridrt."""
        return {"version": __version__}

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Samples: all that have not ended, those that run, and those that wait."""
        counters = service.llm.llm.engine.counters()
        return {"server_load": service.llm.unfinished, "running": counters.running, "waiting": counters.waiting}

    @app.post("/abort")
    async def abort(body: AbortRequest, request: Request) -> dict[str, bool]:
        """Ends a request: its samples have the finish reason "abort". False: nothing of this name runs."""
        names = [f"{owner_of(request.scope)}{prefix}{body.request_id}" for prefix in ("", *ID_PREFIXES)]
        return {"aborted": any([service.llm.abort(name) for name in names])}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, bool]:
        """Forgets cached prefixes that no running request reads. True: none is left."""
        return {"reset": await service.llm.in_thread(service.llm.llm.reset_prefix_cache)}

    @app.get("/fleet/cache_events", response_class=Response, include_in_schema=False)
    async def cache_events() -> Response:
        """What the prefix cache gains and loses, as server-sent events, for routers with the fleet key."""
        return CacheStream(service)

    @app.get("/fleet/transfer", include_in_schema=False)
    async def transfer() -> dict[str, int]:
        """Where a prefill worker listens for decode workers."""
        if service.transfer_port is None:
            raise APIError(404, "this server computes no prompts for others: start it with --role prefill")
        return {"port": service.transfer_port}

    @app.get("/metrics", response_class=Response)
    @app.head("/metrics", include_in_schema=False)
    async def show_metrics() -> Response:
        """For Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)
