"""Answers lines of batches as requests of their tenant, once there is room for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Final

from headrace_common.callers.bounds import FewEach
from headrace_common.callers.priority import Priority
from headrace_common.errors import Unauthenticated
from headrace_common.http.exchange import HttpExchange
from headrace_common.rpc.trace_context import SERVED, ServedCall
from headrace_frontend.openai.batches.folder import Entry
from headrace_frontend.openai.errors import serve
from headrace_frontend.openai.intake import ClientParts, Intake
from headrace_frontend.openai.routes import GenerateRoutes
from headrace_frontend.openai.stored_apis.background import NoConnection
from headrace_frontend.openai.stored_apis.routes import ResponsesRoutes

# The time between two looks at what is free.
_PAUSE_S: Final = 0.01
# One slot in so many is left to the next requests of others.
_SLOTS_PER_FREE_SLOT: Final = 8
# Prompts for each worker, while no other requests run.
_PROMPTS_ALONE: Final = 8


class _LineIntake(Intake):
    """Takes the lines of a tenant's batch, for as long as the key that created it is known."""

    def __init__(self, parts: ClientParts, entry: Entry) -> None:
        super().__init__(parts)
        self._tenant, self._key = entry.tenant, entry.kept["key"]

    def tenant_now(self, exchange: HttpExchange) -> str:
        return self._parts.tenants.by_digest.get(self._key, "")

    def tenant_of(self, exchange: HttpExchange) -> str:
        if self._parts.tenants.keyed and self.tenant_now(exchange) != self._tenant:
            raise Unauthenticated("the API key that created the batch was removed")
        return self._tenant


class LineExchange(HttpExchange):
    """A line as a request, and its response."""

    def __init__(self, host: str, path: str, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        super().__init__(NoConnection(host), "POST", path, headers, chunks=False, keeps_alive=True)
        self.add_body(body)
        self.end_body()
        self.status, self.data, self.retry_s = 0, b"", 0.0

    async def respond(
        self, status: int, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status, self.data = status, data
        self.retry_s = float((headers or {}).get("retry-after", 0.0))


class LineRoom:
    """How many lines may start now. Those that wait take turns.

    A line starts while a slot is free beside those that are left to others, and while fewer prompts are computed than
    workers compute them. So it finds an idle worker, and delays no other prompt by more than its own. More lines start
    while nothing else runs.
    """

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts
        self._turns = FewEach()
        self._lines: Counter[str] = Counter()
        """Those of each model that have started."""

    async def take(self, model: str) -> bool:
        """Waits until a line of a model may start. It has started then, until `end`. False once the router drains."""
        async with self._turns.of(model):
            while not self._parts.runner.draining:
                if self._has_room(model):
                    self._lines[model] += 1
                    return True
                await asyncio.sleep(_PAUSE_S)
        return False

    def end(self, model: str, task: asyncio.Task[None]) -> None:
        """A line has ended, with its task."""
        self._lines[model] -= 1

    def _has_room(self, model: str) -> bool:
        admission = self._parts.admission
        slots = admission.slots_of(model)
        if slots is None or (pool := slots.pool).waiting:
            return False
        low = pool.used_in(Priority.LOW)
        # Lines without a slot yet.
        starting = max(0, self._lines[model] - low)
        if starting >= pool.capacity - pool.capacity // _SLOTS_PER_FREE_SLOT - pool.used:
            return False
        workers = sum(
            one.prefill_worker_count or one.decode_worker_count
            for one in self._parts.models.list_models()
            if one.name == model
        )
        prompts = workers * (_PROMPTS_ALONE if low == pool.used else 1)
        return starting < prompts - admission.prompts[model]


class LineServer:
    """Answers the lines of a batch by the routes of its endpoint."""

    def __init__(self, parts: ClientParts, entry: Entry) -> None:
        self._endpoint, self._host = entry.shown["endpoint"], entry.kept["host"]
        self._intake = _LineIntake(parts, entry)
        generate = GenerateRoutes(parts, self._intake)
        self._answer = {
            "/v1/chat/completions": generate.chat,
            "/v1/completions": generate.complete,
            "/v1/responses": ResponsesRoutes(parts, self._intake, generate).respond,
        }[self._endpoint]

    async def answer(self, body: bytes) -> LineExchange:
        """A request with its response."""
        exchange = LineExchange(self._host, self._endpoint, body)
        SERVED.set(ServedCall(self._endpoint, "POST"))
        await serve(exchange, self._serve(exchange))
        return exchange

    async def _serve(self, exchange: HttpExchange) -> None:
        call, recheck = self._intake.in_bounds(exchange)
        with call, recheck:
            await self._answer(exchange)
