"""Spans of requests, as a collector gets them."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from hybridrt.base.errors import EngineError
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.api.llm import LLM
from tests.support.http_server import WAIT, serving

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


def test_a_request_becomes_a_span_below_its_callers(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    spans: list[Any] = []
    came = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()
            came.set()

        def log_message(self, *arguments: object) -> None: ...

    async def fail(deltas: DeltaStream) -> None:
        raise EngineError("the device is gone")

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with serving(embedded, otlp_endpoint=endpoint) as served:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = {"model": "tested", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "request_id": "traced"}
        served.post("/v1/completions", body, headers={"traceparent": parent})
        with served.http() as client:
            client.get("/health")
        served.post("/v1/completions", body | {"prompt": []})
        late = body | {"max_tokens": 200, "stream": True, "request_id": None}
        served.post("/v1/completions", late, headers={"x-request-timeout": "0.05"})
        monkeypatch.setattr(DeltaStream, "__anext__", fail)
        served.post("/v1/completions", late)
        while len(spans) < 4:
            assert came.wait(WAIT)
            came.clear()
    collector.shutdown()
    collector.server_close()
    span, *others = spans
    found = [(s.status.code, *(a.value.int_value for a in s.attributes if "status" in a.key)) for s in others]
    assert found == [(0, 400), (2, 504), (2, 500)], "2 is ERROR"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (parent[3:35], parent[36:52])
    facts = {attribute.key: attribute.value for attribute in span.attributes}
    assert (span.status.code, facts["http.response.status_code"].int_value) == (0, 200)
    assert facts["gen_ai.response.id"].string_value == "cmpl-traced"
    assert facts["gen_ai.usage.input_tokens"].int_value == 2
    assert facts["gen_ai.usage.output_tokens"].int_value == 3
    assert facts["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert facts["gen_ai.server.time_to_first_token"].double_value > 0
