"""The list of models, in OpenAI's form and in Anthropic's."""

from datetime import UTC, datetime
from typing import Any

from hybridrt.server.core.service import Service


def model_list(service: Service, anthropic: bool) -> dict[str, Any]:
    """The model under each of its names, all on one page."""
    data = [one_model(service, name, anthropic) for name in service.names]
    if not anthropic:
        return {"object": "list", "data": data}
    return {"data": data, "has_more": False, "first_id": service.names[0], "last_id": service.names[-1]}


def one_model(service: Service, name: str, anthropic: bool) -> dict[str, Any]:
    """The model under one name."""
    most = service.llm.llm.plan.max_model_len
    if anthropic:
        created = datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        limits = {"max_input_tokens": most - 1, "max_tokens": most - 1}
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": created,
            "lifecycle": "active",
            **limits,
        }
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "hybridrt",
        "root": service.names[0],
        "parent": None,
        "max_model_len": most,
    }
