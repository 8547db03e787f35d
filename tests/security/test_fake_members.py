"""A holder of worker credentials registers a thousand members at addresses where nothing listens."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil
import pytest

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.client import list_members
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.durations import duration_from_seconds
from headrace_common.rpc.channel import open_channel
from tests.suite.deployment import Suite, greedy, prompt_of, suite
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

# The registry admits about 1,100 registrations at once from a host without names.
FAKES = {"decode": 1_000, "prefill": 50}
ASKED = 60
AT_ONCE = 16
# Nothing listens on port 1.
DEAD = "127.1.{high}.{low}:1"
WATCHED_S = 5.0
# Two tries a second of each of them took 58 % of a core, and the first answers 1.5 s longer.
BUSY_MACHINE_MS = 1_000.0
CPU_SHARE_MAX = 0.25
SETTINGS = (("decode", "model", "sim:decode_step_s=0.001"),)


async def register_fakes(it: Suite, like: registry_pb2.Member, role: Role, count: int) -> None:
    """Registers members like a real one. Each would limit prompts to one token."""
    identity = Credentials(role=role)
    room = asyncio.Semaphore(AT_ONCE)
    async with open_channel(it.deployment.registry, identity) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)

        async def register(number: int) -> None:
            member = registry_pb2.Member()
            member.CopyFrom(like)
            member.worker_id = f"fake-{role}-{number}"
            member.incarnation = f"{number:016x}"
            member.endpoint = DEAD.format(high=number // 250, low=1 + number % 250)
            member.max_model_len = 1
            request = registry_pb2.RegisterRequest(member=member, ttl=duration_from_seconds(300))
            async with room:
                await stub.Register(request, timeout=20)

        await asyncio.gather(*(register(number) for number in range(count)))


async def durations_ms(work: Callable[[int], Awaitable[object]], first: int) -> list[float]:
    """How long each of some requests took, one after the other."""
    found = []
    for number in range(first, first + ASKED):
        began_s = time.monotonic()
        await work(number)
        found.append(1e3 * (time.monotonic() - began_s))
    return found


async def measure(it: Suite, first: int) -> tuple[list[float], list[float]]:
    """The durations of answers and of routing decisions."""

    async def generate(number: int) -> None:
        prompt = prompt_of(40, number)
        assert (await it.generate(prompt, 2)).token_ids == it.expected(prompt, 2)

    async def route(number: int) -> None:
        decision = await it.operator.explain(greedy(prompt_of(40, number), 2))
        assert [candidate.worker_id for candidate in decision.candidates] == ["decode-0"]

    return await durations_ms(generate, first), await durations_ms(route, first + ASKED)


def quantiles(durations: Sequence[float]) -> str:
    p99 = sorted(durations)[int(0.99 * (len(durations) - 1))]
    return f"p50 {statistics.median(durations):.1f} ms, p99 {p99:.1f} ms"


async def test_members_at_dead_addresses_do_not_slow_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with suite(tmp_path, settings=SETTINGS) as it:
        await measure(it, 10_000)
        quiet = await measure(it, 0)
        members = {
            member.worker_id: member for member in await list_members(it.deployment.registry)
        }
        for role, count in FAKES.items():
            await register_fakes(it, members[f"{role}-0"], Role(role), count)
        router = psutil.Process(it.child("router").process.pid)
        attacked = await measure(it, 1_000)

        async def tried() -> bool:
            """Whether the first tries of all members are over: the router uses little CPU then."""
            before_s = sum(router.cpu_times()[:2])
            await asyncio.sleep(1)
            return sum(router.cpu_times()[:2]) - before_s < 0.5

        await until(tried, 60, "the first tries", 0)
        used_s, began_s = sum(router.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(WATCHED_S)
        share = (sum(router.cpu_times()[:2]) - used_s) / (time.monotonic() - began_s)
        later = await measure(it, 2_000)
        (model,) = await it.client.models()
        assert (model.prefill_worker_count, model.decode_worker_count) == (1, 1)
        with capsys.disabled():
            for when, (answers, decisions) in (
                ("quiet", quiet),
                ("just registered", attacked),
                ("later", later),
            ):
                print(
                    f"\n{when}: Generate {quantiles(answers)}; Route {quantiles(decisions)}", end=""
                )
            print(f"\nCPU of the idle router: {share:.1%} of a core")
        for before, after in zip(quiet, later, strict=True):
            assert statistics.median(after) < 2 * statistics.median(before) + BUSY_MACHINE_MS
        assert share < CPU_SHARE_MAX
