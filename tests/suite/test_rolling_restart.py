"""Every service restarts under load, one after the other, and no request fails.

A client may retry once when a router reports that it drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import Draining, WorkerGone
from tests.ports import free_port
from tests.suite.deployment import Suite, suite
from tests.suite.load import load

STREAMS = 6
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
ANSWER_TOKENS = 20
# Long enough that requests are at every stage at each restart.
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.001"),
    ("decode", "model", "sim:decode_step_s=0.02"),
    ("prefill", "member_ttl_s", "3"),
    ("decode", "member_ttl_s", "3"),
)


async def ask(way: Suite, other: Suite, prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        return (await way.generate(prompt, ANSWER_TOKENS, placement=REMOTE)).token_ids
    except (Draining, WorkerGone) as error:
        if "worker_id" in error.metadata:
            raise
    return (await other.generate(prompt, ANSWER_TOKENS, placement=REMOTE)).token_ids


async def restart(it: Suite, name: str) -> None:
    """Stops a process by SIGTERM and restarts it on the same address."""
    assert await it.terminate(name) == 0, name
    await it.restart(name)


async def connected(way: Suite) -> None:
    """A channel to a router that was away reconnects only after a pause."""
    async with asyncio.timeout(15):
        await way.channel.channel_ready()


async def test_a_rolling_restart_of_every_service_fails_no_request(tmp_path: Path) -> None:
    # Routers and registry restart on their addresses, which must stay free in between.
    listen = [
        (name, setting, f"127.0.0.1:{free_port()}")
        for name, setting in (("registry", "internal_listen"), ("router", "listen"))
    ]
    settings = (*SETTINGS, *listen)
    async with suite(tmp_path, prefill_count=2, decode_count=2, settings=settings) as it:
        other = await it.add("router-1", "router", f"--listen=127.0.0.1:{free_port()}")
        async with it.through(other) as by_other:
            await by_other.wait_joined(2, 2)

            async def asker(stream: int, prompt: Sequence[int]) -> tuple[int, ...]:
                ways = (it, by_other) if stream % 2 else (by_other, it)
                return await ask(*ways, prompt)

            async with load(it, STREAMS, ANSWER_TOKENS, asker) as answers:
                # Every restart meets requests in flight.
                await answers.more(STREAMS)
                for name in ("decode-0", "decode-1", "prefill-0", "prefill-1"):
                    await restart(it, name)
                    for way in (it, by_other):
                        await way.wait_joined(2, 2)
                    await answers.more(STREAMS)
                for name in ("registry", "router", "router-1"):
                    await restart(it, name)
                    # The next router restarts once the clients of this one have reconnected.
                    for way in (it, by_other):
                        await connected(way)
                        await way.wait_joined(2, 2)
                    await answers.more(STREAMS)
