"""Descriptions of a server: `GET /` for programs and for browsers, `GET /docs` for people, a line for its log."""

from html import escape
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from hybridrt.base.dtypes import dtype_name, resolve_dtype
from hybridrt.base.version import __version__
from hybridrt.server.core.browser_page import PAGE_PATH, read_page, wants_page
from hybridrt.server.core.service import Service

# The page loads nothing and runs nothing.
_POLICY = {"Content-Security-Policy": "default-src 'none'"}
_HEAD = "<!doctype html><meta charset=utf-8><title>hybridrt</title><h1>hybridrt {}</h1><p>Model: {}"


def add_about(app: FastAPI, service: Service) -> None:
    """Adds both paths."""
    page, headers = read_page()

    @app.get(PAGE_PATH, include_in_schema=False)
    async def about(request: Request) -> Response:
        """What this is; for a browser, a chat and the engine's figures."""
        if wants_page(request.scope):
            return Response(page, media_type="text/html", headers=headers)
        about = {"name": "hybridrt", "version": __version__, "models": service.names, "docs": "/docs"}
        return JSONResponse(about, headers={"Vary": "Accept"})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """All paths, made of /openapi.json."""
        return Response(_page(app.openapi()["paths"], service), media_type="text/html", headers=_POLICY)


def _page(paths: dict[str, Any], service: Service) -> str:
    rows = [
        f"<tr><td>{method.upper()}<td>{escape(path)}<td>{escape(operation.get('description', ''))}"
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]
    return _HEAD.format(__version__, escape(", ".join(service.names))) + f"<table>{''.join(rows)}</table>"


def summary(service: Service) -> str:
    """The model and its limits, in one line."""
    llm, config = service.llm.llm, service.config
    plan, cache = llm.plan, llm.config.prefix_cache
    dtype = dtype_name(resolve_dtype(llm.config.dtype, llm.model_config.dtype, llm.device))
    tokens = [group.num_pages * plan.page_size for group in plan.groups if group.window is None]
    most = "" if plan.slabs is None else "at most "
    kv = f"KV of {most}{tokens[0]} tokens" if tokens else "no KV that grows"
    return (
        f"{llm.model_config.architecture} in {dtype} on {llm.device}: contexts up to {plan.max_model_len} tokens, "
        f"{kv}, {plan.num_rows} running and {config.max_waiting} waiting samples, prefix cache "
        f"{'on' if cache else 'off'}, {len(config.api_keys) or 'no'} API key{'s' * (len(config.api_keys) != 1)}"
    )
