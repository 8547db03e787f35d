"""The first steps of every route: the key, the body, and the admission of the request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import CallerBounds
from headrace_common.deadlines import Deadline
from headrace_common.errors import InvalidRequest, Unauthenticated
from headrace_common.registry.adapters import Adapter
from headrace_common.version import version
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.openai.answers import ModelParsers
from headrace_frontend.openai.body import BodyKind, UnknownFields, parse_body
from headrace_frontend.openai.conversion import openai_violations
from headrace_frontend.openai.exchange import HttpExchange
from headrace_frontend.openai.image_fetch import ImageFetcher
from headrace_frontend.promises import Keep
from headrace_frontend.request.model_names import ModelChoice
from headrace_frontend.request.preparation import RequestPreparer, Result
from headrace_frontend.request.size import RequestSizeCheck
from headrace_frontend.running.runner import RequestRunner
from headrace_frontend.tenants import Tenants
from headrace_text.codec import TextCodec


class ModelLister(Protocol):
    """Lists the models that can serve requests."""

    def list_models(self) -> Sequence[inference_pb2.Model]:
        """The models with at least one live decode worker, by name."""
        ...

    def system_fingerprint(self, choice: ModelChoice) -> str:
        """OpenAI's field of responses. Empty while no decode worker serves the model."""
        ...


def system_fingerprint(layout_hashes: Iterable[bytes], adapter: Adapter | None) -> str:
    """One text for equal models, weights, engines and versions. The hashes are those of all decode workers."""
    parts = sorted(layout.hex() for layout in layout_hashes)
    if not parts:
        return ""
    named = (version(), "" if adapter is None else adapter.digest, *parts)
    return f"fp_{hashlib.sha256(chr(10).join(named).encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class OpenAiParts:
    """The parts of a process that the HTTP API uses."""

    codecs: Mapping[str, TextCodec]
    parsers: Mapping[str, ModelParsers]
    """By served model."""
    models: ModelLister
    tenants: Tenants
    runner: RequestRunner[Any]
    preparer: RequestPreparer
    size: RequestSizeCheck
    count_failures: Callable[[], AbstractContextManager[None]]
    """Counts a request that the block fails or cancels."""
    callers: CallerBounds
    conversations: ConversationStore
    keep: Keep
    images: ImageFetcher
    rejects_unknown_fields: bool = False


class Intake:
    """Takes requests. `deadline_s` bounds those without a timeout, and `body_bytes_max` every body."""

    def __init__(self, parts: OpenAiParts, *, deadline_s: float, body_bytes_max: int) -> None:
        self._parts = parts
        self._deadline_s = deadline_s
        self._body_bytes_max = body_bytes_max
        self._unknown_fields = UnknownFields(rejected=parts.rejects_unknown_fields)

    def tenant_of(self, exchange: HttpExchange) -> str:
        """The tenant of the request's key. Raises Unauthenticated."""
        with self._parts.count_failures():
            try:
                return self._parts.tenants.tenant_of(exchange.headers.items())
            except Unauthenticated as error:
                # The remedy names gRPC's metadata.
                raise Unauthenticated(
                    "a valid API key is required; send it as header 'Authorization: Bearer KEY'"
                ) from error

    async def read(self, exchange: HttpExchange, kind: type[BodyKind]) -> tuple[str, BodyKind]:
        """The tenant and the body."""
        tenant, body, _ = await self.converted(exchange, kind, lambda body: None)
        return tenant, body

    async def converted(
        self, exchange: HttpExchange, kind: type[BodyKind], convert: Callable[[BodyKind], Result]
    ) -> tuple[str, BodyKind, Result]:
        """As `read`, with what `convert` makes of the body. On a thread, unless the body has few values."""
        tenant = self.tenant_of(exchange)
        async with exchange.json_body(self._body_bytes_max) as data:
            await self._parts.callers.wait_turn()
            cost_bytes = self._parts.size.check_json(data)

            def parse() -> tuple[BodyKind, list[str], Result]:
                body = parse_body(kind, data)
                return body, self._unknown_fields.check(body), convert(body)

            body, unknown, converted = await self._parts.preparer.run(tenant, cost_bytes, parse)
        if unknown:
            exchange.add_header("x-headrace-ignored-fields", ", ".join(unknown))
        return tenant, body, converted

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        """The deadline of a request with this timeout, or with none of its own."""
        return Deadline.after(self._deadline_s if timeout_s is None else timeout_s)

    def admitted(
        self, tenant: str, deadline: Deadline | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """Admits work of a tenant, by default with the deadline of a request without a timeout."""
        return self._parts.runner.admitted(tenant, deadline or self.deadline())


@contextmanager
def openai_names(*, chat: bool, formatted: bool = False, echoed: bool = False) -> Iterator[None]:
    """Renames the fields in an InvalidRequest of the block; see `openai_violations`."""
    try:
        yield
    except InvalidRequest as error:
        violations = openai_violations(
            error.violations, chat=chat, formatted=formatted, echoed=echoed
        )
        raise InvalidRequest(violations, cause=error.cause) from error
