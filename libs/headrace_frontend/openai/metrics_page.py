"""The router's metrics over HTTP."""

from __future__ import annotations

from collections.abc import Callable

from headrace_common.errors import Unauthenticated
from headrace_common.ports import is_loopback
from headrace_common.telemetry.metrics.prometheus import content_type
from headrace_frontend.openai.errors import HttpError
from headrace_frontend.openai.exchange import HttpExchange
from headrace_frontend.tenants import Tenants


class MetricsPage:
    """Serves /metrics to callers with a key of its own. Without such keys it is open on loopback only."""

    def __init__(self, readers: Tenants, read: Callable[[str], str], listen: str) -> None:
        """`readers` has the keys, `read` returns the metrics as text of a content type.

        `listen` is the host:port that serves the page.
        """
        self._readers = readers
        self._read = read
        self._is_open = is_loopback(listen) and not readers.keyed

    async def respond(self, exchange: HttpExchange) -> None:
        """Raises HttpError while the page is closed, and Unauthenticated without a valid key."""
        if not self._is_open:
            self._check_key(exchange)
        kind = content_type(exchange.headers.get("accept", ""))
        await exchange.respond(200, self._read(kind).encode(), {"content-type": kind})

    def _check_key(self, exchange: HttpExchange) -> None:
        if not self._readers.keyed:
            raise HttpError(
                403,
                "metrics_closed",
                "/metrics is closed, because other hosts may reach it: set metrics_keys_file",
            )
        try:
            self._readers.tenant_of(exchange.headers.items())
        except Unauthenticated as error:
            raise Unauthenticated(
                "a key of metrics_keys_file is required; send it as header 'Authorization: Bearer KEY'"
            ) from error
