"""A client asks for ten thousand tickets and uses none."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.security.bystander import attack
from tests.suite.deployment import DEADLINE_S, Suite, greedy, prompt_of, suite

pytestmark = pytest.mark.timeout(240)

KEYS = {"attacker": "the-key-of-the-attacker", "bystander": "the-key-of-the-bystander"}
PLACES = 192
UNUSED_MAX = 128
TICKET_S = 10.0
ANSWER_TOKENS = 2
QUIET_REQUESTS = 100
BUSY_MACHINE_S = 0.1


async def answer_s(it: Suite, seed: int) -> float:
    """How long one answer for the bystander takes. Raises AioRpcError."""
    stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)
    prompt = prompt_of(40, seed)
    began_s = time.monotonic()
    call = stub.Generate(
        greedy(prompt, ANSWER_TOKENS),
        metadata=(("x-api-key", KEYS["bystander"]),),
        timeout=DEADLINE_S,
    )
    tokens = [token async for response in call for token in response.token_ids]
    assert tuple(tokens) == it.expected(prompt, ANSWER_TOKENS)
    return time.monotonic() - began_s


async def gets_ticket(it: Suite) -> bool:
    """Whether the bystander is granted a ticket."""
    stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)
    request = inference_pb2.RouteRequest(request=greedy(prompt_of(40, 1), ANSWER_TOKENS))
    metadata = (("x-api-key", KEYS["bystander"]),)
    response = await stub.Route(request, metadata=metadata, timeout=DEADLINE_S)
    granted: bool = response.HasField("direct")
    return granted


@dataclass(slots=True)
class Watched:
    """What the bystander gets in a period."""

    answers_s: list[float] = field(default_factory=list)
    tickets: list[bool] = field(default_factory=list)

    def __str__(self) -> str:
        p99_s = sorted(self.answers_s)[int(0.99 * (len(self.answers_s) - 1))]
        return (
            f"{len(self.answers_s)} answers, p50 {1e3 * self.median_s:.0f} ms, p99 {1e3 * p99_s:.0f} ms, "
            f"worst {1e3 * max(self.answers_s):.0f} ms"
        )

    @property
    def median_s(self) -> float:
        return statistics.median(self.answers_s)

    async def ask(self, it: Suite) -> None:
        self.answers_s.append(await answer_s(it, len(self.answers_s)))
        if len(self.answers_s) % 10 == 0:
            self.tickets.append(await gets_ticket(it))

    async def during(self, it: Suite, attacking: Awaitable[Sequence[str]]) -> Counter[str]:
        """Asks one request after the other until the attack has ended. Returns how its calls ended."""
        task = asyncio.ensure_future(attacking)
        while not task.done():
            await self.ask(it)
        ends = (line.strip() for line in await task)
        return Counter(end if end.startswith("OK") else end.split()[0] for end in ends)


async def test_tickets_that_are_never_used_hold_no_place_of_another_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
    settings = (
        ("router", "api_keys_file", str(keys)),
        ("router", "look_aside", "true"),
        # Calls without a known key are made as fast as the others.
        ("router", "max_concurrent_requests", str(PLACES)),
        ("router", "max_unused_tickets", str(UNUSED_MAX)),
        ("router", "ticket_ttl_s", str(TICKET_S)),
        ("decode", "model", "sim:decode_step_s=0.001"),
    )
    async with suite(tmp_path, settings=settings) as it:
        quiet = Watched()
        for _ in range(QUIET_REQUESTS):
            await quiet.ask(it)
        refused = Watched()
        ends = await refused.during(it, attack(it, "tickets", "a-key-that-is-unknown"))
        assert set(ends) == {"UNAUTHENTICATED"}
        attacked = Watched()
        ends = await attacked.during(it, attack(it, "tickets", KEYS["attacker"]))
        with capsys.disabled():
            print(f"\nquiet: {quiet}; refused calls: {refused}; tickets: {attacked}; {dict(ends)}")
        # No call is refused: those without a ticket go through the router. Tickets return when they expire.
        assert ends["OK"] + ends["OK with a ticket"] == 10_000
        assert ends["OK with a ticket"] >= UNUSED_MAX
        assert ends["OK"] > 5_000
        assert len(attacked.answers_s) > 10
        # A place that waits for an expiring ticket comes after up to 10 s.
        assert max(attacked.answers_s) < TICKET_S / 4
        assert all(attacked.tickets)
        # Calls without a known key take CPU of the machine only.
        assert attacked.median_s < 2 * refused.median_s + BUSY_MACHINE_S
