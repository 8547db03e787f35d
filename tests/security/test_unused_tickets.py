"""A client asks for ten thousand tickets and uses none."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
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


async def ask(it: Suite, seed: int) -> float:
    """One answer for the bystander, in seconds. Raises AioRpcError."""
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


def p99_ms(durations_s: list[float]) -> float:
    return 1e3 * sorted(durations_s)[int(0.99 * (len(durations_s) - 1))]


async def test_tickets_that_are_never_used_hold_no_place_of_another_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
    settings = (
        ("router", "api_keys_file", str(keys)),
        ("router", "look_aside", "true"),
        ("router", "max_concurrent_requests", str(PLACES)),
        ("router", "max_unused_tickets", str(UNUSED_MAX)),
        ("router", "ticket_ttl_s", str(TICKET_S)),
        ("decode", "model", "sim:decode_step_s=0.001"),
    )
    async with suite(tmp_path, settings=settings) as it:
        quiet_s = [await ask(it, seed) for seed in range(QUIET_REQUESTS)]
        attacking = asyncio.create_task(attack(it, "tickets", KEYS["attacker"]))
        attacked_s: list[float] = []
        granted: list[bool] = []
        while not attacking.done():
            attacked_s.append(await ask(it, 1_000 + len(attacked_s)))
            if len(attacked_s) % 10 == 0:
                granted.append(await gets_ticket(it))
        ends = Counter(await attacking)
        with capsys.disabled():
            print(
                f"\nquiet p99 {p99_ms(quiet_s):.0f} ms; attacked: {len(attacked_s)} answers, p99 "
                f"{p99_ms(attacked_s):.0f} ms, worst {1e3 * max(attacked_s):.0f} ms; {dict(ends)}"
            )
        # No call is refused: those without a ticket go through the router. Tickets return when they expire.
        assert ends["OK"] + ends["OK with a ticket"] == 10_000
        assert ends["OK with a ticket"] >= UNUSED_MAX
        assert ends["OK"] > 5_000
        assert len(attacked_s) > 10
        # A place that waits for an expiring ticket comes after up to 10 s.
        assert max(attacked_s) < TICKET_S / 4
        assert all(granted)
