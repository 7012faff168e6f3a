"""OpenTelemetry: a span for each request, with its cost. Needs the extra `otlp`."""

from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from hybridrt.base.errors import ProviderNotInstalledError
from hybridrt.server.core.service import RECORD

# OpenTelemetry's names for generative models.
_ATTRIBUTES = {
    "status": "http.response.status_code",
    "id": "gen_ai.response.id",
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "time_to_first_token": "gen_ai.server.time_to_first_token",
}


class Tracing:
    """An ASGI application around the guard. Requests below /v1/ become spans, children of their
    `traceparent` header. Failures of the server, deadlines included, have the status ERROR.

    Raises:
        ProviderNotInstalledError: the extra is missing.
    """

    def __init__(self, app: ASGIApp, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as e:
            raise ProviderNotInstalledError(f"--otlp-endpoint: {e}: pip install '.[otlp]'") from e
        self._app = app
        self._provider = TracerProvider(resource=Resource.create({"service.name": "hybridrt"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("hybridrt")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = TraceContextTextMapPropagator().extract(headers)
        with self._tracer.start_as_current_span("llm_request", context=parent, kind=SpanKind.SERVER) as span:
            span.set_attribute("http.route", scope["path"][:200])
            try:
                await self._app(scope, receive, send)
            finally:
                span.set_attributes(_attributes(scope[RECORD]))
                if scope[RECORD]["status"] >= 500:
                    span.set_status(StatusCode.ERROR)


def _attributes(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[fact] for fact, name in _ATTRIBUTES.items() if record.get(fact) is not None}
