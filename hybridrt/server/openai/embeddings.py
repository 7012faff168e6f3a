"""/v1/embeddings: texts as vectors."""

import base64
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from starlette.types import Scope

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.api.embeddings import check_dimensions, embedding, pooling_params
from hybridrt.engine.request.outputs import Delta
from hybridrt.server.core.protocol import Body, Prompts
from hybridrt.server.core.reply import Reply
from hybridrt.server.core.request_fields import refuse_fields
from hybridrt.server.core.service import Service
from hybridrt.server.openai.completions import bare_prompt, read_prompts
from hybridrt.server.wire.errors import APIError
from hybridrt.server.wire.sse import Parts

MAX_NUMBERS = 2**22  # of all vectors of a request, before they are cut
_FIELDS = ("truncate_prompt_tokens", "priority", "cache_salt")  # of SamplingParams


class EmbeddingRequest(Body):
    """/v1/embeddings"""

    model_config = ConfigDict(strict=True, extra="allow")  # others would change the vectors
    stream: ClassVar[bool] = False
    return_token_ids: ClassVar[bool] = False
    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # vLLM's name of normalize
    add_special_tokens: bool | None = True
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: Annotated[str | None, Field(pattern=r"^[\x21-\x7e]{1,128}$")] = None
    user: str | None = None

    @property
    def is_normalized(self) -> bool:
        """Whether the vectors have length 1."""
        return self.normalize is not False and self.use_activation is not False


class EmbeddingAnswer(Reply):
    """A list of vectors, in the order of the prompts."""

    def __init__(self, service: Service, name: str, deltas: DeltaStream, body: EmbeddingRequest) -> None:
        super().__init__(service, name, deltas, body)
        self._prompts = {request_id: prepared for request_id, prepared in deltas.requests.items()}
        self._body = body

    def weight(self, delta: Delta) -> int:
        """See Reply.weight."""
        return super().weight(delta) + len(delta.pooled or b"") // 8

    def whole(self, ended: list[Delta]) -> dict[str, Any]:
        for delta in ended:
            self.count(delta)
        found = {delta.request_id: delta.pooled for delta in ended}
        vectors = (self._vector(i, request_id, found[request_id]) for i, request_id in enumerate(self._prompts))
        usage = {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}
        return {"object": "list", "data": Parts(vectors), "model": self.model, "id": self.name, "usage": usage}

    def _vector(self, index: int, request_id: str, pooled: bytes | None) -> dict[str, Any]:
        prepared, body = self._prompts[request_id], self._body
        if pooled is None:
            raise APIError(400, "the request was aborted", code="aborted")
        kind, tokens = prepared.params.pooling or "last", len(prepared.tokens)
        vector = embedding(pooled, tokens, kind, dimensions=body.dimensions, normalize=body.is_normalized)
        plain = vector.astype("<f4")
        text = base64.b64encode(plain.tobytes()).decode() if body.encoding_format == "base64" else plain.tolist()
        return {"object": "embedding", "index": index, "embedding": text}

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def gain(self, delta: Delta) -> Iterator[bytes]:
        return iter(())

    def closing(self) -> Iterator[bytes]:
        return iter(())


async def start_embeddings(service: Service, body: EmbeddingRequest, scope: Scope) -> EmbeddingAnswer:
    """Starts the requests of a body.

    Raises:
        APIError, HybridrtError: it is refused. Nothing has started.
    """
    service.check_model(body.model)
    refuse_fields("embeddings", body)
    size = service.llm.llm.model_config.hidden_size
    check_dimensions(body.dimensions, size)
    prompts = read_prompts(body.input, "input")
    params = _params(body)
    service.check_count(len(prompts), params, "input")
    if len(prompts) * size > MAX_NUMBERS:
        text = f"the vectors have more than {MAX_NUMBERS} numbers together: send fewer prompts at a time"
        raise APIError(400, text, "input")
    given = [await bare_prompt(service, p, params) for p in prompts] if body.add_special_tokens is False else prompts
    batch = await service.llm.prepare_all(given, params)
    name, deltas = service.submit(batch, "embd-", body, scope)
    return EmbeddingAnswer(service, name, deltas, body)


def _params(body: EmbeddingRequest) -> SamplingParams:
    given = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    return pooling_params(body.pooling or "last", **given)
