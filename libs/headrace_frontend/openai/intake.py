"""The first steps of every route: the key, the body, and the admission of the request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

from headrace_common.deadlines import Deadline
from headrace_common.errors import InvalidRequest, Unauthenticated
from headrace_frontend.openai.body import BodyKind, UnknownFields, parse_body
from headrace_frontend.openai.conversion import openai_violations
from headrace_frontend.openai.exchange import HttpExchange
from headrace_frontend.openai.parts import ClientParts
from headrace_frontend.request.preparation import Result


class Intake:
    """Takes requests."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts
        self._unknown_fields = UnknownFields(rejected=parts.rejects_unknown_fields)

    def tenant_of(self, exchange: HttpExchange) -> str:
        """The tenant of the request's key. Raises Unauthenticated."""
        with self._parts.runner.counter.count_failures():
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
        async with exchange.json_body(self._parts.body_bytes_max) as data:
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
        return Deadline.after(self._parts.deadline_s if timeout_s is None else timeout_s)

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
